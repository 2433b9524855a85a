import math
from functools import partial
from itertools import combinations, permutations

import mpmath as mp
import pytest
import scipy.integrate
import torch

from khot._math import drawn_sets, order_sampling
from khot._math.order_sampling import GUMBEL, LOGISTIC, Noise, inclusion, log_prob

pytestmark = pytest.mark.slow

NOISES = pytest.mark.parametrize("noise", [GUMBEL, LOGISTIC], ids=["gumbel", "logistic"])
PI = torch.tensor([0.07, 0.17, 0.41, 0.61, 0.83, 0.91], dtype=torch.float64)  # sums to k = 3


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def all_subsets(n, k):
    return torch.tensor([[i in subset for i in range(n)] for subset in combinations(range(n), k)]).view(-1, n)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uniform(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plackett_luce(scores, subset):
    """log P by enumeration of all orders, in digits enough for what the subtraction cancels."""
    with mp.workdps(400):
        weights = [mp.exp(float(s)) for s in scores]
        total = mp.mpf(0)
        for order in permutations(i for i, chosen in enumerate(subset) if chosen):
            left, chance = mp.fsum(weights), mp.mpf(1)
            for i in order:
                chance *= weights[i] / left
                left -= weights[i]
            total += chance
        return float(mp.log(total))


def pareto_density(y, scores, subset, exp):
    """The density of the least chosen score at y, and the sample being the subset, for logistic noise."""
    product, hazard = 1, 0
    for s, chosen in zip(scores, subset, strict=True):
        above, below = 1 / (1 + exp(y - s)), 1 / (1 + exp(s - y))
        product *= above if chosen else below
        hazard += below if chosen else 0
    return product * hazard


def pareto_pair(gap):
    """log P that the lesser of two scores wins, for logistic noise, in closed form."""
    with mp.workdps(60):
        e = mp.exp(-mp.mpf(gap))
        return float(mp.log(e * (e - 1 + gap) / (1 - e) ** 2))


# The noises


@pytest.mark.parametrize("z", [-690.0, -30.0, -3.0, -0.4, 0.0, 0.36, 0.37, 2.0, 17.0, 50.0, 699.0, 5000.0])
def test_the_noises_are_accurate_in_both_tails(z):
    with mp.workdps(60):
        x = mp.mpf(z)
        u = mp.exp(-x)
        log_sf = mp.log(-mp.expm1(-u)) if z > -5 else mp.log1p(-mp.exp(-u))
        softplus = mp.log1p(mp.exp(-abs(x)))
        log_sigmoid = [min(x, 0) - softplus, min(-x, 0) - softplus]
        expected = {GUMBEL: [-u, log_sf, -x - u - log_sf], LOGISTIC: [*log_sigmoid, log_sigmoid[0]]}
        for noise, values in expected.items():
            for function, value in zip(noise[:3], values, strict=True):
                got = function(tensor(z)).item()
                assert got == pytest.approx(float(value), rel=1e-13, abs=1e-15)
            log_cdf, log_sf, log_hazard = values
            logs = log_sf, log_cdf, log_hazard + log_sf
            for got, log in zip(noise.parts(tensor(z)), logs, strict=True):
                assert got.item() == pytest.approx(float(mp.exp(log)), rel=1e-13, abs=1e-300)


@NOISES
def test_the_derivatives_of_the_noises_are_finite(noise: Noise):
    for function in (*noise[:3], lambda z: torch.stack(noise.parts(z))):
        z = tensor([-1e4, -710.0, -700.0, -36.0, 0.0, 0.36651292058166435, 36.0, 710.0, 1e4]).requires_grad_()
        function(z).sum().backward()
        assert z.grad.isfinite().all()
        z = tensor([-3.0, -0.5, 0.3, 0.4, 3.0]).requires_grad_()
        assert torch.autograd.gradcheck(function, z)


@NOISES
def test_the_quantile_inverts_the_cdf_and_is_finite(noise: Noise):
    u = tensor([2.0**-54, 1e-10, 0.3, 0.5, 0.9])
    torch.testing.assert_close(noise.log_cdf(noise.quantile(u)), u.log(), rtol=1e-13, atol=1e-15)
    assert noise.quantile(tensor(1.0)).isfinite()  # (2⁵³ − ½)·2⁻⁵³ rounds to 1


# log_prob


@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_gumbel_is_plackett_luce(n, scale):
    scores = normal(n) * scale
    for k in range(1, n):
        subsets = all_subsets(n, k)
        expected = tensor([plackett_luce(scores, subset) for subset in subsets])
        got = log_prob(GUMBEL, scores, torch.tensor(k), subsets)
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=2e-14)
        if scale == 1:  # the check tells the laws apart
            assert (log_prob(LOGISTIC, scores, torch.tensor(k), subsets) - expected).abs().max() > 1e-2


