"""How many terms? Criteria for `KHotOptimizer("auto")`, on ten systems that benchmarks/sindy.py does not have.

Here the default of `khot.sindy` was chosen. For each equation, `khot.coding.splice_path` gives the best 0, 1, …, 10
terms. Counted is how often a criterion takes the true terms, of the equations of which the path has them. Derivatives
are central differences, or those of pysindy's `SmoothedFiniteDifference`; two draws of the noise. Writes
results/sindy_criterion.csv and the table sindy-criterion of docs/sparse-coding.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from pysindy import FiniteDifference, SmoothedFiniteDifference
from torch import Tensor

from benchmarks import common
from benchmarks.sindy import NOISE, SYSTEMS, System, noisy, regression, simulate
from khot.coding import Criterion, SplicePath, aicc, bic, ebic, splice_path
from khot.sindy import floored_ebic

SEEDS = (101, 102)
SMALL = (2, 3, 5)
DERIVATIVES: dict[str, Callable[[], Any]] = {"central": FiniteDifference, "smoothed": SmoothedFiniteDifference}


def two_lorenz(coupling: float) -> tuple[dict[tuple[int, ...], float], ...]:
    """Return two of Lorenz's systems, each driven by the other's second state."""
    found = []
    for shift in (0, 3):
        for i, equation in enumerate(SYSTEMS["Lorenz"].equations):
            moved = {tuple(j + shift for j in factors): c for factors, c in equation.items()}
            found.append({**moved, ((shift + 4) % 6,): coupling} if i == 1 else moved)
    return tuple(found)


OTHERS: dict[str, tuple[System, tuple[int, ...]]] = {
    "Chen": (
        System(
            ({(0,): -35.0, (1,): 35.0}, {(0,): -7.0, (0, 2): -1.0, (1,): 28.0}, {(0, 1): 1.0, (2,): -3.0}),
            (-10.0, 0.0, 37.0),
            6.0,
            0.001,
        ),
        SMALL,
    ),
    "Duffing": (
        System(({(1,): 1.0}, {(0,): 1.0, (1,): -0.15, (0, 0, 0): -1.0}), (1.5, 0.5), 30.0, 0.01),
        SMALL,
    ),
    "Brusselator": (
        System(({(): 1.0, (0, 0, 1): 1.0, (0,): -4.0}, {(0,): 3.0, (0, 0, 1): -1.0}), (1.0, 1.0), 20.0, 0.01),
        SMALL,
    ),
    "damped oscillator": (
        System(({(0,): -0.1, (1,): 2.0}, {(0,): -2.0, (1,): -0.1}), (2.0, 0.0), 25.0, 0.01),
        SMALL,
    ),
    "FitzHugh–Nagumo": (
        System(
            ({(0,): 1.0, (0, 0, 0): -1 / 3, (1,): -1.0, (): 0.5}, {(0,): 0.08, (): 0.056, (1,): -0.064}),
            (-1.0, 1.0),
            150.0,
            0.05,
        ),
        SMALL,
    ),
    "Sprott B": (
        System(({(1, 2): 1.0}, {(0,): 1.0, (1,): -1.0}, {(): 1.0, (0, 1): -1.0}), (0.1, 0.1, 0.1), 60.0, 0.01),
        SMALL,
    ),
    "Halvorsen": (
        System(
            tuple({(i,): -1.4, ((i + 1) % 3,): -4.0, ((i + 2) % 3,): -4.0, ((i + 1) % 3,) * 2: -1.0} for i in range(3)),
            (-5.0, 0.0, 0.0),
            20.0,
            0.005,
        ),
        SMALL,
    ),
    "three competitors": (
        System(
            (
                {(0,): 1.0, (0, 0): -1.0, (0, 1): -0.7},
                {(1,): 0.9, (1, 1): -0.8, (1, 2): -0.6},
                {(2,): 1.1, (2, 2): -1.0, (0, 2): -0.9},
            ),
            (0.2, 0.4, 0.3),
            30.0,
            0.01,
        ),
        SMALL,
    ),
    "two Lorenz": (System(two_lorenz(1.5), (-8.0, 8.0, 27.0, 5.0, -3.0, 20.0), 8.0, 0.004), (2, 4)),
    "two Duffing": (
        System(
            (
                {(1,): 1.0},
                {(0,): 1.0, (1,): -0.1, (0, 0, 0): -1.0, (2,): 0.3},
                {(3,): 1.0},
                {(2,): 0.5, (3,): -0.05, (2, 2, 2): -1.0, (0,): 0.3},
            ),
            (1.5, 0.5, -1.0, 0.7),
            40.0,
            0.015,
        ),
        (5, 6),
    ),
}
"""Systems, and the degrees of their libraries."""


def with_floor(loss: Tensor, k: Tensor, rows: float, columns: int, *, share: float) -> Tensor:
    """Return what `floored_ebic` is for a floor of 5 %."""
    floored = loss + share**2 * loss[0]
    return (bic(floored, k, rows, columns) + ebic(floored, k, rows, columns)) / 2


CRITERIA: dict[str, Criterion] = {
    "`aicc`": aicc,
    "`bic`": bic,
    "`ebic`": ebic,
    "floor of 1 %": partial(with_floor, share=0.01),
    "floor of 2 %": partial(with_floor, share=0.02),
    "`floored_ebic`, 5 %": floored_ebic,
    "floor of 10 %": partial(with_floor, share=0.1),
    "floor of 20 %": partial(with_floor, share=0.2),
}


def judge(path: SplicePath, sizes: Sequence[int], hits: Sequence[bool]) -> Iterator[dict[str, Any]]:
    """Say of each equation whether the path has the true terms, and whether each criterion takes them."""
    chosen = {name: path.choose(criterion).tolist() for name, criterion in CRITERIA.items()}
    for i, (size, hit) in enumerate(zip(sizes, hits, strict=True)):
        right = {name: int(hit and k[i] == size) for name, k in chosen.items()}
        yield {"equation": i, "in_path": int(hit), **right}


def run(systems: Sequence[str], noise: Sequence[float], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    for name in systems:
        system, degrees = OTHERS[name]
        t, x = simulate(system)
        for share in noise:
            for seed in seeds if share else seeds[:1]:
                for kind, make in DERIVATIVES.items():
                    for degree in (d for d in degrees if d >= system.degree):
                        task = regression(system, noisy(x, share, seed), t, degree, make())
                        path = splice_path(
                            torch.tensor(task.library), torch.tensor(task.derivatives), min(10, task.truth.shape[1])
                        )
                        truth = torch.tensor(task.truth != 0)
                        sizes = truth.sum(1).tolist()
                        hits = [bool((path.support[k, :, i] == truth[i]).all()) for i, k in enumerate(sizes)]
                        head = {"system": name, "degree": degree, "noise": share, "seed": seed, "derivatives": kind}
                        yield from ({**head, **row} for row in judge(path, sizes, hits))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many equations each criterion gets right, by noise."""
    levels = sorted({row["noise"] for row in rows})
    lines = [f"| criterion | {' | '.join(f'{100 * n:g} %' for n in levels)} | all |"]
    lines.append("| :--- |" + " ---: |" * (len(levels) + 1))
    for name in (*CRITERIA, "in_path"):
        counts = [sum(row[name] for row in rows if row["noise"] == n) for n in levels]
        label = "equations whose terms the path has" if name == "in_path" else name
        lines.append(f"| {label} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    return "<!-- Written by benchmarks/sindy_criterion.py; do not edit. -->\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    args = common.parser(__doc__, "one system, two noise levels, one seed").parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    work = run(["damped oscillator"], (0.0, 0.01), SEEDS[:1]) if args.quick else run(list(OTHERS), NOISE, SEEDS)
    is_interrupted = common.collect(work, rows)
    places = common.places(args, is_partial=is_interrupted)
    common.write(places.results / "sindy_criterion.csv", common.to_csv(rows))
    common.write_table(places.tables / "sindy-criterion.md", table(rows))
    common.show(args, rows, table(rows))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
