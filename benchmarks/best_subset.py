"""`khot.coding.splice` against `abess`, the peer for best subsets, on its own kind of problem; and against enumeration.

Columns are normal with Toeplitz correlations, k of them matter, and the signal-to-noise ratio is given. `abess` is
`pip install abess`. Writes results/best_subset.csv and docs/tables/best-subset.md; some minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks import common
from khot.bench import markdown_table
from khot.coding import splice

SHAPES = ((200, 500, 10), (300, 2000, 10), (500, 5000, 20))
"""Rows, columns, k."""
CORRELATIONS, RATIOS = (0.5, 0.9), (0.5, 2.0, 6.0)
METHODS = ("splice", "abess")


class Row(NamedTuple):
    """One method on one problem."""

    rows: int
    columns: int
    k: int
    correlation: float
    ratio: float
    seed: int
    method: str
    loss: float
    truth: float
    """The loss on the columns that matter."""
    recovered: float
    seconds: float


def problem(shape: tuple[int, int, int], rho: float, ratio: float, seed: int) -> tuple[np.ndarray, ...]:
    """Return a, b, and which columns matter; columns and b are centred."""
    m, p, k = shape
    random = np.random.default_rng(seed)
    a = random.standard_normal((m, p))
    for j in range(1, p):
        a[:, j] = rho * a[:, j - 1] + np.sqrt(1 - rho**2) * a[:, j]
    chosen = random.permutation(p)[:k]
    clean = a[:, chosen] @ (random.choice([-1, 1], k) * random.uniform(0.5, 2, k))
    b = clean + random.standard_normal(m) * np.sqrt(clean.var() / ratio)
    return a - a.mean(0), b - b.mean(), chosen


def solve(method: str, a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """Return the support."""
    if method == "abess":
        from abess.linear import LinearRegression

        return np.flatnonzero(LinearRegression(support_size=k, fit_intercept=False).fit(a, b).coef_)
    found = splice(torch.from_numpy(a), torch.from_numpy(b), k, exact=False)
    return found.support.nonzero().flatten().numpy()


def measure(shapes: tuple[tuple[int, int, int], ...], seeds: int) -> Iterator[Row]:
    """Yield the methods in turn on each problem."""
    for seed, shape, rho, ratio in product(range(seeds), shapes, CORRELATIONS, RATIOS):
        a, b, chosen = problem(shape, rho, ratio, seed)
        for method in METHODS:
            start = time.process_time()
            support = solve(method, a, b, shape[2])
            seconds = time.process_time() - start
            recovered = len(set(support) & set(chosen)) / shape[2]
            yield Row(*shape, rho, ratio, seed, method, left(a, b, support), left(a, b, chosen), recovered, seconds)


def left(a: np.ndarray, b: np.ndarray, support: np.ndarray) -> float:
    """Return the share of ‖b‖² that least squares on some columns leaves."""
    coefs = np.linalg.lstsq(a[:, support], b, rcond=None)[0]
    return float(np.square(b - a[:, support] @ coefs).sum() / np.square(b).sum())


def optima(problems: int) -> tuple[int, int]:
    """Return in how many small problems the search finds what enumeration proves to be best, and how many there are."""
    cases = list(product((8, 14, 20), (2, 4, 6), (0.0, 0.8, 0.95), (0.1, 3.0)))
    hits = 0
    for seed in range(problems):
        p, k, rho, noise = cases[seed % len(cases)]
        random = np.random.default_rng(seed)
        apart = np.abs(np.subtract.outer(np.arange(p), np.arange(p)))
        covariance = rho**apart if seed % 2 else rho + (1 - rho) * np.eye(p)
        a = random.standard_normal((p + 2 + seed % 70, p)) @ np.linalg.cholesky(covariance + 1e-12 * np.eye(p)).T
        b = a[:, random.permutation(p)[:k]] @ random.standard_normal(k) + noise * random.standard_normal(len(a))
        searched, proved = (splice(torch.from_numpy(a), torch.from_numpy(b), k, exact=exact) for exact in (False, True))
        hits += bool(searched.loss <= proved.loss * (1 + 1e-9))
    return hits, problems


def optimum_or_truth(rows: list[Row]) -> str:
    """Say whether the search or the criterion is why true columns are missed."""
    pairs = list(zip(*([row for row in rows if row.method == method] for method in METHODS), strict=True))
    slack = 1 + 1e-4  # of the digits that are kept
    above = sum(mine.loss > its.loss * slack for mine, its in pairs)
    missed = [mine for mine, _ in pairs if mine.recovered < 1]
    stuck = sum(mine.loss > mine.truth * slack for mine in missed)
    fewer = [(mine, its) for mine, its in pairs if mine.recovered < its.recovered]
    lower = sum(mine.loss < its.loss / slack for mine, its in fewer)
    return (
        f"The loss of `splice` is above that of `abess` in {above} of {len(pairs)} problems. In {len(missed)} problems "
        f"it misses true columns, and in {stuck} of these its loss is above that of the true columns. It finds "
        f"fewer of them than `abess` in {len(fewer)} problems, and in {lower} of these at a lower loss.\n"
    )


def table(rows: list[Row], small: tuple[int, int]) -> str:
    """The share of recovered columns, the loss relative to that of abess, and seconds."""
    lines = []
    for shape, rho, ratio in product(
        dict.fromkeys((row.rows, row.columns, row.k) for row in rows), CORRELATIONS, RATIOS
    ):
        of = {
            method: [
                row
                for row in rows
                if (row.rows, row.columns, row.k, row.correlation, row.ratio, row.method)
                == (*shape, rho, ratio, method)
            ]
            for method in METHODS
        }
        if not all(of.values()):
            continue
        shares = [common.mean_and_error([row.recovered for row in of[method]]) for method in METHODS]
        loss, error = common.mean_and_error(
            [mine.loss / its.loss for mine, its in zip(of["splice"], of["abess"], strict=False)]
        )
        seconds = [np.mean([row.seconds for row in of[method]]) for method in METHODS]
        lines.append(
            [
                "{} × {}, {}".format(*shape),
                f"{rho:g}",
                f"{ratio:g}",
                *(f"{mean:.2f} ± {spread:.2f}" for mean, spread in shares),
                f"{loss:.3f} ± {error:.3f}",
                " / ".join(f"{value:.2g}" for value in seconds),
            ]
        )
    heads = ["rows × columns, k", "correlation", "SNR"]
    heads += [*(f"found, {name}" for name in METHODS), "loss of splice", "seconds"]
    return (
        "<!-- Written by benchmarks/best_subset.py; do not edit. -->\n\n"
        + markdown_table(heads, lines)
        + f"\n\nMean ± standard error of {len({row.seed for row in rows})} problems: the share of the true columns "
        "that are chosen, and the loss divided by that of `abess` (below 1 is better). Seconds are in the order of the "
        "methods, on one thread.\n\n"
        f"{optimum_or_truth(rows)}\n"
        f"In {small[0]} of {small[1]} small problems (up to 20 columns, k up to 6, correlations up to 0.95) the search "
        "finds the optimum that enumeration proves.\n"
    )


def main() -> int:
    args = common.parser(__doc__, "the smallest shape, one problem of each kind").parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    shapes, seeds = (SHAPES[:1], 1) if args.quick else (SHAPES, 20)
    with threadpool_limits(1):
        solve("abess", *problem(SHAPES[0], 0.5, 1.0, 0)[:2], 1)  # its import is not timed
        small = optima(20 if args.quick else 500)
        total = len(shapes) * seeds * len(CORRELATIONS) * len(RATIOS) * len(METHODS)
        is_interrupted = common.collect(measure(shapes, seeds), rows, total)
    if not rows:
        return 1
    places = common.places(args, is_interrupted)
    common.write(places.results / "best_subset.csv", common.to_csv(rows, digits=5))
    common.write_table(places.tables / "best-subset.md", table(rows, small))
    common.show(args, rows, table(rows, small))
    return 0


if __name__ == "__main__":
    sys.exit(main())
