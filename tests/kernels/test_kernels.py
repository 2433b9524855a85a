"""The native kernel against the eager reference: every value and every gradient."""

import math

import pytest
import torch
from cases import PROMISED, scores
from hypothesis import given, settings
from hypothesis import strategies as st

import khot
from benchmarks.grid import TEMPERATURES, counts
from khot._math import cdfs, implicit, select, threshold
from khot.kernels import _native
from khot.testing import SCORE_KINDS as DISTRIBUTIONS

pytestmark = pytest.mark.slow

needs_native = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
INF, NAN = math.inf, math.nan
POWERS = [f"power:{p!r}" for p in (1.25, 4 / 3, 1.5, 1.9)]
ATOL = {torch.float32: 1e-6, torch.float64: 1e-12}
PATHS = {name: path for path, name in _native.PATHS.items()}  # a machine without one runs the next


def eager(x, k, temperature, mask=None):
    return threshold.topk(x, k, temperature, mask, cdfs.SIGMOID, early_stop=True)


def rows(*values):
    return (torch.as_tensor(v, dtype=torch.float64) for v in values)


@needs_native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_grid(name, dtype, path):
    for n in (64, 1000, 16384):
        x = scores(name, n, dtype)
        k, temperature = (t.flatten() for t in torch.meshgrid(*rows(counts(n), TEMPERATURES), indexing="ij"))
        got = _native.native_topk(x.expand(len(k), n), k, temperature, None, path=PATHS[path])
        expected = eager(x.double().expand(len(k), n), k, temperature).to(dtype)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-10)
        assert bool(((got.double().sum(-1) - k).abs() <= PROMISED[dtype] * k.clamp(min=1)).all())


@needs_native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cdf", ["laplace", "euclidean", "normal", "cauchy", "power:1.25", "power:1.5"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_family_on_the_grid(name, cdf, dtype, path):
    if not _native.has_kernel(cdf, dtype):
        pytest.skip("eager torch")
    for n in (64, 1000, 16384):
        x = scores(name, n, dtype)
        k, temperature = (t.flatten() for t in torch.meshgrid(*rows(counts(n), TEMPERATURES), indexing="ij"))
        got = _native.native_topk(x.expand(len(k), n), k, temperature, None, cdf, PATHS[path])
        exact = threshold.topk(
            x.double().expand(len(k), n), k, temperature, None, cdfs.cdf_by_name(cdf), early_stop=True
        )
        assert bool(((got >= 0) & (got <= 1)).all())
        torch.testing.assert_close(got, exact.to(dtype), rtol=0, atol=PROMISED[dtype])
        error = (got.double().sum(-1) - k).abs() / k.clamp(min=1)
        assert float(error.max()) <= PROMISED[dtype]


@needs_native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_margins_on_the_grid(name, path):
    for n in (64, 16384):
        x = scores(name, n, torch.float64)
        k, temperature = (t.flatten() for t in torch.meshgrid(*rows(counts(n), TEMPERATURES), indexing="ij"))
        arguments = x.expand(len(k), n), k, temperature, None
        got = _native.margin(*arguments, PATHS[path])
        expected = threshold.margin(*arguments, None, cdfs.SIGMOID, early_stop=True)
        # Σσ(z) − k is known to some roundings of k, so z is to so many of k/Σv.
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-11)


@needs_native
@given(
    batch=st.lists(st.integers(0, 9), max_size=2),
    n=st.one_of(st.integers(1, 40), st.integers(200, 300), st.just(1500)),
    double=st.booleans(),
    layout=st.sampled_from(["contiguous", "strided", "transposed", "expanded"]),
    masking=st.sampled_from(["none", "row", "full"]),
    special=st.sampled_from([None, INF, -INF, NAN]),
    path=st.sampled_from(sorted(PATHS)),
    cdf=st.sampled_from(["sigmoid", "laplace", "euclidean", "normal", "cauchy", *POWERS]),
    whole=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=250, deadline=None)
