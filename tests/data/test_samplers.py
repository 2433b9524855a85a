"""Samplers of data sets."""

from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from design_cases import generator, scores
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import khot
from khot._math import systematic
from khot.data import DesignBatchSampler, DesignSampler, WeightedDataset
from khot.designs import Pivotal, PlackettLuce, Systematic

SIZES = scores(30).mul(1.2).exp()


def test_epochs_have_the_inclusion_probabilities_asked_for():
    sampler = DesignSampler(SIZES, 8)
    torch.testing.assert_close(sampler.probs, khot.inclusion_probs(SIZES, 8))
    counts, rounds = torch.zeros(30, dtype=torch.float64), 3000
    for _ in range(rounds):
        chosen = list(sampler)
        assert len(chosen) == len(set(chosen)) == len(sampler) == 8
        counts[chosen] += 1
    p = sampler.probs
    off = (counts / rounds - p).abs() / (p * (1 - p) / rounds).sqrt().clamp(min=1e-9)
    assert off.max() < 4.5
    assert sampler.epoch == rounds - 1
    torch.manual_seed(0)
    rival = WeightedRandomSampler(SIZES, 8, replacement=False)
    others = torch.zeros(30, dtype=torch.float64)
    for _ in range(rounds):
        others[list(rival)] += 1
    assert ((others / rounds - p).abs() / (p * (1 - p) / rounds).sqrt().clamp(min=1e-9)).max() > 10


def test_batches_have_them_too_and_are_not_the_same():
    sampler = DesignBatchSampler(SIZES, 8, num_batches=2000)
    batches = list(sampler)
    counts = torch.bincount(torch.tensor(batches).flatten(), minlength=30).double() / 2000
    p = sampler.probs
    assert ((counts - p).abs() <= 4.5 * (p * (1 - p) / 2000).sqrt()).all()
    assert all(len(set(batch)) == 8 for batch in batches)
    assert batches[0] != batches[1]
    assert batches != list(sampler), "the next epoch has others"
    # the order within a batch is random: no item prefers the first place
    first = torch.bincount(torch.tensor([batch[0] for batch in batches]), minlength=30).double() / 2000
    assert (first - p / 8).abs().max() < 0.04


@pytest.mark.parametrize("make", [partial(DesignSampler, k=8), partial(DesignBatchSampler, k=8, num_batches=5)])
def test_replicas_share_an_epoch(make):
    whole = list(make(SIZES, seed=3))
    parts = [list(make(SIZES, seed=3, num_replicas=4, rank=r)) for r in range(4)]
    assert all(len(part) == len(make(SIZES, num_replicas=4, rank=0)) for part in parts)
    own = [list(make(SIZES, seed=r, num_replicas=4, rank=r)) for r in range(4)]  # replicas that do not share a seed
    flat = [sorted(i for s in part for i in (chain(*s) if isinstance(s[0], list) else s)) for part in (own, parts)]
    assert flat[0] != flat[1] == sorted(chain(*whole) if isinstance(whole[0], list) else whole)
    if isinstance(whole[0], list):
        for batch, *shares in zip(whole, *parts, strict=True):
            assert sorted(chain(*shares)) == sorted(batch)
    else:
        assert sorted(chain(*parts)) == sorted(whole)
        assert [item for group in zip(*parts, strict=True) for item in group] == whole


@pytest.mark.parametrize("make", [partial(DesignSampler, k=8), partial(DesignBatchSampler, k=8, num_batches=6)])
def test_a_run_resumes_in_the_middle_of_an_epoch(make):
    first = make(SIZES, seed=1)
    list(first)
    expected = [list(make_epoch(make, 1)), list(make_epoch(make, 2))]
    running = iter(first)
    head = [next(running) for _ in range(3)]
    state = first.state_dict()
    again = make(SIZES, seed=99)
    again.load_state_dict(state)
    again.set_epoch(1)  # as a training loop does; the position stays
    assert head + list(again) == expected[0]
    assert list(again) == expected[1]
    lost = make(SIZES, seed=99)
    lost.load_state_dict(state | {"handed": 0})
    assert head + list(lost) != expected[0], "a state without its position is found"
    done = make(SIZES, seed=99)
    done.load_state_dict(again.state_dict())
    assert done.state_dict()["epoch"] == 3
    # an iteration that is broken off is not gone on with by itself
    broken = make(SIZES, seed=1)
    next(iter(broken))
    assert list(broken) == expected[0]


def make_epoch(make, epoch):
    sampler = make(SIZES, seed=1)
    sampler.set_epoch(epoch)
    return sampler


