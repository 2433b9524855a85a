"""Samples from probabilities in a file: the bits of the draw in memory, in the memory of a few chunks."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

import khot
from khot.designs import ConditionalPoisson, Pivotal, Systematic, sample_file

GIVEN = partial(Pivotal, order="given")
DESIGNS = pytest.mark.parametrize("design", [GIVEN, Systematic], ids=["pivotal", "systematic"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def saved(tmp_path, probs):
    np.save(tmp_path / "probs.npy", probs)
    return tmp_path / "probs.npy"


def drawn(*arguments, **options):
    return torch.cat(list(sample_file(*arguments, **options)))


@DESIGNS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_the_bits_of_the_draw_in_memory(tmp_path, design, dtype):
    for trial, n in enumerate((1, 2, 3, 5, 8, 17, 64, 257, 4097, 5000)):
        k = min(n, 1 + trial) - (0.4 if trial % 3 == 0 else 0.0)
        probs = khot.sigmoid_topk(2 * torch.randn(n, generator=seeded(trial), dtype=torch.float64), k).to(dtype)
        k = float(probs.double().sum()) if dtype == torch.float16 else k
        path = saved(tmp_path, probs.numpy())
        expected = design(probs, k, validate_args=False).sample(generator=seeded(trial)).nonzero()[:, 0]
        for chunk in (8, 512, 2**18):
            assert torch.equal(drawn(design, path, k, chunk=chunk, generator=seeded(trial)), expected), (n, chunk)


@DESIGNS
def test_certain_items_and_what_rounding_leaves(tmp_path, design):
    """Zeros, ones, and sums that are off by rounding, in either direction."""
    for trial, off in enumerate((0.0, 4e-8, -4e-8)):
        probs = torch.zeros(300, dtype=torch.float64)
        probs[::7], probs[5], probs[44] = 1.0, 0.5 + off, 0.5
        path = saved(tmp_path, probs.numpy())
        expected = design(probs, 44).sample(generator=seeded(trial)).nonzero()[:, 0]
        assert torch.equal(drawn(design, path, chunk=16, generator=seeded(trial)), expected)


def test_bare_numbers_other_byte_orders_and_progress(tmp_path):
    probs, seen = np.full(40, 0.25), []
    bare = tmp_path / "probs.bin"
    expected = Systematic(torch.from_numpy(probs)).sample_indices(generator=seeded())
    for dtype in ("<f8", ">f8", ">f4", np.float16):
        probs.astype(dtype).tofile(bare)
        assert torch.equal(drawn(Systematic, bare, dtype=dtype, generator=seeded()), expected)
    probs.tofile(bare)
    got = drawn(
        Systematic, bare, dtype=torch.float64, chunk=16, generator=seeded(), on_progress=lambda *at: seen.append(at)
    )
    assert torch.equal(got, expected)
    assert seen == [(16, 80), (32, 80), (40, 80), (56, 80), (72, 80), (80, 80)]


def test_errors(tmp_path):
    path = saved(tmp_path, np.full(8, 0.25))
    for design, name in ((Pivotal, "random order"), (ConditionalPoisson, "ConditionalPoisson")):
        with pytest.raises(NotImplementedError, match=f"A file cannot be drawn from by.*{name}"):
            sample_file(design, path)
    for k in (-1, 9):
        with pytest.raises(ValueError, match="0 ≤ k ≤ 8"):
            sample_file(Systematic, path, k)
    with pytest.raises(ValueError, match="k = 3, within 3e-09; got 2"):
        sample_file(Systematic, path, 3)
    with pytest.raises(ValueError, match="power of two; got 12"):
        sample_file(Systematic, path, chunk=12)
    with pytest.raises(FileNotFoundError):
        sample_file(Systematic, tmp_path / "none.npy")
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(ValueError, match="8 numbers of 8 bytes; got 72 bytes"):
        sample_file(Systematic, path)
    for values, dtype, kind, message in (
        (np.full(8, 0.3), None, ValueError, "sum to an integer, or `k` must be given.*got 2.4"),
        (np.array([0.5, np.nan, 0.5]), None, ValueError, "got nan at 1"),
        (np.array([0.5, 0.5, 1.5, 0.5]), None, ValueError, "got 1.5 at 2"),
        (np.array([[0.5, 0.5]]), None, ValueError, r"one dimension.*\(1, 2\)"),
        (np.array([1, 0]), None, TypeError, "got int64"),
        (np.full(8, 0.25), np.int32, TypeError, "got int32"),
        (np.full(8, 0.25)[:0], None, ValueError, "got 0 bytes"),
    ):
        with pytest.raises(kind, match=message):
            sample_file(Systematic, saved(tmp_path, values), chunk=2, dtype=dtype)
    bare = tmp_path / "bare"
    for size in (0, 13):
        bare.write_bytes(bytes(size))
        with pytest.raises(ValueError, match=r"whole \.npy file.*got another file"):
            sample_file(Systematic, bare)
    with pytest.raises(ValueError, match="positive multiple of 4 bytes; got 13"):
        sample_file(Systematic, bare, dtype=torch.float32)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = saved(tmp_path, np.full(40, 0.25))
    draws = sample_file(GIVEN, path, chunk=8)
    next(draws)
    saved(tmp_path, np.full(40, 0.5))
    with pytest.raises(ValueError, match="must not change while it is read; numbers from 8 on"):
        next(draws)
    draws = sample_file(GIVEN, path, chunk=8)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="ends before 40 numbers"):
        list(draws)


PEAK = r"""
import re, sys, torch
from functools import partial
from khot.designs import Pivotal, Systematic, sample_file
torch.set_num_threads(1)
for n in map(int, sys.argv[2:]):
    for design in (partial(Pivotal, order="given"), Systematic):
        draws = sample_file(design, sys.argv[1] + str(n), dtype="float32", generator=torch.Generator().manual_seed(0))
        print(sum(map(len, draws)), re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_memory_does_not_grow_with_the_file(tmp_path):
    """Eight times as many numbers, 112 MB more in the file, and a peak that is less than 28 MB higher."""
    sizes = (2**22, 2**25)
    for n in sizes:
        np.full(n, 2.0**-6, np.float32).tofile(tmp_path / str(n))
    command = [sys.executable, "-c", PEAK, f"{tmp_path}/", *map(str, sizes)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()
    counts, peaks = [int(t) for t in lines[::2]], [int(t) for t in lines[1::2]]
    assert counts == [2**16, 2**16, 2**19, 2**19]
    assert peaks[3] - peaks[1] < 28 * 1024, peaks
