"""Self-contained HTML reports: escaped elements, the page around them, and charts as inline SVG in the page's colours.

Charts are drawn by hand because they follow the page's light and dark colours and a phone's width, and need no extra.
"""

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import NamedTuple

from .._version import __version__

STYLE = (files(__package__) / "report.css").read_text(encoding="utf-8")
HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)
WIDTH = 480.0
COLORS = ("var(--mark)", "var(--warm)", "var(--other)")
DASHES = ("none", "7 4", "2 3")  # curves differ without colours too


class Html(str):
    """Text that is HTML already; a plain `str` is escaped wherever it is inserted."""


Child = str | Html
Curves = Mapping[str, Sequence[tuple[float, float]]]


def tag(name: str, *children: Child, **attributes: object) -> Html:
    """Make an element; `class_` becomes `class`, `_` in the names of attributes `-`, and None is left out."""
    known = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    given = "".join(f' {key}="{escape(str(value))}"' for key, value in known.items())
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{given}>{inside}</{name}>")


def dim(*children: Child) -> Html:
    """Make a `p` of small print."""
    return tag("p", *children, class_="dim")


def table(header: Sequence[str], rows: Iterable[Sequence[Child]], marked: Sequence[int] = ()) -> Html:
    """Make a table with names on the left and figures on the right; `marked` rows are bold."""
    body = []
    for i, row in enumerate(rows):
        body.append(tag("tr", *(tag("td", cell) for cell in row), class_="mark" if i in marked else None))
    head = tag("thead", tag("tr", *(tag("th", name) for name in header)))
    return tag("div", tag("table", head, tag("tbody", *body)), class_="scroll")


def figure(picture: Html, caption: Child = "") -> Html:
    """Put a caption below a picture."""
    return tag("figure", picture, tag("figcaption", caption) if caption else Html())


def section(title: str, *children: Child) -> Html:
    """Put a heading above some elements."""
    return tag("section", tag("h2", title), *children)


def page(title: str, *children: Child, command: str, packages: Sequence[str]) -> str:
    """Make the document: one file, no network requests; it ends with the command and the versions behind it."""
    versions = [f"khot {__version__}", *(f"{name} {version(name)}" for name in packages)]
    versions.append(f"Python {platform.python_version()}")
    again = section("To do it again", tag("pre", command), dim(", ".join(versions)))
    body = tag("body", tag("main", tag("h1", title), *children, again))
    head = f"{HEAD}{tag('title', title)}<style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


class Bar(NamedTuple):
    """One line of a bar chart; `text`, by default the value, stands at its end."""

    label: str
    value: float
    error: float = 0.0
    is_marked: bool = False
    text: str = ""


def bars(items: Sequence[Bar], *, top: float | None = None, description: str) -> Html:
    """Draw horizontal bars from 0 to `top`, with error bars and figures."""
    most = top or max([0.0, *(item.value + item.error for item in items if math.isfinite(item.value))]) or 1.0
    left, right, step = 150.0, WIDTH - 52.0, 26.0

    def at(value: float) -> float:
        return round(_scale(min(max(value, 0.0), most), 0.0, most, left, right), 2)

    parts = []
    for i, item in enumerate(items):
        y = step * i + 4
        value = item.value if math.isfinite(item.value) else 0.0
        color = "var(--mark)" if item.is_marked else "var(--other)"
        label = item.label if len(item.label) <= 21 else item.label[:20] + "…"
        parts.append(_text(label, left - 8, y + 15, anchor="end", title=item.label))
        parts.append(tag("rect", x=left, y=y, width=round(at(value) - left, 2), height=20, fill=color, rx=2))
        if math.isfinite(item.error) and item.error and value + item.error > 0:
            ends = at(value - item.error), at(value + item.error)
            parts.append(_line(ends[0], y + 10, ends[1], y + 10, "var(--ink)", 1.5))
        parts.append(_text(item.text or f"{item.value:.3f}", right + 8, y + 15))
    return _svg(parts, step * len(items) + 8, description)


