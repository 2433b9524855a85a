"""Designs: every law against enumeration, every sampler against its law, and controls that must fail."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling import marginals_by_programme
from torch import Tensor
from torch.distributions import kl_divergence

import khot
from khot import ops
from khot._math import natural, noise, pivotal, subsets, systematic
from khot.designs import (
    Brewer,
    ConditionalPoisson,
    Design,
    KHotStraightThrough,
    Pareto,
    Pivotal,
    PlackettLuce,
    RelaxedKHot,
    Sampford,
    Systematic,
)
from khot.testing import check_design

A6K3 = torch.tensor([0.07, 0.17, 0.41, 0.61, 0.83, 0.91], dtype=torch.float64)
GIVEN = functools.partial(Pivotal, order="given")
EXACT = {
    "pivotal": Pivotal,
    "pivotal, given order": GIVEN,
    "systematic": Systematic,
    "conditional Poisson": ConditionalPoisson,
    "Sampford": Sampford,
    "Brewer": Brewer,
}
ALL = {**EXACT, "Pareto": Pareto, "Plackett-Luce": PlackettLuce}
EVERY = pytest.mark.parametrize("design", ALL.values(), ids=ALL.keys())
EVERY_EXACT = pytest.mark.parametrize("design", EXACT.values(), ids=EXACT.keys())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


# The shipped check, and what it must find ----------------------------------------------------------------------------


@EVERY_EXACT
def test_exact_designs_pass_the_check(design):
    check_design(design, draws=2_000_000 if design in (Pivotal, GIVEN, Systematic) else 50_000)


@pytest.mark.parametrize("design", [Pareto, PlackettLuce])
def test_other_designs_pass_it_but_for_their_mean(design):
    check_design(design(A6K3), exact=False, draws=100_000)
    with pytest.raises(AssertionError, match="moments: mean and probs"):
        check_design(design(A6K3), draws=1000)


def test_the_check_takes_fractional_sizes_and_float32():
    check_design(GIVEN(A6K3[:5], k=2.09), draws=100_000)
    check_design(Systematic(A6K3[:5], k=2.09), draws=200_000)
    check_design(Pivotal(A6K3.float()), draws=200_000)
    check_design(ConditionalPoisson(logits=scores(6).float(), k=2), draws=20_000)


class GumbelAsPivotal(Pivotal):
    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        return PlackettLuce(self.probs)._draw(draws, seed)


class Shifted(Pivotal):
    """Says π, draws π ± .002."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        shift = torch.zeros_like(self.probs)
        shift[0], shift[1] = 0.002, -0.002
        return Pivotal(self.probs + shift)._draw(draws, seed)


