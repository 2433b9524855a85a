"""Each rival is what it says: against khot where the operator is the same, else against a literal definition."""

import math
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch

import khot
from benchmarks import rivals
from benchmarks.rivals import ALL, published
from khot.bench import Contender, Limit

pytestmark = pytest.mark.slow

MEASURABLE = [name for name, contender in ALL.items() if contender.fn is not None and contender.kind != "khot"]


def scores(*shape, spread=2.0):
    return spread * torch.randn(*shape, dtype=torch.float64)


def gradient(fn, x, g):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, g)[0]


# ── what all have in common ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MEASURABLE)
def test_every_rival_runs_forward_and_backward(name):
    rival, x = ALL[name], torch.randn(2, 3, 12, requires_grad=True)
    y = rival.fn(x, 4)
    y.backward(torch.randn_like(y))
    assert y.shape[:-1] == (2, 3)
    assert y.dtype == x.dtype
    assert bool(y.isfinite().all())
    assert bool(x.grad.isfinite().all())
    assert bool(x.grad.any())
    if rival.kind == "relaxation":
        assert y.shape == x.shape
        is_k = (y.sum(-1) - 4).abs().max() < 1e-3
        assert bool(is_k) == rival.sums_to_k


@pytest.mark.parametrize("name", MEASURABLE)
def test_rows_do_not_see_each_other(name):
    fn, x = ALL[name].fn, scores(4, 12)
    alone = torch.stack([fn(row[None], 3)[0] for row in x])
    torch.testing.assert_close(fn(x, 3), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MEASURABLE)
def test_input_is_left_alone(name):
    x = scores(3, 12)
    before = x.clone()
    ALL[name].fn(x, 3)
    assert torch.equal(x, before)


def test_refusals_give_the_reason():
    rival = Contender(fn=torch.mul, what="", integer_k=True, limits=(Limit("rows·n·k", 100, "too much"),))
    assert rival.refusal(2, 10, 3) == ""
    assert rival.refusal(2, 10, 2.5) == "needs an integer k; got 2.5"
    assert rival.refusal(2, 10, 10) == "needs 0 < k < n = 10; got 10"
    assert rival.refusal(2, 10, 6) == "rows·n·k = 120 > 100: too much"
    assert "pip install absent" in Contender(fn=None, what="", package="absent").refusal(2, 10, 3)


@pytest.mark.parametrize("name", ["halley", "bisection", "lml", "lapsum", "simple"])
def test_half_precision_is_rounded_once(name):
    x = torch.randn(3, 50).bfloat16()
    y = ALL[name].fn(x, 5)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, ALL[name].fn(x.float(), 5).bfloat16(), atol=0, rtol=0)


# ── solvers of σ_k ───────────────────────────────────────────────────────────────────────────────────────────────────


# Halley stops at a residual of 1e-6, which bounds the error of every entry; LML knows the shift to 5e-5.
@pytest.mark.parametrize(("name", "tolerance"), [("halley", 1e-6), ("bisection", 1e-12), ("lml", 5e-5 / 4)])
@pytest.mark.parametrize("k", [1, 7, 20, 39])
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_solvers_find_sigmoid_topk(name, tolerance, k, spread):
    x = scores(6, 40, spread=spread) + 3
    torch.testing.assert_close(ALL[name].fn(x, k), khot.sigmoid_topk(x, k), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["halley", "bisection"])
def test_solvers_take_a_fractional_k(name):
    x = scores(3, 30)
    torch.testing.assert_close(ALL[name].fn(x, 4.5), khot.sigmoid_topk(x, 4.5), atol=1e-6, rtol=0)


def test_halley_starts_from_the_quantile_torch_gives():
    x = scores(3, 31)
    for q in (0.01, 0.3, 29 / 30, 1.0):
        expected = x.quantile(q, -1, keepdim=True)
        torch.testing.assert_close(published._quantile(x, q), expected)


def test_bisection_keeps_its_defect():
    """The margin of 10 is too narrow for k/n = 1/200000: the mask sums to nine times what it should."""
    total = rivals.bisection(torch.zeros(200_000, dtype=torch.float64), 1).sum()
    assert float(total) == pytest.approx(200_000 / (1 + math.exp(10)), rel=1e-6)


def test_soft_converges_to_sigmoid_topk():
    """Squared cost over its maximum M and entropic weight ε make the temperature εM/2."""
    x, epsilon = scores(5, 30, spread=1.0), 0.1
    largest = torch.maximum(x.square(), (x - 1).square()).amax(-1)
    expected = khot.sigmoid_topk(x, 6, temperature=epsilon * largest / 2)
    torch.testing.assert_close(rivals.soft(x, 6, epsilon=epsilon, iterations=2000), expected, atol=1e-9, rtol=0)


