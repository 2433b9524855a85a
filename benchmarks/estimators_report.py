"""The estimators' study as text, tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from khot.bench import markdown_table

if TYPE_CHECKING:
    from benchmarks.estimators import Figures

OBJECTIVES = ("paper", "quadratic", "mlp")
COLUMNS = ("bias", "variance", "error", "rel_bias", "rel_variance")
COLORS = ("#d55e00", "#0072b2")  # told apart by colour-blind readers too
TITLES = {"paper": "the paper's Σ(x − b)²", "quadratic": "zero-diagonal quadratic", "mlp": "tanh network"}


def to_markdown(rows: Sequence[Figures]) -> str:
    """Estimators × objectives: bias / variance / error, relative bias / relative variance."""
    names = list(dict.fromkeys(row.estimator for row in rows))
    found = {(row.estimator, row.objective): row for row in rows}
    objectives = [name for name in OBJECTIVES if any(row.objective == name for row in rows)]
    lines = [
        [f"`{name}`", str(next(row.evaluations for row in rows if row.estimator == name))]
        + [_cell(found.get((name, objective))) for objective in objectives]
        for name in names
    ]
    return markdown_table(["", "evaluations", *(TITLES[name] for name in objectives)], lines)


def _cell(row: Figures | None) -> str:
    if row is None:
        return "–"
    bias, variance, error, rel_bias, rel_variance = (number(getattr(row, name)) for name in COLUMNS)
    return f"{bias} / {variance} / {error}; {rel_bias} / {rel_variance}"


def number(value: float) -> str:
    """Three digits; what is below half of the last one is 0."""
    if abs(value) < 5e-5:
        return "0"
    return f"{value:.4f}".lstrip("0") if value < 0.01 else f"{value:.3f}".lstrip("0") if value < 1 else f"{value:.3g}"


def figure(rows: Sequence[Figures]) -> Figure:
    """Relative bias against relative standard deviation for each objective, both on a log scale with 0 at the edge."""
    objectives = [name for name in OBJECTIVES if any(row.objective == name for row in rows)]
    picture = Figure(figsize=(5.4 * len(objectives), 5.6), layout="constrained")
    named: dict[Any, list[tuple[float, float, str]]] = {}
    for axes, objective in zip(picture.subplots(1, len(objectives), squeeze=False)[0], objectives, strict=True):
        axes.set(
            xscale="log",
            yscale="log",
            xlim=(7e-4, 30),
            xlabel="relative bias (≤ 0.001 at the left edge)",
            ylabel="relative standard deviation",
            title=TITLES[objective],
        )
        points = [
            (max(row.rel_bias, 1e-3), max(row.rel_variance, 1e-4) ** 0.5, row)
            for row in rows
            if row.objective == objective
        ]
        for x, y, row in points:
            axes.plot(x, y, marker="s" if row.evaluations > 2 else "o", color=COLORS[row.evaluations > 2], markersize=6)
        named[axes] = [(x, y, row.estimator.replace("_", " ")) for x, y, row in points]
    handles = [
        picture.axes[0].plot([], [], marker=m, color=c, linestyle="")[0] for m, c in zip("os", COLORS, strict=True)
    ]
    picture.legend(handles, ["1 or 2 evaluations", "8 or 32"], loc="outside upper center", ncols=2, frameon=False)
    picture.draw_without_rendering()  # now it is known where points are
    for axes, names in named.items():
        _label(axes, names)
    return picture


def _label(axes: Any, points: list[tuple[float, float, str]]) -> None:
    """Names beside points, moved up or down until none lies on another."""
    taken: list[tuple[float, float, float]] = []  # left, right, middle, in points
    for x, y, name in sorted(points, key=lambda point: -point[1]):
        left, middle = axes.transData.transform((x, y)) * 72 / axes.figure.dpi
        right = left + 5 + 4.6 * len(name)
        for shift in (0, 10, -10, 20, -20, 30, -30):
            if all(right < a or left > b or abs(middle + shift - m) > 9 for a, b, m in taken):
                break
        taken.append((left, right, middle + shift))
        axes.annotate(name, (x, y), xytext=(5, shift - 3), textcoords="offset points", fontsize=8)
