"""The estimators' study as text, tables and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from ._estimators import OBJECTIVES, Figures
from ._files import markdown_table

COLUMNS = ("bias", "variance", "error", "rel_bias", "rel_variance")
TITLES = {"paper": "the paper's Σ(x − b)²", "quadratic": "zero-diagonal quadratic", "mlp": "tanh network"}


def estimators_json(rows: Sequence[Figures]) -> str:
    """A list of records."""
    return json.dumps([row.record() for row in rows], indent=1)


def estimators_csv(rows: Sequence[Figures]) -> str:
    """The records with a header line."""
    out = io.StringIO()
    names = ("estimator", "objective", *COLUMNS, "evaluations")
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.record() for row in rows)
    return out.getvalue()


def estimators_markdown(rows: Sequence[Figures]) -> str:
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


def plot_estimators(rows: Sequence[Figures], path: Path) -> None:
    """Relative bias against relative standard deviation for each objective, both on a log scale with 0 at the edge."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    objectives = [name for name in OBJECTIVES if any(row.objective == name for row in rows)]
    figure = Figure(figsize=(5.2 * len(objectives), 5.4), layout="constrained")
    for axes, objective in zip(figure.subplots(1, len(objectives), squeeze=False)[0], objectives, strict=True):
        for row in (row for row in rows if row.objective == objective):
            many = row.evaluations > 2
            x, y = max(row.rel_bias, 1e-3), max(row.rel_variance, 1e-4) ** 0.5
            axes.plot(x, y, marker="s" if many else "o", color="#0072b2" if many else "#d55e00", markersize=6)
            axes.annotate(
                row.estimator.replace("_", " "), (x, y), xytext=(5, 3), textcoords="offset points", fontsize=8
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlim=(7e-4, 12),
            xlabel="relative bias (≤ 0.001 at the left edge)",
            ylabel="relative standard deviation",
            title=TITLES[objective],
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "khot"}):  # the same bytes each time
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