def test_soft_is_sinkhorn():
    """Against the textbook iteration on the full kernel, after a few sweeps that are far from convergence."""
    x, k, epsilon, n = scores(8, spread=1.0), 3, 0.1, 8
    cost = torch.stack((x.square(), (x - 1).square()), -1)
    kernel = (-cost / cost.max() / epsilon).exp()
    rows, columns = torch.full((n,), 1 / n, dtype=x.dtype), torch.tensor([(n - k) / n, k / n], dtype=x.dtype)
    v = torch.ones(2, dtype=x.dtype)
    for _ in range(5):
        u = rows / (kernel @ v)
        v = columns / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    torch.testing.assert_close(rivals.soft(x, k, iterations=5), n * plan[:, 1])


@pytest.mark.parametrize("name", ["halley", "bisection", "lml"])
def test_solvers_have_the_gradient_of_sigmoid_topk(name):
    x, g = scores(4, 30), scores(4, 30)
    expected = gradient(partial(khot.sigmoid_topk, k=6), x, g)
    torch.testing.assert_close(gradient(partial(ALL[name].fn, k=6), x, g), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fn", "eps", "atol"),
    [
        (rivals.bisection, 1e-6, 1e-6),
        (published.lapsum, 1e-6, 1e-6),
        (partial(rivals.soft, iterations=1000), 1e-6, 1e-6),
        (published.halley, 1e-3, 1e-4),  # it stops at 1e-6, which a shorter step would magnify
    ],
    ids=["bisection", "lapsum", "soft", "halley"],
)
def test_implicit_gradients(fn, eps, atol):
    x = scores(2, 7, spread=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fn(x, 3), x, eps=eps, atol=atol)


def test_a_saturated_row_has_gradient_zero():
    x = torch.tensor([0.0, 1e4, 2e4, 3e4], dtype=torch.float64)
    assert not gradient(partial(rivals.bisection, k=2), x, torch.randn(4, dtype=torch.float64)).any()


# ── LapSum ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def laplace_topk(x, k):
    """Brute force: bisection on the threshold of the Laplace cdf, one row."""

    def cdf(tau):
        return np.where(x < tau, np.exp(-np.abs(x - tau)) / 2, 1 - np.exp(-np.abs(x - tau)) / 2)

    low, high = x.min() - 50, x.max() + 50
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle).sum() > k else (low, middle)
    return cdf((low + high) / 2)


@pytest.mark.parametrize("k", [0.01, 1, 4.5, 10, 19, 19.99])  # the threshold above all scores, among them, below all
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_lapsum_is_the_laplace_threshold(k, spread):
    x = scores(4, 20, spread=spread)
    expected = np.stack([laplace_topk(row, k) for row in x.numpy()])
    np.testing.assert_allclose(published.lapsum(x, k), expected, atol=1e-10)


def test_lapsum_with_ties():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0, -2.0, -2.0], dtype=torch.float64)
    for k in (1, 2, 3, 5):
        np.testing.assert_allclose(published.lapsum(x, k), laplace_topk(x.numpy(), k), atol=1e-10)


