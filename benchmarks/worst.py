"""The slowest cases of the robustness grid at a million scores, in units of `torch.sigmoid` on the same scores.

One thread, process CPU time, float32. The grid is run through several times, khot and sigmoid in turns; a case's figure
is the ratio of the two medians. Writes `worst.csv` and the table of the docs.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from grid import DISTRIBUTIONS, SEED, TEMPERATURES, counts, scores
from torch import Tensor

import khot
from khot.bench import environment, markdown_table, write

ROOT = Path(__file__).parents[1]


def cpu_time(call: Callable[[], Tensor]) -> float:
    """Seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(n: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """(kind of scores, T, k, ratio) of every case."""
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


def report(rows: list[tuple[str, float, float, float]], n: int) -> str:
    """The worst of each kind of scores, and where."""
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
    rows = measure(args.n, args.rounds)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([("scores", "temperature", "k", "times_sigmoid"), *rows])
    write((args.out or ROOT / "benchmarks" / "results") / "worst.csv", table.getvalue())
    write((args.out or ROOT / "docs" / "tables") / "worst.md", report(rows, args.n))
    print(f"\nworst: {max(row[3] for row in rows):.1f} × torch.sigmoid", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
