"""Pivotal and systematic sampling: exactness, orders and bits."""

import math
from typing import Any

import pytest
import torch
from design_cases import A6K3, GIVEN, generator, scores

import khot
from khot import ops
from khot._math import noise, pivotal, systematic
from khot.designs import Pivotal, Systematic


def expectation(p):
    """E[x] of the sampler for an integer size: its recursion with each coin replaced by its odds; (…, n)."""
    levels, residual = pivotal.plan(p)
    value = (residual >= 0.5).to(p.dtype)[..., None]
    for level in reversed(levels):
        share, won = pivotal.shares(level), level.is_won.to(p.dtype)
        pair = share * value + (1 - share) * won, (1 - share) * value + share * won
        value = torch.stack(pair, -1).flatten(-2)[..., : level.size]
    return value


@pytest.mark.parametrize(("k", "seed"), [(32, 1), (10**5, 1), (999_000, 1)])
def test_pivotal_is_exact_at_a_million(k, seed):
    """E[x], by the recursion that samples with each coin replaced by its odds."""
    p = khot.sigmoid_topk(scores(10**6, seed=seed), k)
    assert (expectation(p) - p).abs().max() <= 1e-13
    assert Pivotal(p).sample(generator=generator()).sum() == k
    rough = p.float()
    assert (expectation(rough.double()) - rough).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "probs",
    [[0.3, 0.7], [0.07, 0.17, 0.41, 0.61, 0.83, 0.91], [0.5] * 8, [1.0, 0.0, 0.5, 0.5, 0.25, 0.75, 1.0], [0.25] * 7],
)
def test_all_coins_give_the_probabilities_of_subsets(probs):
    """Each coin at the middle of its two cells, all 2^coins patterns: the sampler itself, without chance."""
    p = torch.tensor(probs, dtype=torch.float64)
    is_integer = torch.tensor(float(p.sum()) == round(float(p.sum())))
    levels, residual = pivotal.plan(p)
    goes_on = [pivotal.shares(level) for level in levels]  # a coin: whether the left is ahead
    odds = torch.cat([torch.where(level.is_won, 1 - t, t) for level, t in zip(levels, goes_on, strict=True)])
    total = torch.cat([level.total for level in levels])
    pattern = torch.arange(2 ** len(odds))[:, None] >> torch.arange(len(odds)) & 1
    coin = torch.where(pattern == 1, odds / 2, (1 + odds) / 2)
    chance = torch.where(pattern == 1, odds, 1 - odds).prod(-1)
    is_moot = total <= 0  # such a duel decides nothing, whatever the coin
    chance = torch.where(is_moot, 0.5, torch.where(pattern == 1, odds, 1 - odds)).prod(-1)
    roots = [(0.5, 1.0)] if is_integer else [(float(residual) / 2, float(residual)), (1.0, 1 - float(residual))]
    got: dict[tuple[int, ...], float] = {}
    for root, weight in roots:
        x = pivotal.sample(p.expand(len(coin), -1), torch.full((len(coin),), root), coin)
        for row, w in zip(x.long().tolist(), (chance * weight).tolist(), strict=True):
            got[tuple(row)] = got.get(tuple(row), 0.0) + w
    for row, w in got.items():
        x = torch.tensor(row, dtype=torch.float64)
        assert abs(pivotal.log_prob(p, x, is_integer).exp() - w) < 1e-15 or w == 0
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
    is_integer = torch.tensor([True, False, True])
    order = noise.order(noise.bits(seed, 3), n)
    assert (order.sort(-1).values == torch.arange(n)).all()
    for given, is_random in ((None, True), (None, False), (order, False)):
        for is_paired in (False, True):
            arguments: tuple[Any, ...] = (p, is_integer, seed, given, is_random, 2, is_paired)
            assert torch.equal(ops.pivotal(*arguments), pivotal.draw(*arguments))
            assert torch.equal(
                ops.systematic(p, sizes, seed, 2, is_paired), systematic.draw(p, sizes, seed, 2, is_paired)
            )
    assert torch.equal(ops.order(noise.bits(seed, 3), n), order)
    assert torch.equal(ops.uniform(seed, 3, n), noise.uniform(seed, 3, n))