class Swapped(Pivotal):
    """The duel's odds the wrong way round."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        uniforms = 1 - noise.uniform(seed, 0, draws * pivotal.coins(len(self.probs))).view(draws, -1)
        levels, root = pivotal.plan(self.probs)
        value = (root >= 0.5).expand(draws)[:, None]
        end = uniforms.shape[-1]
        for level in reversed(levels):
            start = end - level.odds.shape[-1]
            goes_on = uniforms[:, start:end] * level.total >= level.odds
            end = start
            pair = torch.where(goes_on, value, level.is_won), torch.where(goes_on, level.is_won, value)
            value = torch.stack(pair, -1).flatten(-2)[:, : level.size]
        return value.to(self.probs.dtype)[:, None]


class Sticky(Pivotal):
    """Every draw twice."""

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        return super()._draw((draws + 1) // 2, seed).view(-1, len(self.probs)).repeat_interleave(2, 0)[:draws]


class OneTooMany(Pivotal):
    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        sample = super()._draw(draws, seed).view(draws, -1).clone()
        sample[0] = 1
        return sample


class WrongLogProb(ConditionalPoisson):
    """The law of other parameters: what is drawn with one and scored with the other."""

    def _log_prob(self, value: Tensor) -> Tensor:
        return Sampford(self.probs)._log_prob(value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (GumbelAsPivotal, "frequencies: an inclusion probability"),
        (Shifted, "frequencies: an inclusion probability"),
        (Swapped, "frequencies: an inclusion probability|sizes"),
        (Sticky, "frequencies: the probability of an item in two successive draws"),
        (OneTooMany, "sizes: a sample is not k-hot"),
        (WrongLogProb, "subsets: entropy"),
    ],
)
def test_the_check_fails(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_design(wrong(A6K3))


def test_a_float32_running_sum_is_found_out():
    """n = 10⁶, k = 10⁵: P(drawn) = w/F exactly, while a float32 sum is off by 1e-3 and more."""
    n, k = 10**6, 10**5
    p = khot.sigmoid_topk(scores(n), k)
    one = 1 << systematic.places(n)
    w = systematic.quantised(p, torch.tensor(float(k), dtype=torch.float64))
    assert int(w.sum()) == k * one
    assert (w.to(torch.float64) / one - p).abs().max() < 1e-11
    rough = p.float().cumsum(-1).double().diff(prepend=torch.zeros(1, dtype=torch.float64))
    assert (rough - p).abs().max() > 1e-3


# Pivotal -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "seed"), [(32, 1), (10**5, 1), (999_000, 1)])
def test_pivotal_is_exact_at_a_million(k, seed):
    """E[x], by the recursion that samples with each coin replaced by its odds."""
    p = khot.sigmoid_topk(scores(10**6, seed=seed), k)
    assert (pivotal.expectation(p, torch.tensor(True)) - p).abs().max() <= 1e-13
    assert Pivotal(p).sample(generator=generator()).sum() == k
    rough = p.float()
    assert (pivotal.expectation(rough.double(), torch.tensor(True)) - rough).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "probs",
    [[0.3, 0.7], [0.07, 0.17, 0.41, 0.61, 0.83, 0.91], [0.5] * 8, [1.0, 0.0, 0.5, 0.5, 0.25, 0.75, 1.0], [0.25] * 7],
)
def test_all_coins_give_the_probabilities_of_subsets(probs):
    """Each coin at the middle of its two cells, all 2^coins patterns: the sampler itself, without chance."""
    p = torch.tensor(probs, dtype=torch.float64)
    is_whole = torch.tensor(float(p.sum()) == round(float(p.sum())))
    levels, residual = pivotal.plan(p)
    odds = torch.cat([pivotal.shares(level) for level in levels])
    total = torch.cat([level.total for level in levels])
    pattern = torch.arange(2 ** len(odds))[:, None] >> torch.arange(len(odds)) & 1
    coin = torch.where(pattern == 1, odds / 2, (1 + odds) / 2)
    chance = torch.where(pattern == 1, odds, 1 - odds).prod(-1)
    is_moot = total <= 0  # such a duel decides nothing, whatever the coin
    chance = torch.where(is_moot, 0.5, torch.where(pattern == 1, odds, 1 - odds)).prod(-1)
    roots = [(0.5, 1.0)] if is_whole else [(float(residual) / 2, float(residual)), (1.0, 1 - float(residual))]
    got: dict[tuple[int, ...], float] = {}
    for root, weight in roots:
        x = pivotal.sample(p.expand(len(coin), -1), torch.full((len(coin),), root), coin)
        for row, w in zip(x.long().tolist(), (chance * weight).tolist(), strict=True):
            got[tuple(row)] = got.get(tuple(row), 0.0) + w
    for row, w in got.items():
        x = torch.tensor(row, dtype=torch.float64)
        assert abs(pivotal.log_prob(p, x, is_whole).exp() - w) < 1e-15 or w == 0
    assert abs(sum(got.values()) - 1) < 1e-14


def test_every_pair_occurs_and_pairs_are_equally_likely():
    x = Pivotal(torch.full((8,), 0.25)).sample((10_000,), generator=generator())
    count = (x.mT @ x)[torch.triu_indices(8, 8, 1).unbind()]
    assert count.min() > 0
    # A uniformly random order makes all 28 pairs equally likely: χ² with 27 degrees of freedom, P(> 61) < 2e-4
    assert ((count - 10_000 / 28).square() / (10_000 / 28)).sum() < 61
    shared = Pivotal(torch.full((8,), 0.25), order="shared").sample((10_000,), generator=generator())
    assert ((shared.mT @ shared)[torch.triu_indices(8, 8, 1).unbind()] == 0).sum() == 12


def test_given_order_is_stratified():
    """Of two neighbours whose probabilities sum to 1, exactly one is drawn."""
    x = GIVEN(torch.tensor([0.3, 0.7] * 8)).sample((500,), generator=generator())
    assert (x.unflatten(-1, (8, 2)).sum(-1) == 1).all()


def test_fix_order_makes_probabilities_known():
    design = Pivotal(A6K3.expand(3, -1))
    with pytest.raises(NotImplementedError, match="fix_order"):
        design.log_prob(design.sample())
    for name in ("joint_probs", "entropy"):
        with pytest.raises(NotImplementedError, match="fix_order"):
            getattr(design, name)()
    fixed = design.fix_order(generator())
    assert fixed.order == "given"
    assert design.order == "random"
    x = fixed.enumerate_support()
    p = fixed.log_prob(x).exp()
    torch.testing.assert_close(p.sum(0), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(torch.einsum("sb,sbi->bi", p, x), A6K3.expand(3, -1), atol=1e-14, rtol=0)
    torch.testing.assert_close(torch.einsum("sb,sbi,sbj->bij", p, x, x), fixed.joint_probs(), atol=1e-14, rtol=0)
    assert (fixed.covariance_matrix[..., 0, 1:] <= 0).all()
    seen = fixed.sample((100_000,), generator=generator(1)).to(torch.float64)
    torch.testing.assert_close(torch.einsum("sbi,sbj->bij", seen, seen) / 1e5, fixed.joint_probs(), atol=0.008, rtol=0)


def test_antipodal_log_prob_is_minus_infinity():
    design = GIVEN(torch.tensor([0.2, 0.3, 0.5, 1.0], dtype=torch.float64))
    impossible = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert (design.log_prob(impossible) == -torch.inf).all()
    probs = design.probs.clone().requires_grad_()
    GIVEN(probs).log_prob(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)).backward()
    assert probs.grad is not None
    assert probs.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 17, 100, 1000, 9000, 20_001])
def test_native_and_eager_draw_the_same_bits(n, dtype):
    k = max(1, n // 3)
    p = khot.sigmoid_topk(3 * scores(3, n).to(dtype), k)
    seed, sizes = torch.tensor(-12345678901234567), torch.full((3,), float(k), dtype=torch.float64)
    is_whole = torch.tensor([True, False, True])
    order = noise.order(noise.bits(seed, 3), n)
    assert (order.sort(-1).values == torch.arange(n)).all()
    for given, is_random in ((None, True), (None, False), (order, False)):
        for is_paired in (False, True):
            arguments: tuple[Any, ...] = (p, is_whole, seed, given, is_random, 2, is_paired)
            assert torch.equal(ops.pivotal(*arguments), pivotal.draw(*arguments))
            assert torch.equal(
                ops.systematic(p, sizes, seed, 2, is_paired), systematic.draw(p, sizes, seed, 2, is_paired)
            )
    assert torch.equal(ops.order(noise.bits(seed, 3), n), order)
    assert torch.equal(ops.uniform(seed, 3, n), noise.uniform(seed, 3, n))


def test_random_orders_are_uniform():
    order = noise.order(noise.bits(torch.tensor(7), 60_000), 4)
    code = (order * torch.tensor([64, 16, 4, 1])).sum(-1)
    count = code.unique(return_counts=True)[1].double()
    assert len(count) == 24
    assert ((count - 2500).square() / 2500).sum() < 56  # χ² with 23 degrees of freedom, P < 2e-4


# Invariants of them all ----------------------------------------------------------------------------------------------


@EVERY
def test_sizes_are_exact_in_every_row(design):
    k = torch.arange(12)
    x = design(khot.sigmoid_topk(4 * scores(12, 11), k), k).sample((50,), generator=generator())
    assert (x.sum(-1) == k).all()
    assert ((x == 0) | (x == 1)).all()


@EVERY
def test_threads_do_not_change_a_bit(design):
    threads = torch.get_num_threads()
    try:
        samples = []
        for count in (1, 2):
            torch.set_num_threads(count)
            samples.append(design(logits=scores(40, 500), k=30).sample((4,), generator=generator()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*samples)


@EVERY
def test_shapes_dtypes_and_layouts(design):
    x = scores(2, 3, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        d = design(logits=x.to(dtype), k=2)
        assert (d.batch_shape, d.event_shape) == ((2, 3), (5,))
        sample = d.sample((7, 1), generator=generator())
        assert sample.shape == (7, 1, 2, 3, 5)
        assert sample.dtype == dtype
        assert (sample.float().sum(-1) == 2).all()
        assert d.sample_indices((7,), generator=generator()).shape == (7, 2, 3, 2)
        assert d.mean.dtype == dtype
    strided = design(logits=x.transpose(0, 2)[:, :, :2].transpose(-1, -2).contiguous().transpose(-1, -2), k=1)
    assert strided.sample().shape == (5, 3, 2)
    expanded = design(logits=x[0, 0].expand(4, 5), k=2)
    assert (expanded.sample(generator=generator()).sum(-1) == 2).all()
    empty = design(logits=torch.zeros(0, 5), k=2)
    assert empty.sample((3,)).shape == (3, 0, 5)
    alone = design(logits=torch.zeros(1), k=1)
    assert alone.sample().tolist() == [1.0]


@EVERY
def test_rows_have_sizes_of_their_own(design):
    k = torch.tensor([0, 1, 3, 5])
    d = design(logits=scores(4, 5), k=k)
    torch.testing.assert_close(d.mean.sum(-1), k.double())
    assert (d.sample((20,), generator=generator()).sum(-1) == k).all()
    indices = d.sample_indices(generator=generator())
    assert indices.shape == (4, 5)
    assert ((indices >= 0).sum(-1) == k).all()
    with pytest.raises(NotImplementedError, match="same k"):
        d.enumerate_support()


@EVERY
def test_masked_and_certain_items(design):
    x = torch.tensor([torch.inf, 0.3, -torch.inf, 1.0, -0.5], dtype=torch.float64)
    sample = design(logits=x, k=2).sample((300,), generator=generator())
    assert (sample[:, 0] == 1).all()
    assert (sample[:, 2] == 0).all()
    assert (sample.sum(-1) == 2).all()
    full = design(logits=x, k=4)
    assert full.sample().tolist() == [1, 1, 0, 1, 1]
    torch.testing.assert_close(full.mean, torch.tensor([1.0, 1, 0, 1, 1], dtype=torch.float64))


@EVERY
def test_expand(design):
    d = design(logits=scores(5), k=2)
    wide = d.expand((4, 3))
    assert type(wide) is type(d)
    assert wide.batch_shape == (4, 3)
    assert wide.sample((2,), generator=generator()).shape == (2, 4, 3, 5)
    torch.testing.assert_close(wide.mean[1, 2], d.mean)


@EVERY
def test_the_interface_of_torch_distributions(design):
    d = design(logits=scores(5), k=2)
    assert isinstance(d, torch.distributions.Distribution)
    assert isinstance(d, Design)
    assert not d.has_rsample
    assert d.has_enumerate_support
    assert set(d.arg_constraints) == {"probs", "logits"}
    assert d.enumerate_support().shape == (10, 5)
    assert d.expand((3,)).enumerate_support(expand=False).shape == (10, 1, 5)
    assert bool(d.support.check(d.enumerate_support()).all())
    torch.testing.assert_close(d.stddev, d.mean.mul(1 - d.mean).sqrt())
    assert "k=2" in repr(d)
    with pytest.raises(NotImplementedError):
        d.rsample()


@EVERY
def test_bad_values_raise(design):
    with pytest.raises(ValueError, match="one of `probs` and `logits`; got neither"):
        design()
    with pytest.raises(ValueError, match="got both"):
        design(A6K3, logits=A6K3)
    with pytest.raises(ValueError, match="`k` must be given with `logits`"):
        design(logits=A6K3)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]; got values from -0.1 to 1"):
        design(torch.tensor([-0.1, 0.1, 1.0]))
    with pytest.raises(ValueError, match="must lie in"):
        design(torch.tensor([torch.nan, 1.0]))
    with pytest.raises(ValueError, match=r"must sum to k.*got the sum 1.5 where k = 2"):
        design(torch.tensor([0.5, 0.5, 0.5]))
    with pytest.raises(ValueError, match="at least k items; got a row with 1"):
        design(logits=torch.tensor([0.0, -torch.inf, -torch.inf]), k=2)
    with pytest.raises(ValueError, match=r"\+inf for at most k"):
        design(logits=torch.tensor([torch.inf, torch.inf, 0.0]), k=1)
    with pytest.raises(ValueError, match="NaN"):
        design(logits=torch.tensor([0.0, torch.nan, 0.0]), k=1)
    with pytest.raises(ValueError, match=r"0 ≤ k ≤ 3"):
        design(logits=torch.zeros(3), k=4)
    with pytest.raises(ValueError, match=r"0 ≤ k ≤ 3"):
        design(logits=torch.zeros(2, 3), k=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="broadcast"):
        design(logits=torch.zeros(2, 3), k=torch.tensor([1, 1, 1]))
    with pytest.raises(TypeError, match="float16, bfloat16"):
        design(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="at least one item"):
        design(logits=torch.zeros(3, 0), k=0)
    d = design(logits=torch.zeros(3), k=1)
    if not (isinstance(d, Pivotal) and d.order == "random"):
        with pytest.raises(ValueError, match="support"):
            d.log_prob(torch.tensor([1.0, 1.0, 0.0]))


@EVERY
def test_fractional_sizes(design):
    if design in (Pivotal, GIVEN, Systematic):
        d = design(A6K3[:5], k=2.09)
        x = d.sample((100_000,), generator=generator())
        assert set(x.sum(-1).tolist()) == {2.0, 3.0}
        torch.testing.assert_close(x.mean(0), A6K3[:5], atol=0.008, rtol=0)
        assert d.sample_indices((50,)).shape[-1] == 3
        mixed = design(logits=scores(2, 6), k=torch.tensor([2.5, 3.0]))
        assert (mixed.sample((500,))[:, 1].sum(-1) == 3).all()
        with pytest.raises(ValueError, match="give `k=` too"):
            design(A6K3[:5])
    else:
        with pytest.raises(ValueError, match="whole number"):
            design(A6K3[:5], k=2.09)


def test_modes():
    x = scores(7)
    for design in (ConditionalPoisson, PlackettLuce):
        d = design(logits=x, k=3)
        assert torch.equal(d.mode, khot.hard_topk(x, 3))
        assert d.log_prob(d.mode) == d.log_prob(d.enumerate_support()).max()
    for design in (Pivotal, Systematic, Sampford, Brewer, Pareto):
        with pytest.raises(NotImplementedError, match="The mode of"):
            _ = design(logits=x, k=3).mode


def test_too_many_subsets():
    with pytest.raises(NotImplementedError, match="At most 100000 subsets"):
        Sampford(logits=torch.zeros(40), k=20).entropy()
    with pytest.raises(NotImplementedError, match="up to k = 12"):
        Brewer(logits=torch.zeros(40), k=20).log_prob(Brewer(logits=torch.zeros(40), k=20).sample())


def test_probabilities_that_do_not_quite_sum_to_k():
    """float32 sums are off by 1e-6; the samples are not."""
    p = khot.sigmoid_topk(torch.randn(20, 3000, generator=generator()), 500)
    for design in (Pivotal, GIVEN, Systematic, ConditionalPoisson, Sampford, Pareto):
        assert (design(p, 500).sample((2,), generator=generator()).sum(-1) == 500).all()
    nearly_hard = torch.tensor([1 - 6e-8, 1e-7, 1.0, 3e-6, 0.0, 1.0])
    for design in ALL.values():
        x = design(nearly_hard, 3).sample((1000,), generator=generator())
        assert (x.sum(-1) == 3).all()
        assert (x[:, 4] == 0).all()


def test_bfloat16_probabilities_with_an_explicit_size():
    p = khot.sigmoid_topk(scores(64), 8).to(torch.bfloat16)
    for design in (Pivotal, Systematic, ConditionalPoisson):
        assert (design(p, 8).sample((100,)).float().sum(-1) == 8).all()


@pytest.mark.parametrize("design", [Pivotal, GIVEN, Systematic])
def test_antithetic_pairs_have_the_law_and_vary_less(design):
    d = design(A6K3)
    x = d.sample((200_000,), generator=generator(), antithetic=True)
    assert (x.sum(-1) == 3).all()
    first, second = x[::2], x[1::2]
    for half in (first, second):
        z = (half.mean(0) - A6K3) / (A6K3 * (1 - A6K3) / 100_000).sqrt()
        assert z.abs().max() < 4.5
    weights = scores(6)
    correlation = torch.corrcoef(torch.stack((first @ weights, second @ weights)))[0, 1]
    assert correlation < -0.1
    with pytest.raises(ValueError, match="must be even; got 3"):
        d.sample((3,), antithetic=True)


def test_designs_without_antithetic_samples_say_so():
    with pytest.raises(NotImplementedError, match="`Pivotal` and `Systematic` have"):
        Sampford(A6K3).sample((2,), antithetic=True)


def test_common_random_numbers():
    """The same seed and nearly the same π: nearly the same samples."""
    p = khot.sigmoid_topk(scores(200), 20)
    near = khot.sigmoid_topk(scores(200) + 1e-3 * scores(200, seed=1), 20)
    for design in (Pivotal, Systematic):
        same = design(p).sample((500,), generator=generator())
        moved, other = (
            design(near).sample((500,), generator=generator()),
            design(near).sample((500,), generator=generator(1)),
        )
        assert (same != moved).double().mean() < 0.1 * (same != other).double().mean()


# What a review found, each by its own name --------------------------------------------------------------------------


def test_sums_that_are_off_by_half_an_item_do_not_change_the_size():
    for p, k in ((torch.full((10_000,), 0.1, dtype=torch.bfloat16), 1000), (torch.full((10**6,), 0.1) + 8e-7, 10**5)):
        for design in (Pivotal, GIVEN, Systematic):
            assert design(p, k).sample(generator=generator()).double().sum() == k
    p = torch.full((1000,), 0.1, dtype=torch.bfloat16)
    assert abs(GIVEN(p, 100).variance_of_sum(torch.ones(1000))) < 1e-3


@EVERY
def test_one_item_too_few_is_not_within_the_tolerance(design):
    p = torch.zeros(200_000)
    p[:99_999] = 1
    with pytest.raises(ValueError, match="`probs` must exceed 0 for at least k items; got a row with 99999"):
        design(p, 100_000)


@EVERY
def test_gradients_of_variances_are_right_or_none(design):
    if design is Pivotal:
        return
    theta = torch.tensor([0.7, -0.3, 0.2, 1.1], dtype=torch.float64, requires_grad=True)
    weights = torch.linspace(-1, 1, 4, dtype=torch.float64)

    def variance(t: Tensor) -> Tensor:
        return design(logits=t, k=2).variance_of_sum(weights)

    if variance(theta).requires_grad:
        assert torch.autograd.gradcheck(variance, (theta,))
    else:
        assert design is Systematic


@EVERY
def test_gradients_are_finite_where_items_are_certain(design):
    if design is Pivotal:
        return
    theta = torch.tensor([3.0, 0.5, 0.5, 40.0, -60.0], requires_grad=True)
    x = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
    d = design(logits=theta, k=3)
    if d.log_prob(x) > -torch.inf:
        assert torch.autograd.grad(d.log_prob(x), theta)[0].isfinite().all()
    assert torch.autograd.grad(d.entropy(), theta)[0].isfinite().all()
    probs = torch.tensor([0.0, 1.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    d = design(probs, 2)
    for value in (d.log_prob(torch.tensor([0.0, 1.0, 1.0, 0.0])), d.entropy(), d.joint_probs().sum()):
        if value.requires_grad:
            assert torch.autograd.grad(value, probs, retain_graph=True)[0].isfinite().all()


def test_second_derivatives_of_conditional_poisson_from_probabilities():
    theta = scores(5).requires_grad_()
    x = torch.tensor([1.0, 0, 1, 0, 1], dtype=torch.float64)

    def log_prob(t: Tensor) -> Tensor:
        return ConditionalPoisson(khot.sigmoid_topk(t, 3), 3, validate_args=False).log_prob(x)

    assert torch.autograd.gradgradcheck(log_prob, (theta,))
    (expected,) = torch.autograd.grad(log_prob(theta), theta)
    torch.testing.assert_close(torch.func.grad(log_prob)(theta.detach()), expected)


def test_the_check_takes_a_fixed_order_and_half_precision():
    check_design(Pivotal(A6K3).fix_order(generator(3)), draws=20_000)
    check_design(Pivotal(torch.tensor([0.25, 0.5, 0.5, 0.75], dtype=torch.float16)), draws=20_000)


@EVERY
def test_nothing_left_to_chance(design):
    for k, x in ((0, torch.zeros(4)), (4, torch.ones(4))):
        d = design(logits=torch.zeros(4), k=k)
        assert torch.equal(d.sample(), x)
        if design is not Pivotal:
            assert d.enumerate_support().shape == (1, 4)
            assert abs(d.log_prob(x)) < 1e-6
            assert abs(d.entropy()) < 1e-6
            torch.testing.assert_close(d.joint_probs(), x[:, None] * x)
    assert Pivotal(torch.tensor([0.2, 0.3]), k=0.5).enumerate_support().shape == (3, 2)


def test_brewer_counts_only_what_is_left_to_chance():
    p = torch.tensor([1.0] * 12 + [0.5, 0.5])
    assert Brewer(p).log_prob(torch.tensor([1.0] * 13 + [0.0])) == pytest.approx(math.log(0.5))


def test_conditional_poisson_after_inference_mode():
    p = A6K3.clone().requires_grad_()
    design = ConditionalPoisson(p)
    with torch.inference_mode():
        x = design.sample(generator=generator())
    assert torch.autograd.grad(design.log_prob(x.clone()), p)[0].abs().sum() > 0


@pytest.mark.parametrize("offset", [0.0, 1e8, 1e15])
def test_probabilities_do_not_see_a_common_offset(offset):
    design = ConditionalPoisson(logits=torch.tensor([1.0, 3.0, 0.0, 5.0], dtype=torch.float64) * 0.5 + offset, k=2)
    assert abs(design.log_prob(design.enumerate_support()).exp().sum() - 1) < 1e-12
    wide = ConditionalPoisson(logits=torch.tensor([1e30, 0.0, -1e30, 5.0], dtype=torch.float64), k=2)
    assert abs(wide.log_prob(wide.enumerate_support()).exp().sum() - 1) < 1e-12


@pytest.mark.parametrize("design", [PlackettLuce, ConditionalPoisson])
def test_masks_written_as_the_least_number(design):
    least = torch.finfo(torch.float32).min
    masked = design(logits=torch.tensor([1.0, 0.0, least, 5.0, 2.0, least]), k=2)
    without = design(logits=torch.tensor([1.0, 0.0, 5.0, 2.0]), k=2)
    got = masked.log_prob(torch.tensor([1.0, 0, 0, 1, 0, 0]))
    torch.testing.assert_close(got, without.log_prob(torch.tensor([1.0, 0, 1, 0])))
    huge = design(logits=torch.tensor([1.0, 0.0, -1e308, 5.0, 2.0], dtype=torch.float64), k=2)
    torch.testing.assert_close(huge.log_prob(torch.tensor([1.0, 0, 0, 1, 0])).float(), got)


def test_items_that_are_certain_have_no_gradient():
    inf = torch.inf
    theta = torch.tensor([-inf, 3.0, 0.5, 0.5, inf], dtype=torch.float64, requires_grad=True)
    design = ConditionalPoisson(logits=theta, k=3)
    (gradient,) = torch.autograd.grad(design.log_prob(torch.tensor([0.0, 1, 0, 1, 1], dtype=torch.float64)), theta)
    assert gradient[0] == gradient[4] == 0


def test_relaxed_hard_samples_of_bad_or_half_precision_rows():
    with pytest.raises(ValueError, match="cannot be drawn from"):
        khot.sample_relaxed_khot(torch.zeros(4), torch.tensor(1.5), hard=True)
    x = khot.sample_relaxed_khot(torch.zeros(500, 4096, dtype=torch.bfloat16), 256, hard=True, generator=generator())
    first = x[:, :2048].double().sum() / (500 * 256)  # ties in bfloat16 noise went to the lowest index
    assert abs(first - 0.5) < 5 * 0.5 / (500 * 256) ** 0.5
    with pytest.raises(ValueError, match="`temperature` must be > 0; got -1"):
        RelaxedKHot(torch.tensor(-1.0), logits=torch.zeros(4), k=2)
    certain = RelaxedKHot(0.5, logits=torch.tensor([torch.inf, 0.0, 1.0, 2.0]), k=2)
    y = certain.sample((5,), generator=generator())
    expected = RelaxedKHot(0.5, logits=torch.tensor([0.0, 1.0, 2.0]), k=1).log_prob(y[:, 1:])
    torch.testing.assert_close(certain.log_prob(y), expected)


@EVERY
def test_weights_of_any_dtype_and_batch(design):
    if design is Pivotal:
        return
    d = design(logits=scores(5), k=2)
    weights = torch.arange(15).view(3, 5)
    got = d.variance_of_sum(weights)
    assert got.shape == (3,)
    torch.testing.assert_close(got[1], d.variance_of_sum(weights[1].double()))


def test_joint_probabilities_must_be_of_pairs():
    with pytest.raises(ValueError, match=r"`joint_probs` must have the shape \(…, 6, 6\); got \(6,\)"):
        khot.horvitz_thompson_variance(A6K3, A6K3, A6K3)


# Conditional Poisson and Sampford ------------------------------------------------------------------------------------


def log_elementary(theta: Tensor, k: int) -> Tensor:
    """log e_k by the dynamic programme over items, in logarithms: O(nk), the reference."""
    row = torch.full((*theta.shape[:-1], k + 1), -torch.inf, dtype=theta.dtype)
    row[..., 0] = 0
    for item in theta.unbind(-1):
        row = torch.cat((row[..., :1], torch.logaddexp(row[..., 1:], row[..., :-1] + item[..., None])), -1)
    return row[..., k]


@pytest.mark.parametrize("n", [300, 2000])
@pytest.mark.parametrize("scale", [0.1, 1, 10])
def test_normaliser_equals_the_dynamic_programme(n, scale):
    for k in (1, 10, n // 2, n - 1):
        theta = scale * scores(n, seed=k)
        expected = log_elementary(theta, k)
        got = natural.log_normaliser(theta, torch.tensor(float(k), dtype=torch.float64))
        assert abs(got - expected) <= 1e-10 * abs(expected), (k, got, expected)


def test_spot_values_of_r():
    """R's `sampling`: UPMEpiktildefrompik, UPMEpik2frompikw, UPMEpikfromq, UPsampfordpi2, UPtillepi2."""
    design = ConditionalPoisson(A6K3)
    tilde = [0.10207808952, 0.22381707472, 0.44172796439, 0.57962671404, 0.77935236597, 0.87339779135]
    np.testing.assert_allclose(design.logits.sigmoid().numpy(), tilde, atol=1e-10, rtol=0)
    assert abs(design.joint_probs()[0, 1] - 0.00491709331799) < 1e-12
    assert abs(Sampford(A6K3).joint_probs()[0, 1] - 0.00401349580870) < 1e-12
    marginals = [0.04359213425, 0.11560391406, 0.35488162126, 0.66188266085, 0.88211790856, 0.94192176103]
    np.testing.assert_allclose(ConditionalPoisson(logits=A6K3.logit(), k=3).mean.numpy(), marginals, atol=1e-10, rtol=0)


