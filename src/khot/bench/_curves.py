"""Learning curves as a summary, a file and a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

from ._learning import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

R = TypeVar("R", bound=Row)
STYLE = {  # Okabe and Ito's colours; one kind of line for each family
    "straight_through": ("#0072b2", "-"),
    "simple": ("#56b4e9", "-"),
    "imle": ("#cc79a7", "-"),
    "relaxed": ("#e69f00", "--"),
    "xie_ermon": ("#d55e00", "--"),
    "score": ("#999999", "-."),
    "rloo": ("#009e73", "-."),
    "taylor": ("#000000", "-."),
    "reinmax": ("#9a7d0a", "-."),
}


def summary(rows: Sequence[R], measure: str, others: Sequence[str]) -> list[dict[str, str | float]]:
    """At the last step, the estimators that got there, by the mean of a measure over seeds, the least first.

    `error` is the standard error of the mean, `wins` counts seeds on which no other is better, `behind` is the mean
    difference to the first, seed by seed, with its standard error.
    """
    last = max((row.step for row in rows), default=0)
    final: dict[str, dict[int, R]] = {}
    for row in rows:
        if row.step == last:
            final.setdefault(row.estimator, {})[row.seed] = row
    value = {name: {seed: getattr(r, measure) for seed, r in found.items()} for name, found in final.items()}
    names = sorted(value, key=lambda name: fmean(value[name].values()))
    seeds = sorted({seed for found in value.values() for seed in found})
    least = {seed: min(found[seed] for found in value.values()) for seed in seeds}
    result: list[dict[str, str | float]] = []
    for rank, name in enumerate(names, 1):
        mean, error = mean_and_error(list(value[name].values()))
        behind, behind_error = mean_and_error([value[name][seed] - value[names[0]][seed] for seed in seeds])
        some = next(iter(final[name].values()))
        result.append(
            {
                "rank": rank,
                "estimator": name,
                "mean": mean,
                "error": error,
                "wins": sum(value[name][seed] <= least[seed] + 1e-9 for seed in seeds),
                "behind": behind,
                "behind_error": behind_error,
                **{other: fmean(getattr(r, other) for r in final[name].values()) for other in others},
                "evaluations": some.evaluations,
                "rate": some.rate,
                "knob": some.knob,
            }
        )
    return result


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is 0 for one value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def to_csv(rows: Sequence[Row]) -> str:
    """With a header line; six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(rows[0])])
    writer.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in asdict(row).values()] for row in rows)
    return text.getvalue()


def from_csv(row: type[R], text: str) -> list[R]:
    """What `to_csv` wrote."""
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
    read = {field.name: kinds[str(field.type)] for field in fields(row)}
    return [
        row(**{name: read[name](value) for name, value in line.items()}) for line in csv.DictReader(text.splitlines())
    ]


def figure(
    rows: Sequence[Row], panels: Mapping[str, str], references: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """A panel for each measure: means over seeds and their standard errors against evaluations, and `references`."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5 * len(panels), 4.8), layout="constrained")
    grid = picture.subplots(1, len(panels), squeeze=False)[0]
    names = [str(row["estimator"]) for row in summary(rows, next(iter(panels)), ())]
    names += [name for name in dict.fromkeys(row.estimator for row in rows) if name not in names]
    for axes, (measure, label) in zip(grid, panels.items(), strict=True):
        shown: list[float] = []  # what the axis must hold: the first point is far off, and the same for all
        for name in names:
            points: dict[int, list[float]] = {}
            for row in rows:
                if row.estimator == name:
                    points.setdefault(row.evaluations, []).append(getattr(row, measure))
            mean, error = zip(*(mean_and_error(values) for values in points.values()), strict=True)
            colour, line = STYLE[name]
            axes.plot(list(points), mean, line, color=colour, label=name, linewidth=1.6)
            low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
            axes.fill_between(list(points), low, high, color=colour, alpha=0.15, linewidth=0)
            shown += [*low[1:], *high[1:]]
        for (name, of), dash in zip((references or {}).items(), ((0, (1, 1)), (0, (1, 4))), strict=False):
            axes.axhline(of[measure], color="black", linestyle=dash, linewidth=1.2, label=name)
            shown.append(of[measure])
        if shown:
            margin = 0.03 * (max(shown) - min(shown))
            axes.set_ylim(min(shown) - margin, max(shown) + margin)
        axes.set(xlabel="evaluations of the objective", ylabel=label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="0.93")
    handles, labels = grid[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    return picture


def save(picture: Figure, path: Path) -> None:
    """The same bytes each time."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "khot", "svg.fonttype": "none"}):
        picture.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
