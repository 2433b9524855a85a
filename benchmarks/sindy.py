"""Which terms are in the equations? `KHotOptimizer` and pysindy's optimizers on six systems with known equations.

Each run takes a trajectory, adds noise (a share of the standard deviation of each state), differentiates it by
pysindy's `SmoothedFiniteDifference` at its defaults, and gives the same library and derivatives to all methods. A run
is exact if the terms of all equations are right, none missing and none in excess. Methods marked with * are told
something about the truth. Writes results/sindy.csv, and tables and the picture of docs/sparse-coding.md. `--miosr` is a
study of its own: `KHotOptimizer(k)` beside pysindy's MIOSR, which is told the same k and uses Gurobi at its defaults
(`pip install gurobipy`; the licence that comes with it is for small problems). It writes results/sindy_miosr.csv.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from pysindy import PolynomialLibrary, SINDy, SmoothedFiniteDifference
from pysindy.optimizers import FROLS, SR3, SSR, STLSQ
from scipy.integrate import solve_ivp

from benchmarks import common
from benchmarks.style import BLUE, GREY, ORANGE, panels, styled
from khot.sindy import KHotOptimizer

NOISE = (0.0, 0.001, 0.01, 0.05, 0.1)
DEGREES = (2, 3, 5)
THRESHOLDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of STLSQ; the truth says which of them is reported."""
SEEDS, FEW = 10, 3
LARGE = 100  # terms from which on there are FEW seeds, and SSR, which removes one term at a time, is left out
Term = tuple[int, ...]


class System(NamedTuple):
    """Equations: the coefficient of each product of states, by the numbers of its factors."""

    equations: tuple[dict[Term, float], ...]
    start: tuple[float, ...]
    time: float
    step: float

    @property
    def degree(self) -> int:
        """The highest number of factors."""
        return max(len(factors) for equation in self.equations for factors in equation)


def lorenz_96(size: int, force: float) -> tuple[dict[Term, float], ...]:
    """Return ẋᵢ = (xᵢ₊₁ − xᵢ₋₂)·xᵢ₋₁ − xᵢ + force, in a ring."""
    return tuple(
        {(): force, (i,): -1.0, ((i + 1) % size, (i - 1) % size): 1.0, ((i - 2) % size, (i - 1) % size): -1.0}
        for i in range(size)
    )


SYSTEMS = {
    "Lorenz": System(
        ({(0,): -10.0, (1,): 10.0}, {(0,): 28.0, (1,): -1.0, (0, 2): -1.0}, {(0, 1): 1.0, (2,): -8 / 3}),
        (-8.0, 8.0, 27.0),
        10.0,
        0.004,
    ),
    "Lotka–Volterra": System(
        ({(0,): 1.1, (0, 1): -0.4}, {(0, 1): 0.1, (1,): -0.4}),
        (10.0, 5.0),
        50.0,
        0.02,
    ),
    "Van der Pol": System(({(1,): 1.0}, {(0,): -1.0, (1,): 1.5, (0, 0, 1): -1.5}), (2.0, 0.0), 25.0, 0.01),
    "Rössler": System(
        ({(1,): -1.0, (2,): -1.0}, {(0,): 1.0, (1,): 0.2}, {(): 0.2, (2,): -5.7, (0, 2): 1.0}),
        (5.0, 3.0, 0.0),
        50.0,
        0.02,
    ),
    "cubic oscillator": System(
        ({(0, 0, 0): -0.1, (1, 1, 1): 2.0}, {(0, 0, 0): -2.0, (1, 1, 1): -0.1}),
        (2.0, 0.0),
        25.0,
        0.01,
    ),
    "Lorenz-96": System(lorenz_96(6, 8.0), (1.0, 8.0, 8.0, 8.0, 8.0, 8.0), 10.0, 0.005),
}


class Row(NamedTuple):
    """One fit."""

    system: str
    degree: int
    noise: float
    seed: int
    method: str
    exact: bool
    missing: int
    """True terms that were not found."""
    extra: int
    error: float
    """‖ξ − truth‖/‖truth‖ over all coefficients."""
    seconds: float
    """CPU time of the fit, all of the grid for the best of a grid."""


