"""Rows that start from a sample keep the promises of `sigmoid_topk`, also where the sample misleads."""

import math
from itertools import product

import pytest
import torch

from khot.kernels import _native
from khot.testing import score_vector

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
N = 70_000  # just above 65,536
PATHS = [_native.AVX512, _native.AVX2, _native.PORTABLE]
KINDS = {
    "normal": lambda x: x,
    "sorted": lambda x: x.sort().values,
    "four values": lambda x: (1.2 * x).round().clamp(-1, 2),
    "two humps": lambda x: x + 20 * (torch.arange(N) % 2),
    "heavy tail": lambda x: x.exp() ** 3,
    "one above": lambda x: x + 30 * (torch.arange(N) == 12_345),
    "a period": lambda x: x + 10 * (torch.arange(N) % 32 < 16),  # half of all scores, in step with the sample's runs
    "blocks": lambda x: x + 10 * (torch.arange(N) % 4096 < 64),
    "offset": lambda x: x + 1000,
    "infinite": lambda x: torch.where(x > 4, math.inf, torch.where(x < -2, -math.inf, x)),
}
COUNTS = (0.5, 1.0, 10.0, N / 100, N / 2, N - 5000.5, N - 1.0)


def bisected(x: torch.Tensor, k: float, temperature: float) -> torch.Tensor | None:
    """Return σ_k by bisection in float64; None if no finite threshold gives it."""
    finite, y = x.isfinite(), (x == math.inf).double()
    rest = k - float(y.sum())
    if not 0 < rest < int(finite.sum()):
        return None
    scores = x[finite]
    z = (scores - scores.sort(descending=True).values[math.ceil(rest) - 1]) / temperature  # no digit is lost near it
    low, high = -50.0, 50.0
    while high - low > 1e-9:
        middle = low / 2 + high / 2
        low, high = (middle, high) if torch.sigmoid(z - middle).sum() > rest else (low, middle)
    y[finite] = torch.sigmoid(z - low)
    return y


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_agree_with_bisection_in_float64(kind):
    x = KINDS[kind](torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).float()
    for temperature, k in product((1e-3, 0.1, 1.0), COUNTS):
        exact = bisected(x.double(), k, temperature)
        for path in PATHS if exact is not None else ():
            got = _native.native_topk(x, k, temperature, None, path=path).double()
            torch.testing.assert_close(got, exact, rtol=0, atol=1e-6)
            assert abs(got.sum() - k) <= 1e-6 * max(k, 1)


@pytest.mark.parametrize("path", PATHS)
def test_a_sum_that_rounds_in_its_lanes_does_not_decide(path):
    """Half of the entries are near 1: their sum in float32 was off by more than v, the slope, could bear."""
    n = 65_536
    x = score_vector("bimodal", n).float()
    got = _native.native_topk(x, n / 2, 0.1, None, path=path).double()
    torch.testing.assert_close(got, bisected(x.double(), n / 2, 0.1), rtol=0, atol=5e-7)


@pytest.mark.parametrize("path", PATHS)
def test_a_row_whose_sample_is_masked_or_not_a_number(path):
    x = torch.randn(N, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(N) % 5 == 3
    got = _native.native_topk(x, 1000.0, 1.0, mask, path=path)
    torch.testing.assert_close(got[mask], _native.native_topk(x[mask], 1000.0, 1.0, None, path=path), rtol=0, atol=1e-6)
    assert not got[~mask].any()
    x[N // 2] = math.nan
    assert _native.native_topk(x, 1000.0, 1.0, None, path=path).isnan().all()


@pytest.mark.parametrize("cdf", ["sigmoid", "laplace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_result_that_is_streamed_past_the_cache_has_the_bits_of_its_rows(dtype, cdf):
    n = 8195  # no multiple of a cache line
    x = torch.randn((16 << 20) // (n * 4) + 3, n, generator=torch.Generator().manual_seed(3)).to(dtype)
    room = torch.full((x.numel() + 2,), -1.0, dtype=dtype)
    y = _native.native_topk(x, 100.0, 0.3, None, cdf, out=room[1:-1].view(x.shape))
    assert room[0] == room[-1] == -1  # nothing beside it was written
    for some in (slice(0, 40), slice(len(x) - 40, len(x))):
        assert torch.equal(y[some], _native.native_topk(x[some], 100.0, 0.3, None, cdf))


@pytest.mark.parametrize("path", PATHS)
def test_a_short_step_is_short_for_doubles_too(path):
    """A step along the slope errs by its square, with opposite signs on both sides of τ: the sum does not tell."""
    for seed in range(8):
        x = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 3
        got = _native.native_topk(x[None], N / 2, 0.1, None, "laplace", path)[0]
        low, high = -1.0, 1.0
        for _ in range(60):
            z = (x - (low + high) / 2) / 0.1
            y = torch.where(z < 0, z.clamp(max=0).exp() / 2, 1 - (-z.clamp(min=0)).exp() / 2)
            low, high = ((low + high) / 2, high) if y.sum() > N / 2 else (low, (low + high) / 2)
        assert (got - y).abs().max() < 1e-11


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [8192, 8195])  # all rows are streamed, or those that begin at a cache line
def test_a_large_gradient_that_is_streamed_past_the_cache_has_the_bits_of_its_rows(n, dtype, path):
    rows = (4 << 20) // (n * dtype.itemsize)
    x, g = torch.randn(2, rows, n, generator=torch.Generator().manual_seed(4)).to(dtype)

    def solved(x, g):
        if dtype not in _native.HALVES:
            y = _native.native_topk(x, 100.0, 0.3, None, path=path)
            return y, _native.native_pull(g, y, 0.3, path=path)
        roots = torch.empty(len(x), 2, dtype=torch.float64)
        y = _native.half_topk(x, 100.0, 0.3, None, path=path, roots=roots)
        return y, _native.half_pull(g, x, roots, 100.0, 0.3, None, path=path)

    wholes = solved(x, g)
    for some in (slice(0, 9), slice(len(x) - 9, len(x))):
        for whole, part in zip(wholes, solved(x[some], g[some]), strict=True):
            assert torch.equal(whole[some], part)
