"""What was measured on feature selection, as a file, tables and a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import mean_and_error
from benchmarks.common import to_csv as rows_to_csv
from benchmarks.style import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, panels, styled
from khot.bench import markdown_table

NOTE = "<!-- Written by benchmarks/feature_selection.py; do not edit. -->"
STYLE = {  # Okabe and Ito's colours
    "khot": (ORANGE, "o"),
    "khot, for each row, relaxed": (ORANGE, "*"),
    "khot, for each row, sampled": (ORANGE, "X"),
    "L2X, for each row": (INK, "*"),
    "concrete": (BLUE, "s"),
    "STG, λ = 0.1": (SKY, "D"),
    "STG, λ = 1": (SKY, "P"),
    "STG, λ = 3": (SKY, "h"),
    "F test": (GREEN, "^"),
    "mutual information": (GREEN, "v"),
    "L1": (PINK, "<"),
    "RFE": (PINK, ">"),
    "random": (GREY, "."),
    "all features": (INK, "d"),
}
PER_ROW = "khot, for each row, relaxed"
RIVALS = (
    "`concrete` is the selector of concrete autoencoders with a supervised head; rows that take a feature twice are "
    "given the next best. It, STG (its k greatest μ) and L2X are our own implementations, with the network, the steps "
    "and the batches of `KHotSelector`."
)
MODELS = {"linear": "logistic", "forest": "forest"}


class Row(NamedTuple):
    """One number; the fields are the columns of the CSV."""

    set: str
    k: int
    method: str
    seed: int
    measure: str
    value: float


def to_csv(rows: Sequence[Row]) -> str:
    """With a header line; six digits."""
    return rows_to_csv(rows, digits=6)


def from_csv(text: str) -> list[Row]:
    """What `to_csv` wrote."""
    lines = list(csv.reader(io.StringIO(text)))[1:]
    return [Row(name, int(k), method, int(seed), measure, float(v)) for name, k, method, seed, measure, v in lines]


def values(rows: Sequence[Row], **wanted: object) -> list[float]:
    """Of the rows with these fields, one for each seed."""
    return [row.value for row in rows if all(getattr(row, field) == value for field, value in wanted.items())]


def _cells(rows: Sequence[Row], column: dict[str, object], show: Callable[[str, list[float]], str]) -> dict[str, str]:
    """A column of a table: method to text, the best in bold; what is not a choice of k features cannot be best."""
    found = {method: values(rows, method=method, **column) for method in STYLE}
    means = {method: mean_and_error(of)[0] for method, of in found.items() if of}
    best = max((mean for method, mean in means.items() if method != "all features"), default=None)
    return {
        method: f"**{text}**" if means[method] == best and method != "all features" else text
        for method in means
        if (text := show(method, found[method]))
    }


def told(rows: Sequence[Row], columns: dict[str, dict[str, object]]) -> str:
    """Who is ahead of khot (of its choice for each row, if there is one), and whether by two standard errors.

    Errors are those of the difference, seed by seed.
    """
    clearly, hardly = [], []
    for name, column in columns.items():
        ours = next(method for method in (PER_ROW, "khot") if method == "khot" or values(rows, method=method, **column))
        mine = values(rows, method=ours, **column)
        for method in STYLE:
            theirs = values(rows, method=method, **column)
            if method.startswith("khot") or method == "all features" or not mine or len(theirs) != len(mine):
                continue
            by, error = mean_and_error([b - a for a, b in zip(mine, theirs, strict=True)])
            if by > 0:
                (clearly if by > 2 * error else hardly).append(f"{method} on {name} ({by:.3f} ± {error:.3f})")
    parts = [
        f"{label}: {', '.join(found)}."
        for label, found in (("Ahead of khot", clearly), ("Ahead, but within two standard errors", hardly))
        if found
    ]
    return "\n\n".join(parts) or "No method is ahead of khot."


def recovery_table(rows: Sequence[Row]) -> str:
    """Methods × sets of known answer: the share found, and the seeds where the whole set was."""
    sets = list(dict.fromkeys((row.set, row.k) for row in rows if row.measure == "found"))

    def show(name: str) -> Callable[[str, list[float]], str]:
        def text(method: str, found: list[float]) -> str:
            rank = values(rows, set=name, method=method, measure="median rank")
            if name == "switch":
                return f"{mean_and_error(found)[0]:.0%}" + (f", rank {mean_and_error(rank)[0]:.1f}" if rank else "")
            whole = values(rows, set=name, method=method, measure="whole")
            return f"{mean_and_error(found)[0]:.0%}, {sum(whole):.0f}/{len(whole)}"

        return text

    columns = [_cells(rows, {"set": name, "measure": "found"}, show(name)) for name, _ in sets]
    lines = [[method, *(c.get(method, "–") for c in columns)] for method in STYLE if any(method in c for c in columns)]
    heading = ["", *(f"{name}, k = {k}" for name, k in sets)]
    notes = (
        "The share of the true features among the k selected, and the seeds on which all of them were; on `switch`, "
        "where five features matter in each row and others in the next, the mean over rows, and the median rank of the "
        "true ones (3 at best, 5.5 by chance). Bold is the best of a column. Columns of the sets are in random order. "
    )
    ahead = told(rows, {name: {"set": name, "measure": "found"} for name, _ in sets})
    return "\n\n".join([NOTE, markdown_table(heading, lines), notes + RIVALS, ahead]) + "\n"


def scores_table(rows: Sequence[Row]) -> str:
    """Methods × real sets and models: test accuracy."""
    columns = [
        {"set": name, "k": k, "measure": measure}
        for name, k in dict.fromkeys((row.set, row.k) for row in rows if row.measure in MODELS)
        for measure in MODELS
    ]

    def show(method: str, of: list[float]) -> str:
        mean, error = mean_and_error(of)
        return f"{mean:.3f} ± {error:.3f}"

    cells = [_cells(rows, column, show) for column in columns]
    lines = [[method, *(c.get(method, "–") for c in cells)] for method in STYLE if any(method in c for c in cells)]
    names = [f"{c['set']}, k = {c['k']}, {MODELS[str(c['measure'])]}" for c in columns]
    notes = (
        "Accuracy of logistic regression and of a random forest on a quarter of the rows, held out; means over splits "
        "± standard error; bold is the best choice of k features in a column. STG's λ is not tuned, but all are shown. "
    )
    ahead = told(rows, dict(zip(names, columns, strict=True)))
    left = [] if any(row.set == "MNIST" for row in rows) else ["MNIST was not measured: it takes `--mnist DIR`."]
    return "\n\n".join([NOTE, markdown_table(["", *names], lines), notes + RIVALS, ahead, *left]) + "\n"


@styled
def figure(rows: Sequence[Row]) -> Figure:
    """Dots with standard errors: shares found on the left, accuracies on the right."""
    picture, ((left, right),) = panels(1, 2, 7.6)
    known = {row.set: {"set": row.set, "measure": "found"} for row in rows if row.measure == "found"}
    real = {
        f"{row.set}, k = {row.k},\n{MODELS[row.measure]}": {"set": row.set, "k": row.k, "measure": row.measure}
        for row in rows
        if row.measure in MODELS
    }
    _dots(left, rows, known)
    _dots(right, rows, real)
    left.set(xlabel="share of the true features found", xlim=(-0.03, 1.03))
    right.set(xlabel="test accuracy")
    seen: dict[str, object] = {}
    for axes in (left, right):
        seen |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [name for name in STYLE if name in seen]
    picture.legend([seen[name] for name in order], order, loc="outside lower center", ncols=4)
    return picture


def _dots(axes: Axes, rows: Sequence[Row], lines: dict[str, dict[str, object]]) -> None:
    """A band for each line, and in it a dot for each method, one below the other."""
    for place, column in enumerate(lines.values()):
        found = {method: of for method in STYLE if (of := values(rows, method=method, **column))}
        for i, (method, of) in enumerate(found.items()):
            mean, error = mean_and_error(of)
            colour, marker = STYLE[method]
            y = place + 0.8 * ((i + 0.5) / len(found) - 0.5)
            label = method if place == 0 or method not in axes.get_legend_handles_labels()[1] else None
            axes.errorbar(mean, y, xerr=error, fmt=marker, color=colour, ms=5, elinewidth=1, label=label)
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color=GRID, alpha=0.5, zorder=0, linewidth=0)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(True, axis="x")
