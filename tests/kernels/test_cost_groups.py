"""Short rows with costs are solved side by side: the eager solver's answers, whatever stands beside a row."""

import math

import pytest
import torch
from cases import RELAXATIONS
from test_costs import CDFS, KINDS, exactly, priced

import khot
from khot._math import threshold
from khot._math.cdfs import cdf_by_name
from khot.kernels import _costs, _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
PATHS = sorted(_native.PATHS)
SPREADS = {"even": 0.3, "wide": 6.0, "steep": 16.0, "equal": 0.0}


@pytest.fixture
def hold():
    """Hold all calls of a test to a path, and let them go."""
    yield _native.LIBRARY.khot_hold
    _native.LIBRARY.khot_hold(_native.WIDE)


def posed(rows, n, kind, spread):
    """Return scores, costs, budgets at both ends and between, and temperatures from cold to hot."""
    rng = torch.Generator().manual_seed(rows * n)
    x = KINDS[kind](torch.randn(rows, n, generator=rng, dtype=torch.float64)).float()
    c = (10 ** (SPREADS[spread] * (torch.rand(rows, n, generator=rng, dtype=torch.float64) - 0.5))).float()
    u = torch.rand(3, rows, generator=rng, dtype=torch.float64)
    share = u[0]
    share[::3] = 10 ** (-5 * u[1, ::3])
    share[1::3] = 1 - 10 ** (-5 * u[1, 1::3])
    return x, c, share, 10 ** (8 * u[2] - 4)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n"), [(4, 1), (7, 2), (40, 16), (33, 64), (19, 100), (17, 256)])
