"""The slowest cases of the robustness grid: a long row, and short rows.

One thread, process CPU time. A million scores (float32) are compared with `torch.sigmoid` on the same scores, in
`worst.csv` and `worst.md`. Many short rows are compared with normal scores of the same shape at T = 1 and k = n/4, in
`worst-short.csv` and `worst-short.md`: what the values of the scores, k and T can cost. Each round takes other rows: a
processor learns the branches of rows that it meets again. The grid is run through several times, each case and its
yardstick in turns; a case's figure is the ratio of the two medians of that one run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
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
    """Return the seconds that one call takes."""
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


class Short(NamedTuple):
    """One case of short rows, and how many times it took as long as normal scores."""

    scores: str
    rows: int
    n: int
    dtype: str
    temperature: float
    k: float
    ratio: float


SHAPES = ((8192, 8), (4096, 16), (1024, 64), (20000, 64), (512, 256))  # (rows, n)
PARTS = 3  # sets of rows, which rounds take in turns
AIM = 8  # at most so many times as long as normal scores
DTYPES = {"float32": torch.float32, "float64": torch.float64}
KINDS = (*SCORE_KINDS, "0 and 1", "confident")


def short_scores(name: str, rows: int, n: int, part: int) -> Tensor:
    """Rows of scores of a named kind, others in each part; "confident": one score is 20 above normal ones."""
    if name in SCORE_KINDS:
        return torch.stack([score_vector(name, n, seed=SEED + part * rows + row) for row in range(rows)])
    rng = torch.Generator().manual_seed(SEED + part)
    x = torch.randn(rows, n, generator=rng, dtype=torch.float64)
    return (x > 1).double() if name == "0 and 1" else x + 20 * (torch.arange(n) == n // 3)


def measure_short(shapes: Sequence[tuple[int, int]], rounds: int) -> list[Short]:
    """Measure every case of short rows."""
    found = []
    for (rows, n), (dtype, kind) in product(shapes, DTYPES.items()):
        usual = [short_scores("normal", rows, n, part).to(kind) for part in range(PARTS)]
        for name in KINDS:
            some = [short_scores(name, rows, n, part).to(kind) for part in range(PARTS)]
            for temperature, k in product((0.001, 0.01, 0.03, 0.1, 1.0), (0.5, 1, n / 4, n / 2, n - 1, n - 0.01)):
                ours, base = [], []
                for turn in range(rounds):
                    x, normal = some[turn % PARTS], usual[turn % PARTS]
                    base.append(cpu_time(lambda x=normal, k=n / 4: khot.sigmoid_topk(x, k)))
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

    def cell(name: str, shape: tuple[int, int]) -> str:
        ratios = [worst(name, shape, dtype) for dtype in DTYPES]
        figures = " / ".join(f"{ratio:.1f}" for ratio in ratios)
        return figures if max(ratios) <= AIM else f"**{figures}: missed**"

    lines = [[name, *(cell(name, shape) for shape in shapes)] for name in KINDS]
    return (
        "<!-- Written by benchmarks/worst.py; do not edit. -->\n\n"
        + markdown_table(["scores", *(f"{rows}×{n}" for rows, n in shapes)], lines)
        + "\n\nThe worst of 30 cases (T from 0.001 to 1, k from 0.5 to n − 0.01), float32 / float64, forward, one "
        "thread: CPU time in units of that of normal scores with T = 1 and k = n/4, in one interleaved run; "
        f"above {AIM} a cell is called missed; {environment()['cpu']}; {common.vectors()}.\n"
    )


def report(rows: list[Row], n: int) -> str:
    """The worst of each kind of scores, and where."""
    lines = []
    for name in SCORE_KINDS:
        mine = sorted((row for row in rows if row[0] == name), key=lambda row: row[3])
        _, temperature, k, worst = mine[-1]
        lines.append([name, f"{mine[len(mine) // 2][3]:.2f}", f"{worst:.1f}", f"T = {temperature:g}, k = {k:g}"])
    return (
        "<!-- Written by benchmarks/worst.py; do not edit. -->\n\n"
        + markdown_table(["scores", "median case", "worst case", "which"], lines)
        + f"\n\nn = {n}, forward, one thread, CPU time in units of `torch.sigmoid`'s; {environment()['cpu']}; "
        + f"{common.vectors()}.\n"
    )


def main() -> int:
    parser = common.parser(__doc__, "rows of 1000 scores, once through the grid")
    parser.add_argument("--n", type=int, default=10**6, help="scores in a row (10⁶)")
    parser.add_argument("--rounds", type=int, default=7, help="times through the grid (7)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n, rounds = (1000, 1) if args.quick else (args.n, args.rounds)
    rows, places = measure(n, rounds), common.places(args)
    short = measure_short(((64, 8), (32, 16)) if args.quick else SHAPES, rounds)
    for name, table, text in (("worst", rows, report(rows, n)), ("worst-short", short, report_short(short))):
        common.write(places.results / f"{name}.csv", common.to_csv(table))
        common.write_table(places.tables / f"{name}.md", text)
    worst, worst_short = max(row.times_sigmoid for row in rows), max(case.ratio for case in short)
    verdict = f"worst: {worst:.1f} × torch.sigmoid; of short rows {worst_short:.1f} × normal scores"
    common.show(args, [*rows, *short], verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
