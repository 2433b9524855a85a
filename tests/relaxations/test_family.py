"""The members of the family: each law, each equivalence with the literature, costs, and relaxations of one's own."""

import functools
import math

import entmax
import numpy as np
import pytest
import torch
from cases import PROMISED, RELAXATIONS, scores
from scipy import optimize, stats

import khot
from benchmarks.grid import TEMPERATURES, counts
from khot._math import cdfs, threshold
from khot.testing import SCORE_KINDS as DISTRIBUTIONS
from khot.testing import check_relaxation

DOUBLE = torch.float64
MEMBERS = {name: case for name, case in RELAXATIONS.items() if name != "sigmoid_topk"}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("name", MEMBERS)
def test_sums_on_the_grid(name, kind, dtype):
    for n in (64, 1024):
        x = scores(kind, n, dtype)
        k, temperature = (
            t.flatten()
            for t in torch.meshgrid(*(torch.tensor(v, dtype=DOUBLE) for v in (counts(n), TEMPERATURES)), indexing="ij")
        )
        y = MEMBERS[name].fn(x.expand(len(k), n), k, temperature=temperature)
        assert bool(((y >= 0) & (y <= 1)).all())
        error = (y.double().sum(-1) - k).abs() / k.clamp(min=1)
        assert float(error.max()) <= PROMISED[dtype]
        if dtype == torch.float32:
            exact = MEMBERS[name].fn(x.double().expand(len(k), n), k, temperature=temperature)
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cdf", ["sigmoid", "laplace", "normal", "cauchy", "euclidean", "power:1.3333333333333333"])
def test_the_fixed_steps_of_other_devices_solve_the_grid(cdf):
    k, temperature = (
        t.flatten()
        for t in torch.meshgrid(*(torch.tensor(v, dtype=DOUBLE) for v in (counts(64), TEMPERATURES)), indexing="ij")
    )
    for kind in DISTRIBUTIONS:
        x = scores(kind, 64, torch.float32).expand(len(k), 64)
        y = threshold.topk(x, k, temperature, None, cdfs.cdf_by_name(cdf), early_stop=False)
        assert float(((y.double().sum(-1) - k).abs() / k.clamp(min=1)).max()) <= 1e-6


@pytest.mark.parametrize("name", MEMBERS)
def test_a_long_row(name):
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    for k in (1, 1000.5, 150_000):
        y = MEMBERS[name].fn(x, k, temperature=0.5)
        assert abs(float(y.double().sum()) - k) <= 2e-6 * k


# ── the same thing by other means ─────────────────────────────────────────────────────────────────────────────────────


def sinkhorn(gain, mass, chosen, sweeps=20_000):
    """Entropic transport of `mass` to two anchors that take `chosen` and the rest; the share that is chosen."""
    kernel = np.stack([np.exp(gain - gain.max()), np.exp(-gain.max()) * np.ones_like(gain)], -1)
    columns = np.array([chosen, mass.sum() - chosen])
    b = np.ones(2)
    for _ in range(sweeps):
        a = mass / (kernel @ b)
        b = columns / (kernel.T @ a)
    return a * kernel[:, 0] * b[0] / mass


def test_sinkhorn_with_two_anchors_is_sigmoid_topk():
    """SOFT: cost (x − anchor)², anchors 0 and 1, entropy ε; its T is ε/2."""
    x, k, epsilon = np.random.default_rng(0).normal(size=20), 6, 0.7
    gain = (x**2 - (x - 1) ** 2) / epsilon
    expected = sinkhorn(gain, np.full(20, 1 / 20), k / 20)
    got = khot.sigmoid_topk(torch.tensor(x), k, temperature=epsilon / 2)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


def test_sinkhorn_with_costs_is_spartan():
    rng = np.random.default_rng(1)
    values, costs, budget, beta = rng.normal(size=15), rng.uniform(0.5, 2, size=15), 5.5, 3.0
    expected = sinkhorn(beta * values / costs, costs, budget)
    got = khot.sigmoid_topk(torch.tensor(values), budget, temperature=1 / beta, costs=torch.tensor(costs))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


def test_entmax_budget_is_euclidean_topk():
    x = torch.randn(8, 30, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) * 3
    for k in (1, 4, 17):
        expected = entmax.budget_bisect(x, budget=k, dim=-1, n_iter=100)
        torch.testing.assert_close(khot.euclidean_topk(x, k), expected, rtol=0, atol=1e-9)


