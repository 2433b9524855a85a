"""Which router? Every router of khot on two small problems: eight experts, equal parameters, data and steps.

A piecewise-linear regression and scikit-learn's digits, beside a dense network with as many parameters as a token meets
and a linear model. Settings (learning rate, temperature, weight of the balance) are the best of a grid on three other
seeds, on data that is not scored. All seeds of a router are trained at once, with the same batches for every router.
Writes results/moe.csv, results/moe_load.csv (the run over time), docs/tables/moe.md and docs/img/moe-load.svg; an
hour, one thread. Ctrl-C ends early, and writes what there is. `--more` keeps the runs of the CSVs, and adds those that
are missing; `--settings FILE` takes the settings of an earlier moe.csv, and tunes only what it has not.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure

from benchmarks import common
from benchmarks.common import mean_and_error
from benchmarks.moe_problems import (
    DENSE,
    EXPERTS,
    PROBLEMS,
    ROUTERS,
    TUNING,
    Measures,
    Problem,
    Setting,
    grid,
    train,
)
from benchmarks.style import BLUE, GREEN, GREY, ORANGE, PINK, panels, styled
from khot.bench import markdown_table

CASES = (("regression", 1), ("regression", 2), ("digits", 2))
AT_ONCE = 5
"""Seeds that are trained together; an interruption leaves as many of every router, or none."""
TITLES = {"regression": "Regression", "digits": "Digits"}
SHOWN = {
    "softmax_topk": (GREY, "-"),
    "sigmoid_gates": (GREEN, "-."),
    "noisy_topk": (PINK, ":"),
    "sigma_topk": (BLUE, "-"),
    "balanced_sigma_topk": (ORANGE, "--"),
}
"""In the figure; Okabe and Ito's colours."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    seeds: tuple[int, ...]
    steps: int
    points: int
    tuning_steps: int
    """0 for no tuning: the first of each list."""


FULL = Plan(seeds=tuple(range(10)), steps=1000, points=10, tuning_steps=500)
QUICK = Plan(seeds=(0, 1), steps=100, points=5, tuning_steps=0)


@dataclass(frozen=True, kw_only=True)
class Row(Measures):
    """One router, problem, k, seed and step; the fields are the columns of the CSV."""

    problem: str
    k: int
    router: str
    seed: int
    step: int
    rate: float
    temperature: float
    balance: float


def run(
    plan: Plan,
    on_progress: Callable[[str], None] = lambda text: None,
    known: Sequence[Row] = (),
    tuned: Sequence[Row] = (),
) -> Iterator[list[Row]]:
    """Case by case and router by router, but for the seeds that are known; over time for what the figure shows."""
    settings = {(r.problem, r.k, r.router): Setting(r.rate, r.temperature, r.balance) for r in (*tuned, *known)}
    done = {(row.problem, row.k, row.router, row.seed) for row in known}
    parts = [plan.seeds[i : i + AT_ONCE] for i in range(0, len(plan.seeds), AT_ONCE)]
    for part, (name, k) in product(parts, CASES):
        for router in (*(name for name, contender in ROUTERS.items() if contender.least <= k), *DENSE):
            case = (name, k, router)
            seeds = [seed for seed in part if (*case, seed) not in done]
            if not seeds:
                continue
            on_progress(f"{name}, k = {k}: {router}")
            setting = settings[case] = settings.get(case) or choose(router, PROBLEMS[name], k, plan.tuning_steps)
            members, about = [(seed, setting) for seed in seeds], {"problem": name, "k": k, "router": router}
            points = plan.points if k == 2 and router in SHOWN else 1
            when = [round(plan.steps * i / points) for i in range(points + 1)]
            yield [
                Row(**asdict(each), **about, seed=seed, step=step, **setting._asdict())
                for step, found in train(router, PROBLEMS[name], k, members, steps=plan.steps, when=when)
                for seed, each in zip(seeds, found, strict=True)
            ]


