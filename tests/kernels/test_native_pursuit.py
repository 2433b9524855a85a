"""The native matching pursuit against its eager twin."""

from unittest.mock import patch

import pytest
import torch

from khot import coding
from khot._math import pursuit
from khot.kernels import _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)


def problem(seed, m, n, d, dtype):
    generator = torch.Generator().manual_seed(seed)
    x, atoms = (torch.randn(size, d, generator=generator, dtype=torch.float64) for size in (m, n))
    return x.to(dtype), torch.nn.functional.normalize(atoms, dim=-1).to(dtype)


@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n", "d", "k"), [(100, 256, 64, 5), (33, 37, 12, 12), (1, 1, 3, 1), (7, 5, 9, 5)])
def test_it_is_its_twin(m, n, d, k, dtype, path):
    x, atoms = problem(m + n, m, n, d, dtype)
    counts = torch.arange(m) % (k + 1)
    arguments = (x, atoms, atoms @ atoms.mT, counts, k, None)
    ours, eager = _native.orthogonal(*arguments, path=path), pursuit.orthogonal(*arguments)
    close = {"atol": 2e-4, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 1e-9, "rtol": 1e-9}
    assert torch.equal(ours.used, eager.used)
    assert torch.equal(ours.used.sum(-1), counts.clamp(max=d))
    assert torch.equal(ours.atoms[ours.used], eager.atoms[eager.used])
    torch.testing.assert_close(ours.coefs, eager.coefs, **close)


def test_tolerances_and_atoms_that_depend_on_each_other():
    x, atoms = problem(0, 200, 40, 6, torch.float64)
    atoms[20:] = atoms[:20]
    for tolerance in (None, torch.linspace(0, 2, 200, dtype=torch.float64)):
        arguments = (x, atoms, atoms @ atoms.mT, torch.full((200,), 10), 10, tolerance)
        ours, eager = _native.orthogonal(*arguments), pursuit.orthogonal(*arguments)
        assert torch.equal(ours.used, eager.used)
        assert ours.used.sum(-1).max() <= 6
        torch.testing.assert_close(ours.coefs, eager.coefs)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(threads):
    x, atoms = problem(1, 500, 128, 32, torch.float32)
    one = coding.omp(x, atoms, 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        several = _native.orthogonal(x, atoms, atoms @ atoms.mT, torch.full((500,), 4), 4, None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(several.atoms.flatten(), one.columns)


def test_omp_runs_without_the_library():
    x, atoms = problem(2, 50, 30, 10, torch.float64)
    native = coding.omp(x, atoms, 3)
    with patch.object(_native, "LIBRARY", None):
        eager = coding.omp(x, atoms, 3)
    torch.testing.assert_close(native.dense(), eager.dense())


def test_overflow_stays_in_its_row():
    x, atoms = problem(3, 4, 10, 5, torch.float32)
    x[2] = 3e38
    code = coding.omp(x, atoms, 2).dense()
    torch.testing.assert_close(code[[0, 1, 3]], coding.omp(x[[0, 1, 3]], atoms, 2).dense())
