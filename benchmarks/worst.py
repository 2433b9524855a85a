"""The slowest cases of the robustness grid: a long row, and short rows.

One thread, process CPU time. A million scores (float32) are compared with `torch.sigmoid` on the same scores, in
`worst.csv` and `worst.md`. Many short rows are compared with normal scores of the same shape at T = 1 and k = n/4, in
`worst-short.csv` and `worst-short.md`: what the values of the scores, k and T can cost. The grid is run through several
times, each case and its yardstick in turns; a case's figure is the ratio of the two medians of that one run.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from grid import DISTRIBUTIONS, SEED, TEMPERATURES, counts, scores
from torch import Tensor

import khot
from khot.bench import environment, markdown_table, write

ROOT = Path(__file__).parents[1]


def cpu_time(call: Callable[[], Tensor]) -> float:
    """Return the seconds that one call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(n: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """Measure every case of a long row: (kind of scores, T, k, ratio)."""
    rows = []
    for done, name in enumerate(DISTRIBUTIONS):
        x = scores(name, n, torch.Generator().manual_seed(SEED)).float()
        cases = list(product(TEMPERATURES, counts(n)))
        ours: list[list[float]] = [[] for _ in cases]
        sigmoid: list[float] = []
        for _ in range(rounds):
            for index, (temperature, k) in enumerate(cases):
                sigmoid.append(cpu_time(lambda x=x: torch.sigmoid(x)))
                ours[index].append(cpu_time(lambda x=x, k=k, t=temperature: khot.sigmoid_topk(x, k, temperature=t)))
        base = statistics.median(sigmoid)
        rows += [(name, *case, statistics.median(times) / base) for case, times in zip(cases, ours, strict=True)]
        if sys.stderr.isatty():
            print(f"\r{done + 1}/{len(DISTRIBUTIONS)} kinds of scores", end="", file=sys.stderr, flush=True)
    return rows


class Short(NamedTuple):
    """One case of short rows, and how many times it took as long as normal scores."""

    scores: str
    rows: int
    n: int
    dtype: str
    temperature: float
    k: float
    ratio: float


SHAPES = ((8192, 8), (4096, 16), (1024, 64), (512, 256))  # (rows, n)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
KINDS = (*DISTRIBUTIONS, "0 and 1", "confident")


def short_scores(name: str, rows: int, n: int) -> Tensor:
    """Rows of scores of a named kind; "confident": one score is 20 above normal ones."""
    rng = torch.Generator().manual_seed(SEED)
    if name in DISTRIBUTIONS:
        return torch.stack([scores(name, n, rng) for _ in range(rows)])
    x = torch.randn(rows, n, generator=rng, dtype=torch.float64)
    return (x > 1).double() if name == "0 and 1" else x + 20 * (torch.arange(n) == n // 3)


def measure_short(shapes: Sequence[tuple[int, int]], rounds: int) -> list[Short]:
    """Measure every case of short rows."""
    found = []
    for (rows, n), (dtype, kind) in product(shapes, DTYPES.items()):
        usual = short_scores("normal", rows, n).to(kind)
        for name in KINDS:
            x = short_scores(name, rows, n).to(kind)
            for temperature, k in product((0.001, 0.01, 0.03, 0.1, 1.0), (0.5, 1, n / 4, n / 2, n - 1, n - 0.01)):
                ours, base = [], []
                for _ in range(rounds):
                    base.append(cpu_time(lambda x=usual, k=n / 4: khot.sigmoid_topk(x, k)))
                    ours.append(cpu_time(lambda x=x, k=k, t=temperature: khot.sigmoid_topk(x, k, temperature=t)))
                ratio = statistics.median(ours) / statistics.median(base)
                found.append(Short(name, rows, n, dtype, temperature, k, ratio))
        if sys.stderr.isatty():
            print(f"\r{rows}×{n} {dtype}    ", end="", file=sys.stderr, flush=True)
    return found


def report_short(cases: list[Short]) -> str:
    """Tabulate the worst case of each kind of scores, for each shape."""
    shapes = list(dict.fromkeys((case.rows, case.n) for case in cases))

    def worst(name: str, shape: tuple[int, int], dtype: str) -> float:
        return max(c.ratio for c in cases if (c.scores, (c.rows, c.n), c.dtype) == (name, shape, dtype))

    lines = [[name, *(" / ".join(f"{worst(name, s, d):.1f}" for d in DTYPES) for s in shapes)] for name in KINDS]
    return (
        "<!-- Written by benchmarks/worst.py; do not edit. -->\n\n"
        + markdown_table(["scores", *(f"{rows}×{n}" for rows, n in shapes)], lines)
        + "\n\nThe worst of 30 cases (T from 0.001 to 1, k from 0.5 to n − 0.01), float32 / float64, forward, one "
        "thread: CPU time in units of that of normal scores with T = 1 and k = n/4, in one interleaved run; "
        f"{environment()['cpu']}.\n"
    )


def report(rows: list[tuple[str, float, float, float]], n: int) -> str:
    """Tabulate the worst case of each kind of scores, and where it is."""
    lines = []
    for name in DISTRIBUTIONS:
        mine = sorted((row for row in rows if row[0] == name), key=lambda row: row[3])
        _, temperature, k, worst = mine[-1]
        lines.append([name, f"{mine[len(mine) // 2][3]:.2f}", f"{worst:.1f}", f"T = {temperature:g}, k = {k:g}"])
    about = environment()
    return (
        "<!-- Written by benchmarks/worst.py; do not edit. -->\n\n"
        + markdown_table(["scores", "median case", "worst case", "which"], lines)
        + f"\n\nn = {n}, forward, one thread, CPU time in units of `torch.sigmoid`'s; {about['cpu']}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10**6, help="scores in a row (10⁶)")
    parser.add_argument("--rounds", type=int, default=7, help="times through the grid (7)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results and docs/tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, tables = args.out or ROOT / "benchmarks" / "results", args.out or ROOT / "docs" / "tables"
    rows, short = measure(args.n, args.rounds), measure_short(SHAPES, args.rounds)
    for name, header, table, text in (
        ("worst", ("scores", "temperature", "k", "times_sigmoid"), rows, report(rows, args.n)),
        ("worst-short", Short._fields, short, report_short(short)),
    ):
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([header, *table])
        write(results / f"{name}.csv", lines.getvalue())
        write(tables / f"{name}.md", text)
    print(f"\nworst: {max(row[3] for row in rows):.1f} × torch.sigmoid", file=sys.stderr)
    print(f"worst of short rows: {max(case.ratio for case in short):.1f} × normal scores", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