def test_logistic_against_scipy():
    scores, subset = [0.3, -1.2, 2.0, 0.0, 0.9], [1, 0, 0, 1, 1]
    expected, _ = scipy.integrate.quad(pareto_density, -50, 60, (scores, subset, math.exp), epsabs=0, epsrel=1e-13)
    got = log_prob(LOGISTIC, tensor(scores), torch.tensor(3), torch.tensor(subset)).exp().item()
    assert got == pytest.approx(expected, rel=1e-12)


@NOISES
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 1e3])
def test_the_chances_of_all_subsets_sum_to_one_and_to_the_inclusions(noise: Noise, scale):
    for n in (2, 5, 8):
        scores = normal(n, seed=n) * scale
        for k in range(n + 1):
            subsets = all_subsets(n, k)
            p = log_prob(noise, scores, torch.tensor(k), subsets).exp()
            assert abs(p.sum().item() - 1) < 1e-13
            got = inclusion(noise, scores, torch.tensor(k))
            torch.testing.assert_close(got, p @ subsets.double(), rtol=0, atol=1e-12)


def test_tiny_chances():
    scores, subset = [250.0, 250.5, 0.0, 0.1], [0, 0, 1, 1]
    got = [
        log_prob(noise, tensor(scores), torch.tensor(2), torch.tensor(subset)).item() for noise in (GUMBEL, LOGISTIC)
    ]
    assert got[0] == pytest.approx(plackett_luce(scores, subset), abs=1e-12)
    with mp.workdps(20):
        scale = mp.exp(494)  # mpmath's tolerance is absolute
        pieces = [mp.mpf(y) for y in range(-60, 321, 10)]
        integral = mp.quad(lambda y: scale * pareto_density(y, scores, subset, mp.exp), pieces)
        assert got[1] == pytest.approx(float(mp.log(integral)) - 494, abs=1e-12)
    assert max(got) < -490


@pytest.mark.parametrize("gap", [1e-3, 1.0, 40.0, 500.0, 8000.0])
def test_the_lesser_of_two_logistic_scores(gap):
    got = log_prob(LOGISTIC, tensor([5.0, 5.0 + gap]), torch.tensor(1), torch.tensor([True, False])).item()
    assert got == pytest.approx(pareto_pair(5.0 + gap - 5.0), rel=1e-15, abs=1e-12)


def test_a_plateau_beyond_the_most_nodes_keeps_ten_digits():
    scores, subset = tensor([0.0, 1e6]), torch.tensor([True, False])
    got = log_prob(LOGISTIC, scores, torch.tensor(1), subset).item()
    assert got == pytest.approx(-1e6 + math.log(1e6 - 1), rel=1e-10)


