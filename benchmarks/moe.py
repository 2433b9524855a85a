"""Which router? Every router of khot on two small problems: eight experts, equal parameters, data and steps.

A piecewise-linear regression and scikit-learn's digits, beside a dense network with as many parameters as a token meets
and a linear model. Settings (learning rate, temperature, weight of the balance) are tuned in two stages, on other seeds
and on data that is not scored: all of a grid on three seeds and half of the steps, then the best four on ten more seeds
and all steps. Seeds of a router are trained together, with the same batches for every router. Writes
results/moe_tuning.csv, results/moe.csv, results/moe_load.csv (the run over time), docs/tables/moe.md and
docs/img/moe-load.svg; an hour, one thread. Ctrl-C ends early, and writes what there is. `--more` keeps the runs of the
CSVs, and adds those that are missing; `--tune` ends before anything is scored.
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
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks import common
from benchmarks.common import mean_and_error
from benchmarks.moe_problems import (
    DENSE,
    EXPERTS,
    OURS,
    PROBLEMS,
    ROUTERS,
    TUNING,
    Measures,
    Setting,
    grid,
    train,
)
from benchmarks.style import BLUE, GREEN, GREY, ORANGE, PINK, panels, styled
from khot.bench import markdown_table

CASES = (("regression", 1), ("regression", 2), ("digits", 2))
AT_ONCE = 10
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
class Stage:
    """A part of the tuning: the best settings of the stage before, on seeds that no other stage has."""

    settings: int | None
    """How many; None for all of the grid."""
    seeds: tuple[int, ...]
    steps: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    seeds: tuple[int, ...]
    steps: int
    points: int
    stages: tuple[Stage, ...]
    """Of the tuning; without any, the first of each list is taken."""


STAGES = (Stage(settings=None, seeds=TUNING[:3], steps=500), Stage(settings=4, seeds=TUNING[3:], steps=1000))
FIRST = 100
"""Seeds from here on are scored; no earlier table, which may have led to a router here, was of these."""
FULL = Plan(seeds=tuple(range(FIRST, FIRST + 20)), steps=1000, points=10, stages=STAGES)
QUICK = Plan(seeds=(0, 1), steps=100, points=5, stages=())


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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting on one tuning seed; the fields are the columns of the CSV."""

    problem: str
    k: int
    router: str
    seed: int
    steps: int
    rate: float
    temperature: float
    balance: float
    error: float


def cases() -> Iterator[tuple[str, int, str]]:
    """Problem, k and router."""
    for name, k in CASES:
        for router in (*(each for each, contender in ROUTERS.items() if contender.least <= k), *DENSE):
            yield name, k, router


def tune(
    plan: Plan, on_progress: Callable[[str], None] = lambda text: None, known: Sequence[Trial] = ()
) -> Iterator[list[Trial]]:
    """Case by case and stage by stage, but for the stages that are known."""
    for case in cases():
        name, k, router = case
        mine = [trial for trial in known if (trial.problem, trial.k, trial.router) == case]
        settings = grid(router, PROBLEMS[name](TUNING[0]))
        for stage in plan.stages:
            settings = settings[: stage.settings]
            trials = [trial for trial in mine if trial.seed in stage.seeds]
            if not trials:
                on_progress(f"{name}, k = {k}: {router}, {len(settings)} settings")
                trials = _trials(case, settings, stage)
                yield trials
            settings = ranked(trials)


def _trials(case: tuple[str, int, str], settings: Sequence[Setting], stage: Stage) -> list[Trial]:
    name, k, router = case
    about, trials = {"problem": name, "k": k, "router": router, "steps": stage.steps}, []
    for rate in dict.fromkeys(setting.rate for setting in settings):
        members = [(seed, setting) for setting in settings if setting.rate == rate for seed in stage.seeds]
        ((_, found),) = train(router, PROBLEMS[name], k, members, steps=stage.steps, when=[stage.steps])
        for (seed, setting), each in zip(members, found, strict=True):
            trials.append(Trial(**about, seed=seed, **setting._asdict(), error=each.error))
    return trials


def ranked(trials: Sequence[Trial]) -> list[Setting]:
    """Settings, the least mean error first."""
    errors: dict[Setting, list[float]] = {}
    for trial in trials:
        errors.setdefault(Setting(trial.rate, trial.temperature, trial.balance), []).append(trial.error)
    return sorted(errors, key=lambda setting: fmean(errors[setting]))


def chosen(plan: Plan, trials: Sequence[Trial]) -> dict[tuple[str, int, str], Setting]:
    """For each case the best setting of the last stage, or the first of each list if nothing was tuned."""
    settings = {(name, k, router): grid(router, PROBLEMS[name](TUNING[0]))[0] for name, k, router in cases()}
    of: dict[tuple[str, int, str], list[Trial]] = {}
    for trial in trials if plan.stages else ():
        if trial.seed in plan.stages[-1].seeds:
            of.setdefault((trial.problem, trial.k, trial.router), []).append(trial)
    return settings | {case: ranked(each)[0] for case, each in of.items()}