@pytest.mark.parametrize("n", [65_537, 200_001])
def test_one_long_row_has_the_same_bits_over_several_threads(n):
    k, seed, is_whole = n // 5, torch.tensor(3), torch.tensor([False])
    p = khot.sigmoid_topk(3 * scores(1, n).float(), k)
    sizes = torch.tensor([float(k)], dtype=torch.float64)
    order = noise.order(noise.bits(seed, 1), n)
    draws = {
        "random": lambda: ops.pivotal(p, is_whole, seed, None, True, 1, False),
        "given": lambda: ops.pivotal(p, is_whole, seed, order, False, 1, False),
        "as they come": lambda: ops.pivotal(p, is_whole, seed, None, False, 2, True),
        "systematic": lambda: ops.systematic(p, sizes, seed, 2, True),
        "order": lambda: ops.order(noise.bits(seed, 1), n),
    }
    before = torch.get_num_threads()
    try:
        results = [[draw() for draw in draws.values()] for threads in (1, 2, 3) if not torch.set_num_threads(threads)]
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_systematic_samples_of_a_wrong_sum_have_the_same_bits_natively():
    """What is lacking is more than a shift of the logits gives, or than 2⁵⁰ units: the rare ways of the kernel."""
    p = torch.cat((torch.zeros(1, 300), torch.full((1, 40), 1e-9), torch.ones(1, 300), torch.rand(1, 60)), -1)
    for k in (0.0, 250.0, 330.0, 360.4, 399.0, 700.0):
        arguments = (p, torch.tensor([k], dtype=torch.float64), torch.tensor(5), 4, True)
        assert torch.equal(ops.systematic(*arguments), systematic.draw(*arguments)), k


def long_orders(n, keys=20_000):
    """Scores of three χ² tests of random orders: where an item is, where two are, and who is beside the first."""
    order = noise.order(noise.bits(torch.tensor(11), keys), n)
    place = order.argsort(-1)
    beside = order.gather(-1, (place[:, :1] ^ 1).clamp(max=n - 1))[:, 0]
    cells = [order[:, 3], beside[beside > 0] - 1]
    cells += [order[:, i] * 8 // n * 8 + order[:, j] * 8 // n for i, j in ((0, 1), (0, n // 2), (5, 37), (0, 512))]
    result = []
    for cell in cells:
        count = cell.bincount().double()
        mean, freedom = count.sum() / len(count), len(count) - 1
        result.append(float((((count - mean).square() / mean).sum() - freedom) / (2 * freedom) ** 0.5))
    return result


@pytest.mark.slow
@pytest.mark.long
def test_long_random_orders_are_as_good_as_uniform(monkeypatch):
    assert max(long_orders(520)) < 4
    assert max(long_orders(1000)) < 4
    monkeypatch.setattr(noise, "ROUNDS", 3)
    assert max(long_orders(1000)) > 10, "fewer rounds are found out"


def test_random_orders_are_uniform():
    order = noise.order(noise.bits(torch.tensor(7), 60_000), 4)
    code = (order * torch.tensor([64, 16, 4, 1])).sum(-1)
    count = code.unique(return_counts=True)[1].double()
    assert len(count) == 24
    assert ((count - 2500).square() / 2500).sum() < 56  # χ² with 23 degrees of freedom, P < 2e-4


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


@pytest.mark.parametrize("k", [2.25, 3, 0, 6])
def test_variances_of_systematic_sums_took_cubic_time(k):
    """4000 items took 8 seconds."""
    p = khot.sigmoid_topk(2 * scores(3, 6), k)
    p[0] = k / 6  # running sums that are integers
    d, a = Systematic(p, k), scores(4, 1, 6)
    expected = (a * (d.covariance_matrix @ a[..., None])[..., 0]).sum(-1)
    torch.testing.assert_close(d.variance_of_sum(a), expected, atol=1e-13, rtol=1e-12)
    large = Systematic(logits=scores(200_000), k=5000)
    sums = large.sample((300,), generator=generator()) @ scores(200_000, seed=1)
    assert 0.6 < float(large.variance_of_sum(scores(200_000, seed=1)) / sums.var()) < 1.6


def test_the_mode_and_the_entropy_of_systematic_samples_were_said_to_be_intractable():
    for p, k in ((A6K3, 3), (A6K3[:5], 2.09), (torch.full((6,), 0.5, dtype=torch.float64), 3)):
        d = Systematic(p, k)
        x = d.enumerate_support()
        log = d.log_prob(x)
        torch.testing.assert_close(d.entropy(), torch.special.entr(log.exp()).sum())
        assert abs(d.log_prob(d.mode) - log.max()) < 1e-12
    assert Systematic(logits=scores(100_000), k=500).entropy() < math.log(100_001)
