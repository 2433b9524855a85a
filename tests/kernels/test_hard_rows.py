"""Hard selection: short rows side by side and longer ones, on every path, against the eager reference."""

import math

import pytest
import torch

import khot
from khot._math import select
from khot.kernels import _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
LENGTHS = [*range(1, 41), 64, 100, 257]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, math.nan]


@pytest.fixture(params=[_native.AVX512, _native.AVX2, _native.PORTABLE], ids=["AVX-512", "AVX2", "portable"])
def held(request):
    """Hold all calls of a test to a path, and let them go."""
    _native.LIBRARY.khot_hold(request.param)
    yield
    _native.LIBRARY.khot_hold(_native.WIDE)


def posed(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows (160, n) of several kinds, a k for each, of which some cannot be, and a mask."""
    rng = torch.Generator().manual_seed(n)
    x = torch.randn(160, n, generator=rng, dtype=torch.float64).to(dtype)
    x[40:80] = (2 * x[40:80]).round()  # ties, with zeros of both signs
    x[80:120] = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(0, 9, (40, n), generator=rng)]
    x[120:125, n // 2] = math.nan
    x[125:130] = 7.0
    k = torch.randint(0, n + 2, (160,), generator=rng).double()
    k[::13] += 0.5
    k[::29], k[1::31], k[2::37] = -1.0, math.nan, 1e300
    return x, k, torch.rand(160, n, generator=rng) < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_is_that_of_the_reference(held, dtype):
    for n in LENGTHS:
        x, k, mask = posed(n, dtype)
        for rows in (1, 15, 17, 160):
            for allowed in (None, mask[:rows], mask[:1].expand(rows, n)):
                got = _native.hard_topk(x[:rows], k[:rows], allowed)
                assert torch.equal(got.isnan(), (want := select.k_hot(x[:rows], k[:rows], allowed)).isnan())
                assert torch.equal(got.nan_to_num(2), want.nan_to_num(2))
        for count in (0.0, 1.0, float(n // 2), float(n), n + 1.0, 0.5):
            ones = select.k_hot(x, torch.full((160,), count, dtype=torch.float64), None)
            assert torch.equal(_native.hard_topk(x, count, None).nan_to_num(2), ones.nan_to_num(2))


@pytest.mark.parametrize("n", [2, 8, 16, 17, 64])
def test_threads_do_not_change_a_bit(n, threads_restored):
    x = torch.randn(20_001, n, generator=torch.Generator().manual_seed(n)).mul(4).round()
    k = torch.arange(len(x)) % (n + 1)
    torch.set_num_threads(1)
    alone = khot.hard_topk(x, k)
    torch.set_num_threads(2)
    assert torch.equal(khot.hard_topk(x, k), alone)
    assert torch.equal(alone.sum(-1), k.float())


@pytest.fixture
def threads_restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