def choose(router: str, make: Callable[[int], Problem], k: int, steps: int) -> Setting:
    """The least mean error over the tuning seeds."""
    settings, errors = grid(router, make(TUNING[0])), {}
    for rate in {setting.rate for setting in settings} if steps else ():
        members = [(seed, setting) for setting in settings if setting.rate == rate for seed in TUNING]
        ((_, found),) = train(router, make, k, members, steps=steps, when=[steps])
        for (_, setting), each in zip(members, found, strict=True):
            errors.setdefault(setting, []).append(each.error)
    return min(errors, key=lambda setting: fmean(errors[setting])) if errors else settings[0]


def last(rows: Sequence[Row]) -> list[Row]:
    """Those of whole runs."""
    end = max((row.step for row in rows), default=0)
    return [row for row in rows if row.step == end]


def table(rows: Sequence[Row]) -> str:
    """A table for each case, the best router first, and what it says."""
    parts = ["<!-- Written by benchmarks/moe.py; do not edit. -->"]
    for name, k in CASES:
        of: dict[str, list[Row]] = {}
        for row in last(rows):
            if (row.problem, row.k) == (name, k):
                of.setdefault(row.router, []).append(row)
        if of:
            order = sorted(of, key=lambda router: fmean(row.error for row in of[router]))
            heading = [
                "",
                _measure(name),
                "minus the first's",
                "MaxVio",
                "dead experts",
                "entropy",
                "experts a token",
                "settings",
            ]
            best = next((router for router in order if router in ROUTERS), order[0])
            lines = [_line(router, of[router], of[best]) for router in order]
            missing = [f"`{each}`" for each, router in ROUTERS.items() if router.least <= k and each not in of]
            said = verdict(of, order) + (f" Not run: {', '.join(missing)}." if missing else "")
            parts += [f"**{TITLES[name]}, k = {k} of {EXPERTS}**", markdown_table(heading, lines), said]
    return "\n\n".join(parts) + "\n"


def _measure(name: str) -> str:
    return "wrong digits, %" if name == "digits" else "error, % of the variance"


def _gap(rows: Sequence[Row], others: Sequence[Row]) -> tuple[float, float]:
    """The mean difference and its error, paired by seed."""
    theirs = {row.seed: row.error for row in others}
    return mean_and_error([100 * (row.error - theirs[row.seed]) for row in rows if row.seed in theirs])


def _line(router: str, rows: Sequence[Row], best: Sequence[Row]) -> list[str]:
    mean, error = mean_and_error([100 * row.error for row in rows])
    first, text = (
        rows[0],
        [f"{mean:.2f} ± {error:.2f}", "–" if rows is best else "{:.2f} ± {:.2f}".format(*_gap(rows, best))],
    )
    if router in DENSE:
        return [router, *text, "–", "–", "–", "–", f"{first.rate:g}"]
    means = (fmean(getattr(row, m) for row in rows) for m in ("violation", "dead", "entropy", "active"))
    settings = f"{first.rate:g}, {first.temperature:g}" + (f", {first.balance:g}" if first.balance else "")
    return [f"`{router}`", *text, *(f"{value:.2f}" for value in means), settings]


def verdict(of: dict[str, list[Row]], order: Sequence[str]) -> str:
    """Who is first, where σ_k is, and whether a router is behind the linear model."""
    routers = [router for router in order if router in ROUTERS]
    if "sigma_topk" not in routers or len(of["sigma_topk"]) != len(of[routers[0]]):
        return "Not all routers were run."
    best, ours = routers[0], next(router for router in routers if "sigma" in router)
    said = f"The first router is `{best}`."
    for name in dict.fromkeys((ours, "sigma_topk")):
        if name != best:
            gap, error = _gap(of[name], of[best])
            told = "within" if gap <= 2 * error else "behind by more than"
            said += f" `{name}` is {told} two standard errors of the difference, {gap:.2f} ± {error:.2f}."
    linear = fmean(row.error for row in of["linear"]) if "linear" in of else float("inf")
    worse = [f"`{name}`" for name in routers if fmean(row.error for row in of[name]) >= linear]
    return said + (f" Behind the linear model: {', '.join(worse)}." if worse else " All are ahead of the linear model.")


