"""Where the processor takes subnormal numbers for zero, a row of the smallest scores ends, and ends right."""

import subprocess
import sys

import pytest
import torch

from khot.kernels import _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
TIMEOUT = 120.0  # seconds; the loop that this is about never ended
CHILD = """
import itertools, torch, khot
from khot.kernels import _native

assert torch.set_flush_denormal(True)
for dtype, n, path in itertools.product(
    (torch.float32, torch.float64), (3, 24, 300, 3000, 70_000), (_native.WIDE, _native.AVX2, _native.PORTABLE)
):
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0, tiny, -tiny, 2 * tiny, -3 * tiny], dtype=dtype)
    for some in (values, values[:2], values[[0, 2]], values[1:3]):
        x = some[torch.randint(len(some), (4, n), generator=torch.Generator().manual_seed(n))]
        order = x.sort(descending=True).values
        for k in {1, n // 3, n // 2, n - 1}:
            y = _native.hard_topk(x, float(k), None, path)
            least = x.where(y == 1, 1.0).amin(-1)
            assert bool(((y.sum(-1) == k) & (least == order[:, k - 1])).all()), ("hard", dtype, n, path, k)
            for temperature in (1.0, 1e-30):
                y = _native.native_topk(x, k + 0.5, temperature, None, path=path)
                assert bool(((y.sum(-1) - k - 0.5).abs() < 1e-5 * n).all()), (dtype, n, path, k, temperature)
print("ended")
"""


@pytest.mark.long
def test_rows_of_the_smallest_numbers_end_where_subnormals_are_zero():
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor does not flush subnormal numbers")
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, encoding="utf-8", timeout=TIMEOUT)
    assert done.stdout == "ended\n", done.stderr