def test_a_run_resumes_on_another_number_of_replicas():
    two = [DesignSampler(SIZES, 8, num_replicas=2, rank=r) for r in range(2)]
    running = [iter(s) for s in two]
    head = [next(it) for _ in range(2) for it in running]
    four = [DesignSampler(SIZES, 8, num_replicas=4, rank=r) for r in range(4)]
    for sampler in four:
        sampler.load_state_dict(two[0].state_dict())
    tail = [list(s) for s in four]
    assert head + list(chain(*tail)) == list(DesignSampler(SIZES, 8))
    odd = DesignSampler(SIZES, 9, num_replicas=3, rank=0)
    with pytest.raises(ValueError, match="4 items are left"):
        odd.load_state_dict(odd.state_dict() | {"handed": 5})


def test_the_weighted_loss_has_no_bias():
    """Over many epochs the weighted sum of a loss is that over all items; without weights it is not."""
    y = scores(30, seed=2) + 1
    sampler = DesignSampler(SIZES, 8)
    loader = DataLoader(WeightedDataset(TensorDataset(y), sampler.weights), batch_size=4, sampler=sampler)
    totals = torch.tensor([sum(float((w * v[0]).sum()) for v, w in loader) for _ in range(800)])
    error = totals.std() / 800**0.5
    assert abs(totals.mean() - y.sum()) < 4 * error
    plain = torch.tensor([sum(float(v[0].sum()) for v, _ in loader) * 30 / 8 for _ in range(800)])
    assert abs(plain.mean() - y.sum()) > 4 * plain.std() / 800**0.5


def test_designs_and_arrays():
    spread = DesignSampler(np.ones(40), 4, design=Systematic)
    assert np.diff(sorted(spread)).tolist() == [10, 10, 10]
    rival = DesignSampler(SIZES, 8, design=PlackettLuce)
    torch.testing.assert_close(rival.weights, 1 / PlackettLuce(khot.inclusion_probs(SIZES, 8), 8).mean)
    never = DesignSampler([0, 1, 2], 1)
    assert never.weights[0] == torch.inf
    assert DesignSampler(SIZES.float(), 8).probs.dtype == torch.float32


def batches(k, sizes=None, of=3):
    return DesignBatchSampler(SIZES if sizes is None else sizes, k, num_batches=of)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        (r"multiple of `num_replicas` = 3", lambda: DesignSampler(SIZES, 8, num_replicas=3, rank=0)),
        ("0 ≤ k ≤ 30", lambda: DesignSampler(SIZES, 31)),
        ("0 ≤ rank ≤ 1", lambda: DesignSampler(SIZES, 8, num_replicas=2, rank=2)),
        (r"shape \(n\)", lambda: DesignSampler(torch.ones(2, 3), 1)),
        ("num_batches` must be ≥ 1", lambda: DesignBatchSampler(SIZES, 8, num_batches=0)),
        ("are missing", lambda: DesignSampler(SIZES, 8).load_state_dict({})),
        ("k = 8; got 4", lambda: DesignSampler(SIZES, 8).load_state_dict(DesignSampler(SIZES, 4).state_dict())),
        ("k = 4; got 8", lambda: batches(4).load_state_dict(batches(8).state_dict())),
        ("epochs of 3; got epochs of 2", lambda: batches(4).load_state_dict(batches(4, of=2).state_dict())),
        ("items = 30; got 29", lambda: batches(4).load_state_dict(batches(4, SIZES[1:]).state_dict())),
        ("same sizes; Σ π i/n", lambda: batches(4).load_state_dict(batches(4, SIZES.flip(0)).state_dict())),
        ("one for each item", lambda: WeightedDataset([1, 2], torch.ones(3))),
    ],
)
def test_errors_of_samplers(match, call):
    with pytest.raises(ValueError, match=match):
        call()


def test_replicas_are_those_of_the_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    sampler = DesignSampler(SIZES, 8)
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (4, 3, 2)
    assert list(sampler) == list(DesignSampler(SIZES, 8, num_replicas=4, rank=3))
    assert DesignSampler(SIZES, 8, num_replicas=1, rank=0).num_replicas == 1


def along(probs):
    """The law of pivotal samples along the items, by definition: the first open item duels with the next."""
    law = {}

    def duel(chance, first, rest, taken):
        if not rest:
            law[taken] = law.get(taken, 0) + chance
            return
        (i, a), (j, b), others = first, rest[0], rest[1:]
        is_won, s = a + b >= 1, a + b
        left = (1 - a) / (2 - s) if is_won else a / s if s else Fraction(1)  # the chance that i goes on
        for item, part, loser in ((i, left, j), (j, 1 - left, i)):
            if part:
                won = taken | {loser} if is_won else taken
                duel(chance * part, (item, s - is_won), others, won)

    items = [(i, Fraction(round(1000 * float(p)), 1000)) for i, p in enumerate(probs)]
    duel(Fraction(1), items[0], [*items[1:], (-1, Fraction(0))], frozenset())
    return {items: float(chance) for items, chance in law.items()}


def chi_square(draw, law, draws):
    counts = Counter(frozenset(draw().tolist()) for _ in range(draws))
    stray = sum(count for s, count in counts.items() if law.get(s, 0) < 1e-9)
    off = sum((counts[s] - draws * p) ** 2 / (draws * p) for s, p in law.items() if p > 1e-9)
    return stray, off, sum(p > 1e-9 for p in law.values()) - 1