class Task(NamedTuple):
    """A regression: all methods get the same."""

    library: np.ndarray  # Θ, (rows, terms)
    derivatives: np.ndarray  # (rows, states)
    truth: np.ndarray  # (states, terms)


def simulate(system: System) -> tuple[np.ndarray, np.ndarray]:
    """Return the times and the states, (rows, states)."""
    terms = [[(c, list(factors)) for factors, c in equation.items()] for equation in system.equations]

    def slope(_: float, x: np.ndarray) -> list[float]:
        return [sum(c * np.prod(x[factors]) for c, factors in equation) for equation in terms]

    at = np.arange(0, system.time, system.step)
    solved = solve_ivp(slope, (0, system.time), system.start, "LSODA", t_eval=at, rtol=1e-10, atol=1e-12)
    return at, solved.y.T


@cache
def trajectory(name: str) -> tuple[np.ndarray, np.ndarray]:
    return simulate(SYSTEMS[name])


def noisy(x: np.ndarray, noise: float, seed: int) -> np.ndarray:
    shaken: np.ndarray = x + noise * x.std(0) * np.random.default_rng(seed).standard_normal(x.shape)
    return shaken


def regression(system: System, x: np.ndarray, t: np.ndarray, degree: int, differentiate: Any) -> Task:
    """Return the library of the states, as smoothed by the differentiation, and their derivatives."""
    derivatives = np.asarray(differentiate(x, t))
    library = PolynomialLibrary(degree)
    values = np.asarray(library.fit_transform(np.asarray(differentiate.smoothed_x_)))
    truth = np.zeros((x.shape[1], values.shape[1]))
    powers = [tuple(row) for row in library.powers_]
    for i, equation in enumerate(system.equations):
        for factors, coefficient in equation.items():
            truth[i, powers.index(tuple(factors.count(j) for j in range(x.shape[1])))] = coefficient
    return Task(values, derivatives, truth)


def make_task(name: str, degree: int, noise: float, seed: int) -> Task:
    t, x = trajectory(name)
    return regression(SYSTEMS[name], noisy(x, noise, seed), t, degree, SmoothedFiniteDifference())


def fit(optimizer: Any, task: Task) -> np.ndarray:
    """Return the coefficients, (states, terms)."""
    coefficients: np.ndarray = optimizer.fit(task.library, task.derivatives).coef_
    return coefficients


def sizes(task: Task) -> list[int]:
    return [int(k) for k in np.count_nonzero(task.truth, 1)]


def error(found: np.ndarray, task: Task) -> float:
    return float(np.linalg.norm(found - task.truth) / np.linalg.norm(task.truth))


def best_threshold(task: Task) -> np.ndarray:
    """Fit STLSQ with each threshold, and return the one with the fewest wrong terms and then the least error."""
    found = [fit(STLSQ(threshold=threshold), task) for threshold in THRESHOLDS]
    return min(found, key=lambda c: (int(((c != 0) != (task.truth != 0)).sum()), error(c, task)))


def along(name: str, optimizer: Any, task: Task) -> dict[str, np.ndarray]:
    """Return what an optimizer chose, and least squares on the terms that it had when their number was right."""
    found, told = {name: fit(optimizer, task)}, np.zeros_like(task.truth)
    for i, k in enumerate(sizes(task)):
        chosen = [step[i] != 0 for step in optimizer.history_ if np.count_nonzero(step[i]) == k]
        if chosen:
            told[i, chosen[0]] = np.linalg.lstsq(task.library[:, chosen[0]], task.derivatives[:, i], rcond=None)[0]
    return {**found, f"{name}, at k *": told}


def one(name: str, make: Callable[[Task], Any]) -> Callable[[Task], dict[str, np.ndarray]]:
    return lambda task: {name: fit(make(task), task)}


SOLVERS: tuple[Callable[[Task], dict[str, np.ndarray]], ...] = (
    one('KHotOptimizer("auto")', lambda task: KHotOptimizer("auto")),
    one("KHotOptimizer(k) *", lambda task: KHotOptimizer(sizes(task))),
    one("KHotOptimizer(total=…) *", lambda task: KHotOptimizer(total=sum(sizes(task)))),
    one("STLSQ", lambda task: STLSQ()),
    lambda task: {"STLSQ, best threshold *": best_threshold(task)},
    lambda task: along("SSR", SSR(max_iter=task.library.shape[1]), task) if task.library.shape[1] < LARGE else {},
    lambda task: along("FROLS", FROLS(), task),
    one("SR3", lambda task: SR3()),
)


