"""Short rows are solved eight at a time, also where they are cold, tied or nearly full; and ties are not sorted."""

import math

import pytest
import torch

from khot._math import select
from khot.kernels import _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
KINDS = {
    "normal": lambda x: x,
    "outlier": lambda x: x + 20 * (torch.arange(x.shape[-1]) == 0),
    "ties": lambda x: (1.5 * x).round(),
    "zeros and ones": lambda x: (x > 1).double(),
    "bimodal": lambda x: x + 20 * (x > 0.3),
    "heavy tails": lambda x: x / x.flip(-1),
    "offset": lambda x: x + 1000,
    "infinite": lambda x: torch.where(x > 1.5, math.inf, torch.where(x < -1.5, -math.inf, x)),
    "decades": lambda x: 10 ** (8 * x),
}


def cases(n: int, kind: str) -> tuple[torch.Tensor, ...]:
    """Return rows of scores that float32 can hold, and their k and T: cold and warm, k whole, tiny, nearly n."""
    rng = torch.Generator().manual_seed(n)
    x = KINDS[kind](torch.randn(203, n, generator=rng, dtype=torch.float64)).float()
    unit = torch.rand(3, 203, generator=rng, dtype=torch.float64)
    k = n * unit[0]
    k[::4] = k[::4].round()
    k[1::4] = 10 ** (-9 * unit[1, 1::4])
    k[2::4] = n - 10 ** (-9 * unit[1, 2::4])
    return x, k, 10 ** (6 * unit[2] - 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 16, 61, 128, 256])
def test_cold_short_rows_agree_with_float64(n, kind):
    x, k, temperature = cases(n, kind)
    got = _native.native_topk(x, k, temperature, None).double()
    exact = _native.native_topk(x.double(), k, temperature, None)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-6, equal_nan=True)
    solved = ~exact.isnan().any(-1)
    assert bool(((got.sum(-1) - k).abs() <= 1e-6 * k.clamp(min=1))[solved].all())
    assert bool((got[(x == -torch.inf) & solved.unsqueeze(-1)] == 0).all())
    assert bool((got[exact == 0] <= 1e-15).all())  # where 1 − p is solved for, p below the rounding of 1 becomes 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-9, 1e-20])
def test_threshold_between_two_scores_that_are_next_to_each_other(temperature):
    x = torch.full((24, 12), 1000.0)
    x[:, 7:] = torch.nextafter(x[0, 0], x.new_tensor(0.0))
    for size in (1.0, -1.0, 1e-10, 1e33):
        scores, k = size * x, 7.0 if size > 0 else 5.0
        got, exact = (_native.native_topk(t, k, abs(size) * temperature, None) for t in (scores, scores.double()))
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["normal", "outlier", "ties"])
def test_masked_short_rows_are_those_without_the_masked_entries(kind):
    x, k, temperature = cases(40, kind)
    mask = torch.arange(40) % 5 != 2
    k = k * 32 / 40
    got = _native.native_topk(torch.where(mask, x, 1e30), k, temperature, mask.expand(x.shape))
    without = _native.native_topk(x[:, mask], k, temperature, None)
    torch.testing.assert_close(got[:, mask], without, rtol=0, atol=1e-6)
    assert bool((got[:, ~mask] == 0).all())


@pytest.mark.parametrize("n", [8, 61])
def test_a_short_row_that_can_not_be_satisfied_spoils_no_other(n):
    x, k, temperature = cases(n, "outlier")
    expected = _native.native_topk(x, k, temperature, None)
    bad = torch.arange(len(k)) % 5 == 1
    x[bad, 0], k[bad & (k > n / 2)] = math.nan, n + 1.0
    got = _native.native_topk(x, k, temperature, None)
    assert bool(got[bad].isnan().all())
    torch.testing.assert_close(got[~bad], expected[~bad], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [2, 3, 7, 9, 130])
def test_groups_of_rows_that_are_not_eight(rows):
    x, k, temperature = (t[:rows] for t in cases(16, "bimodal"))
    alone = torch.cat(
        [_native.native_topk(x[i : i + 1], k[i : i + 1], temperature[i : i + 1], None) for i in range(rows)]
    )
    torch.testing.assert_close(_native.native_topk(x, k, temperature, None), alone, rtol=0, atol=1e-6)


def parts(*counts: tuple[float, int]) -> torch.Tensor:
    """Return each value so many times, shuffled."""
    x = torch.cat([torch.full((count,), value) for value, count in counts])
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [300, 3000, 100_000])
@pytest.mark.parametrize(
    "x",
    [
        lambda m: parts((1.0, m // 5), (0.0, m - m // 5)),
        lambda m: parts((1.0, m // 5), (0.5, 3), (0.0, m - m // 5 - 3)),
        lambda m: parts((2.0, m // 5), (1.0, 1), (0.0, m // 2), (-0.0, m // 5)),
        lambda m: parts((math.inf, m // 5), (1.0, m // 5), (-1e-45, m // 2)),
    ],
)
def test_order_statistics_around_heavy_ties(x, size, dtype):
    x = x(size).to(dtype)
    for k in (1, size // 5 - 1, size // 5, size // 5 + 1, size // 5 + 3, size // 5 + 4, size // 2, len(x) - 1, len(x)):
        count = torch.tensor(float(k), dtype=torch.float64)
        assert torch.equal(_native.hard_topk(x, count, None), select.k_hot(x, count, None))
        if x.isfinite().all() and k < len(x):
            y = _native.native_topk(x, count, 1e-3, None).double()
            above = x > x.sort(descending=True).values[k - 1]
            assert abs(float(y.sum()) - k) <= 1e-6 * k
            assert bool((y[above] > 1 - 1e-6).all())


@pytest.mark.parametrize("n", [24, 100, 256])
def test_a_cold_row_has_the_same_bits_in_any_group(n):
    noise = torch.rand(200, n, generator=torch.Generator().manual_seed(0))
    x = (noise.argsort(-1) + noise) / 4  # no two so near that the quick way would do
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    for temperature in (1e-2, 3e-3, 1e-4):
        whole, mixed = (_native.native_topk(t, 5.0, temperature, None) for t in (x, x[order]))
        assert torch.equal(mixed, whole[order])
