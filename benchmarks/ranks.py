"""One row on two ranks: time beside one process and beside gathering the row, and rounds against hardness.

Two processes on gloo, one thread each, float32 normal scores, k = n/100. All contenders take turns in one run; a time
is the median of the turns of the slower rank. `model` is not measured: it is arithmetic, with its assumptions stated.
Writes results/ranks.csv, docs/tables/ranks.md, docs/tables/ranks-model.md and docs/img/ranks.svg; a minute.
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
from matplotlib.figure import Figure
from torch import Tensor

import khot
from benchmarks import common
from benchmarks.style import BLUE, GREEN, INK, ORANGE, SKY, panels, styled
from khot.bench import markdown_table
from khot.distributed import messages

RANKS, TURNS = 2, 5
SIZES = (10**5, 10**6, 10**7)
HARDNESS = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)


class Machine(NamedTuple):
    """What the model assumes."""

    name: str
    latency: float
    """Seconds a hop; a round is 2·log2(ranks) of them."""
    bandwidth: float
    """Bytes a second that a rank receives."""
    memory: float
    """Bytes a second that a rank reads or writes."""
    room: float
    """Bytes that a rank has for the row."""


GPU = Machine("GPUs", 5e-6, 25e9, 1.5e12, 60e9)
NODE = Machine("CPU nodes", 30e-6, 1.25e9, 15e9, 250e9)
ROUNDS, PASSES = 5, 6
"""The rounds of a call on an ordinary row of float32 scores, and its passes over the part; a hard top-k has as many."""
CASES = {
    GPU: ((10**9, 8), (10**9, 64), (10**9, 4096), (10**10, 64), (10**11, 512), (10**12, 512), (10**12, 4096)),
    NODE: ((10**9, 8), (10**9, 64), (10**9, 512), (10**12, 4096)),
}


class Row(NamedTuple):
    """One figure."""

    part: str
    """"time" (seconds), "rounds" (a count) or "bytes"."""
    case: str
    size: float
    """n, or the temperature."""
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


def in_parts(machine: Machine, n: float, ranks: int) -> tuple[float, float]:
    """Return the seconds of a call on parts, and how many of them are messages, by the model."""
    messages = ROUNDS * 2 * math.log2(ranks) * machine.latency
    return PASSES * 4 * n / ranks / machine.memory + messages, messages


def by_gathering(machine: Machine, n: float, ranks: int) -> float:
    """Return the seconds of gathering the row and choosing from it; inf if it does not fit."""
    if 4 * n > machine.room:
        return math.inf
    return 4 * n * (ranks - 1) / ranks / machine.bandwidth + PASSES * 4 * n / machine.memory


def model_table() -> str:
    """Return the table of the model."""
    lines = []
    for machine, cases in CASES.items():
        for n, ranks in cases:
            whole, messages = in_parts(machine, n, ranks)
            gathered = by_gathering(machine, n, ranks)
            said = "does not fit" if math.isinf(gathered) else seconds(gathered)
            parts = f"{seconds(whole)} ({seconds(messages)})"
            lines.append([machine.name, f"10^{round(math.log10(n))}", str(ranks), parts, said])
    assumed = "; ".join(
        f"{m.name}: {1e6 * m.latency:g} µs a hop, {m.bandwidth / 1e9:g} GB/s a link, {m.memory / 1e9:g} GB/s of "
        f"memory, {m.room / 1e9:g} GB for the row"
        for m in CASES
    )
    return (
        f"A model, **not measured**. {assumed}.\n"
        f"{ROUNDS} rounds of 2·log2(ranks) hops, {PASSES} passes over the part.\n\n"
        + markdown_table(["", "n", "ranks", "in parts (messages)", "all-gather + top-k"], lines)
        + "\n"
    )


def seconds(value: float) -> str:
    """Return a time with two digits or three."""
    number, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.2g} {unit}"


@styled
def figure(rows: list[Row]) -> Figure:
    """Draw the model's curves, and the measured points of two ranks beside them."""
    drawn, (axes,) = panels(1, 2, 4.6, sharey=True)
    sizes = [10 ** (i / 4) for i in range(20, 49)]
    for ax, machine, ranks in ((axes[0], NODE, (2, 64, 512)), (axes[1], GPU, (8, 64, 4096))):
        for count, colour in zip(ranks, (SKY, BLUE, GREEN), strict=True):
            ax.plot(
                sizes, [in_parts(machine, n, count)[0] for n in sizes], color=colour, label=f"{count} ranks, in parts"
            )
        gathered = [by_gathering(machine, n, ranks[0]) for n in sizes]
        ax.plot(sizes, gathered, color=ORANGE, linestyle="--", label="all-gather + top-k")
        ax.set(xscale="log", yscale="log", xlabel="scores in the row", title=f"Model: {machine.name}")
        ax.grid(visible=True)
    for case, colour, marker in (("σ_k, in parts", SKY, "o"), ("σ_k, gathered", ORANGE, "s")):
        points = [(row.size, row.value) for row in rows if row.part == "time" and row.case == case]
        axes[0].plot(*zip(*points, strict=True), marker, color=colour, markeredgecolor=INK, label=f"measured: {case}")
    axes[0].set_ylabel("seconds a call")
    for ax in axes:
        ax.legend(loc="upper left", fontsize=10)
    return drawn


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
    return (
        f"Two ranks of one machine, gloo, one thread each, k = n/100; medians of {TURNS} turns.\n\n"
        + markdown_table(["", *(f"n = {n:,.0f}" for n in sizes)], times)
        + "\n\nRounds (and bytes that a rank sends) of one row of n = 40,000, k = 400, against T:\n\n"
        + markdown_table(["T", *kinds], hard)
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
    rows = [Row(part, case, float(size), float(value)) for part, case, size, value in lines]
    common.write(at.results / "ranks.csv", common.to_csv(rows))
    common.write_table(at.tables / "ranks.md", report(rows))
    common.write_table(at.tables / "ranks-model.md", model_table())
    common.write_picture(at.images / "ranks.svg", figure(rows))
    common.show(args, rows, report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
