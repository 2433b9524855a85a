"""The evaluation of the Successive Halving paper, redone: quality and time of soft selections of k among n embeddings.

Embeddings are uniform in [−1, 1]³², scores in [0, 1]; quality is the normalised Chamfer cosine similarity between the
true top k and what was produced, time that of a forward pass per item. Successive Halving with both boosts, the
iterative softmax with α swept (the paper left it at 1, which is all but a plain mean), and khot's ladder with T swept.
A cell is drawn until its standard error is small enough or its time is up; the tables say which error was reached.
Writes `successive_halving.csv`, the tables and the figures of the docs. Ctrl-C ends early, and writes what there is.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import khot
from benchmarks import common
from benchmarks.style import BLUE, GREEN, INK, ORANGE, SKY, WIDTH, styled
from khot.bench import markdown_table
from khot.metrics import chamfer_cosine

DEPTH = 32
NS, KS = (16, 64, 256, 1024, 4096, 16384), (2, 8, 32, 128, 512, 2048)
ALPHAS = (1.0, 1e2, 1e4, 1e6, 1e8)
SPACINGS = (0.3, 0.1, 0.03, 0.01)  # T in units of the mean spacing of the scores, 1/n
SCALES = (20.0, 50.0, 200.0)
BATCH = 2**23  # numbers in the largest tensor of a batch, about
# Means of the repository's CSV, as `reference/n, k` of the paper's table.
PUBLISHED = {
    (16, 2): 0.968,
    (64, 2): 0.943,
    (256, 2): 0.805,
    (1024, 2): 0.556,
    (4096, 2): 0.323,
    (16384, 2): 0.195,
    (16, 8): 0.980,
    (64, 8): 0.976,
    (256, 8): 0.950,
    (1024, 8): 0.844,
    (4096, 8): 0.556,
    (16384, 8): 0.350,
    (64, 32): 0.983,
    (256, 32): 0.979,
    (1024, 32): 0.953,
    (4096, 32): 0.847,
    (16384, 32): 0.566,
    (256, 128): 0.985,
    (1024, 128): 0.982,
    (4096, 128): 0.955,
    (16384, 128): 0.849,
    (1024, 512): 0.986,
    (4096, 512): 0.982,
    (16384, 512): 0.955,
    (4096, 2048): 0.986,
    (16384, 2048): 0.982,
}
Select = Callable[[Tensor, Tensor, int], Tensor]


class Method(NamedTuple):
    """One way to select, at one setting."""

    name: str
    parameter: float
    select: Select
    """(embeddings, scores, k) -> (…, k, d)."""
    has_matrix: bool
    """Whether it writes out k × n numbers."""


def methods(n: int) -> list[Method]:
    """All ways and settings for rows of n scores."""

    def halving(boost: khot.boosts.Boost) -> Select:
        return lambda e, v, k: khot.successive_halving_topk(e, v, k, boost=boost, with_weights=False).values

    def iterative(alpha: float) -> Select:
        return lambda e, v, k: khot.iterative_topk(e, v, k, alpha=alpha).values

    def ladder(spacing: float) -> Select:
        return lambda e, v, k: khot.ordered_topk(v, k, temperature=spacing / n) @ e

    return [
        Method("halving, double exponential", 20, halving(khot.boosts.double_exp(20)), False),
        *(Method("halving, linear", c, halving(khot.boosts.linear(c)), False) for c in SCALES),
        *(Method("iterative", a, iterative(a), True) for a in ALPHAS),
        *(Method("ladder", s, ladder(s), True) for s in SPACINGS),
    ]


class Row(NamedTuple):
    """A measured cell; the fields are the columns of the CSV."""

    n: int
    k: int
    method: str
    parameter: float
    nccs: float
    error: float
    draws: int
    ms_per_item: float


def measure(n: int, k: int, method: Method, error: float, seconds: float) -> Row:
    """Draw until the standard error is below `error`, or the time is up."""
    generator = torch.Generator().manual_seed(n * 10_000 + k)
    batch = max(1, min(512, BATCH // (n * max(DEPTH, k if method.has_matrix else 1))))
    seen: list[Tensor] = []
    spent, start = 0.0, time.perf_counter()
    while True:
        embeddings = 2 * torch.rand(batch, n, DEPTH, generator=generator) - 1
        scores = torch.rand(batch, n, generator=generator)
        target = embeddings.gather(1, scores.topk(k).indices.unsqueeze(-1).expand(-1, -1, DEPTH))
        begun = time.perf_counter()
        selected = method.select(embeddings, scores, k)
        spent += time.perf_counter() - begun
        seen.append(chamfer_cosine(selected, target).double())
        values = torch.cat(seen)
        reached = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
        is_enough = len(values) >= 8 and reached <= error
        if is_enough or (time.perf_counter() - start > seconds and len(values) > 1):
            return Row(
                n,
                k,
                method.name,
                method.parameter,
                float(values.mean()),
                reached,
                len(values),
                1e3 * spent / len(values),
            )


def run(ns: tuple[int, ...], ks: tuple[int, ...], error: float, seconds: float) -> Iterator[Row]:
    """Every cell. The released boost is measured to `error`; the others, which are swept, to twice that."""
    for n in ns:
        for k in ks:
            if k < n:
                for method in methods(n):
                    is_main = method.name == "halving, double exponential"
                    yield measure(n, k, method, error * (1 if is_main else 2), seconds * (4 if is_main else 1))


def best(rows: list[Row], n: int, k: int, method: str) -> Row | None:
    """The best setting of a method in a cell."""
    return max((r for r in rows if (r.n, r.k, r.method) == (n, k, method)), key=lambda r: r.nccs, default=None)


def tables(rows: list[Row]) -> str:
    """Quality and time, for the docs."""
    cells = list(dict.fromkeys((r.n, r.k) for r in rows))
    swept = ("halving, double exponential", "halving, linear", "iterative", "ladder")

    def quality(n: int, k: int) -> list[str]:
        found = [best(rows, n, k, name) for name in swept]
        plain = next((r for r in rows if (r.n, r.k, r.method, r.parameter) == (n, k, "iterative", 1.0)), None)
        top = max((r.nccs for r in found if r), default=math.nan)

        def show(row: Row | None, prefix: str = "") -> str:
            if row is None:
                return "–"
            value = f"{row.nccs:.3f}"
            return (f"**{value}**" if row.nccs == top else value) + (f" ({prefix}{row.parameter:g})" if prefix else "")

        main = found[0]
        return [
            f"{n}, {k}",
            f"{PUBLISHED[n, k]:.3f}" if (n, k) in PUBLISHED else "–",
            show(main) + (f" ± {main.error:.4f}" if main else ""),
            show(found[1], "C = "),
            show(plain),
            show(found[2], "α = "),
            show(found[3], "T = n⁻¹·"),
        ]

    def times(n: int, k: int) -> list[str]:
        found = [best(rows, n, k, name) for name in swept]
        return [f"{n}, {k}", *(f"{r.ms_per_item:.3g}" if r else "–" for r in found)]

    lost = [
        f"({n}, {k})"
        for n, k in cells
        if (ours := best(rows, n, k, "ladder")) and (main := best(rows, n, k, swept[0])) and ours.nccs <= main.nccs
    ]
    where = "The ladder is above Successive Halving with the released boost in every cell"
    if lost:
        where = f"The ladder is above Successive Halving with the released boost in all cells but {', '.join(lost)}"
    heading = [
        "n, k",
        "published",
        "halving (20)",
        "halving, linear, best C",
        "iterative, α = 1",
        "iterative, best α",
        "ladder, best T",
    ]
    return (
        "\n\n".join(
            [
                "<!-- Written by benchmarks/successive_halving.py; do not edit. -->",
                "Normalised Chamfer cosine similarity; bold is the best of a row.",
                markdown_table(heading, (quality(n, k) for n, k in cells)),
                where + ".",
                "Milliseconds per item, forward, wall time, at those settings:",
                markdown_table(["n, k", *swept], (times(n, k) for n, k in cells)),
            ]
        )
        + "\n"
    )


STYLE = {
    "halving, double exponential": (BLUE, "s-"),
    "halving, linear": (SKY, "D-"),
    "iterative": (GREEN, "^-"),
    "ladder": (ORANGE, "o-"),
}


QUALITY = ("nccs", "normalised Chamfer cosine", False)
TIME = ("ms_per_item", "ms per item", True)
"""What the two pictures show: a column, its label, and whether its axis is logarithmic."""


@styled
def draw(rows: list[Row], value: str, ylabel: str, log: bool) -> Figure:
    """A figure with a panel per k: a quantity against n, each method at its best setting."""
    ks = [k for k in KS if sum(r.k == k for r in rows)]
    figure = Figure(figsize=(WIDTH, 0.9 + 2.9 * math.ceil(len(ks) / 3)), layout="constrained")
    grid = figure.subplots(math.ceil(len(ks) / 3), min(3, len(ks)), sharey=True, squeeze=False).flatten()
    for axes in grid[len(ks) :]:
        axes.set_axis_off()
    for axes, k in zip(grid, ks, strict=False):
        for name, (colour, form) in STYLE.items():
            points = [r for n in NS if (r := best(rows, n, k, name))]
            axes.plot([r.n for r in points], [getattr(r, value) for r in points], form, color=colour, label=name, ms=4)
        if value == "nccs":
            plain = [r for r in rows if (r.k, r.method, r.parameter) == (k, "iterative", 1.0)]
            axes.plot([r.n for r in plain], [r.nccs for r in plain], "^:", color=GREEN, label="iterative, α = 1", ms=4)
            paper = [(n, v) for (n, at), v in PUBLISHED.items() if at == k]
            axes.plot(*zip(*paper, strict=True), "x", color=INK, label="published", ms=5, zorder=3)
        axes.set(xscale="log", title=f"k = {k}", xlabel="n")
        axes.set_xticks(NS, [str(n) if i % 2 == 0 else "" for i, n in enumerate(NS)])
        axes.minorticks_off()
        if log:
            axes.set_yscale("log")
        axes.grid(True)
    for axes in grid[:: min(3, len(ks))]:
        axes.set_ylabel(ylabel)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def write_figures(rows: list[Row], folder: Path) -> None:
    """The two pictures."""
    common.write_picture(folder / "halving-quality.svg", draw(rows, *QUALITY))
    common.write_picture(folder / "halving-time.svg", draw(rows, *TIME))


def main() -> int:
    parser = common.parser(__doc__, "n ≤ 1024 and k ≤ 32, coarser: some 20 seconds")
    parser.add_argument("--error", type=float, default=0.002, help="standard error to reach (0.002)")
    parser.add_argument("--seconds", type=float, default=4.0, help="longest time for a setting of a cell (4)")
    args = parser.parse_args()
    ns, ks = (NS[:4], KS[:3]) if args.quick else (NS, KS)
    error, seconds = (0.01, 0.3) if args.quick else (args.error, args.seconds)
    if not (error > 0 and seconds > 0):
        parser.error(f"--error and --seconds must be > 0; got {error:g} and {seconds:g}")
    total = sum(len(methods(n)) for n in ns for k in ks if k < n)
    rows: list[Row] = []
    is_interrupted = common.collect(run(ns, ks, error, seconds), rows, total)
    if not rows:
        return 130
    places = common.places(args)
    common.write(places.results / "successive_halving.csv", common.to_csv(rows))
    common.write_table(places.tables / "successive-halving.md", tables(rows))
    write_figures(rows, places.images)
    common.show(args, rows, tables(rows))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
