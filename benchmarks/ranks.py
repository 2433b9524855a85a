"""One row on two ranks: time beside one process and beside gathering the row, and rounds against hardness.

Two processes on gloo, one thread each, float32 normal scores, k = n/100. All contenders take turns in one run; a time
is the median of the turns of the slower rank. `model` is not measured: it is arithmetic, with its assumptions stated.
Writes results/ranks.csv and docs/tables/ranks.md; two minutes.
"""

from __future__ import annotations

import csv
import math
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import khot
from benchmarks import common
from khot.bench import markdown_table
from khot.distributed import messages

RANKS, TURNS = 2, 5
SIZES = (10**5, 10**6, 10**7)
HARDNESS = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)
LATENCY, BANDWIDTH, MEMORY, ROUNDS, PASSES = 5e-6, 25e9, 1.5e12, 5, 6
"""The model's assumptions, of GPUs: seconds a hop, bytes/s of a link and of memory, rounds, passes over the part."""


class Row(NamedTuple):
    """One figure."""

    part: str
    """"time" (seconds), "rounds" (a count), or "model" (seconds, not measured)."""
    case: str
    size: float
    """n, the temperature for "rounds", or the ranks for "model"."""
    value: float


def gathered(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(parts, own)
    return torch.cat(parts)


def contenders(x: Tensor, own: Tensor, k: int) -> dict:
    world = dist.group.WORLD
    return {
        "σ_k, one process": lambda: khot.sigmoid_topk(x, k) if dist.get_rank() == 0 else None,
        "σ_k, in parts": lambda: khot.sigmoid_topk(own, k, group=world),
        "σ_k, gathered": lambda: khot.sigmoid_topk(gathered(own), k),
        "hard, in parts": lambda: khot.hard_topk(own, k, group=world),
        "hard, gathered, torch.topk": lambda: gathered(own).topk(k),
    }


def measure(rank: int, folder: str, sizes: tuple[int, ...], turns: int) -> None:
    """Run on one rank; the first one writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300)
    )
    rows: list[Row] = []
    for n in sizes:
        x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        own = x.chunk(RANKS)[rank].contiguous()
        fns = contenders(x, own, n // 100)
        times: dict[str, list[float]] = {name: [] for name in fns}
        for turn in range(turns + 1):
            for name, fn in fns.items():
                dist.barrier()
                start = time.perf_counter()
                fn()
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn:  # the first is a warm-up
                    times[name].append(float(seconds))
        rows += [Row("time", name, n, statistics.median(each)) for name, each in times.items()]
    x = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(1))
    for name, scores in (("normal", x), ("cubed Cauchy", torch.tan(1.5 * torch.tanh(x)) ** 3)):
        for temperature in HARDNESS:
            with messages() as sent:
                khot.sigmoid_topk(scores.chunk(RANKS, -1)[rank], 400, temperature=temperature, group=dist.group.WORLD)
            rows.append(Row("rounds", name, temperature, len(sent) - 1))  # two messages of the first round fly together
            rows.append(Row("bytes", name, temperature, sum(message.bytes for message in sent)))
    if rank == 0:
        Path(folder, "rows.csv").write_text(common.to_csv(rows, digits=3))
    dist.destroy_process_group()


def model() -> list[Row]:
    """Return the time of a call on GPUs, on paper: local passes and rounds, against gathering the row."""
    rows = []
    for n, ranks in ((10**9, 8), (10**9, 64), (10**10, 64), (10**12, 4096)):
        split = PASSES * 4 * n / ranks / MEMORY + ROUNDS * 2 * math.log2(ranks) * LATENCY
        gather = 4 * n * (ranks - 1) / ranks / BANDWIDTH + PASSES * 4 * n / MEMORY
        rows += [Row("model", f"in parts, n = 10^{round(math.log10(n))}", ranks, split)]
        rows += [Row("model", f"gathered, n = 10^{round(math.log10(n))}", ranks, gather)]
    return rows


def report(rows: list[Row]) -> str:
    """Return the tables."""
    sizes = sorted({row.size for row in rows if row.part == "time"})
    names = list(dict.fromkeys(row.case for row in rows if row.part == "time"))
    at = {(row.part, row.case, row.size): row.value for row in rows}
    times = [[name, *(f"{1e3 * at['time', name, n]:.1f} ms" for n in sizes)] for name in names]
    kinds = list(dict.fromkeys(row.case for row in rows if row.part == "rounds"))
    hard = [
        [f"{t:g}", *(f"{at['rounds', kind, t]:g} ({at['bytes', kind, t]:,.0f} B)" for kind in kinds)]
        for t in sorted({row.size for row in rows if row.part == "rounds"}, reverse=True)
    ]
    paper = [[row.case, f"{row.size:g}", f"{1e3 * row.value:.3g} ms"] for row in rows if row.part == "model"]
    return (
        f"Two ranks of one machine, gloo, one thread each, k = n/100; medians of {TURNS} turns.\n\n"
        + markdown_table(["", *(f"n = {n:,.0f}" for n in sizes)], times)
        + "\n\nRounds (and bytes that a rank sends) of one row of n = 40,000, k = 400, against T:\n\n"
        + markdown_table(["T", *kinds], hard)
        + f"\n\nA model of GPUs, **not measured**: {1e6 * LATENCY:g} µs a hop, {BANDWIDTH / 1e9:g} GB/s a link, "
        + f"{MEMORY / 1e12:g} TB/s of memory, {ROUNDS} rounds, {PASSES} passes over the part.\n\n"
        + markdown_table(["", "ranks", "time"], paper)
        + "\n"
    )


def main() -> int:
    """Run the script."""
    args = common.parser(__doc__, "short rows, two turns").parse_args()
    at = common.places(args)
    with tempfile.TemporaryDirectory() as folder:
        sizes, turns = ((1000, 10_000), 2) if args.quick else (SIZES, TURNS)
        mp.spawn(measure, (folder, sizes, turns), nprocs=RANKS)
        _, *lines = csv.reader(Path(folder, "rows.csv").read_text().splitlines())
    rows = [Row(part, case, float(size), float(value)) for part, case, size, value in lines] + model()
    common.write(at.results / "ranks.csv", common.to_csv(rows))
    common.write_table(at.tables / "ranks.md", report(rows))
    common.show(args, rows, report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
