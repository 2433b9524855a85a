"""Half precision in the native kernel: the bits of float32 rounded once, and the gradient of float64."""

import pytest
import torch

import khot
from khot._math import threshold
from khot._math.cdfs import cdf_by_name
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
    x = (2 * torch.randn(shape, generator=generator)).to(dtype)
    mask = torch.rand(shape, generator=generator) > 0.2
    rows = torch.linspace(0.5, shape[1] / 2, shape[0], dtype=torch.float64)
    for k, temperature, allowed in ((1.0, 1.0, None), (rows, 0.1, None), (rows, 2 / rows, mask), (1.5, 1e-3, mask)):
        y = _native.native_topk(x.float(), k, temperature, allowed, path=path)
        got = _native.half_topk(x, k, temperature, allowed, path=path)
        torch.testing.assert_close(got, y.to(dtype), rtol=0, atol=0, equal_nan=True)


def excess(got, exact, rest):
    """Return by how much an error passes half a unit in the last of 16 bits, and `rest`; the largest of all entries."""
    least, digits = (-125, 8) if got.dtype == torch.bfloat16 else (-13, 11)
    half = torch.exp2(exact.frexp()[1].clamp(min=least) - digits - 1.0)
    return ((got.double() - exact).abs() - 1.001 * half - rest).max().item()


def laws():
    """The cdfs with a kernel, with the slope F'(z) and, for a kink, where it is."""
    root_two_pi = (2 * torch.pi) ** 0.5
    return {
        "sigmoid": (lambda z: z.sigmoid() * (-z).sigmoid(), ()),
        "laplace": (lambda z: (-z.abs()).exp() / 2, ()),
        "euclidean": (lambda z: ((z > 0) & (z < 1)).double(), (0, 1)),
        "normal": (lambda z: (-z * z / 2).exp() / root_two_pi, ()),
        "cauchy": (lambda z: 1 / (torch.pi * (1 + z * z)), ()),
        "power:1.5": (lambda z: 2 * z.clamp(0, 1) * (z < 1), (1,)),
    }


@needs_native
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cdf", laws())
def test_gradients_are_those_of_float64_rounded_once(cdf, dtype, path):
    """But for what float32 leaves of F' and of its mean, some 1e-6/T; entries at a kink have no gradient."""
    generator, (slope, kinks) = torch.Generator().manual_seed(0), laws()[cdf]
    for shape in SHAPES:
        x, g = (2 * torch.randn(2, *shape, generator=generator)).to(dtype)
        mask = torch.rand(shape, generator=generator) > 0.2
        rows = torch.linspace(0.5, shape[1] / 2, shape[0], dtype=torch.float64)
        for k, temperature, allowed in ((1.0, 1.0, None), (rows, 0.1, None), (rows, 2 / rows, mask), (1.5, 0.03, mask)):
            roots = x.new_empty(shape[0], 2, dtype=torch.float64)
            _native.half_topk(x, k, temperature, allowed, cdf, path, roots)
            got = _native.half_pull(g, x, roots, k, temperature, allowed, cdf, path)
            size, heat = (torch.as_tensor(t, dtype=torch.float64).expand(shape[0]) for t in (k, temperature))
            scores = x.double() if allowed is None else x.double().masked_fill(~allowed, -torch.inf)
            z = threshold.margin(scores, size, heat, None, None, cdf_by_name(cdf), early_stop=True)
            v = slope(z)
            mean = (v * g.double()).sum(-1, keepdim=True) / v.sum(-1, keepdim=True).clamp(min=1e-300)
            exact, rest = v * (g.double() - mean) / heat[:, None], 3e-6 * g.abs().max().double() / heat[:, None]
            is_smooth = torch.ones(shape[0], dtype=torch.bool)
            for kink in kinks:
                is_smooth &= ((z - kink).abs() > 1e-5).all(-1)
            assert excess(got[is_smooth], exact[is_smooth], rest[is_smooth]) <= 0
            if shape == (64, 1024) and allowed is None and isinstance(k, float) and cdf == "sigmoid":
                # From y of 16 bits it would not be so.
                y = _native.half_topk(x, k, temperature, allowed, cdf, path).double()
                w = y * (1 - y)
                rough = w * (g.double() - (w * g.double()).sum(-1, keepdim=True) / w.sum(-1, keepdim=True))
                assert excess(rough.to(dtype), exact, rest) > 0


@needs_native
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_finite_threshold_keep_their_gradients(dtype, path):
    """Saturated rows have none, ties at infinity that of float32, NaN and rows that cannot be satisfied have NaN."""
    inf, nan = torch.inf, torch.nan
    x = torch.tensor(
        [[1, 2, 3, 4], [1, inf, inf, inf], [nan, 1, 2, 3], [1, 2, -inf, -inf], [1, 2, 3, 4], [1, 2, 3, inf]]
    )
    k = torch.tensor([0, 2, 2, 3, 4, 2], dtype=torch.float64)
    g = torch.tensor([[1.0, -2, 3, 0.5]]).expand(6, 4).to(dtype)
    x = x.to(dtype)
    roots = torch.zeros(6, 2, dtype=torch.float64)
    y = _native.half_topk(x, k, 1.0, None, path=path, roots=roots)
    torch.testing.assert_close(y, _native.native_topk(x.float(), k, 1.0, None, path=path).to(dtype), equal_nan=True)
    assert roots[:, 0].isnan().tolist() == [True, True, True, True, True, False]
    expected = _native.native_pull(g.float(), _native.native_topk(x.float(), k, 1.0, None, path=path), 1.0, path=path)
    got = _native.half_pull(g, x, roots, k, 1.0, None, path=path)
    assert (got[[0, 4]] == 0).all()
    assert got[[2, 3]].isnan().all()
    torch.testing.assert_close(got, expected.to(dtype), equal_nan=True)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_same_bits_at_any_number_of_threads(dtype):
    x, g = torch.randn(2, 2, 200_000, generator=torch.Generator().manual_seed(4)).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            roots = torch.empty(2, 2, dtype=torch.float64)
            y = _native.half_topk(x, 1000.0, 0.1, None, roots=roots)
            found.append((y, roots, _native.half_pull(g, x, roots, 1000.0, 0.1, None)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_the_cotangent_stays_nan(dtype):
    """Also with all bits of a NaN set, which must not round to a number."""
    x = torch.randn(1, 40).to(dtype)
    g = torch.ones(1, 40, dtype=dtype)
    for bits in (0x7FFF, -1, 0x7F81 if dtype == torch.bfloat16 else 0x7C01):
        g[0, 3] = torch.tensor([bits], dtype=torch.int16).view(dtype)[0]
        roots = torch.empty(1, 2, dtype=torch.float64)
        _native.half_topk(x, 4.0, 1.0, None, roots=roots)
        assert _native.half_pull(g, x, roots, 4.0, 1.0, None).isnan().all()


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
    roots = torch.empty(1, 2, dtype=torch.float64)
    _native.half_topk(x, 32.0, 1e-3, None, roots=roots)
    assert torch.equal(_native.half_pull(g, x, roots, 32.0, 1e-3, None), expected)


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