def test_entropies_are_ordered_as_published():
    """Nats on the six-item vector; conditional Poisson has the greatest."""
    published = {ConditionalPoisson: 1.8897, Sampford: 1.8891, Brewer: 1.8892, Systematic: 1.362, GIVEN: 1.615}
    for design, value in published.items():
        assert abs(design(A6K3).entropy() - value) < 6e-4


@pytest.mark.parametrize(("n", "k", "scale"), [(6, 3, 1), (40, 39, 3), (500, 5, 2), (5000, 2000, 1), (5000, 10, 3)])
def test_natural_parameters_are_solved_for(n, k, scale):
    p = khot.sigmoid_topk(scale * scores(n), k)
    theta = ConditionalPoisson(p).logits
    assert (natural.marginals(theta, torch.tensor(float(k), dtype=torch.float64)) - p).abs().max() < 1e-12


def test_solving_in_a_batch_of_unlike_rows():
    p = torch.stack([khot.sigmoid_topk(s * scores(30, seed=i), 7) for i, s in enumerate((0.01, 1, 5, 30))])
    p[0, :3] = torch.tensor([1.0, 0.0, 0.0])
    p[0, 3:] = 6 / 27
    design = ConditionalPoisson(p, 7)
    got = natural.marginals(design.logits, design._sizes)
    assert (got - p).abs().max() < 1e-12


