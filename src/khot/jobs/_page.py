"""Self-contained HTML reports: escaped elements, the page around them, and charts by matplotlib as inline SVG."""

import io
import math
import platform
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import numpy as np

from .._extras import require
from .._version import __version__

STYLE = (files(__package__) / "report.css").read_text(encoding="utf-8")
HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:{scripts}\">"
)
COLORS = {name: f"#{i:02}{i:02}{i:02}" for i, name in enumerate(("ink", "dim", "line", "mark", "other", "warm"), 1)}
"""What matplotlib draws with; in the page they become the variables of report.css, which differ in light and dark."""
CURVES = (("mark", "-"), ("warm", "--"))  # curves differ without colours too
MARKED = 20  # points of a curve up to which each has a marker
BLUE = (0.2, 0.55, 0.8)  # of pictures, whose cells differ in opacity: it is seen on white and on black
CHART = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLORS["ink"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLORS["line"]),
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "svg.fonttype": "none",
    "svg.hashsalt": "khot",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.axisbelow": True,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "text.parse_math": False,
}


class Html(str):
    """Mark text that is HTML already; a plain `str` is escaped wherever it is inserted."""


Child = str | Html


def tag(name: str, *children: Child, **attributes: object) -> Html:
    """Make an element; `class_` becomes `class`, and None is left out."""
    given = "".join(f' {key.rstrip("_")}="{escape(str(v))}"' for key, v in attributes.items() if v is not None)
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{given}>{inside}</{name}>")


def dim(*children: Child) -> Html:
    """Make a `p` of small print."""
    return tag("p", *children, class_="dim")


def table(header: Sequence[str], rows: Iterable[Sequence[Child]], marked: Sequence[int] = ()) -> Html:
    """Make a table with names on the left and figures on the right; `marked` rows are bold."""
    lines = enumerate([tag("td", cell) for cell in row] for row in rows)
    body = [tag("tr", *cells, class_="mark" if i in marked else None) for i, cells in lines]
    head = tag("thead", tag("tr", *(tag("th", name) for name in header)))
    return tag("div", tag("table", head, tag("tbody", *body)), class_="scroll")


def figure(picture: Html, caption: Child = "") -> Html:
    """Put a caption below a picture."""
    return tag("figure", picture, tag("figcaption", caption) if caption else Html())


def section(title: str, *children: Child) -> Html:
    """Put a heading above some elements."""
    return tag("section", tag("h2", title), *children)


def page(title: str, *children: Child, command: str, packages: Sequence[str], style: str = "", script: str = "") -> str:
    """Make the document: one file, no network requests; it ends with the command and the versions behind it.

    A script is the only one that the page may run: it is allowed by its hash.
    """
    versions = [f"khot {__version__}", *(f"{name} {version(name)}" for name in packages)]
    versions.append(f"Python {platform.python_version()}")
    again = section("To do it again", tag("pre", command), dim(", ".join(versions)))
    hashed = b64encode(sha256(script.encode()).digest()).decode()
    code = tag("script", Html(script)) if script else Html()
    body = tag("body", tag("main", tag("h1", title), *children, again), code)
    head = HEAD.format(scripts=f"; script-src 'sha256-{hashed}'" if script else "")
    head += f"{tag('title', title)}<style>{STYLE}{style}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


def meter(value: float, top: float = 1.0, *, is_marked: bool = False) -> Html:
    """Make a bar for a cell of a table, of the length value / top; none for a value that is not finite."""
    share = min(max(value / top, 0.0), 1.0) if math.isfinite(value) and top > 0 else 0.0
    return tag("span", class_="meter mark" if is_marked else "meter", style=f"width: {share:.1%}")


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, y: str, x: str = "step", log: bool = False, description: str
) -> Html:
    """Draw curves over steps, or another x, with a legend.

    Points that are not finite, or not positive on a log scale, are left out. An axis of whole numbers has no others;
    y begins at 0 then, if it is not logarithmic.
    """

    def draw(axes: Any) -> None:
        known = {n: [(u, v) for u, v in c if math.isfinite(v) and (v > 0 or not log)] for n, c in series.items()}
        for (color, dash), (name, curve) in zip(CURVES, known.items(), strict=False):
            marker = "o" if len(curve) <= MARKED else None  # a line of one point is not seen
            axes.plot(*np.reshape(curve, (-1, 2)).T, dash, color=COLORS[color], label=name, marker=marker, ms=4)
        values = [v for curve in known.values() for _, v in curve]
        if log and values:
            axes.set(yscale="log", ylim=(min(values) / 1.3, max(values) * 1.3))
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(ticker.NullLocator())
        elif all(v == round(v) for v in values):
            axes.set_ylim(-0.03 * (most := max([1.0, *values])), 1.1 * most)
            axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if all(u == round(u) for curve in known.values() for u, _ in curve):
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.set(xlabel=x, ylabel=y)
        axes.grid(axis="y")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(known))

    ticker = require("matplotlib.ticker", extra="plot")
    return _svg(draw, 2.6, description)


def pixels(values: np.ndarray, chosen: np.ndarray, *, description: str) -> Html:
    """Draw a map of values in [0, 1], stronger for larger; chosen cells have a frame."""

    def draw(axes: Any) -> None:
        _image(axes, values)
        for row, column in np.argwhere(chosen):
            at = [column - 0.5, column + 0.5, column + 0.5, column - 0.5, column - 0.5]
            axes.plot(at, [row - 0.5, row - 0.5, row + 0.5, row + 0.5, row - 0.5], color=COLORS["warm"], linewidth=2)

    return _svg(draw, 2.6, description)


def pairs(images: np.ndarray, chosen: np.ndarray, *, description: str) -> Html:
    """Draw images in a row, and below each what is left of it at the chosen pixels."""

    def draw(axes: Any) -> None:
        shown = images / (images.max() or 1)
        for image, (whole, part) in zip(shown, axes.T, strict=True):
            _image(whole, image)
            _image(part, np.where(chosen, np.maximum(image, 0.04), 0))  # a pixel that is seen and empty is seen too

    return _svg(draw, 1.15, description, (2, len(images)))


def _image(axes: Any, values: np.ndarray) -> None:
    """Draw values in [0, 1] as the opacity of one colour, which is seen on white and on black."""
    axes.imshow(np.dstack([*(np.full(values.shape, part) for part in BLUE), np.clip(values, 0, 1)]))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True)


def _svg(draw: Callable[[Any], None], height: float, description: str, grid: tuple[int, int] = (1, 1)) -> Html:
    """Draw a figure as inline SVG in the colours of the page."""
    out = io.StringIO()
    with require("matplotlib", extra="plot").rc_context(CHART):
        figure = require("matplotlib.figure", extra="plot").Figure(figsize=(5, height), layout="constrained")
        draw(figure.subplots(*grid))
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->| xmlns(:\w+)?=\S+", "", out.getvalue(), flags=re.S)
    for name, color in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    text = re.sub(r" (width|height)=\"[\d.]+pt\"", "", text, count=2)
    return Html(text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))