def test_quadratic_programme_is_euclidean_topk():
    x, k, temperature = np.random.default_rng(2).normal(size=12) * 2, 4.5, 0.8
    solution = optimize.minimize(
        lambda y: 0.5 * ((y - x / temperature) ** 2).sum(),
        np.full(12, k / 12),
        jac=lambda y: y - x / temperature,
        bounds=[(0, 1)] * 12,
        constraints={"type": "eq", "fun": lambda y: y.sum() - k, "jac": lambda y: np.ones(12)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    got = khot.euclidean_topk(torch.tensor(x), k, temperature=temperature)
    np.testing.assert_allclose(got, solution.x, rtol=0, atol=1e-7)


def entropy(y):
    return y * np.log(y)


def laplace_potential(y):
    small = np.minimum(y, 1 - y)
    return entropy(small) + small * (np.log(2) - 1)


POTENTIALS = {  # Ω, and its derivative, which is the quantile
    "sigmoid_topk": (lambda y: entropy(y) + entropy(1 - y), stats.logistic.ppf),
    "laplace_topk": (laplace_potential, stats.laplace.ppf),
    "normal_topk": (lambda y: -stats.norm.pdf(stats.norm.ppf(y)), stats.norm.ppf),
    "cauchy_topk": (lambda y: -np.log(np.sin(np.pi * y)) / np.pi, stats.cauchy.ppf),
    "euclidean_topk": (lambda y: y**2 / 2, lambda y: y),
    "power_topk": (lambda y: 0.75 * y ** (4 / 3), lambda y: y ** (1 / 3)),
}


@pytest.mark.parametrize("name", POTENTIALS)
def test_each_maximises_its_regularised_problem(name):
    """⟨x, y⟩ − T ΣΩ(y) over Δ_k, by a general solver that knows nothing of thresholds."""
    x, k, temperature = np.array([1.3, 0.4, 0.1, -0.2, -0.9, -1.4]), 2.5, 0.9
    potential, slope = POTENTIALS[name]
    start = np.full(6, k / 6)
    assert optimize.check_grad(lambda y: potential(y).sum(), slope, start) < 1e-6
    inside = 0 if name in ("euclidean_topk", "power_topk") else 1e-9
    solution = optimize.minimize(
        lambda y: temperature * potential(y).sum() - x @ y,
        start,
        jac=lambda y: temperature * slope(y) - x,
        bounds=[(inside, 1 - inside)] * 6,
        constraints={"type": "eq", "fun": lambda y: y.sum() - k, "jac": lambda y: np.ones(6)},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 2000},
    )
    got = RELAXATIONS[name].fn(torch.tensor(x), k, temperature=temperature)
    np.testing.assert_allclose(got, solution.x, rtol=0, atol=1e-6)


def lapsum(x, k):
    """Σ F(x − τ) = k for the Laplace cdf in closed form: between two sorted scores it is a quadratic in e^τ."""
    s = np.sort(x)
    for i in range(len(s) + 1):  # i scores lie below τ
        below, above = np.exp(s[:i]).sum() / 2, np.exp(-s[i:]).sum() / 2
        # e^{−τ}·below + (n − i) − e^{τ}·above = k
        c = k - (len(s) - i)
        root = (-c + math.sqrt(c * c + 4 * above * below)) / (2 * above) if above else below / c
        tau = math.log(root) if root > 0 else -math.inf
        if (i == 0 or tau >= s[i - 1]) and (i == len(s) or tau <= s[i]):
            z = x - tau
            return np.where(z > 0, 1 - np.exp(-np.abs(z)) / 2, np.exp(-np.abs(z)) / 2)
    raise AssertionError("no interval")


def test_lapsum_is_laplace_topk():
    rng = np.random.default_rng(3)
    for n, k in ((5, 2), (40, 7.5), (40, 39.2), (300, 1)):
        x = rng.normal(size=n) * 2
        np.testing.assert_allclose(khot.laplace_topk(torch.tensor(x), k), lapsum(x, k), rtol=0, atol=1e-10)


def test_power_of_two_is_euclidean():
    x = torch.randn(5, 9, dtype=DOUBLE)
    assert torch.equal(khot.power_topk(x, 3, p=2), khot.euclidean_topk(x, 3))
    torch.testing.assert_close(khot.power_topk(x, 3, p=2 + 1e-9), khot.euclidean_topk(x, 3), rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.2, 3.0])
