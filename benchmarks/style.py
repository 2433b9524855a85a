"""One style for all pictures of the docs: transparent, legible at the width of a page, for light and dark grounds.

A function that draws wears `@styled`; `common.write_picture` writes what it returns, and a second file for dark
grounds.
"""

from __future__ import annotations

import colorsys
import functools
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

PAPER, INK, FAINT, GRID = "#fbfbfb", "#22303c", "#9aa5ae", "#e3e6e8"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"  # Okabe and Ito: told apart by colour-blind readers too
SKY, YELLOW, PINK, GOLD, GREY = "#56b4e9", "#e69f00", "#cc79a7", "#9a7d0a", "#7d868d"
WIDTH = 10.0
"""Of a picture that fills the page, in inches: 12 points of it are 11.5 pixels of a page of 690."""

STYLE: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.edgecolor": FAINT,
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    "axes.titlesize": 12.5,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the bytes are the same everywhere
    "font.size": 12,
    "grid.color": GRID,
    "legend.fontsize": 11,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "xtick.color", "ytick.color", "axes.labelcolor", "axes.titlecolor"), INK),
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    **dict.fromkeys(("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.1),
    "svg.hashsalt": "khot",
}


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function draw in this style."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """Return a figure as wide as the page, and its grid of axes, (rows, columns)."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def dark(svg: str) -> str:
    """Return a picture for dark grounds: greys are turned round, colours are lightened."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: _lit(match[0]), svg)


def _lit(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    if max(red, green, blue) - min(red, green, blue) < 0.14:
        light = 1 - 0.86 * light
    elif light < 0.55:
        light, saturation = 0.55, min(saturation, 0.7)
    elif light > 0.6:
        light = min(light + 0.14, 0.85)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, saturation))