def test_covariance_is_the_hessian():
    theta, k = scores(7), torch.tensor(3.0, dtype=torch.float64)
    design = ConditionalPoisson(logits=theta, k=3)
    hessian = torch.func.hessian(lambda t: natural.log_normaliser(t, k))(theta)
    torch.testing.assert_close(design.covariance_matrix, hessian, atol=1e-14, rtol=0)
    mean = functools.partial(_mean, k=3)
    torch.testing.assert_close(torch.func.jacrev(mean)(theta), hessian, atol=1e-14, rtol=0)
    torch.testing.assert_close(torch.func.jacfwd(mean)(theta), hessian, atol=1e-14, rtol=0)
    batch = scores(4, 7)
    torch.testing.assert_close(torch.vmap(mean)(batch), mean(batch))


def _mean(theta: Tensor, k: int) -> Tensor:
    return ConditionalPoisson(logits=theta, k=k, validate_args=False).mean


def test_gradients_of_conditional_poisson():
    theta = scores(2, 6).requires_grad_()
    x = ConditionalPoisson(logits=theta, k=3).sample((4,), generator=generator())
    for of in (
        lambda t: ConditionalPoisson(logits=t, k=3).log_prob(x),
        lambda t: ConditionalPoisson(logits=t, k=3).mean,
        lambda t: ConditionalPoisson(logits=t, k=3).entropy(),
    ):
        assert torch.autograd.gradcheck(of, (theta,))
        assert torch.autograd.gradgradcheck(of, (theta,))
    assert torch.autograd.gradcheck(lambda t: ConditionalPoisson(khot.sigmoid_topk(t, 3)).log_prob(x), (theta,))
    # ∇_π log p = C⁺(x − π)
    probs = A6K3.clone().requires_grad_()
    design = ConditionalPoisson(probs)
    subset = torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(design.log_prob(subset), probs)
    expected = torch.linalg.pinv(design.covariance_matrix.detach()) @ (subset - A6K3)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


