"""What the build hook says of compilers that khot cannot use."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

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


def kernels(folder):
    """A folder like khot/kernels, of which nothing is built."""
    shutil.copytree(SOURCES, folder / "native")
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script plays the compiler")
@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_is_not_gcc_or_clang_is_refused(name, hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(compiler(tmp_path, name, COMPILERS[name])))
    outcome = hook.build(kernels(tmp_path))
    assert outcome == f"not built: {name} is not GCC or Clang, which khot needs"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["build.txt", name]


def test_no_compiler_at_all(hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = hook.build(kernels(tmp_path))
    assert outcome.startswith("not built: no C++ compiler (")
    assert "MSVC will not do" in outcome


@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
def test_the_compiler_here_is_taken(hook):
    assert hook.is_gnu(["c++"])


def test_what_is_built_is_built_again_only_if_something_changed(hook, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setattr(hook, "installed_torch", lambda: torch)
    made, torch = [], ("2.13.0", "/of/torch")

    def compile_all(folder, compiler, given):
        for name in (hook.LIBRARY, hook.EXTENSION, *([hook.WITH_TORCH] if given else [])):
            (folder / name).write_text("compiled")
        made.append(given)
        return f"built {len(made)}" + (f", {hook.HEADERS} {given[0]}" if given else "")

    monkeypatch.setattr(hook, "compile_all", compile_all)
    folder = kernels(tmp_path)

    def outcome():
        return hook.build(folder).split(",")[0]

    assert [outcome(), outcome()] == ["built 1", "built 1"]
    (folder / hook.WITH_TORCH).unlink()
    assert [outcome(), outcome()] == ["built 2", "built 2"], "a file is missing"
    torch = None
    assert [outcome(), outcome()] == ["built 3", "built 3"], "there is another torch, or none"
    assert not (folder / hook.WITH_TORCH).exists()
    (folder / "_direct_torch.of-another-python.so").touch()
    (folder / "native" / "khot.h").write_text("// another")
    assert [outcome(), outcome()] == ["built 4", "built 4"], "a source changed"
    assert not list(folder.glob("_direct_torch*")), "the note is not of its torch"
    (folder / hook.NOTE).write_text("")
    assert [outcome(), outcome()] == ["built 5", "built 5"], "an empty note, as a full disk leaves it"
    monkeypatch.setattr(hook, "compile_all", lambda *_: 1 / 0)
    (folder / hook.LIBRARY).unlink()
    with pytest.raises(ZeroDivisionError):
        outcome()
    assert not (folder / hook.NOTE).exists(), "an interrupted build is not taken for whole"
    monkeypatch.setattr(hook, "compile_all", compile_all)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert outcome() == "built 6", "another compiler"


def test_the_torch_here_is_found_without_an_import(hook, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")  # as pip's own environment has it
    version, folder = hook.installed_torch()
    assert version == torch.__version__
    assert Path(folder) == Path(torch.__file__).parent
