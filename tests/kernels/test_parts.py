"""The native `sums_at` and `value_at`, which parts of rows are evaluated by, against the eager ones."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from khot import ops
from khot._math import across, threshold
from khot._math.cdfs import CAUCHY, cdf_by_name
from khot.kernels import _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def posed(seed, rows, n, dtype, scale, temperature):
    """Rows with infinite scores and ties, and a point of each: anchors and shifts of both signs."""
    x = (scale * random(seed, rows, n)).to(dtype)
    which = torch.rand(rows, n, generator=torch.Generator().manual_seed(seed + 1))
    x[which < 0.02], x[which > 0.98] = -torch.inf, torch.inf
    x[(which > 0.4) & (which < 0.45)] = 0.5
    anchor, shift = random(seed + 2, 2, rows, 1)
    anchor = (scale * anchor).to(dtype).double()
    heat = torch.full((rows, 1), temperature, dtype=dtype).double()
    return threshold.Rows(x, torch.zeros(rows, 1).double(), heat, None), threshold.Point(anchor, shift)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    n=st.integers(1, 3000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1e-3, 1.0, 50.0, 1e6]),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 100.0]),
    name=st.sampled_from([*_native.CDFS, "power:1.25", "power:1.5"]),
    path=st.sampled_from([_native.WIDE, _native.AVX2, _native.PORTABLE]),
)
def test_agreement_with_the_eager_sums_and_values(seed, rows, n, dtype, scale, temperature, name, path):
    assume(_native.has_kernel(name, dtype))
    posing, point = posed(seed, rows, n, dtype, scale, temperature)
    cdf = cdf_by_name(name)
    expected = threshold.sums_at(cdf, posing, point)
    got = _native.sums_at(posing.x, *point, posing.temperature, name, path)
    assert torch.equal(got[:, 0], expected[:, 0]), "counts are exact"
    # The eager sums below the median are differences of sums, so the errors are those of the larger sums.
    pairs = expected[:, 1:].unflatten(-1, (2, 2)).sum(-1, keepdim=True).expand(-1, 2, 2).flatten(1)
    # A normal tail e^(−z²/2) errs by z² roundings of z, and z² is −2 log of it.
    roundings = 40 - 2 * pairs.clamp(1e-38, 1).log() if name == "normal" else 40
    assert ((got[:, 1:] - expected[:, 1:]).abs() <= roundings * EPS[dtype] * pairs + 1e-36).all()
    step = 1e-3 * random(seed + 3, rows, 1)
    y = _native.value_at(posing.x, *point, posing.temperature, step, name, path)
    whole = threshold.value_at(cdf, posing, point, step)
    assert y.dtype == dtype
    torch.testing.assert_close(y, whole, rtol=16 * EPS[dtype], atol=4 * EPS[dtype])


@pytest.mark.parametrize("path", [_native.WIDE, _native.PORTABLE])
@pytest.mark.parametrize("name", _native.IN_EVERY_DTYPE)
def test_thresholds_at_infinity_and_nan(name, path):
    """Nothing, everything, and rows without a threshold; infinite scores stay where they belong."""
    x = torch.tensor([0.0, torch.inf, -torch.inf, 1e30, -2.0] * 7).repeat(4, 1)
    x[3, 11] = torch.nan
    shift = torch.tensor([[torch.inf], [-torch.inf], [torch.nan], [0.3]]).double()
    posing = threshold.Rows(x, torch.zeros(4, 1).double(), torch.full((4, 1), 0.1).double(), None)
    point, step = threshold.Point(torch.zeros(4, 1).double(), shift), torch.zeros(4, 1).double()
    got = _native.value_at(x, *point, posing.temperature, step, name, path)
    expected = threshold.value_at(cdf_by_name(name), posing, point, step)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-6, atol=1e-7)
    assert got[2].isnan().all()
    assert got[3].isnan().sum() == 1


@pytest.mark.parametrize("name", ["sigmoid", "laplace"])
def test_small_tails_keep_their_digits(name):
    """Down to where the solver takes logarithms, at a sum of tiny/eps."""
    for dtype, depth in ((torch.float32, 70.0), (torch.float64, 670.0)):
        x = torch.linspace(-depth, depth, 1001, dtype=dtype)[None]
        nothing, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
        rows, point = threshold.Rows(x.double(), nothing, one, None), threshold.Point(nothing, nothing)
        exact = threshold.value_at(cdf_by_name(name), rows, point, nothing)
        y = _native.value_at(x, *point, one, nothing, name)
        assert ((y.double() - exact).abs() <= 4 * EPS[dtype] * exact).all()


def test_the_same_bits_at_any_number_of_threads():
    posing, point = posed(0, 1, 200_001, torch.float32, 1.0, 1.0)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.sums_at(cdf_by_name("sigmoid"), posing, point))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_which_calls_take_the_kernel():
    """Costs, and cdfs without a kernel, are summed by eager torch; the passes of rows in parts are these."""
    from khot.distributed import _ops

    posing, point = posed(0, 2, 50, torch.float64, 1.0, 1.0)
    costs = posing._replace(costs=torch.ones(2, 50).double())
    step = torch.zeros(2, 1).double()
    for cdf, rows in ((CAUCHY, posing), (cdf_by_name("sigmoid"), costs)):
        assert torch.equal(ops.sums_at(cdf, rows, point), threshold.sums_at(cdf, rows, point))
        assert torch.equal(ops.value_at(cdf, rows, point, step), threshold.value_at(cdf, rows, point, step))
    assert across.Passes(ops.sums_at, ops.value_at) == _ops.KERNELS