@NOISES
def test_a_common_offset_changes_nothing(noise: Noise):
    scores, subsets, k = normal(7).mul(2**10).round() / 2**10, all_subsets(7, 3), torch.tensor(3)
    far = scores + 2.0**20
    torch.testing.assert_close(
        log_prob(noise, far, k, subsets), log_prob(noise, scores, k, subsets), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(inclusion(noise, far, k), inclusion(noise, scores, k), rtol=0, atol=1e-14)


@NOISES
def test_never_and_always(noise: Noise):
    scores = tensor([torch.inf, 0.3, -torch.inf, 1.0, -0.5, torch.inf])
    finite = tensor([0.3, 1.0, -0.5])
    subsets = all_subsets(6, 4)
    got = log_prob(noise, scores, torch.tensor(4), subsets)
    possible = subsets[:, 0] & subsets[:, 5] & ~subsets[:, 2]
    expected = log_prob(noise, finite, torch.tensor(2), subsets[possible][:, [1, 3, 4]])
    torch.testing.assert_close(got[possible], expected, rtol=0, atol=1e-14)
    assert (got[~possible] == -torch.inf).all()
    pi = inclusion(noise, scores, torch.tensor(4))
    assert pi[0] == pi[5] == 1
    assert pi[2] == 0
    torch.testing.assert_close(pi[[1, 3, 4]], inclusion(noise, finite, torch.tensor(2)), rtol=0, atol=1e-13)
    assert inclusion(noise, scores, torch.tensor(2)).tolist() == [1, 0, 0, 0, 0, 1]
    assert inclusion(noise, scores, torch.tensor(5)).tolist() == [1, 1, 0, 1, 1, 1]
    assert log_prob(noise, scores, torch.tensor(3), subsets).eq(-torch.inf).all()  # of another size


@NOISES
def test_gradients(noise: Noise):
    scores, subset = normal(2, 5).requires_grad_(), tensor([[1, 0, 1, 0, 0], [0, 1, 1, 0, 1]])
    k = tensor([2.0, 3.0])
    assert torch.autograd.gradcheck(lambda s: log_prob(noise, s, k, subset), scores)
    assert torch.autograd.gradgradcheck(lambda s: log_prob(noise, s, k, subset), scores)


@NOISES
def test_gradients_are_finite_at_the_edges(noise: Noise):
    rows = [
        ([0.0, -torch.inf, 1.0, torch.inf, 2.0], [1, 0, 0, 1, 0]),  # possible
        ([0.0, -torch.inf, 1.0, torch.inf, 2.0], [1, 1, 0, 0, 0]),  # not
        ([0.0, -torch.inf, -torch.inf, torch.inf, -torch.inf], [1, 0, 0, 1, 0]),  # sure
        ([1e3, -2e3, 0.0, 1.0, 3e3], [0, 1, 0, 1, 0]),
    ]
    scores = tensor([row for row, _ in rows]).requires_grad_()
    got = log_prob(noise, scores, torch.tensor(2), torch.tensor([subset for _, subset in rows]))
    got[got.isfinite()].sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[~scores.isfinite()] == 0).all()
    assert (scores.grad[1:3] == 0).all()
    torch.testing.assert_close(scores.grad.sum(-1), torch.zeros(4).double(), rtol=0, atol=1e-11)  # no common offset


