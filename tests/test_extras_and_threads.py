"""Optional packages are named by one function, and training loops do not take all cores for small work."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from sae_runs import CONFIG, SHORT, matrix

from khot import _process
from khot._extras import require
from khot.sae import Activations, train
from khot.sklearn import Gate, KHotSelector

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_require_imports_or_says_how_to_install():
    assert require("numpy.linalg", extra="cli") is np.linalg
    with pytest.raises(
        ModuleNotFoundError, match=r"^nosuch is missing: run pip install '\.\[cli\]' in a clone of khot$"
    ):
        require("nosuch.part", extra="cli")


def test_a_package_that_is_there_and_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import nosuch_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'nosuch_dependency'"):
        require("broken_package", extra="cli")


def test_every_extra_that_is_named_exists():
    """khot is not on PyPI: nothing may tell users to install `khot[…]` from there."""
    named = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text()
        assert "khot[" not in text, path
        named |= {*re.findall(r'extra="(\w+)"', text)}
    install = (ROOT / "README.md").read_text().split("## What is in it")[0]
    rows = {*re.findall(r"^\| `(\w+)` \| .* \| .* \|$", install, re.M)}
    assert {"cli", "select", "sae"} <= named <= rows <= set(EXTRAS)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_small_work_has_one_thread_and_large_work_has_all():
    with _process.threads_for(_process.PAYS - 1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with _process.threads_for(_process.PAYS):
        assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), _process.threads_for(0):
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_training_loops_have_one_thread_and_restore_the_number(tmp_path, monkeypatch):
    seen = []
    x = np.random.default_rng(0).standard_normal((50, 4))

    def look(*_):
        seen.append(torch.get_num_threads())

    KHotSelector(2, strategy=Gate(max_steps=4), callback=look).fit(x, x[:, 0] > 0)
    assert set(seen) == {1}
    seen.clear()
    train(Activations(matrix()), CONFIG, SHORT, tmp_path / "out", on_step=look)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
    monkeypatch.setattr(_process, "PAYS", 1)  # a negative control
    seen.clear()
    KHotSelector(2, strategy=Gate(max_steps=4), callback=look).fit(x, x[:, 0] > 0)
    assert set(seen) == {3}


def test_verbose_shows_a_line_on_stderr_and_silence_is_the_default(capsys):
    x = np.random.default_rng(0).standard_normal((50, 4))
    KHotSelector(2, strategy=Gate(max_steps=4)).fit(x, x[:, 0] > 0)
    assert capsys.readouterr() == ("", "")
    KHotSelector(2, strategy=Gate(max_steps=4), verbose=1).fit(x, x[:, 0] > 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "\rKHotSelector: step 4 of 4, validation loss" in err
    assert max(map(len, err.split("\r"))) <= 90
