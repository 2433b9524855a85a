"""The slowest cases of the robustness grid at a million scores, in units of `torch.sigmoid` on the same scores.

One thread, process CPU time, float32. The grid is run through several times, khot and sigmoid in turns; a case's figure
is the ratio of the two medians. Writes `worst.csv` and the table of the docs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

import khot
from benchmarks import common
from benchmarks.grid import SEED, TEMPERATURES, counts
from khot.bench import environment, markdown_table
from khot.testing import SCORE_KINDS, score_vector


class Row(NamedTuple):
    """One case; the fields are the columns of the CSV."""

    scores: str
    temperature: float
    k: float
    times_sigmoid: float


def cpu_time(call: Callable[[], Tensor]) -> float:
    """Seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(n: int, rounds: int) -> list[Row]:
    """Time every case."""
    rows = []
    for done, name in enumerate(SCORE_KINDS, 1):
        x = score_vector(name, n, seed=SEED).float()
        cases = list(product(TEMPERATURES, counts(n)))
        ours: list[list[float]] = [[] for _ in cases]
        sigmoid: list[float] = []
        for _ in range(rounds):
            for index, (temperature, k) in enumerate(cases):
                sigmoid.append(cpu_time(lambda x=x: torch.sigmoid(x)))
                ours[index].append(cpu_time(lambda x=x, k=k, t=temperature: khot.sigmoid_topk(x, k, temperature=t)))
        base = statistics.median(sigmoid)
        rows += [Row(name, *case, statistics.median(times) / base) for case, times in zip(cases, ours, strict=True)]
        common.say(name, done, len(SCORE_KINDS))
    return rows


def report(rows: list[Row], n: int) -> str:
    """The worst of each kind of scores, and where."""
    lines = []
    for name in SCORE_KINDS:
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
    parser = common.parser(__doc__, "rows of 1000 scores, once through the grid")
    parser.add_argument("--n", type=int, default=10**6, help="scores in a row (10⁶)")
    parser.add_argument("--rounds", type=int, default=7, help="times through the grid (7)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n, rounds = (1000, 1) if args.quick else (args.n, args.rounds)
    rows, places = measure(n, rounds), common.places(args)
    common.write(places.results / "worst.csv", common.to_csv(rows))
    common.write(places.tables / "worst.md", report(rows, n))
    common.show(args, rows, f"worst: {max(row.times_sigmoid for row in rows):.1f} × torch.sigmoid")
    return 0


if __name__ == "__main__":
    sys.exit(main())