@EVERY
def test_gradients_survive_a_sample_and_a_backward(design):
    """A parameter cached while sampling, without gradients, once cut log_prob off from it."""
    if design is Pivotal:
        return
    for dtype in (torch.float32, torch.float64):
        for name in ("logits", "probs"):
            value = (scores(6) if name == "logits" else A6K3).to(dtype).requires_grad_()
            d = design(**{name: value}, k=3)
            x = d.sample(generator=generator())
            first, second = (torch.autograd.grad(d.log_prob(x), value)[0] for _ in range(2))
            assert torch.equal(first, second)
            assert first.abs().sum() > 0


def test_conjugate_gradients_do_not_run_away_along_the_null_space():
    """They once went on past convergence, where the rounding errors have a direction that Cov does not see."""
    for trial in range(60):
        n = 2 + trial % 10
        k = torch.full((2,), 1.0 + trial % (n - 1), dtype=torch.float64)
        counts = subsets.counts(natural.tilt((0.5 + trial % 5) * scores(2, n, seed=trial), k)[0], k)
        mean = subsets.marginals(counts)
        covariance = subsets.joint(counts) - mean[..., :, None] * mean[..., None, :]
        r = scores(2, n, seed=trial + 1)
        r = (r - r.mean(-1, keepdim=True)) * torch.tensor([[1.0], [0.0]])
        v = natural.covariance_solve(counts, r)
        assert ((covariance @ v[..., None])[..., 0] - r).abs().max() <= 1e-12 * v.abs().max().clamp(
            min=1
        )  # backward error


