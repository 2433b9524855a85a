"""Loading the native library, and its C interface."""

import ctypes
import re
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from khot._math import noise
from khot.kernels import _native, _samplers

needs_native = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
HEADER = _native.HERE / "native" / "khot.h"
KINDS = {"pointer": ctypes.c_void_p, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double}


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


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_brings_no_openmp_of_its_own():
    """Two runtimes in one process have two pools of threads, and each takes the machine for its own."""
    code = """if True:
        import torch
        from pathlib import Path
        def openmp():
            paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
            return sorted(path for path in paths if "omp" in Path(path).name)
        torch.randn(64, 4096).exp().sum()
        before = openmp()
        import khot
        khot.sigmoid_topk(torch.randn(64, 4096), 3)
        assert khot.kernels.status()["cpu"].startswith("native")
        assert openmp() == before, (before, openmp())
        assert len(before) == 1, before
    """
    subprocess.run([sys.executable, "-c", code], check=True)


class Loader:
    """Stands for `ctypes.CDLL` where torch keeps its OpenMP to itself."""

    def __init__(self, has_openmp=True):
        self.loaded, self.has_openmp = [], has_openmp

    def __call__(self, path, mode=0):
        if "libgomp" in path:
            if not self.has_openmp:
                raise OSError("libgomp.so.1: cannot open shared object file")
            self.loaded.append((path, mode))
        elif not self.loaded:
            raise OSError("libkhot.so: undefined symbol: GOMP_parallel")
        return path


@pytest.mark.parametrize("place", ["torch/lib/libgomp.so.1", "torch.libs/libgomp-98df74fd.so.1.0.0", None])
def test_it_finds_the_openmp_that_torch_keeps_to_itself(tmp_path, place):
    (tmp_path / "torch").mkdir()
    if place:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    loader = Loader()
    with (
        patch.object(_native.ctypes, "CDLL", loader),
        patch.object(torch, "__file__", str(tmp_path / "torch" / "__init__.py")),
    ):
        assert _native._open(tmp_path / "libkhot.so") == str(tmp_path / "libkhot.so")
    assert loader.loaded == [(str(tmp_path / place) if place else "libgomp.so.1", _native.ctypes.RTLD_GLOBAL)]


def test_without_any_openmp_it_is_eager_and_says_why(tmp_path):
    (tmp_path / "libkhot.so").touch()
    with patch.object(_native.ctypes, "CDLL", Loader(has_openmp=False)), patch.object(_native, "HERE", tmp_path):
        library, reason = _native._load()
    assert library is None
    assert reason == "eager torch (native library does not load: libgomp.so.1: cannot open shared object file)"


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
    [("khot_rows", _native._Rows), ("khot_draws", _native.Draws), ("khot_signals", _native._Signals)],
)
def test_structs_are_those_of_the_header(name, struct):
    assert [(KINDS[kind], field) for kind, field in declared_fields(name)] == [(t, f) for f, t in struct._fields_]


def test_every_entry_point_has_a_signature():
    declared = re.findall(r"KHOT_API \w+ (khot_\w+)\(", HEADER.read_text(encoding="utf-8"))
    assert sorted(declared) == sorted(_native._SIGNATURES)


@needs_native
def test_codes_are_those_of_the_header():
    text = HEADER.read_text(encoding="utf-8")
    assert "KHOT_FLOAT = 0, KHOT_DOUBLE = 1" in text
    assert "KHOT_PORTABLE = 0, KHOT_AVX2 = 1, KHOT_AVX512 = 2" in text
    assert "KHOT_SIGMOID, KHOT_LAPLACE, KHOT_EUCLIDEAN, KHOT_NORMAL, KHOT_CAUCHY, KHOT_POWER, KHOT_CDFS" in text
    assert (_native.PORTABLE, _native.AVX2, _native.AVX512) == (0, 1, 2)
    assert {torch.float32: 0, torch.float64: 1} == _native.DTYPES


@needs_native
def test_orders_are_those_of_the_reference():
    keys = torch.tensor([3, -5, 2**62])
    assert torch.equal(_samplers.order(keys, 700), noise.order(keys, 700))


@pytest.mark.slow
def test_python_files_alone_run_without_header_and_library(tmp_path):
    """What tools that pack a program take along: no khot.h, no libkhot."""
    names = [name for name in sys.path if name.endswith("site-packages")]
    shutil.copytree(_native.HERE.parent, tmp_path / "khot", ignore=shutil.ignore_patterns("native", "libkhot*"))
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{names!r}]; import torch, khot; print(khot.__file__); "
    code += "print(khot.sigmoid_topk(torch.zeros(4), 2).tolist(), khot.kernels.status()['cpu'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith(f"{tmp_path}/khot/__init__.py\n[0.5, 0.5, 0.5, 0.5] eager torch")
