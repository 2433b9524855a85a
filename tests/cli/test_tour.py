"""`khot tour`, and the explorer as a file."""

import re
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs import make_melt
from khot.cli import _tour
from khot.cli._app import app

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def opened(monkeypatch):
    addresses = []
    monkeypatch.setattr(webbrowser, "open", lambda url: addresses.append(url) is None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    return addresses


def khot(*arguments):
    done = CliRunner().invoke(app, ["tour", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_tour_opens_the_explorer(opened):
    assert _tour.EXPLORER.as_uri() in khot()
    assert opened == [_tour.EXPLORER.as_uri()]
    assert _tour.EXPLORER.is_file()


def test_no_open_prints_the_address_only(opened):
    assert _tour.EXPLORER.as_uri() in khot("--no-open")
    assert opened == []


def test_without_a_display_nothing_is_opened(opened, monkeypatch):
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert "No display here" in khot()
    assert opened == []


def test_without_a_browser_it_says_so(opened, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert "No browser was found" in khot()


@pytest.mark.slow
def test_tour_needs_no_extra():
    code = (
        "import sys; sys.modules.update(typer=None, rich=None, matplotlib=None)\n"
        "sys.argv = ['khot', 'tour', '--no-open']\n"
        "from khot.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == _tour.EXPLORER.as_uri()


def test_the_docs_have_the_same_explorer():
    assert (DOCS / "explorer.html").read_bytes() == _tour.EXPLORER.read_bytes(), "run `make figures`"


def test_the_animated_picture_is_current_and_small():
    for name, colors, dots in (
        ("melt.svg", make_melt.LIGHT, make_melt.LIGHT_DOTS),
        ("melt-dark.svg", make_melt.DARK, make_melt.DARK_DOTS),
    ):
        picture = (DOCS / "img" / name).read_text()
        assert picture == make_melt.melt(colors, dots), "run `make figures`"
        assert len(picture) < 150_000


def test_the_explorer_asks_for_nothing_from_outside():
    page = _tour.EXPLORER.read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|<script src|url\(", page)