def lines(series: Curves, *, x_label: str, y_label: str, log_y: bool = False, description: str) -> Html:
    """Draw curves with a legend; points that are not finite, or not positive on a log scale, are left out."""
    known = {
        name: [(x, math.log10(y) if log_y else y) for x, y in points if math.isfinite(y) and (y > 0 or not log_y)]
        for name, points in series.items()
    }
    points = [point for curve in known.values() for point in curve] or [(0.0, 0.0)]
    height, left, right, top, bottom = 270.0, 52.0, WIDTH - 8.0, 46.0, 228.0
    across, up = (_range([point[i] for point in points]) for i in (0, 1))
    parts = []
    for value, label in _ticks(*up, log_y):
        y = _scale(value, *up, bottom, top)
        parts += [_line(left, y, right, y), _text(label, left - 8, y + 4, anchor="end", is_dim=True)]
    for value, label in _ticks(*across, False):
        parts.append(_text(label, _scale(value, *across, left, right), bottom + 18, anchor="middle", is_dim=True))
    for i, (name, curve) in enumerate(known.items()):
        look = {"stroke": COLORS[i % 3], "stroke_width": 2, "stroke_dasharray": DASHES[i % 3]}
        at = " ".join(f"{_scale(x, *across, left, right):.1f},{_scale(y, *up, bottom, top):.1f}" for x, y in curve)
        x = left + (right - left) / len(known) * i
        parts += [tag("polyline", points=at, fill="none", **look), tag("line", x1=x, y1=12, x2=x + 22, y2=12, **look)]
        parts.append(_text(name, x + 27, 16))
    labels = ((x_label, height - 8), (y_label, top - 8))
    parts += [_text(label, right, y, anchor="end", is_dim=True) for label, y in labels]
    return _svg(parts, height, description)


def pixels(values: Sequence[Sequence[float]], chosen: Sequence[Sequence[bool]], *, description: str) -> Html:
    """Draw a map of values in [0, 1], darker for larger; chosen cells have a frame."""
    rows, columns = len(values), len(values[0])
    size = min(40.0, 320.0 / max(rows, columns))
    left = (WIDTH - size * columns) / 2
    cells, frames = [], []
    for i in range(rows):
        for j in range(columns):
            at = {"x": round(left + size * j, 2), "y": round(size * i + 2, 2), "width": size, "height": size}
            cells.append(tag("rect", **at, fill="var(--line)"))
            cells.append(tag("rect", **at, fill="var(--mark)", fill_opacity=round(values[i][j], 3)))
            if chosen[i][j]:
                frames.append(tag("rect", **at, fill="none", stroke="var(--warm)", stroke_width=max(1.5, size / 12)))
    return _svg([*cells, *frames], size * rows + 4, description)


def _svg(parts: Sequence[Html], height: float, description: str) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=description)


def _text(text: str, x: float, y: float, *, anchor: str = "start", is_dim: bool = False, title: str = "") -> Html:
    hover = tag("title", title) if title not in ("", text) else Html()
    look = "dim" if is_dim else None
    return tag("text", text, hover, x=round(x, 2), y=round(y, 2), text_anchor=anchor, class_=look)


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "var(--line)", width: float = 1.0) -> Html:
    at = {"x1": round(x1, 2), "y1": round(y1, 2), "x2": round(x2, 2), "y2": round(y2, 2)}
    return tag("line", **at, stroke=color, stroke_width=width)


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (value - low) / (high - low) * (end - start)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return a little more than the values span, and never an empty range."""
    low, high = min(values), max(values)
    margin = 0.03 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """Return about four round numbers within a range, which is of logarithms if `log`, with their labels."""
    if log:
        tens = range(math.floor(low), math.ceil(high) + 1)
        steps = (1, 2, 5) if len(tens) < 4 else (1,)
        marks = ((ten + math.log10(step), f"{step * 10.0**ten:g}") for ten in tens for step in steps)
        return [(value, label) for value, label in marks if low <= value <= high]
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 5)
    places = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(i * step, f"{round(i * step, 12):g}") for i in places]
