"""The estimators' study as text, tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.style import BLUE, INK, ORANGE, panels, styled
from khot.bench import markdown_table

if TYPE_CHECKING:
    from benchmarks.estimators import Figures

OBJECTIVES = ("paper", "quadratic", "mlp")
COLUMNS = ("bias", "variance", "error", "rel_bias", "rel_variance")
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
    return f"{bias} / {variance} / {error} ± {number(row.error_se)}; {rel_bias} / {rel_variance}"


def number(value: float) -> str:
    """Three digits; what is below half of the last one is 0."""
    if abs(value) < 5e-5:
        return "0"
    return f"{value:.4f}".lstrip("0") if value < 0.01 else f"{value:.3f}".lstrip("0") if value < 1 else f"{value:.3g}"


@styled
def figure(rows: Sequence[Figures]) -> Figure:
    """Relative bias and relative standard deviation of each estimator, a panel for each objective; 0 is at the edge."""
    objectives = [name for name in OBJECTIVES if any(row.objective == name for row in rows)]
    names = list(dict.fromkeys(row.estimator for row in rows))
    least, most = 1e-3, 30
    picture, grid = panels(1, len(objectives), 1.3 + 0.33 * len(names), sharey=True)
    for axes, objective in zip(grid[0], objectives, strict=True):
        for row in (row for row in rows if row.objective == objective):
            place, bias, spread = names.index(row.estimator), row.rel_bias, max(row.rel_variance, 0) ** 0.5
            axes.plot(max(bias, least), place, "o", color=ORANGE, markersize=8)
            axes.plot(
                max(spread, least), place, "s", color=BLUE, markersize=7, markerfacecolor="none", markeredgewidth=2
            )
        axes.set(xscale="log", xlim=(0.7 * least, most), ylim=(len(names) - 0.5, -0.5), title=TITLES[objective])
        axes.set_xticks((1e-3, 1e-2, 0.1, 1, 10), ("0", "0.01", "0.1", "1", "10"))
        axes.minorticks_off()
        axes.grid(True)
    several = {row.estimator for row in rows if row.evaluations > 2}
    grid[0][0].set_yticks(range(len(names)), [name + (" *" if name in several else "") for name in names])
    for label in grid[0][0].get_yticklabels():
        label.set_color(INK)
    marks = [("o", ORANGE, "relative bias"), ("s", BLUE, "relative standard deviation")]
    handles = [
        grid[0][0].plot([], [], mark, color=colour, markerfacecolor=colour if mark == "o" else "none")[0]
        for mark, colour, _ in marks
    ]
    said = [text for *_, text in marks]
    picture.legend(handles, said, loc="outside upper center", ncols=2)
    return picture