def mixed_integer(task: Task) -> dict[str, np.ndarray]:
    """Fit MIOSR with the right number of terms in each equation; nothing if the licence does not allow the size."""
    from gurobipy import GurobiError
    from pysindy.optimizers import MIOSR

    try:
        return {"MIOSR(k) *": fit(MIOSR(group_sparsity=tuple(sizes(task)), target_sparsity=None), task)}
    except GurobiError as problem:
        if problem.errno != TOO_LARGE:
            raise
        return {}


TOO_LARGE = 10010  # Gurobi's number for a model beyond the size of the licence
TOLD = (SOLVERS[1], mixed_integer)
Solvers = Sequence[Callable[[Task], dict[str, np.ndarray]]]


def run(
    systems: Sequence[str],
    degrees: Sequence[int],
    noise: Sequence[float],
    seeds: int,
    solvers: Solvers = SOLVERS,
) -> Iterator[Row]:
    for name in systems:
        for degree in (d for d in degrees if d >= SYSTEMS[name].degree):
            for share in noise:
                terms = make_task(name, degree, share, 0).library.shape[1]
                count = 1 if share == 0 else seeds if terms < LARGE else min(FEW, seeds)
                for seed in range(count):
                    task = make_task(name, degree, share, seed)
                    yield from compare(name, degree, share, seed, task, solvers)


def compare(name: str, degree: int, noise: float, seed: int, task: Task, solvers: Solvers = SOLVERS) -> Iterator[Row]:
    wanted = task.truth != 0
    for solve in solvers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pysindy: thresholds that leave no term, ill-conditioned ridges
            start = time.process_time()
            results = solve(task)
            seconds = time.process_time() - start
        for method, found in results.items():
            missing, extra = int((wanted & (found == 0)).sum()), int((~wanted & (found != 0)).sum())
            exact = missing + extra == 0
            yield Row(name, degree, noise, seed, method, exact, missing, extra, error(found, task), seconds)


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WRITTEN = "<!-- Written by benchmarks/sindy.py; do not edit. -->\n\n"


def percent(rows: Sequence[Any]) -> str:
    """Return the share of exact runs: each system and degree counts the same, whatever its number of runs."""
    cells: dict[Any, list[bool]] = {}
    for row in rows:
        cells.setdefault((row.system, row.degree, row.noise), []).append(bool(row.exact))
    return f"{100 * fmean(fmean(cell) for cell in cells.values()):.0f}" if cells else "–"


def table(rows: Sequence[Any]) -> str:
    """Return the share of exact runs by noise, and the median coefficient error and time."""
    levels = sorted({row.noise for row in rows})
    head = ["method", *(f"{100 * n:g} %" for n in levels), "all", "error", "seconds"]
    lines = [f"| {' | '.join(head)} |", f"| :--- |{' ---: |' * (len(head) - 1)}"]
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        cells = [percent([row for row in own if row.noise == n]) for n in levels]
        last = [percent(own), f"{median(r.error for r in own):.2g}", f"{median(r.seconds for r in own):.2g}"]
        lines.append(f"| {method.replace('*', chr(92) + '*')} | {' | '.join(cells + last)} |")
    return WRITTEN + "\n".join(lines) + "\n"


SHOWN = ('KHotOptimizer("auto")', "KHotOptimizer(k) *", "STLSQ", "STLSQ, best threshold *", "SSR, at k *")


def systems_table(rows: Sequence[Any]) -> str:
    """Return the share of exact runs by system and degree, over all noise levels."""
    lines = ["| system | degree | terms | " + " | ".join(m.replace("*", "\\*") for m in SHOWN) + " |"]
    lines.append("| :--- | ---: | ---: |" + " ---: |" * len(SHOWN))
    for name, degree in dict.fromkeys((row.system, row.degree) for row in rows):
        own = [row for row in rows if (row.system, row.degree) == (name, degree)]
        terms = make_task(name, degree, 0.0, 0).truth.shape[1]
        cells = [percent([row for row in own if row.method == method]) for method in SHOWN]
        lines.append(f"| {name} | {degree} | {terms} | {' | '.join(cells)} |")
    return WRITTEN + "\n".join(lines) + "\n"