def test_natural_parameters_of_all_kinds_of_rows():
    for trial in range(100):
        n = 2 + trial % 30
        k = 1 + trial % (n - 1)
        p = khot.sigmoid_topk(10.0 ** (trial % 5 - 2) * scores(n, seed=trial), k)
        design = ConditionalPoisson(p, k)
        assert (natural.marginals(design._theta, design._sizes) - p).abs().max() < 1e-10, (trial, n, k)


def test_divergence():
    p, q = ConditionalPoisson(logits=scores(3, 6), k=2), ConditionalPoisson(logits=scores(3, 6, seed=1), k=2)
    x = p.enumerate_support()
    expected = (p.log_prob(x).exp() * (p.log_prob(x) - q.log_prob(x))).sum(0)
    torch.testing.assert_close(kl_divergence(p, q), expected)
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(3, dtype=torch.float64), atol=1e-13, rtol=0)
    narrow = ConditionalPoisson(logits=torch.tensor([-torch.inf, 0, 0, 0, 0, 0], dtype=torch.float64), k=2)
    assert (kl_divergence(p, narrow) == torch.inf).all()
    assert (kl_divergence(narrow, p).isfinite()).all()


def test_extreme_natural_parameters():
    theta = torch.tensor([1e4, 5e3, 0.0, -1.0, -5e3, -1e6], dtype=torch.float64)
    design = ConditionalPoisson(logits=theta, k=3)
    torch.testing.assert_close(design.mean, torch.tensor([1, 1, 0.7310585786, 0.2689414214, 0, 0], dtype=torch.float64))
    x = design.sample((2000,), generator=generator())
    assert (x[:, :2] == 1).all()
    assert abs(x[:, 2].mean() - 0.731) < 0.04
    assert design.log_prob(torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.float64)) == pytest.approx(
        math.log(0.7310585786)
    )