@NOISES
def test_chunks_of_nodes_change_nothing(noise: Noise, monkeypatch):
    scores, subsets, k = normal(6).requires_grad_(), all_subsets(6, 2), torch.tensor(2)
    whole = log_prob(noise, scores, k, subsets)
    (gradient,) = torch.autograd.grad(whole.sum(), scores)
    pi = inclusion(noise, scores, k)
    monkeypatch.setattr(order_sampling, "CHUNK", 3000)
    in_chunks = log_prob(noise, scores, k, subsets)
    torch.testing.assert_close(in_chunks, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(in_chunks.sum(), scores)[0], gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(inclusion(noise, scores, k), pi, rtol=0, atol=1e-15)


# inclusion


@NOISES
@pytest.mark.parametrize("place", [0.0, 0.4, 1.0])
def test_long_rows_sum_to_k(noise: Noise, place):
    for scores in (normal(2000), normal(300) ** 5 * 30):
        k = 1 + round(place * (len(scores) - 2))
        pi = inclusion(noise, scores, torch.tensor(k))
        assert abs(pi.sum().item() - k) < 1e-10
        assert ((pi >= 0) & (pi <= 1)).all()
        assert (pi[scores.argsort()].diff() > -1e-13).all()


def test_one_of_many_gumbel_scores_is_softmax():
    scores = normal(1500) * 2
    torch.testing.assert_close(inclusion(GUMBEL, scores, torch.tensor(1)), scores.softmax(-1), rtol=0, atol=1e-13)
    last = log_prob(GUMBEL, scores, torch.tensor(1), torch.eye(1500)[:3])
    torch.testing.assert_close(last, scores.log_softmax(-1)[:3], rtol=0, atol=1e-12)


@NOISES
def test_rows_with_gaps_ties_and_counts_of_their_own(noise: Noise):
    scores = tensor(
        [[0.0] * 6, [1e6, 1e6, 3.0, 3.0, 3.0, -1e6], [1e3, 0, -1e3, -2e3, -3e3, 40.0], [1e300, 0, 1, 2, 3, 4]]
    )
    k = torch.tensor([4, 3, 2, 6])
    third = 1 / 3
    expected = tensor([[4 / 6] * 6, [1, 1, third, third, third, 0], [1, 0, 0, 0, 0, 1], [1] * 6])
    torch.testing.assert_close(inclusion(noise, scores, k), expected, rtol=0, atol=1e-13)
    batched = inclusion(noise, scores[:, None].expand(4, 2, 6), k[:, None].expand(4, 2).double())
    torch.testing.assert_close(batched, expected[:, None].expand(4, 2, 6), rtol=0, atol=1e-13)
    assert inclusion(noise, scores[:0], k[:0]).shape == (0, 6)
    assert log_prob(noise, scores[:0], k[:0], scores[:0]).shape == (0,)


def test_the_inclusions_are_not_the_asked_for_ones():
    k = torch.tensor(3)
    assert (inclusion(LOGISTIC, PI.logit(), k) - PI).abs().max() > 1e-3
    assert (inclusion(GUMBEL, PI.log(), k) - PI).abs().max() > 0.05


@NOISES
def test_inclusions_are_those_of_draws(noise: Noise):
    """12 z-scores below 4.5: it fails by chance once in 10⁴ seeds, and an error of 0.012 passes once in 10⁹."""
    draws, scores = 200_000, PI.logit()
    noisy = scores + noise.quantile(uniform(draws, 6))
    share = torch.zeros(draws, 6).scatter_(-1, noisy.topk(3).indices, 1.0).double().mean(0)

    def worst(pi):
        return ((share - pi) / (pi * (1 - pi) / draws).sqrt()).abs().max()

    pi = inclusion(noise, scores, torch.tensor(3))
    assert worst(pi) < 4.5
    assert worst((pi + 0.012 * tensor([1, -1, 1, -1, 1, -1])).clamp(0.001, 0.999)) > 4.5


@pytest.mark.parametrize(("n", "scale"), [(2, 1.0), (8, 1.0), (8, 30.0), (12, 1e3), (40, 1.0)])
def test_inclusion_of_few_items_by_their_sets(n, scale, monkeypatch):
    """10⁴ rows of 8 took a second, by an integral for each; the sets that can be drawn on the way are few."""
    scores, k = normal(9, n, seed=n) * scale, torch.tensor([1, 2, n - 1 if n < 20 else 2] * 3)
    scores[0, 0] = -torch.inf
    listed = inclusion(GUMBEL, scores, k)
    assert listed.sum(-1).sub(k).abs().max() < 1e-12
    monkeypatch.setattr(drawn_sets, "MOST_SETS", 0)
    torch.testing.assert_close(listed, inclusion(GUMBEL, scores, k), rtol=0, atol=1e-12)


@NOISES
@pytest.mark.parametrize("spread", [0.3, 2.0, 30.0])
def test_sets_one_by_one_and_the_integral_agree(noise: Noise, spread):
    scores = spread * torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores[0, 3] = -torch.inf
    k = torch.tensor([1.0, 3.0, 4.0, 6.0, 8.0], dtype=torch.float64)
    found = order_sampling._integrated(noise, scores, k)
    torch.testing.assert_close(found.sum(-1), k, rtol=0, atol=2e-12)
    if noise is GUMBEL:
        torch.testing.assert_close(found, order_sampling._listed(noise, scores, k), rtol=0, atol=1e-12)


@NOISES
def test_inclusions_of_many_rows_are_taken_by_parts(noise: Noise, monkeypatch):
    scores = torch.randn(7, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    k = torch.full((7,), 5)
    whole = inclusion(noise, scores, k)
    (slope,) = torch.autograd.grad(whole[:, 0].square().sum(), scores)
    monkeypatch.setattr(order_sampling, "AT_ONCE", 1 << 11)
    parts = inclusion(noise, scores, k)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(parts[:, 0].square().sum(), scores)[0], slope, rtol=0, atol=1e-12)


@NOISES
@pytest.mark.parametrize(("n", "k"), [(6, 2), (30, 12), (150, 70), (500, 200)])
def test_gradients_of_inclusions(noise: Noise, n, k):
    """By products, a spectrum and few scores: central differences, and a Jacobian without a common offset."""
    scores, size = normal(1, n, seed=n).requires_grad_(), tensor([k])
    direction, weight = normal(1, n, seed=1), normal(1, n, seed=2)
    law = partial(order_sampling._integrated, noise)
    (slope,) = torch.autograd.grad((law(scores, size) * weight).sum(), scores)
    with torch.no_grad():
        ends = [(law(scores + h * direction, size) * weight).sum() for h in (1e-4, -1e-4)]
    assert abs((slope * direction).sum() - (ends[0] - ends[1]) / 2e-4) < 1e-7
    assert abs(slope.sum()) < 1e-12


@NOISES
@pytest.mark.parametrize(("n", "k", "spread"), [(4, 2, 1.0), (40, 24, 1.0), (90, 30, 0.1), (60, 12, 3.0), (300, 90, 2)])
def test_nodes_are_enough(noise: Noise, n, k, spread):
    """With nodes for the width of the window alone, the sum of 64 items was off by 1e-5."""
    scores = spread * torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    size = torch.full((2,), float(k), dtype=torch.float64)
    found = order_sampling._integrated(noise, scores, size)
    torch.testing.assert_close(found, order_sampling._integrated(noise, scores, size, 44.0), rtol=0, atol=1e-12)
    single = order_sampling._integrated(noise, scores, size, order_sampling.RARE_SINGLE)
    torch.testing.assert_close(found, single, rtol=1e-8, atol=1e-10)
    assert (order_sampling._integrated(noise, scores, size, 8.0) - found).abs().max() > 1e-8


@NOISES
@pytest.mark.parametrize(("n", "k", "spread"), [(400, 90, 0.3), (700, 600, 1.0), (1500, 20, 2.0), (1500, 700, 4.0)])
def test_few_scores_stand_for_many_items(noise: Noise, n, k, spread, monkeypatch):
    scores, size = spread * normal(3, n), tensor([k] * 3)
    assert order_sampling._is_smooth(scores)
    few = order_sampling._integrated(noise, scores, size)
    monkeypatch.setattr(order_sampling, "MANY", n)
    torch.testing.assert_close(few, order_sampling._integrated(noise, scores, size), rtol=0, atol=2e-13)
    if k == 700:
        monkeypatch.setattr(order_sampling, "MANY", 300)
        monkeypatch.setattr(order_sampling, "_degree", lambda *_: 24)
        assert (order_sampling._integrated(noise, scores, size) - few).abs().max() > 1e-9  # too low a degree


def test_items_that_are_too_far_apart_or_sure_stand_for_themselves():
    assert not order_sampling._is_smooth(100 * normal(1, 1000))
    assert not order_sampling._is_smooth(torch.cat((normal(1, 999), tensor([[-torch.inf]])), -1))
    assert order_sampling._is_smooth(normal(1, 1000))


@NOISES
def test_an_inclusion_against_mpmath(noise: Noise):
    """∫ f(y − s_i) P(fewer than k of the others are above y) dy, with 30 digits."""
    scores, k = [0.3, -1.2, 2.0, 0.0, 0.9, 0.5, -0.4], 3

    def parts(z):
        below = mp.exp(-mp.exp(-z)) if noise is GUMBEL else 1 / (1 + mp.exp(-z))
        return below, mp.exp(-z) * below if noise is GUMBEL else below * (1 - below)

    def density(y, i):
        law = [mp.mpf(1)] + [mp.mpf(0)] * k
        for j, s in enumerate(scores):
            below = parts(y - s)[0]
            if j != i:
                law = [below * a + (1 - below) * b for a, b in zip(law, [mp.mpf(0), *law], strict=False)]
        return parts(y - scores[i])[1] * sum(law[:k])

    with mp.workdps(30):
        expected = [float(mp.quad(partial(density, i=i), list(range(-8, 60, 2)))) for i in (1, 4)]
    got = order_sampling._integrated(noise, tensor([scores]), tensor([k]))[0, [1, 4]]
    torch.testing.assert_close(got, tensor(expected), rtol=0, atol=1e-13)
