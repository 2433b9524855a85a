"""The pictures of the docs: one style, a light and a dark variant, text that can be read at the width of a page."""

import re

import matplotlib
import pytest
from matplotlib.figure import Figure

from benchmarks import pictures, style
from benchmarks.common import COMMITTED, svg, write_picture

PAGE, LEAST = 690, 9.0
"""The width of a page on a code host, and the smallest text on it, in pixels."""
LIGHT = sorted(path for path in COMMITTED.images.glob("*.svg") if not path.stem.endswith("-dark"))
DRAWN = [path for path in LIGHT if "Matplotlib" in path.read_text()]


def smallest_text(text):
    """The size of the smallest text of a picture of matplotlib, in pixels when it is as wide as the page.

    Matplotlib writes a text as outlines, 100 units to the font size, in a group that is scaled down.
    """
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', text)[1])
    sizes = [float(found) for found in re.findall(r'<g [^>]*transform="translate\([^)]*\)[^"]*scale\(([\d.]+) -', text)]
    return min(sizes) * 100 * min(1.0, PAGE / width) if sizes else float("inf")


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_text_is_legible(path):
    assert smallest_text(path.read_text(encoding="utf-8")) >= LEAST


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_there_is_a_dark_variant_and_no_ground(path):
    text = path.read_text(encoding="utf-8")
    assert path.with_name(f"{path.stem}-dark.svg").read_text(encoding="utf-8") == style.dark(text)
    assert "data:image/png" not in text, "pixels cannot be turned dark"
    ground = re.search(r'<g id="patch_1">.*?</g>', text, re.DOTALL)
    assert ground is None or "fill: none" in ground[0] or "opacity: 0" in ground[0]


def test_every_study_has_its_picture():
    assert set(pictures.FIGURES) <= {path.stem for path in LIGHT}


def test_the_pictures_are_redrawn_from_the_results():
    """Two of them, since matplotlib's versions differ in their outlines: the same numbers are in the committed file."""
    for name in ("moe-theory", "sae-l0"):
        fresh = svg(pictures.FIGURES[name]())
        committed = (COMMITTED.images / f"{name}.svg").read_text(encoding="utf-8")
        said = [set(re.findall(r"<!-- (.+?) -->", text)) for text in (fresh, committed)]
        assert said[0] == said[1]
        assert len(said[0]) > 5


def small(size, color=style.INK):
    with matplotlib.rc_context(style.STYLE):
        figure = Figure(figsize=(style.WIDTH, 2))
        figure.text(0.5, 0.5, "text", fontsize=size, color=color)
    return figure


def test_text_that_is_too_small_is_found(tmp_path):
    assert smallest_text(svg(small(8))) < LEAST <= smallest_text(svg(small(10)))
    write_picture(tmp_path / "a.svg", small(12))
    light, dark = ((tmp_path / name).read_text() for name in ("a.svg", "a-dark.svg"))
    assert style.INK in light
    assert style.INK not in dark
    write_picture(tmp_path / "a.png", small(12))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def lightness(colour):
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 765


def test_dark_colours_are_light_on_dark():
    assert lightness(style.dark(style.INK)) > 0.7
    assert lightness(style.dark(style.PAPER)) < 0.25
    assert all(lightness(style.dark(colour)) > 0.4 for colour in (style.BLUE, style.GREEN, style.ORANGE, style.SKY))
    assert style.dark('clip-path="url(#p0c8407bf11)"') == 'clip-path="url(#p0c8407bf11)"', "ids are not colours"
