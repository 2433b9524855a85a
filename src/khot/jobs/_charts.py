"""Pictures for reports, as inline SVG in the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ._html import Html, tag

WIDTH = 480.0
COLORS = ("var(--mark)", "var(--warm)", "var(--other)")
DASHES = ("none", "7 4", "2 3")  # told apart without colours too


class Bar(NamedTuple):
    """One line of a bar chart."""

    label: str
    value: float
    error: float = 0.0
    is_marked: bool = False
    text: str = ""
    """The figure at the end; the value if empty."""


def bars(items: Sequence[Bar], *, top: float | None = None, description: str) -> Html:
    """Horizontal bars from 0 to `top`, with their errors and figures."""
    most = top or max((item.value + item.error for item in items), default=1.0) or 1.0
    left, right, step = 150.0, WIDTH - 52.0, 26.0
    parts = []
    for i, item in enumerate(items):
        y = step * i + 4
        end = _scale(min(max(item.value, 0.0), most), 0.0, most, left, right)
        color = "var(--mark)" if item.is_marked else "var(--other)"
        parts.append(_text(_cut(item.label, 21), left - 8, y + 15, anchor="end", title=item.label))
        parts.append(tag("rect", x=left, y=y, width=round(end - left, 2), height=20, fill=color, rx=2))
        if item.error:
            low, high = (
                _scale(min(max(item.value + sign * item.error, 0.0), most), 0.0, most, left, right) for sign in (-1, 1)
            )
            parts.append(_line(low, y + 10, high, y + 10, "var(--ink)", 1.5))
        parts.append(_text(item.text or f"{item.value:.3f}", right + 8, y + 15))
    return _svg(parts, step * len(items) + 8, description)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    description: str,
) -> Html:
    """Curves with a legend; what is not finite, or not positive on a log scale, is left out."""
    known = {
        name: [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log_y)]
        for name, points in series.items()
    }
    points = [point for curve in known.values() for point in curve] or [(0.0, 1.0)]
    height, left, right, top, bottom = 270.0, 52.0, WIDTH - 8.0, 46.0, 228.0
    (x_low, x_high), (y_low, y_high) = (_range([p[i] for p in points], log_y and i == 1) for i in (0, 1))
    parts = []
    for value in _ticks(y_low, y_high, log_y):
        y = _scale(_place(value, log_y), _place(y_low, log_y), _place(y_high, log_y), bottom, top)
        parts += [_line(left, y, right, y), _text(f"{value:g}", left - 8, y + 4, anchor="end", is_dim=True)]
    for value in _ticks(x_low, x_high, False):
        x = _scale(value, x_low, x_high, left, right)
        parts.append(_text(f"{value:g}", x, bottom + 18, anchor="middle", is_dim=True))
    for i, (name, curve) in enumerate(known.items()):
        color, dash = COLORS[i % len(COLORS)], DASHES[i % len(DASHES)]
        at = " ".join(
            f"{_scale(x, x_low, x_high, left, right):.1f},"
            f"{_scale(_place(y, log_y), _place(y_low, log_y), _place(y_high, log_y), bottom, top):.1f}"
            for x, y in curve
        )
        parts.append(tag("polyline", points=at, fill="none", stroke=color, stroke_width=2, stroke_dasharray=dash))
        x = left + (right - left) / len(known) * i
        parts.append(tag("line", x1=x, y1=12, x2=x + 22, y2=12, stroke=color, stroke_width=2, stroke_dasharray=dash))
        parts.append(_text(name, x + 27, 16))
    parts.append(_text(x_label, right, height - 8, anchor="end", is_dim=True))
    parts.append(_text(y_label, right, top - 8, anchor="end", is_dim=True))
    return _svg(parts, height, description)


def pixels(values: Sequence[Sequence[float]], chosen: Sequence[Sequence[bool]], *, description: str) -> Html:
    """A map of values in [0, 1]: the more, the darker; chosen cells have a frame."""
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


def _text(
    text: str, x: float, y: float, *, anchor: str = "start", is_dim: bool = False, title: str | None = None
) -> Html:
    more = {"class_": "dim"} if is_dim else {}
    hover = tag("title", title) if title and title != text else Html()
    return tag("text", text, hover, x=round(x, 2), y=round(y, 2), text_anchor=anchor, **more)


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "var(--line)", width: float = 1.0) -> Html:
    at = {"x1": round(x1, 2), "y1": round(y1, 2), "x2": round(x2, 2), "y2": round(y2, 2)}
    return tag("line", **at, stroke=color, stroke_width=width)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (value - low) / (high - low) * (end - start)


def _place(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """A little more than what the values span, and never nothing."""
    low, high = min(values), max(values)
    if log:
        return (low / 1.05, high * 1.05)
    margin = 0.03 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers within a range, some four of them."""
    if log:
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if len(tens) < 4 else (1,)
        return [s * 10.0**t for t in tens for s in steps if low <= s * 10.0**t <= high]
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 5)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