def test_both_samplers_of_conditional_poisson_agree_with_the_law():
    """n = 40, k = 2 is drawn one by one; n = 9, k = 4 along the tree of counts; steep weights fall back to it."""
    for theta, k in ((0.5 * scores(40), 2), (4 * scores(40), 2), (0.5 * scores(9), 4)):
        design = ConditionalPoisson(logits=theta, k=k)
        x = design.sample((200_000,), generator=generator())
        z = (x.mean(0) - design.mean) / (design.variance / 200_000).sqrt().clamp(min=1e-5)
        assert z.abs().max() < 5, z.abs().max()
        upper = torch.triu_indices(len(theta), len(theta), 1).unbind()
        joint = design.joint_probs()[upper]
        z = ((x.mT @ x / 200_000)[upper] - joint) / (joint * (1 - joint) / 200_000).sqrt().clamp(min=1e-5)
        assert z.abs().max() < 5.5, z.abs().max()


def test_large_designs_have_the_right_sizes_and_means():
    n, k = 5000, 2000
    theta = 2 * scores(n)
    for design in (ConditionalPoisson(logits=theta, k=k), Sampford(logits=theta, k=k), Pareto(logits=theta, k=k)):
        x = design.sample((40,), generator=generator())
        assert (x.sum(-1) == k).all()
        mean = design.probs if isinstance(design, Pareto) else design.mean
        # Σ weights · (x̄ − π) over all items, against the variance of independent draws, which is greater
        for weights in (scores(n, seed=1), theta, mean):
            spread = (weights.square() * mean * (1 - mean)).sum().div(40).sqrt()
            assert (weights * (x.mean(0) - mean)).sum().abs() < 5 * spread


def test_counts_are_those_of_independent_draws():
    """P(S = k) and P(S − x_i = k) against the product of polynomials."""
    z = scores(9)
    p = z.sigmoid().tolist()
    for k in range(10):
        c = subsets.counts(z, torch.tensor(k))
        assert abs(subsets.log_size(c).exp() - _polynomial(p)[k]) < 1e-15
        less, same = subsets.without(c)
        for i in (0, 4):
            rest = [*_polynomial(p[:i] + p[i + 1 :]), 0.0]
            total = _polynomial(p)[k]
            assert abs(less[i] * total - (rest[k - 1] if k else 0.0)) < 1e-14
            assert abs(same[i] * total - rest[k]) < 1e-14


def _polynomial(p: list[float]) -> list[float]:
    row = np.array([1.0])
    for q in p:
        row = np.convolve(row, [1 - q, q])
    return list(row)


# Samples in a call ---------------------------------------------------------------------------------------------------


@EVERY_EXACT
def test_sample_khot_has_the_mean_and_the_gradient_of_sigmoid_topk(design):
    x = scores(6).requires_grad_()
    soft = khot.sigmoid_topk(x, 2)
    rows = x.expand(20_000, 6)
    y = khot.sample_khot(rows, 2, design=design, generator=generator())
    assert (y.sum(-1) == 2).all()
    assert ((y.mean(0) - soft).abs() / (soft * (1 - soft) / 20_000).sqrt()).max() < 4.5
    weights = scores(6, seed=1)
    one = khot.sample_khot(x, 2, design=design, generator=generator())
    torch.testing.assert_close(
        torch.autograd.grad((weights * one).sum(), x)[0], torch.autograd.grad((weights * soft).sum(), x)[0]
    )


def test_sample_khot_takes_dims_masks_sizes_and_dtypes():
    x = torch.randn(3, 5, 4, generator=generator())
    k = torch.tensor([1, 2, 3])[:, None]
    mask = torch.ones(5, 1, dtype=torch.bool)
    mask[1] = False
    for fn in (khot.sample_khot, functools.partial(khot.sample_relaxed_khot, hard=True)):
        y = fn(x, k, dim=1, mask=mask, temperature=0.5, generator=generator())
        assert y.shape == x.shape
        assert (y.sum(1) == k).all()
        assert (y[:, 1] == 0).all()
        assert torch.equal(y, fn(x, k, dim=1, mask=mask, temperature=0.5, generator=generator()))
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            y = fn(x.to(dtype), 2, generator=generator())
            assert y.dtype == dtype
            assert (y.float().sum(-1) == 2).all()
        with pytest.raises(
            ValueError, match=r"got 12 rows of 12 that cannot be drawn from, the first at index \(0, 0\)"
        ):
            fn(x, 5, dim=1, mask=mask)
        with pytest.raises(ValueError, match="cannot be drawn from"):
            fn(torch.tensor([1.0, torch.nan, 0.0]), 1)
    soft = khot.sample_relaxed_khot(x, 2.5, mask=torch.tensor([True, True, True, False]), generator=generator())
    torch.testing.assert_close(soft.sum(-1), torch.full((3, 5), 2.5))
    assert (soft[..., 3] == 0).all()
    fractional = khot.sample_khot(x, 1.5, generator=generator())
    assert set(fractional.sum(-1).flatten().tolist()) == {1.0, 2.0}


