"""A cotangent that is NaN or infinite where an entry cannot change: it must not reach the others."""

import math

import pytest
import torch

import khot
from khot._math import cdfs, implicit
from khot._math.cdfs import cdf_by_name
from khot.kernels import _native

needs_native = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
CDFS = ("sigmoid", "laplace", "euclidean", "normal", "cauchy", "power:1.5")
SIZES = (3, 20, 40, 64, 100, 1000)  # rows in registers, in groups, and one by one
BAD = (math.nan, math.inf, -math.inf)


def problem(n, dtype):
    """Return rows (5, n) of scores with entries at −∞, a cotangent that is 0 there, and where they are."""
    generator = torch.Generator().manual_seed(n)
    x, g = (torch.randn(5, n, generator=generator).to(dtype) for _ in range(2))
    is_out = torch.rand(5, n, generator=generator) < 0.3
    is_out[:, -1] = True
    is_out[2] = False  # a row without any
    is_out[:, :2] = False
    return x.masked_fill(is_out, -math.inf), g.masked_fill(is_out, 0), is_out


@needs_native
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("n", SIZES)
def test_kernels(n, cdf, path):
    for dtype in (torch.float32, torch.float64):
        if not _native.has_kernel(cdf, dtype):
            continue
        x, g, is_out = problem(n, dtype)
        y = _native.native_topk(x, 1.5, 1.0, None, cdf, path)
        usual, dk = _native.native_pull(g, y, 1.0, None, cdf, path), torch.empty(5, dtype=torch.float64)
        for value in BAD:
            dx = _native.native_pull(g.masked_fill(is_out, value), y, 1.0, dk, cdf, path)
            assert torch.equal(dx, usual)
            assert dk.isfinite().all()
        live = g.clone()
        live[1, y[1].sub(0.5).abs().argmin()] = math.nan
        is_lost = _native.native_pull(live, y, 1.0, None, cdf, path).isnan()
        assert is_lost[1].any()
        assert not is_lost[[0, 2, 3, 4]].any()


@needs_native
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, cdf, path):
    for n in SIZES:
        x, g, is_out = problem(n, dtype)
        roots = torch.empty(5, 2, dtype=torch.float64)
        _native.half_topk(x, 1.5, 1.0, None, cdf, path, roots)
        usual = _native.half_pull(g, x, roots, 1.5, 1.0, None, cdf, path)
        assert usual.isfinite().all()
        for value in BAD:
            dx = _native.half_pull(g.masked_fill(is_out, value), x, roots, 1.5, 1.0, None, cdf, path)
            assert torch.equal(dx, usual)


@pytest.mark.parametrize("cdf", CDFS)
def test_eager(cdf):
    x, g, is_out = problem(20, torch.float64)
    law = cdf_by_name(cdf)
    y = cdfs.value(law, x)
    for at in (implicit.at_value(y, 1.0, law), implicit.at_margin(x, 1.0, None, law)):
        usual = implicit.pull_value(g, at)
        for value in BAD:
            got = implicit.pull_value(g.masked_fill(is_out, value), at)
            for one, other in zip(got, usual, strict=True):
                assert torch.equal(one, other)


def masked_gradient(fn, x, g):
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(fn(x), x, g)
    return dx


@pytest.mark.parametrize("value", BAD)
def test_public_calls(value):
    x, g, is_out = problem(40, torch.float32)
    for fn in (
        lambda x: khot.sigmoid_topk(x, 1.5),
        lambda x: khot.sigmoid_topk(x, torch.full((5,), 1.5, dtype=torch.float64, requires_grad=True)),
        lambda x: khot.sigmoid_topk(x.nan_to_num(), 1.5, mask=~is_out),
    ):
        dx = masked_gradient(fn, x, g.masked_fill(is_out, value))
        assert torch.equal(dx, masked_gradient(fn, x, g))
        assert (dx[is_out] == 0).all()


@pytest.mark.compile
def test_compiled_call():
    x, g, is_out = problem(40, torch.float32)
    fn = torch.compile(lambda x: khot.sigmoid_topk(x, 1.5), backend="aot_eager")
    dx = masked_gradient(fn, x, g.masked_fill(is_out, math.nan))
    torch.testing.assert_close(dx, masked_gradient(lambda x: khot.sigmoid_topk(x, 1.5), x, g))
