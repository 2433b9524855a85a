"""The native kernel of a soft top-k with costs against the eager solver, mpmath, and itself."""

import math
from unittest.mock import patch

import mpmath
import pytest
import torch
from cases import RELAXATIONS
from hypothesis import given, settings
from hypothesis import strategies as st

import khot
from khot._math import threshold
from khot._math.cdfs import cdf_by_name
from khot.kernels import _costs, _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
CDFS = [*_native.CDFS, "power:1.5"]
KINDS = {
    "normal": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "heavy": lambda x: x / x.flip(-1),
    "offset": lambda x: x + 1000,
    "infinite": lambda x: torch.where(x > 2, torch.inf, torch.where(x < -1, -torch.inf, x)),
}
COSTS = {
    "even": lambda u: 0.5 + u,
    "wide": lambda u: 10 ** (6 * u - 3),
    "whole": lambda u: 1 + (4 * u).floor(),
    "equal": lambda u: torch.full_like(u, 0.1),
}
NEAR = {torch.float32: 2e-6, torch.float64: 1e-9}
INF = math.inf


def posed(seed, shape, kind, costs):
    generator = torch.Generator().manual_seed(seed)
    x = KINDS[kind](torch.randn(shape, generator=generator, dtype=torch.float64))
    return x, COSTS[costs](torch.rand(shape, generator=generator, dtype=torch.float64))


def exactly(s, k, temperature, mask, costs, cdf):
    """The eager solver in float64, of scores per cost."""
    cdf, t = cdf_by_name(cdf), torch.full(s.shape[:-1], temperature, dtype=torch.float64)
    k = k if isinstance(k, torch.Tensor) else torch.full_like(t, k)
    prices = costs if mask is None else torch.where(mask, costs, 1.0)
    z = threshold.margin(s.double(), k, t, mask, prices.double(), cdf, early_stop=True)
    return threshold.value(cdf, z, k, prices.double()), z


def priced(x, costs):
    return torch.where(x.isinf(), x, x / costs)


problems = {
    "seed": st.integers(0, 10**6),
    "shape": st.sampled_from([(4, 1), (5, 7), (3, 64), (2, 1000), (1, 70_000)]),
    "kind": st.sampled_from(sorted(KINDS)),
    "costs": st.sampled_from(sorted(COSTS)),
    "share": st.floats(1e-3, 0.999),
    "temperature": st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    "is_masked": st.booleans(),
    "cdf": st.sampled_from(CDFS),
    "path": st.sampled_from(sorted(_native.PATHS)),
}


@settings(max_examples=150, deadline=None)
@given(**problems)
def test_entries_are_those_of_the_eager_solver(seed, shape, kind, costs, share, temperature, is_masked, cdf, path):
    """The sum within the promise; and Σ c·|y − y_exact|, as all entries err in one direction, as far as it allows."""
    x, c = posed(seed, shape, kind, costs)
    mask = x < x.nan_to_num().mean() + 2 if is_masked else None
    for dtype, near in NEAR.items():
        if not _native.has_kernel(cdf, dtype):
            continue
        x, c = x.to(dtype), c.to(dtype)
        k = share * (c if mask is None else c * mask).sum(-1, dtype=torch.float64)
        y, is_left = _costs.topk(x, k, temperature, mask, c, cdf, path=path)
        exact, _ = exactly(priced(x, c), k, temperature, mask, c, cdf)
        y, exact, paid, most = (t[~is_left].double() for t in (y, exact, c, k.clamp(min=1)))
        assert ((y >= 0) & (y <= 1)).all()
        assert (((paid * y).sum(-1) - k[~is_left]).abs() <= near / 2 * most).all()
        assert ((paid * (y - exact).abs()).sum(-1) <= 4 * near * most).all()
        assert not is_left.any() or kind == "infinite" or is_masked