def run(
    plan: Plan,
    settings: dict[tuple[str, int, str], Setting],
    on_progress: Callable[[str], None] = lambda text: None,
    known: Sequence[Row] = (),
) -> Iterator[list[Row]]:
    """Case by case and router by router, but for the seeds that are known; over time for what the figure shows."""
    done = {(row.problem, row.k, row.router, row.seed) for row in known}
    parts = [plan.seeds[i : i + AT_ONCE] for i in range(0, len(plan.seeds), AT_ONCE)]
    for part, case in product(parts, list(cases())):
        name, k, router = case
        seeds = [seed for seed in part if (*case, seed) not in done]
        if not seeds:
            continue
        on_progress(f"{name}, k = {k}: {router}")
        setting = settings[case]
        members, about = [(seed, setting) for seed in seeds], {"problem": name, "k": k, "router": router}
        points = plan.points if k == 2 and router in SHOWN else 1
        when = [round(plan.steps * i / points) for i in range(points + 1)]
        yield [
            Row(**asdict(each), **about, seed=seed, step=step, **setting._asdict())
            for step, found in train(router, PROBLEMS[name], k, members, steps=plan.steps, when=when)
            for seed, each in zip(seeds, found, strict=True)
        ]


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
            said = verdict(of, order, OURS[k]) + (f" Not run: {', '.join(missing)}." if missing else "")
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


def verdict(of: dict[str, list[Row]], order: Sequence[str], ours: str) -> str:
    """Who is first, where khot's own formulation and plain σ_k are, and whether a router is behind the linear model."""
    routers = [router for router in order if router in ROUTERS]
    if "sigma_topk" not in routers or len(of["sigma_topk"]) != len(of[routers[0]]):
        return "Not all routers were run."
    best = routers[0]
    said = f"The first router is `{best}`" + (", which was chosen before scoring." if best == ours else ".")
    for name in dict.fromkeys((ours, "sigma_topk")):
        if name != best and name in of:
            gap, error = _gap(of[name], of[best])
            told = "within" if gap <= 2 * error else "behind by more than"
            about = ", chosen before scoring," if name == ours else ""
            said += f" `{name}`{about} is {told} two standard errors of the difference, {gap:.2f} ± {error:.2f}."
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


def to_csv(rows: Sequence[Row] | Sequence[Trial], kind: type = Row) -> str:
    """With a header line; six digits."""
    measures = [field.name for field in fields(Measures)] if kind is Row else []
    names = [field.name for field in fields(kind) if field.name not in measures]
    return common.to_csv(rows, [*names, *measures], digits=6)


def from_csv(text: str, kind: type = Row) -> list[Any]:
    """The rows again."""
    kinds = {"str": str, "int": int, "float": float}
    types = {f.name: kinds[str(f.type)] for f in fields(kind)}
    return [kind(**{k: types[k](v) for k, v in line.items()}) for line in csv.DictReader(io.StringIO(text))]


def main() -> int:
    parser = common.parser(__doc__, "two seeds, 100 steps, nothing tuned: under a minute")
    parser.add_argument("--redraw", action="store_true", help="only the table and the figure, from the CSVs there are")
    parser.add_argument("--more", action="store_true", help="keep the runs of the CSVs, and add those that are missing")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"how many seeds ({len(FULL.seeds)})")
    parser.add_argument("--tune", action="store_true", help="only choose settings; nothing is scored")
    args = parser.parse_args()
    places = common.places(args)
    torch.set_num_threads(1)  # batches are small
    is_interrupted = False
    if not args.redraw:
        plan = QUICK if args.quick else FULL
        if args.seeds:
            plan = replace(plan, seeds=tuple(range(FIRST, FIRST + args.seeds)))
        files = [places.results / name for name in ("moe.csv", "moe_load.csv", "moe_tuning.csv")]
        rows, curves = (_read(path) if args.more else [] for path in files[:2])
        trials = _read(files[2], Trial) if args.more else []
        try:
            for tried in tune(plan, _progress, trials.copy()):
                trials += tried
                common.write(files[2], to_csv(_ordered(trials), Trial))
            for found in () if args.tune else run(plan, chosen(plan, trials), _progress, rows.copy()):
                rows += last(found)
                curves += [row for row in found if row.k == 2 and row.router in SHOWN]
                common.write(files[0], to_csv(_ordered(rows)))
                common.write(files[1], to_csv(_ordered(curves)))
        except KeyboardInterrupt:
            is_interrupted = True
        if args.tune or not rows:
            return 130 if is_interrupted else 0
    found, curves = (_read(places.results / name) for name in ("moe.csv", "moe_load.csv"))
    common.write_table(places.tables / "moe.md", table(found))
    common.write_picture(places.images / "moe-load.svg", figure(curves))
    common.show(args, found, table(found))
    return 130 if is_interrupted else 0


def _read(path: Path, kind: type = Row) -> list[Any]:
    return from_csv(path.read_text(encoding="utf-8"), kind) if path.exists() else []


def _ordered(rows: Sequence[Any]) -> list[Any]:
    """By case and router, as one run has them."""
    place = {case: i for i, case in enumerate(cases())}
    return sorted(rows, key=lambda row: (place[row.problem, row.k, row.router], *_when(row)))


def _when(row: Row | Trial) -> tuple[float, ...]:
    if isinstance(row, Row):
        return row.seed, row.step
    return row.steps, row.rate, -row.temperature, row.balance, row.seed


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