def test_entries_and_margins_of_a_group_are_those_of_the_eager_solver(rows, n, kind, spread, hold):
    x, c, share, temperature = posed(rows, n, kind, spread)
    mask = torch.arange(n) % 5 != 2 if n % 2 == 0 and n > 2 else None
    mask = None if mask is None else mask.expand(x.shape)
    k = share * (c if mask is None else c * mask).sum(-1, dtype=torch.float64)
    for place, cdf in enumerate(CDFS):
        hold(PATHS[(place + n) % len(PATHS)])
        y, is_left = _costs.topk(x, k, temperature, mask, c, cdf)
        z = _costs.margin(priced(x, c), k, temperature, mask, c, cdf_by_name(cdf)).double()
        alone = [_costs.topk(*(t[i : i + 1] for t in (x, k, temperature)), None if mask is None else mask[i : i + 1],
                             c[i : i + 1], cdf) for i in range(rows)]  # fmt: skip
        both = ~(is_left | torch.cat([left for _, left in alone]))
        y, single, k_of, paid = (t[both].double() for t in (y, torch.cat([y for y, _ in alone]), k, c))
        most = k_of.clamp(min=1)
        assert ((y >= 0) & (y <= 1)).all()
        assert (((paid * y).sum(-1) - k_of).abs() <= 1e-6 * most).all()
        assert ((paid * (y - single).abs()).sum(-1) <= 4e-6 * most).all()
        assert (is_left == torch.cat([left for _, left in alone])).all()
        prices = c.double() if mask is None else torch.where(mask, c, 1.0).double()
        solved = ~z.isnan().any(-1)
        spent = (prices * threshold.value(cdf_by_name(cdf), z, k, prices)).sum(-1)
        assert ((spent - k).abs() <= 8e-6 * k.clamp(min=1))[solved].all()


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("path", PATHS)
def test_a_group_agrees_with_float64(cdf, path):
    x, c, share, _ = posed(37, 48, "normal", "even")
    for temperature in (0.03, 1.0, 30.0):
        k = share * c.sum(-1, dtype=torch.float64)
        y, is_left = _costs.topk(x, k, temperature, None, c, cdf, path=path)
        exact, _ = exactly(priced(x, c), k, temperature, None, c, cdf)
        assert not is_left.any()
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("cdf", CDFS)
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads(cdf):
    x, c, share, temperature = posed(300, 40, "normal", "even")
    k = share * c.sum(-1, dtype=torch.float64)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        results = []
        for threads, which in ((1, torch.arange(300)), (2, torch.arange(300)), (2, order)):
            torch.set_num_threads(threads)
            row = (x[which], k[which], temperature[which])
            y, _ = _costs.topk(*row, None, c[which], cdf)
            z, _ = _costs.topk(priced(x, c)[which], *row[1:], None, c[which], cdf, gives_margins=True)
            dx = _costs.pull(x[which], y, temperature[which], c[which], cdf)
            results.append([t[which.argsort()] for t in (y, z, dx)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("rows", [3, 4, 5, 17])
def test_a_row_that_can_not_be_solved_spoils_no_other(rows):
    x, c, _, _ = posed(rows, 20, "normal", "even")
    k, expected = 4.0, khot.sigmoid_topk(x, 4.0, costs=c)
    for place, number in ((x, math.nan), (x, math.inf), (c, 0.0), (c, -1.0), (c, math.inf), (c, math.nan)):
        was = place[1, 3].clone()
        place[1, 3] = number
        y = khot.sigmoid_topk(x, k, costs=c)
        assert bool(y[1].isnan().all()) == (place is c or math.isnan(number))
        kept = torch.arange(rows) != 1
        assert torch.equal(y[kept], expected[kept])
        place[1, 3] = was


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_of_a_group_are_those_of_float64(name, is_shared):
    """In x alone, by the kernel; and in k, T and the costs too."""
    x, c, _, _ = posed(21, 50, "normal", "even")
    c, mask = (c[:1] if is_shared else c), x < 1
    k, t = torch.linspace(1, 20, 21, dtype=torch.float64), torch.linspace(0.3, 2, 21, dtype=torch.float64)
    g = torch.linspace(-1, 1, x.numel()).view(x.shape)
    for count in (1, 4):
        gradients = []
        for dtype in (torch.float32, torch.float64):
            leaves = [t.clone().to(dtype).requires_grad_(i < count) for i, t in enumerate((x, k, t, c))]
            y = RELAXATIONS[name].fn(leaves[0], leaves[1], temperature=leaves[2], costs=leaves[3], mask=mask)
            gradients.append(torch.autograd.grad(y, leaves[:count], g.to(dtype)))
        for single, double in zip(*gradients, strict=True):
            torch.testing.assert_close(single.double(), double, rtol=2e-4, atol=2e-5 * float(double.abs().max()))


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_cotangent_where_there_is_no_slope_is_not_read(name, rows, dtype):
    """It made the whole row's gradient NaN: masked, and at −inf."""
    c = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0], dtype=dtype)
    ordinary = torch.tensor([0.1, 0.5, 0.2, -0.3, 1.0], dtype=dtype).repeat(rows, 1)
    mask = torch.tensor([True, True, False, True, True])
    for x, allowed in ((ordinary, mask), (ordinary.where(mask, -math.inf), None)):
        gradients = []
        for bad in (0.0, math.nan, math.inf, -math.inf):
            leaf = x.clone().requires_grad_()
            y = RELAXATIONS[name].fn(leaf, 2.0, costs=c, mask=allowed, temperature=2.0)
            g = torch.tensor([1.0, 2.0, bad, 3.0, -1.0], dtype=dtype).repeat(rows, 1)
            gradients += torch.autograd.grad(y, leaf, g)
        assert gradients[0].abs().sum() > 0
        assert (gradients[0][:, 2] == 0).all()
        assert all(torch.equal(gradients[0], other) for other in gradients[1:])


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_score_of_infinity_has_no_derivative_whoever_else_needs_one(name, dtype):
    """Three share a budget; the gradient in x alone was [−.179, −.179, 1.071, 0]."""
    x = torch.tensor([[math.inf, math.inf, math.inf, 0.0], [0.3, -0.2, 1.0, 0.1]], dtype=dtype)
    c, g = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=dtype), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    gradients = []
    for needs_costs, create_graph in ((False, False), (True, False), (False, True)):
        leaf, prices = x.clone().requires_grad_(), c.clone().requires_grad_(needs_costs)
        y = RELAXATIONS[name].fn(leaf, 1.75, costs=prices)
        torch.testing.assert_close(y[0], torch.tensor([0.5, 0.5, 0.5, 0.0], dtype=dtype))
        gradients += torch.autograd.grad(y, leaf, g.expand(2, 4), create_graph=create_graph)
    for dx in gradients:
        assert torch.equal(dx[0], torch.zeros_like(dx[0]))
        torch.testing.assert_close(dx[1], gradients[0][1], rtol=1e-4, atol=1e-6)
    assert gradients[0][1].abs().max() > 0.01