@settings(max_examples=80, deadline=None)
@given(**problems)
def test_margins_are_those_of_the_eager_solver(seed, shape, kind, costs, share, temperature, is_masked, cdf, path):
    x, c = posed(seed, shape, kind, costs)
    mask = x < x.nan_to_num().mean() + 2 if is_masked else None
    for dtype, near in NEAR.items():
        if not _native.has_kernel(cdf, dtype):
            continue
        s, c = priced(x, c).to(dtype), c.to(dtype)
        k = share * (c if mask is None else c * mask).sum(-1, dtype=torch.float64)
        z = _costs.margin(s, k, temperature, mask, c, cdf_by_name(cdf), path=path).double()
        prices, paid = (
            c.double() if mask is None else torch.where(mask, c, 1.0).double(),
            exactly(s, k, temperature, mask, c, cdf)[0],
        )
        y = threshold.value(cdf_by_name(cdf), z, k, prices)
        assert ((prices * (y - paid).abs()).sum(-1) <= 4 * near * k.clamp(min=1))[~paid.isnan().any(-1)].all()
        assert torch.equal(z.isnan(), exactly(s, k, temperature, mask, c, cdf)[1].isnan())


def test_a_margin_has_the_digits_of_mpmath():
    x, c = posed(3, (12,), "normal", "even")
    for dtype, near in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        s, prices = (x / c).to(dtype), c.to(dtype)
        z = _costs.margin(s[None], 5.0, 0.3, None, prices[None], cdf_by_name("sigmoid"))[0]
        with mpmath.workdps(40):
            exact = [[mpmath.mpf(float(v)) for v in t] for t in (s, prices)]

            def paid(tau, exact=exact):
                return mpmath.fsum(v / (1 + mpmath.exp((tau - u) / 0.3)) for u, v in zip(*exact, strict=True)) - 5

            tau = mpmath.findroot(paid, (-20, 20), solver="anderson", tol=1e-30)
            expected = torch.tensor([float((u - tau) / 0.3) for u in exact[0]], dtype=torch.float64)
        torch.testing.assert_close(z.double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extremes_of_the_contract(name, dtype):
    """What the eager solver says, through the public call: the kernel leaves to it what has no finite threshold."""
    fn, whole = RELAXATIONS[name].fn, torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=dtype)
    ordinary = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=dtype)
    x = torch.stack([
        ordinary, ordinary, ordinary, ordinary,
        torch.tensor([INF, 0.0, 1.0, 2.0]), torch.tensor([INF, INF, INF, 0.0]), torch.tensor([-INF, 0.0, 1.0, -INF]),
        torch.tensor([math.nan, 0.0, 1.0, 2.0]), ordinary, torch.full((4,), -INF),
    ]).to(dtype)  # fmt: skip
    k = torch.tensor([0.0, 5.0, 6.0, 5.0 - 1e-12, 2.0, 1.75, 2.5, 1.0, math.nan, 1.0], dtype=torch.float64)
    y = fn(x, k, costs=whole, temperature=0.5)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.equal(y[1], torch.ones_like(y[0]))
    assert bool(y[2].isnan().all())
    torch.testing.assert_close(y[3], torch.ones_like(y[0]))
    assert y[4, 0] == 1
    torch.testing.assert_close((whole * y[4]).sum(), torch.tensor(2.0, dtype=dtype))
    torch.testing.assert_close(y[5], torch.tensor([0.5, 0.5, 0.5, 0.0], dtype=dtype))
    torch.testing.assert_close(y[6], torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=dtype))
    assert bool(y[7:].isnan().all())
    for bad in (0.0, -1.0, math.nan, -INF):
        costs = whole.clone()
        costs[2] = bad
        assert bool(fn(x[0], 1.0, costs=costs).isnan().all())
        masked = fn(x[0], 1.0, costs=costs, mask=costs > 0)
        torch.testing.assert_close(masked[[0, 1, 3]], fn(x[0, [0, 1, 3]], 1.0, costs=whole[[0, 1, 3]]))
        assert masked[2] == 0
    assert bool(fn(x[0], 1.0, costs=whole, temperature=torch.tensor(-1.0)).isnan().all())


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e30])
def test_extreme_temperatures(temperature):
    """Hard: the best per cost fill the budget, and one of them in part. Soft: all get the same share."""
    x, c = (t.float() for t in posed(5, (3, 200), "normal", "even"))
    y = khot.sigmoid_topk(x, 40.0, costs=c, temperature=temperature).double()
    torch.testing.assert_close((c * y).sum(-1), torch.full((3,), 40.0, dtype=torch.float64), rtol=1e-6, atol=0)
    if temperature < 1:
        assert (((y > 1e-6) & (y < 1 - 1e-6)).sum(-1) <= 1).all()
        order = (x / c).argsort(-1, descending=True)
        assert (y.gather(-1, order).diff(dim=-1) <= 0).all()
    else:
        torch.testing.assert_close(y, (40 / c.double().sum(-1, keepdim=True)).expand_as(y), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_gradients_in_float32_are_those_of_float64(name, is_masked):
    """In x alone by the kernel; in k, T and the costs too by the margins."""
    x, c = posed(6, (3, 2, 50), "normal", "even")
    mask = (x < 1) if is_masked else None
    k, t = torch.tensor([[5.0], [8.0], [0.3]]), torch.tensor([0.5, 1.5])
    g = torch.linspace(-1, 1, x.numel()).view(x.shape)
    for count in (1, 4):
        gradients = []
        for dtype in (torch.float32, torch.float64):
            leaves = [t.clone().to(dtype).requires_grad_(i < count) for i, t in enumerate((x, k, t, c))]
            y = RELAXATIONS[name].fn(leaves[0], leaves[1], temperature=leaves[2], costs=leaves[3], mask=mask)
            gradients.append(torch.autograd.grad(y, leaves[:count], g.to(dtype)))
        for single, double in zip(*gradients, strict=True):
            torch.testing.assert_close(single.double(), double, rtol=2e-4, atol=2e-5 * float(double.abs().max()))


def test_public_calls_use_the_kernel_and_its_derivative():
    x, c = (t.float().requires_grad_() for t in posed(7, (4, 30), "normal", "even"))
    prices = c.detach()[0]
    refusal = AssertionError("the eager solver was called")
    with (
        patch.object(threshold, "margin", side_effect=refusal),
        patch.object(_costs, "pull", wraps=_costs.pull) as pull,
    ):
        khot.normal_topk(x, 5, costs=prices).sum().backward()
        assert pull.call_count == 1
        khot.normal_topk(x, 5, costs=c).sum().backward()
        assert pull.call_count == 1
        with pytest.raises(AssertionError, match="eager"):
            khot.power_topk(x, 5, p=3.0, costs=prices)  # without a kernel
        with pytest.raises(AssertionError, match="eager"):
            khot.normal_topk(x, 0, costs=prices)  # rows that the kernel leaves


def test_controls_see_costs_that_are_not_read():
    """The checks above fail for a kernel that forgets the costs, or divides by them twice."""
    x, c = posed(8, (2, 64), "normal", "even")
    exact, _ = exactly(x / c, 10.0, 1.0, None, c, "sigmoid")
    plain = _native.native_topk((x / c), 10.0, 1.0, None)
    twice, _ = _costs.topk(x / c, 10.0, 1.0, None, c, "sigmoid")
    for wrong in (plain, twice):
        assert ((c * (wrong - exact).abs()).sum(-1) > 0.1).all()
    y, _ = _costs.topk(x, 10.0, 1.0, None, c, "sigmoid")
    g = torch.ones_like(y) * x
    dx, other = (_costs.pull(g, y, 1.0, t, "sigmoid") for t in (c, torch.ones_like(c)))
    assert (dx - other).abs().max() > 0.01
    torch.testing.assert_close((dx * c).sum(-1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 200_000), (5, 70_000), (300, 65)])
def test_the_same_bits_at_any_number_of_threads(shape):
    x, c = (t.float() for t in posed(9, shape, "normal", "even"))
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, _ = _costs.topk(x, shape[1] / 9, 0.7, None, c, "sigmoid")
            results.append((y, _costs.pull(x, y, 0.7, c, "sigmoid")))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_costs_of_any_layout():
    x, c = (t.float() for t in posed(10, (2, 3, 20), "normal", "even"))
    for costs in (c[0, 0], c[:, :1], c[0, 0, 0], c.mT.contiguous().mT, c[..., ::2].repeat(1, 1, 2), c.double()):
        got = khot.sigmoid_topk(x, 3.0, costs=costs)
        expected = khot.sigmoid_topk(x.double(), 3.0, costs=costs.expand(x.shape).double().contiguous())
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6)
    got = khot.sigmoid_topk(x, 1.0, costs=c, dim=1)
    torch.testing.assert_close(got.mT.contiguous(), khot.sigmoid_topk(x.mT, 1.0, costs=c.mT))
