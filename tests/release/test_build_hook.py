"""What the build hook says of compilers that khot cannot use."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "khot" / "kernels" / "native"
FAKE = """#!/bin/sh
{}
"""
COMPILERS = {
    # As cl does: a banner to stderr, the error to stdout.
    "cl": "echo 'Microsoft (R) C/C++ Optimizing Compiler' >&2; echo 'cl : error D8021: invalid argument'; exit 2",
    "odd": "echo '#define __cplusplus 201703L'",  # takes the options, and is another compiler
}


@pytest.fixture
def hook(monkeypatch):
    """The module hatch_build.py, without hatchling, which only builds have."""
    names = ("hatchling", "builders", "hooks", "plugin", "interface")
    for i in range(len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[: i + 1]), ModuleType(names[i]))
    sys.modules[".".join(names)].BuildHookInterface = object
    spec = importlib.util.spec_from_file_location("hatch_build_under_test", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler(folder, name, script):
    path = folder / name
    path.write_text(FAKE.format(script))
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script plays the compiler")
@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_is_not_gcc_or_clang_is_refused(name, hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(compiler(tmp_path, name, COMPILERS[name])))
    outcome = hook.build(SOURCES, tmp_path / "libkhot.so", tmp_path / "_direct.abi3.so")
    assert outcome == f"not built: {name} is not GCC or Clang, which khot needs"
    assert not (tmp_path / "libkhot.so").exists()


def test_no_compiler_at_all(hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = hook.build(SOURCES, tmp_path / "libkhot.so", tmp_path / "_direct.abi3.so")
    assert outcome.startswith("not built: no C++ compiler (")
    assert "MSVC will not do" in outcome


@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
def test_the_compiler_here_is_taken(hook):
    assert hook.is_gnu(["c++"])
