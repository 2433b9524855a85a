"""Half precision in the native kernel: the bits of float32, rounded once."""

import pytest
import torch

import khot
from khot.kernels import _native

needs_native = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
DTYPES = (torch.bfloat16, torch.float16)
SHAPES = ((3, 5), (16, 16), (7, 64), (33, 300), (64, 1024), (2, 20000), (1, 70000))


@needs_native
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_float32_rounded_once(shape, dtype, path):
    generator = torch.Generator().manual_seed(0)
    x, g = (2 * torch.randn(2, *shape, generator=generator)).to(dtype)
    mask = torch.rand(shape, generator=generator) > 0.2
    rows = torch.linspace(0.5, shape[1] / 2, shape[0], dtype=torch.float64)
    for k, temperature, allowed in ((1.0, 1.0, None), (rows, 0.1, None), (rows, 2 / rows, mask), (1.5, 1e-3, mask)):
        y = _native.native_topk(x.float(), k, temperature, allowed, path=path)
        got = _native.half_topk(x, k, temperature, allowed, path=path)
        torch.testing.assert_close(got, y.to(dtype), rtol=0, atol=0, equal_nan=True)
        dx = _native.native_pull(g.float(), y, temperature, path=path).to(dtype)
        got = _native.half_pull(g, x, k, temperature, allowed, path=path)
        torch.testing.assert_close(got, dx, rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_16_bits_is_read_as_torch_reads_it(dtype, path):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    k = x.numel() / 3
    y = _native.native_topk(x.float(), k, 10.0, None, path=path).to(dtype)
    assert torch.equal(_native.half_topk(x, k, 10.0, None, path=path), y)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_written_to_16_bits_round_and_overflow_as_in_torch(dtype):
    x = torch.zeros(1, 64, dtype=dtype)
    g = (torch.randn(1, 64, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-9, 4, 64)).to(dtype)
    y = _native.native_topk(x.float(), 32.0, 1e-3, None)
    expected = _native.native_pull(g.float(), y, 1e-3).to(dtype)
    assert torch.equal(_native.half_pull(g, x, 32.0, 1e-3, None), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_in_half_precision(dtype):
    x = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    for fn, dim in ((khot.sigmoid_topk, -1), (khot.laplace_topk, 1), (khot.sigmoid_topk, 0)):
        y, z = fn(a, 1, dim=dim, temperature=0.5), fn(b.float(), 1, dim=dim, temperature=0.5).to(dtype)
        assert torch.equal(y, z)
        g = torch.ones_like(y) * x
        assert torch.equal(*(torch.autograd.grad(out, leaf, g)[0] for out, leaf in ((y, a), (z, b))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_derivatives_in_half_precision(dtype):
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    (dx,) = torch.autograd.grad(khot.sigmoid_topk(x, 4).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.float().square().sum(), x)
    leaf = x.detach().float().requires_grad_()
    (dx,) = torch.autograd.grad(khot.sigmoid_topk(leaf, 4).square().sum(), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(dx.square().sum(), leaf)
    torch.testing.assert_close(second.float(), expected, rtol=0.1, atol=0.02)


def test_a_tensor_k_with_a_gradient_is_computed_in_float32():
    """The kernel in half precision has no derivative in k: such calls take the other way."""
    x, k = torch.randn(3, 20).bfloat16(), torch.full((3,), 2.0, requires_grad=True)
    (dk,) = torch.autograd.grad(khot.sigmoid_topk(x, k).float().sum(), k)
    torch.testing.assert_close(dk, torch.ones(3), rtol=0.02, atol=0.02)


@needs_native
def test_scores_that_change_before_backward_are_found():
    x = torch.randn(3, 20).bfloat16().requires_grad_()
    scores = x * 1
    y = khot.sigmoid_topk(scores, 2)
    scores.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
