"""Loading the native library, its C interface, and what it does without memory."""

import re
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from khot._math import noise
from khot.kernels import _native

needs_native = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
HEADER = _native.HERE / "native" / "khot.h"


def test_without_a_library(tmp_path):
    with patch.object(_native, "HERE", tmp_path):
        library, reason = _native._load()
        assert library is None
        assert reason.startswith("eager torch (native library not built")
        (tmp_path / "build.txt").write_text("not built: no C++ compiler (looked for $CXX, c++, g++, clang++)\n")
        assert "no C++ compiler" in _native._load()[1]
        (tmp_path / "libkhot.so").write_bytes(b"not a library")
        library, reason = _native._load()
        assert library is None
        assert "does not load" in reason


@needs_native
def test_library_of_another_header_is_refused(tmp_path):
    (tmp_path / "native").mkdir()
    shutil.copy(_native.HERE / "libkhot.so", tmp_path)
    shutil.copy(HEADER, tmp_path / "native")
    with patch.object(_native, "HERE", tmp_path):
        assert _native._load()[1].startswith("native")
        (tmp_path / "native" / "khot.h").write_bytes(HEADER.read_bytes() + b"\n")
        library, reason = _native._load()
    assert library is None
    assert "another version of khot.h" in reason


def declared_fields(name: str) -> list[tuple[str, str]]:
    """Return (type, name) of each field of a struct of khot.h."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    body = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text)
    assert body is not None
    fields = []
    for line in filter(None, (part.strip() for part in body[1].split(";"))):
        kind, names = re.fullmatch(r"(const \w+\*|\w+) (.*)", line, flags=re.DOTALL).groups()
        fields += [("pointer" if "*" in kind else kind, each.strip()) for each in names.split(",")]
    return fields


@pytest.mark.parametrize(
    ("name", "struct"),
    [("khot_rows", _native._Rows), ("khot_draws", _native._Draws), ("khot_signals", _native._Signals)],
)
def test_structs_are_those_of_the_header(name, struct):
    kinds = {"pointer": _native._POINTER, "int64_t": _native._LONG, "int32_t": _native._INT, "double": _native._DOUBLE}
    assert [(kinds[kind], field) for kind, field in declared_fields(name)] == [(t, f) for f, t in struct._fields_]


def test_every_entry_point_has_a_signature():
    declared = re.findall(r"KHOT_API \w+ (khot_\w+)\(", HEADER.read_text(encoding="utf-8"))
    assert sorted(declared) == sorted(_native._SIGNATURES)


@needs_native
def test_codes_are_those_of_the_header():
    text = HEADER.read_text(encoding="utf-8")
    assert "KHOT_FLOAT = 0, KHOT_DOUBLE = 1" in text
    assert "KHOT_PORTABLE = 0, KHOT_WIDE = 1" in text
    assert "KHOT_SIGMOID, KHOT_LAPLACE, KHOT_EUCLIDEAN" in text
    assert (_native.PORTABLE, _native.WIDE) == (0, 1)
    assert {torch.float32: 0, torch.float64: 1} == _native._DTYPES


WITHOUT_MEMORY = """
import resource, sys, torch
from khot.kernels import _native
torch.set_num_threads(1)
n, seed = 4_000_000, torch.tensor(1)
p = torch.full((1, n), 0.5)
whole = torch.ones(1, dtype=torch.bool)
calls = {
    "pivotal": lambda: _native.pivotal(p, whole, seed, None, True, 1, False),
    "order": lambda: _native.order(torch.tensor([1]), n),
}
calls[sys.argv[1]]()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000,) * 2)  # enough for the result, not for the work
try:
    calls[sys.argv[1]]()
except MemoryError as error:
    print(error)
"""


@pytest.mark.slow
@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
@pytest.mark.parametrize("name", ["pivotal", "order"])
def test_failed_allocation_is_a_memory_error_not_an_abort(name):
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no memory to sample rows of 4000000 items" in done.stdout


@needs_native
def test_orders_are_those_of_the_reference():
    keys = torch.tensor([3, -5, 2**62])
    assert torch.equal(_native.order(keys, 700), noise.order(keys, 700))