@styled
def figure(rows: Sequence[Row]) -> Figure:
    """MaxVio and the entropy of routing over training, k = 2: means over seeds."""
    picture, grid = panels(2, len(PROBLEMS), 6.4, sharex=True)
    for column, name in enumerate(PROBLEMS):
        for axes, (measure, label) in zip(
            grid[:, column], {"violation": "MaxVio", "entropy": "entropy, nats"}.items(), strict=True
        ):
            for router, (colour, line) in SHOWN.items():
                points: dict[int, list[float]] = {}
                for row in rows:
                    if (row.problem, row.k, row.router) == (name, 2, router):
                        points.setdefault(row.step, []).append(getattr(row, measure))
                axes.plot(list(points), [fmean(v) for v in points.values()], line, color=colour, label=router)
            axes.set(ylim=(0, None), ylabel=label)
            axes.grid(True)
        grid[0, column].set_title(TITLES[name])
        grid[1, column].set_xlabel("step")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3)
    return picture


def to_csv(rows: Sequence[Row]) -> str:
    """With a header line; six digits."""
    measures = [field.name for field in fields(Measures)]
    names = [field.name for field in fields(Row) if field.name not in measures]
    return common.to_csv(rows, [*names, *measures], digits=6)


def from_csv(text: str) -> list[Row]:
    """The rows again."""
    kinds = {"str": str, "int": int, "float": float}
    types = {f.name: kinds[str(f.type)] for f in fields(Row)}
    return [Row(**{k: types[k](v) for k, v in line.items()}) for line in csv.DictReader(io.StringIO(text))]


def main() -> int:
    parser = common.parser(__doc__, "two seeds, 100 steps, nothing tuned: under a minute")
    parser.add_argument("--redraw", action="store_true", help="only the table and the figure, from the CSVs there are")
    parser.add_argument("--more", action="store_true", help="keep the runs of the CSVs, and add those that are missing")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"how many seeds ({len(FULL.seeds)})")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="an earlier moe.csv, whose settings to keep")
    args = parser.parse_args()
    places = common.places(args)
    torch.set_num_threads(1)  # batches are small
    is_interrupted = False
    if not args.redraw:
        rows, curves = (_read(places.results / name) if args.more else [] for name in ("moe.csv", "moe_load.csv"))
        tuned, plan = _read(args.settings) if args.settings else [], QUICK if args.quick else FULL
        if args.seeds:
            plan = replace(plan, seeds=tuple(range(args.seeds)))
        try:
            for found in run(plan, _progress, rows.copy(), tuned):
                rows += last(found)
                curves += [row for row in found if row.k == 2 and row.router in SHOWN]
                common.write(places.results / "moe.csv", to_csv(_ordered(rows)))
                common.write(places.results / "moe_load.csv", to_csv(_ordered(curves)))
        except KeyboardInterrupt:
            is_interrupted = True
        if not rows:
            return 130
    found, curves = (_read(places.results / name) for name in ("moe.csv", "moe_load.csv"))
    common.write_table(places.tables / "moe.md", table(found))
    common.write_picture(places.images / "moe-load.svg", figure(curves))
    common.show(args, found, table(found))
    return 130 if is_interrupted else 0


def _read(path: Path) -> list[Row]:
    return from_csv(path.read_text(encoding="utf-8")) if path.exists() else []


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """By case and router, as one run has them."""
    names = [*ROUTERS, *DENSE]
    place = {case: i for i, case in enumerate(CASES)}
    return sorted(rows, key=lambda row: (place[row.problem, row.k], names.index(row.router), row.seed, row.step))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