def test_other_norms(p):
    check_relaxation(
        functools.partial(khot.power_topk, p=p), quantile=lambda y: y ** (p - 1), symmetric=False, smooth=False
    )


def test_sparse_members_have_exact_zeros_and_ones():
    x = torch.tensor([9.0, 4.0, 0.6, 0.4, -3.0])
    for fn in (khot.euclidean_topk, khot.power_topk):
        y = fn(x, 3)
        assert y[0] == y[1] == 1
        assert y[4] == 0
        assert 0 < y[3] < y[2] < 1


def test_gradient_at_a_corner_counts_the_entry_as_fixed():
    x = torch.tensor([1.0, 0.5, 0.5, 0.0], dtype=DOUBLE, requires_grad=True)  # τ = 0: y = x
    y = khot.euclidean_topk(x, 2)
    torch.testing.assert_close(y.detach(), x.detach())
    jacobian = torch.autograd.functional.jacobian(lambda t: khot.euclidean_topk(t, 2), x)
    expected = torch.zeros(4, 4, dtype=DOUBLE)
    expected[1:3, 1:3] = torch.tensor([[0.5, -0.5], [-0.5, 0.5]])
    torch.testing.assert_close(jacobian, expected)


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", RELAXATIONS)
def test_costs(name):
    fn = RELAXATIONS[name].fn
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 9, dtype=DOUBLE, generator=generator)
    costs = 0.5 + torch.rand(9, dtype=DOUBLE, generator=generator)
    for k in (0.5, 3.0, 6.0):
        y = fn(x, k, temperature=0.4, costs=costs)
        torch.testing.assert_close((costs * y).sum(-1), torch.full((4,), k, dtype=DOUBLE), rtol=0, atol=1e-10)
    torch.testing.assert_close(fn(x, 3, costs=torch.ones(9, dtype=DOUBLE)), fn(x, 3), rtol=0, atol=1e-10)
    whole = float(costs.sum())
    torch.testing.assert_close(fn(x, whole, costs=costs), torch.ones_like(x))
    assert bool(fn(x, whole + 1, costs=costs).isnan().all())
    bad = costs.clone()
    bad[3] = 0
    assert bool(fn(x, 3, costs=bad).isnan().all())
    mask = torch.arange(9) != 4
    masked = fn(x, 3, costs=costs, mask=mask)
    torch.testing.assert_close(masked[:, mask], fn(x[:, mask], 3, costs=costs[mask]), rtol=0, atol=1e-10)
    assert bool((masked[:, 4] == 0).all())
    moved = fn(x.T, 3, dim=0, costs=costs[:, None])
    torch.testing.assert_close(moved.T, fn(x, 3, costs=costs), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAXATIONS)
def test_gradients_with_costs(name):
    case = RELAXATIONS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, dtype=DOUBLE, generator=generator).requires_grad_()
    costs = (0.5 + torch.rand(2, 5, dtype=DOUBLE, generator=generator)).requires_grad_()
    k = torch.tensor([1.3, 2.2], dtype=DOUBLE, requires_grad=True)
    temperature = torch.tensor([1.5, 0.9], dtype=DOUBLE, requires_grad=True)

    def call(x, k, temperature, costs):
        return case.fn(x, k, temperature=temperature, costs=costs)

    arguments = (x, k, temperature, costs)
    assert torch.autograd.gradcheck(call, arguments, check_forward_ad=True, check_batched_grad=True)
    if case.promises.get("smooth", True):
        assert torch.autograd.gradgradcheck(call, arguments)


def test_gradient_with_costs_is_spartans_formula():
    x = torch.randn(7, dtype=DOUBLE, requires_grad=True)
    costs, g, beta = 0.5 + torch.rand(7, dtype=DOUBLE), torch.randn(7, dtype=DOUBLE), 2.0
    m = khot.sigmoid_topk(x, 3.0, temperature=1 / beta, costs=costs)
    (got,) = torch.autograd.grad(m, x, g)
    w = (m * (1 - m)).detach()
    expected = beta * w * (g / costs - (g * w).sum() / (costs * w).sum())
    torch.testing.assert_close(got, expected)