def test_lapsum_across_a_gap():
    """The sums above the threshold are e^−40 of those below: not to be found as a difference of two."""
    x = torch.tensor([40.0] * 2 + [0.0] * 5)
    np.testing.assert_allclose(published.lapsum(x, 2), [1, 1, 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(published.lapsum(x, 3), laplace_topk(x.double().numpy(), 3), atol=1e-6)


def test_lapsum_keeps_its_digits_in_float32():
    x = torch.randn(2, 20_000)
    for k in (1, 2000, 19_999):
        total = published.lapsum(x, k).sum(-1, dtype=torch.float64)
        np.testing.assert_allclose(total, k, rtol=3e-6)


# ── softmax after softmax ────────────────────────────────────────────────────────────────────────────────────────────


def softmax(values):
    weights = [math.exp(v - max(values)) for v in values]
    return [w / sum(weights) for w in weights]


def goyal_literally(row, k, alpha):
    left, total = list(row), [0.0] * len(row)
    for _ in range(k):
        top = max(left)
        total = [t + p for t, p in zip(total, softmax([-alpha * (v - top) ** 2 for v in left]), strict=True)]
        left[left.index(top)] = -10000.0
    return total


def xie_ermon_literally(row, k, tau):
    weights, total = list(row), [0.0] * len(row)
    for _ in range(k):
        p = softmax([w / tau for w in weights])
        total = [t + q for t, q in zip(total, p, strict=True)]
        weights = [w + math.log(1 - q) for w, q in zip(weights, p, strict=True)]
    return total


@pytest.mark.parametrize("k", [1, 3, 8])
def test_goyal_is_its_loop(k):
    x = scores(4, 9)
    expected = [goyal_literally(row, k, 2.0) for row in x.tolist()]
    np.testing.assert_allclose(rivals.goyal(x, k, alpha=2.0), expected, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_xie_ermon_is_its_loop(k):
    x = scores(4, 9)
    expected = [xie_ermon_literally(row, k, 0.7) for row in x.tolist()]
    np.testing.assert_allclose(rivals.xie_ermon(x, k, tau=0.7), expected, atol=1e-12)


@pytest.mark.parametrize("fn", [rivals.goyal, rivals.xie_ermon, rivals.ncpss, rivals.dftopk, rivals.simple])
def test_gradients_by_autograd(fn):
    x = scores(2, 6, spread=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fn(x, 3), x)


def test_xie_ermon_exceeds_one():
    """Its known defect: the sum is right, the entries are not probabilities."""
    y = rivals.xie_ermon(torch.randn(1000, 64), 6, tau=0.5)
    torch.testing.assert_close(y.sum(-1), torch.full((1000,), 6.0))
    assert float((y.amax(-1) > 1).float().mean()) > 0.3


# ── no solver ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("offset", [-3.0, 0.0, 3.0])
def test_ncpss_sums_to_k_and_has_no_shift(offset):
    x, k, n = scores(5, 20), 6, 20
    y = rivals.ncpss(x + offset, k)
    p = (x + offset).sigmoid()
    s = p.sum(-1, keepdim=True)
    torch.testing.assert_close(y, torch.where(s >= k, k * p / s, 1 - (n - k) * (1 - p) / (n - s)))
    torch.testing.assert_close(y.sum(-1), torch.full((5,), 6.0, dtype=y.dtype))
    assert not torch.allclose(rivals.ncpss(x + offset + 1, k), y, atol=1e-2)  # σ_k would not move


def test_dftopk_does_not_sum_to_k():
    x, k = scores(5, 20), 6
    ordered = x.sort(-1, descending=True).values
    y = rivals.dftopk(x, k, temperature=0.5)
    middle = (ordered[:, k - 1] + ordered[:, k]) / 2
    torch.testing.assert_close(y, ((x - middle[:, None]) / 0.5).sigmoid())
    assert float((y.sum(-1) - k).abs().min()) > 0.01


# ── SIMPLE ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def conditional_poisson(x, k):
    """Inclusion probabilities by enumeration of all subsets, one row."""
    marginals, total = np.zeros(len(x)), 0.0
    for subset in map(list, combinations(range(len(x)), k)):
        weight = math.exp(x[subset].sum())
        marginals[subset] += weight
        total += weight
    return marginals / total


@pytest.mark.parametrize("n", [2, 5, 8])
def test_simple_is_conditional_poisson(n):
    x = scores(4, n)
    for k in range(1, n + 1):
        expected = np.stack([conditional_poisson(row, k) for row in x.numpy()])
        np.testing.assert_allclose(rivals.simple(x, k), expected, atol=1e-10)


def test_simple_golden_values():
    x = torch.tensor([0.3, 0.6, 0.5, 0.2], dtype=torch.float64).logit()
    np.testing.assert_allclose(rivals.simple(x, 2), [0.3568, 0.7622, 0.6595, 0.2216], atol=5e-5)


# ── other people's packages ──────────────────────────────────────────────────────────────────────────────────────────


def test_budget_bisect_is_the_projection():
    pytest.importorskip("entmax")
    x = scores(5, 20)
    y = ALL["entmax.budget_bisect"].fn(x, 6)
    torch.testing.assert_close(y.sum(-1), torch.full((5,), 6.0, dtype=y.dtype))
    for row, projected in zip(x, y, strict=True):
        inside = (projected > 0) & (projected < 1)
        tau = (row - projected)[inside].mean()
        torch.testing.assert_close(projected, (row - tau).clamp(0, 1))


@pytest.mark.parametrize("name", ["entmax.entmax15", "entmax.budget_bisect", "torchsort.soft_rank"])
def test_packages_are_listed_whether_installed_or_not(name):
    rival = ALL[name]
    assert rival.package == name.partition(".")[0]
    if rival.fn is None:
        assert rival.refusal(2, 10, 3) == f"{rival.package} is not installed (pip install {rival.package})"