def test_values_and_gradients(batch, n, double, layout, masking, special, path, cdf, whole, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double and _native.has_kernel(cdf, torch.float64) else torch.float32

    def uniform(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    x = (torch.randn(*batch, n, generator=generator, dtype=torch.float64) * 10 ** (4 * uniform(1) - 2)).to(dtype)
    if special is not None:
        x = torch.where(uniform(*batch, n) < 0.1, special, x)
    if layout == "strided":
        x = torch.stack((x, -x), -1).flatten(-2)[..., ::2]
    elif layout == "transposed" and batch:
        x = x.movedim(-1, 0).contiguous().movedim(0, -1)
    elif layout == "expanded" and batch:
        x = x[:1].expand(x.shape)
    mask = {"none": None, "row": uniform(n) < 0.8, "full": uniform(*batch, n) < 0.8}[masking]
    mask = None if mask is None else mask.expand(x.shape)
    k = uniform(*batch) * 1.1 * n
    k = k.floor() if whole else k
    temperature = 10 ** (4 * uniform(*batch) - 2)

    law = cdfs.cdf_by_name(cdf)
    got = _native.native_topk(x, k, temperature, mask, cdf, PATHS[path])
    expected = threshold.topk(x, k, temperature, mask, law, early_stop=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=ATOL[dtype], equal_nan=True)

    margins = _native.margin(x.double(), k, temperature, mask, PATHS[path])
    expected = threshold.margin(x.double(), k, temperature, mask, None, cdfs.SIGMOID, early_stop=True)
    torch.testing.assert_close(margins, expected, rtol=1e-11, atol=1e-11, equal_nan=True)

    g = torch.randn(*batch, n, generator=generator, dtype=torch.float64).to(dtype)
    coarse = (4 * x).round()  # with ties
    hard = _native.hard_topk(coarse, k, mask, PATHS[path])
    torch.testing.assert_close(hard, select.k_hot(coarse, k, mask), rtol=0, atol=0, equal_nan=True)

    dk = torch.zeros(batch, dtype=torch.float64)
    dx = _native.native_pull(g, got, temperature, dk, cdf, PATHS[path])
    at = implicit.at_value(got.double(), temperature, law)
    exact_dx, exact_dk, _ = implicit.pull_value(g.double(), at)
    # Both are differences of numbers of this size, to so many digits; where Σv is all rounding there are none.
    v, eps = at.slope, torch.finfo(dtype).eps
    clear = ~(v.sum(-1) < 1e-4)
    size = (v * g.abs().double()).amax(-1) / temperature
    close_dx = (dx.double() - exact_dx).abs().amax(-1) <= 50 * eps * size + 1e-30
    close_dk = (dk - exact_dk).abs() <= 50 * eps * g.abs().double().amax(-1) / v.sum(-1).clamp(max=1)
    is_nan = got.isnan().any(-1)
    assert bool((close_dx & close_dk | is_nan | ~clear).all())
    assert bool((dx.isnan().any(-1) == is_nan).all())


@needs_native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sharp_rows_are_not_left_to_eager(path, dtype, monkeypatch):
    if path == "portable" and dtype == torch.float32:
        pytest.skip("the narrow path leaves every margin in float32 to the other method")
    x = torch.randn(200, 9, dtype=dtype, generator=torch.Generator().manual_seed(0))
    k, temperature = torch.full((200,), 3.0, dtype=torch.float64), torch.logspace(-6, 0, 200, dtype=torch.float64)
    expected = threshold.margin(x, k, temperature, None, None, cdfs.SIGMOID, early_stop=True)
    monkeypatch.setattr(threshold, "margin", None)
    got = _native.margin(x, k, temperature, None, PATHS[path])
    error = (got - expected).abs().amax(-1)
    assert (error <= 4 * torch.finfo(dtype).eps * (1 + x.abs().amax(-1) / temperature)).all()


@needs_native
def test_saturated_rows_have_zero_gradient():
    p = torch.tensor([[1.0, 0.0, 1.0], [0.5, 0.5, 1.0]])
    dk = torch.ones(2, dtype=torch.float64)
    dx = _native.native_pull(torch.randn(2, 3), p, 1.0, dk)
    assert bool((dx[0] == 0).all())
    assert dk[0] == 0
    assert bool((dx[1, :2] != 0).all())


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 300_000), (3, 100_000), (70, 5000), (1000, 64), (9001, 10)])
@pytest.mark.parametrize("temperature", [1.0, 1e-3])
@pytest.mark.parametrize("cdf", ["sigmoid", "laplace", "euclidean", "cauchy", "power:1.5"])
def test_same_bits_at_any_number_of_threads(shape, dtype, temperature, cdf):
    if not _native.has_kernel(cdf, dtype):
        pytest.skip("eager torch")
    x, g = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    k, t = torch.full(shape[:1], shape[1] / 10).double(), torch.full(shape[:1], temperature).double()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            p, dk = _native.native_topk(x, k, t, None, cdf), torch.zeros_like(k)
            results.append((p, _native.native_pull(g, p, t, dk, cdf), dk))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_hard_selection_of_long_rows(name):
    x = scores(name, 200_000, torch.float32)
    for k in (1, 10, 1000, 100_000, 199_999, 200_000):
        got = _native.hard_topk(x, torch.tensor(k, dtype=torch.float64), None)
        assert torch.equal(got, select.k_hot(x, torch.tensor(k, dtype=torch.float64), None))


@needs_native
def test_kernel_is_what_the_op_runs():
    x = torch.randn(4, 50)
    expected = _native.native_topk(x, *rows([5.0] * 4, [1.0] * 4), None)
    assert torch.equal(khot.sigmoid_topk(x, 5), expected)
    assert "native" in khot.kernels.status()["cpu"]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_eager_reference_keeps_its_promise(name, dtype):
    for n in (64, 1024):
        x = scores(name, n, dtype)
        k, temperature = (t.flatten() for t in torch.meshgrid(*rows(counts(n), TEMPERATURES), indexing="ij"))
        total = eager(x.expand(len(k), n), k, temperature).double().sum(-1)
        assert bool(((total - k).abs() <= PROMISED[dtype] * k.clamp(min=1)).all())
