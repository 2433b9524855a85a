"""Samplers of data sets."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from design_cases import scores
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import khot
from khot.data import DesignBatchSampler, DesignSampler, WeightedDataset
from khot.designs import PlackettLuce, Systematic

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
    with pytest.raises(ValueError, match="4 items are left"):
        DesignSampler(SIZES[:9], 9, num_replicas=3, rank=0).load_state_dict(two[0].state_dict())


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


@pytest.mark.parametrize(
    ("match", "call"),
    [
        (r"multiple of `num_replicas` = 3", lambda: DesignSampler(SIZES, 8, num_replicas=3, rank=0)),
        ("0 ≤ k ≤ 30", lambda: DesignSampler(SIZES, 31)),
        ("0 ≤ rank ≤ 1", lambda: DesignSampler(SIZES, 8, num_replicas=2, rank=2)),
        (r"shape \(n\)", lambda: DesignSampler(torch.ones(2, 3), 1)),
        ("num_batches` must be ≥ 1", lambda: DesignBatchSampler(SIZES, 8, num_batches=0)),
        ("are missing", lambda: DesignSampler(SIZES, 8).load_state_dict({})),
        ("epochs of 8", lambda: DesignSampler(SIZES, 8).load_state_dict(DesignSampler(SIZES, 4).state_dict())),
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