def test_batches_are_pivotal_samples_along_an_order():
    """χ² of whole subsets, below its 1 − 10⁻⁵ quantile; samples along another order, and systematic ones, are not."""
    probs, random = torch.tensor([0.07, 0.17, 0.41, 0.61, 0.83, 0.91], dtype=torch.float64), generator()
    law = along(probs)
    assert abs(sum(law.values()) - 1) < 1e-12

    def pivotal(p):
        passed = systematic.quantised(p, torch.tensor(3.0, dtype=torch.float64)).cumsum(-1)
        return lambda: systematic.draw_pivotal(passed, 3, torch.rand(2, 3, dtype=torch.float64, generator=random))

    stray, off, freedom = chi_square(pivotal(probs), law, 10_000)
    limit = freedom + 4.3 * (2 * freedom) ** 0.5 + 12
    assert stray == 0
    assert off < limit
    moved = pivotal(probs.roll(2))
    stray, off, _ = chi_square(lambda: (moved() - 2) % 6, law, 10_000)
    assert stray > 0 or off > limit
    other = Systematic(probs)
    stray, off, _ = chi_square(lambda: other.sample_indices(generator=random), law, 2000)
    assert stray > 0 or off > limit


@pytest.mark.parametrize("sizes", [[1.0] * 8, [9.0, 1.0, 1.0, 1.0, 1.0, 9.0, 0.0], [1.0, 1.0], [5.0, 1.0, 1.0]])
def test_batches_have_exact_probabilities_and_sizes(sizes):
    """Each frequency within 4.5 standard errors, and k different items in every batch; certain ones in all."""
    sampler = DesignBatchSampler(sizes, k=2, num_batches=50)
    batches = torch.tensor([batch for _ in range(60) for batch in sampler])
    assert (batches[:, 0] != batches[:, 1]).all()
    share = torch.bincount(batches.flatten(), minlength=len(sizes)) / len(batches)
    error = (sampler.probs * (1 - sampler.probs) / len(batches)).sqrt()
    assert ((share - sampler.probs).abs() <= 4.5 * error).all()
    assert not ((share - 1.25 * sampler.probs).abs() <= 4.5 * error).all(), "the check finds an error of a quarter"


def test_orders_of_batches_change_with_epochs_and_resume():
    sizes = torch.arange(1.0, 41.0)
    whole = DesignBatchSampler(sizes, k=4, num_batches=6, seed=3)
    epochs = [list(whole), list(whole)]
    assert epochs[0] != epochs[1]
    again = DesignBatchSampler(sizes, k=4, num_batches=6, seed=3)
    again.load_state_dict(again.state_dict() | {"epoch": 1, "handed": 4})
    assert list(again) == epochs[1][4:]
    halves = [DesignBatchSampler(sizes, k=4, num_batches=6, seed=3, num_replicas=2, rank=rank) for rank in range(2)]
    joined = [sorted(a + b) for a, b in zip(*map(list, halves), strict=True)]
    assert joined == [sorted(batch) for batch in epochs[0]]
    laws = DesignBatchSampler(sizes, k=4, num_batches=6, design=Pivotal)
    assert all(len(set(batch)) == 4 for batch in laws)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sizes_of_half_precision_have_exact_probabilities(dtype):
    """Both π and 1/π were rounded to the dtype of the sizes, by up to 0.4 %."""
    size = scores(200).exp().to(dtype)
    expected = khot.inclusion_probs(size.double(), 20)
    for sampler in (DesignSampler(size, 20), DesignBatchSampler(size, 20, num_batches=1)):
        torch.testing.assert_close(sampler.probs, expected)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"handed": -3}, "0 ≤ handed ≤ 4"),
        ({"handed": 5}, "0 ≤ handed ≤ 4"),
        ({"epoch": "x"}, "`epoch` must be an int"),
        ({"epoch": -1}, "`epoch` must be ≥ 0"),
        ({"seed": 0.5}, "`seed` must be an int"),
    ],
)
def test_states_that_no_sampler_has(wrong, match):
    """They were loaded, and failed later or drew other items."""
    for sampler in (DesignSampler([1.0] * 8, 4), DesignBatchSampler([1.0] * 8, 2, num_batches=4)):
        state = sampler.state_dict()
        with pytest.raises((TypeError, ValueError), match=match):
            sampler.load_state_dict(state | wrong)
        with pytest.raises(TypeError, match="`state` must be a Mapping"):
            sampler.load_state_dict(None)
        sampler.load_state_dict(state)


@pytest.mark.parametrize("sizes", [[], [1.0, float("nan")], [1.0, -1.0]])
def test_errors_name_the_sizes(sizes):
    with pytest.raises(ValueError, match="`sizes` must"):
        DesignSampler(sizes, 0)