@styled
def portrait(noise: float = 0.03, degree: int = 5, seconds: float = 8.0) -> Figure:
    """Draw noisy data of Lorenz's system, and what the equations do that two optimizers find in them."""
    t, truth = trajectory("Lorenz")
    data = noisy(truth, noise, 0)
    shown = t[t < seconds]
    curves = {f"data with {100 * noise:g} % of noise": (data[: len(shown)], GREY)}
    for name, optimizer, color in (("KHotOptimizer", KHotOptimizer(), BLUE), ("STLSQ", STLSQ(), ORANGE)):
        model = SINDy(optimizer, PolynomialLibrary(degree), SmoothedFiniteDifference()).fit(data, t)
        kws = {"method": "LSODA", "rtol": 1e-6, "atol": 1e-6}
        label = f"{name}: {model.complexity} terms"
        curves[label] = (model.simulate(np.array(SYSTEMS["Lorenz"].start), shown, integrator_kws=kws), color)
    picture, (axes,) = panels(1, 3, 3.6, sharex=True, sharey=True)
    for panel, (title, (x, color)) in zip(axes, curves.items(), strict=True):
        panel.plot(x[:, 0], x[:, 2], color=color, linewidth=0.9)
        panel.set(title=title, xlabel="x")
    axes[0].set(ylabel="z", xlim=(-22, 22), ylim=(0, 52))
    return picture


def main() -> int:
    parser = common.parser(__doc__, "two systems, degree 2, two noise levels, two seeds")
    parser.add_argument("--system", action="append", choices=list(SYSTEMS), help="repeat for more; default: all")
    parser.add_argument("--redraw", action="store_true", help="write tables and picture of the committed rows")
    parser.add_argument("--miosr", action="store_true", help="KHotOptimizer(k) and MIOSR(k), and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Any] = []
    is_interrupted = False
    if args.miosr:
        return main_miosr(args)
    if args.redraw:
        rows = common.read_rows(common.COMMITTED.results / "sindy.csv")
        for row in rows:
            row.exact = str(row.exact) == "True"
    elif args.quick:
        is_interrupted = common.collect(run(("Lotka–Volterra", "Lorenz-96"), (2,), (0.0, 0.01), 2), rows)
    else:
        is_interrupted = common.collect(run(args.system or tuple(SYSTEMS), DEGREES, NOISE, SEEDS), rows)
    places = common.places(args, is_partial=is_interrupted or bool(args.system))
    if not args.redraw:
        common.write(places.results / "sindy.csv", common.to_csv(rows, digits=4))
    text = table(rows)
    common.write_table(places.tables / "sindy.md", text)
    common.write_table(places.tables / "sindy-systems.md", systems_table(rows))
    if not args.quick:
        common.write_picture(places.images / "lorenz.svg", portrait())
    common.show(args, rows, text)
    return 130 if is_interrupted else 0


def main_miosr(args: Any) -> int:
    """Run the study beside MIOSR, on the libraries that are small enough for the licence."""
    rows: list[Any] = []
    names, noise, seeds = (["Lotka–Volterra"], (0.01,), 2) if args.quick else (args.system or SYSTEMS, NOISE, SEEDS)
    is_interrupted = common.collect(run(list(names), DEGREES, noise, seeds, TOLD), rows)
    rows = common_tasks(rows)
    places = common.places(args, is_partial=is_interrupted or bool(args.system))
    common.write(places.results / "sindy_miosr.csv", common.to_csv(rows, digits=4))
    common.write_table(places.tables / "sindy-miosr.md", table(rows))
    common.show(args, rows, table(rows))
    return 130 if is_interrupted else 0


def common_tasks(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of the runs that every method has."""
    methods = {row.method for row in rows}
    run_of = {(row.system, row.degree, row.noise, row.seed): set[str]() for row in rows}
    for row in rows:
        run_of[row.system, row.degree, row.noise, row.seed].add(row.method)
    return [row for row in rows if run_of[row.system, row.degree, row.noise, row.seed] == methods]


if __name__ == "__main__":
    sys.exit(main())