def test_zero_and_one_probabilities_are_kept():
    x = torch.tensor([torch.inf, -torch.inf, 0.0, 0.0])
    y = khot.sample_khot(x.expand(500, 4), 2, generator=generator())
    assert (y[:, 0] == 1).all()
    assert (y[:, 1] == 0).all()


def test_relaxed_samples_are_differentiable_and_sharpen_to_gumbel_top_k():
    x = scores(6).requires_grad_()

    def sample(t: Tensor) -> Tensor:
        return khot.sample_relaxed_khot(t, 2, temperature=0.7, generator=generator())

    assert torch.autograd.gradcheck(sample, (x,))
    sharp = khot.sample_relaxed_khot(x.detach(), 2, temperature=1e-6, generator=generator())
    hard = khot.sample_relaxed_khot(x.detach(), 2, hard=True, generator=generator())
    torch.testing.assert_close(sharp, hard)
    many = khot.sample_relaxed_khot(x.detach().expand(100_000, 6), 2, hard=True, generator=generator())
    torch.testing.assert_close(many.mean(0), PlackettLuce(logits=x.detach(), k=2).mean, atol=0.007, rtol=0)


def test_relaxed_khot_density_integrates_to_one():
    """On a grid of y_1, y_2 with y_3 = k − y_1 − y_2, and by the mean of another density's ratio for n = 5."""
    for k, temperature in ((1.0, 0.8), (1.5, 1.3)):
        design = RelaxedKHot(temperature, logits=torch.tensor([0.5, 0.0, -0.7], dtype=torch.float64), k=k)
        m = 1500
        side = (torch.arange(m, dtype=torch.float64) + 0.5) / m
        y = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).flatten(0, 1)
        y = torch.cat((y, k - y.sum(-1, keepdim=True)), -1)
        y = y[(y[:, 2] > 0) & (y[:, 2] < 1)]
        assert abs(design.log_prob(y).exp().sum() / m**2 - 1) < 0.01
    p, q = (RelaxedKHot(t, logits=scores(5, seed=s), k=2) for t, s in ((0.9, 0), (0.8, 1)))
    y = q.sample((400_000,), generator=generator())
    assert abs((p.log_prob(y) - q.log_prob(y)).exp().mean() - 1) < 0.02


def test_relaxed_khot_is_a_distribution():
    x = scores(3, 5).requires_grad_()
    d = RelaxedKHot(torch.tensor([0.5, 1.0, 2.0]), logits=x, k=2)
    assert d.has_rsample
    y = d.rsample((4,), generator=generator())
    assert y.shape == (4, 3, 5)
    assert bool(d.support.check(y).all())
    assert torch.autograd.grad(y.square().sum(), x)[0].abs().sum() > 0
    assert not d.sample().requires_grad
    assert d.log_prob(y).shape == (4, 3)
    assert d.expand((2, 3)).sample().shape == (2, 3, 5)
    assert "RelaxedKHot(temperature=" in repr(d)
    with pytest.raises(ValueError, match="`temperature` must be > 0"):
        RelaxedKHot(0.0, logits=x, k=2)
    masked = RelaxedKHot(0.5, logits=torch.tensor([0.0, -torch.inf, 1.0, 2.0]), k=2)
    value = masked.sample((10,), generator=generator())
    assert (value[:, 1] == 0).all()
    without = RelaxedKHot(0.5, logits=torch.tensor([0.0, 1.0, 2.0]), k=2)
    torch.testing.assert_close(masked.log_prob(value), without.log_prob(value[:, [0, 2, 3]]), rtol=1e-4, atol=1e-4)


def test_khot_straight_through():
    x = scores(3, 5).requires_grad_()
    d = KHotStraightThrough(logits=x, k=2)
    y = d.rsample((4,), generator=generator())
    assert (y.sum(-1) == 2).all()
    assert torch.equal(y.detach(), Pivotal(logits=x, k=2).sample((4,), generator=generator()))
    weights = scores(5, seed=1)
    expected = torch.autograd.grad((weights * khot.sigmoid_topk(x, 2)).sum() * 4, x)[0]
    torch.testing.assert_close(torch.autograd.grad((weights * y).sum(), x)[0], expected)
    assert d.has_rsample


# Totals --------------------------------------------------------------------------------------------------------------


def test_horvitz_thompson_has_no_bias_and_the_variance_it_says():
    y = scores(6).square() + 1
    for design in (GIVEN(A6K3), Systematic(A6K3), ConditionalPoisson(A6K3), Sampford(A6K3), Brewer(A6K3)):
        x = design.enumerate_support()
        p = design.log_prob(x).exp()
        estimate = khot.horvitz_thompson(y, x, design.mean)
        torch.testing.assert_close((p * estimate).sum(), y.sum())
        variance = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs())
        torch.testing.assert_close(variance, (p * (estimate - y.sum()).square()).sum())
        torch.testing.assert_close(variance, design.variance_of_sum(y / design.mean))
    design = Sampford(A6K3)
    x = design.enumerate_support()
    each = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs(), sample=x)
    variance = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs())
    torch.testing.assert_close((design.log_prob(x).exp() * each).sum(), variance)


def test_horvitz_thompson_does_not_read_what_was_not_drawn():
    x, p = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.0, 0.5])
    assert khot.horvitz_thompson(torch.tensor([1.0, torch.nan, 2.0]), x, p) == 6.0
    with pytest.raises(ValueError, match="must broadcast"):
        khot.horvitz_thompson(torch.ones(2), x, p)
    with pytest.raises(TypeError, match="`sample` must be a real"):
        khot.horvitz_thompson(torch.ones(3), [1, 0, 1], p)  # type: ignore[arg-type]


def test_the_programme_of_the_benchmark_is_the_same_law():
    theta = scores(60)
    torch.testing.assert_close(marginals_by_programme(theta, 17), ConditionalPoisson(logits=theta, k=17).mean)