def test_costs_compile_and_vmap():
    x, costs = torch.randn(3, 6, dtype=DOUBLE), 0.5 + torch.rand(6, dtype=DOUBLE)
    expected = khot.laplace_topk(x, 2, costs=costs)
    compiled = torch.compile(lambda t, c: khot.laplace_topk(t, 2, costs=c), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, costs), expected)
    rows = torch.func.vmap(lambda row: khot.laplace_topk(row, 2, costs=costs))(x)
    torch.testing.assert_close(rows, expected)


# ── bad arguments ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("p", [1, 0.5, -1, math.inf, math.nan])
def test_bad_norms(p):
    with pytest.raises(ValueError, match="`p` must be > 1"):
        khot.power_topk(torch.randn(4), 2, p=p)


@pytest.mark.parametrize(
    ("costs", "error", "message"),
    [
        (2.0, TypeError, "`costs` must be a floating torch.Tensor"),
        (torch.ones(4, dtype=torch.int64), TypeError, "`costs` must be a floating torch.Tensor"),
        (torch.ones(3), ValueError, "`costs` must broadcast to the shape of `x`"),
    ],
)
def test_bad_costs(costs, error, message):
    with pytest.raises(error, match=message):
        khot.laplace_topk(torch.randn(4), 2, costs=costs)


def test_bad_budget():
    with pytest.raises(ValueError, match="budget, must be ≥ 0; got -1"):
        khot.sigmoid_topk(torch.randn(4), -1, costs=torch.ones(4))


# ── what once broke ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("p", [1.005, 1.02, 1.1, 5.0, 10.0])
def test_steep_norms_are_solved(p, dtype):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 10, 100):
        x = torch.randn(50, n, generator=generator).to(dtype)
        k = torch.rand(50, generator=generator).double() * n
        for temperature in (1.0, 0.01):
            y = khot.power_topk(x, k, p=p, temperature=temperature)
            assert float(((y.double().sum(-1) - k).abs() / k.clamp(min=1)).max()) <= 1e-6


@pytest.mark.parametrize("name", RELAXATIONS)
def test_costs_learn_beside_infinite_and_masked_scores(name):
    for special in (math.inf, -math.inf):
        costs = torch.ones(4, requires_grad=True)
        x = torch.tensor([special, 2.0, 1.0, 0.0])
        y = RELAXATIONS[name].fn(x, 1.6, costs=costs, temperature=2.0)
        (gradient,) = torch.autograd.grad(y[1], costs)
        assert bool(gradient.isfinite().all())
    free = torch.tensor([1.0, 0.0, 1.0, 1.0])  # a price of 0 where nothing may be bought
    y = RELAXATIONS[name].fn(torch.randn(4), 2.0, costs=free, mask=free > 0)
    assert y.sum().item() == pytest.approx(2, abs=1e-6)


def test_forward_mode_with_costs_at_the_threshold():
    """x = [1, 0, −1], k = 1.5: the middle entry has z = 0, where |z| has no slope."""
    x, ones = torch.tensor([1.0, 0.0, -1.0], dtype=DOUBLE), torch.ones(3, dtype=DOUBLE)
    for fn in (khot.sigmoid_topk, khot.laplace_topk, khot.normal_topk, khot.cauchy_topk):
        forward, reverse = (
            jacobian(lambda t, fn=fn: fn(t, 1.5, costs=ones))(x) for jacobian in (torch.func.jacfwd, torch.func.jacrev)
        )
        torch.testing.assert_close(forward, reverse)


@pytest.mark.parametrize("name", ["sigmoid_topk", "normal_topk", "cauchy_topk"])
def test_forward_mode_over_forward_mode(name):
    """torch drops the second tangent of a custom Function, but not of an op that differentiates level by level."""
    x = torch.randn(4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))

    def fn(t):
        return getattr(khot, name)(t, 2).square().sum()

    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(fn))(x), torch.func.hessian(fn)(x))


def test_a_count_of_numpy():
    x = torch.randn(4)
    for k in (np.float32(2), np.int64(2), np.array(2)):
        torch.testing.assert_close(khot.laplace_topk(x, k), khot.laplace_topk(x, 2))
