"""Decoding with certified attention: one query for each head over a long cache, d = 64, beside torch's SDPA.

Keys lie in clusters of 64 (noise .1), and a query points to one cluster: sharp heads, whose entropy is measured, and
moderate ones, whose queries are shorter. Times are medians of interleaved calls on one thread: SDPA, the certified
call at ε = .01, and the same without the native library. Then one append, the mean of 1024 that come one by one (with
the growth of the cells), and the building of the cells. The last column is the number of decoded tokens after which
building, appending and attending together have taken less time than SDPA.

Writes results/attention_speed.csv and docs/tables/attention-speed.md; two minutes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import common
from khot.attention import Ball, KeyCells, certified_attention
from khot.bench import markdown_table

D, EPSILON = 64, 0.01
SHARP = {"sharp": 2.0, "moderate": 1.0}
CASES = ((1, 4096), (1, 8192), (1, 16384), (1, 65536), (8, 4096), (8, 16384), (8, 32768))
APPENDS = 1024


class TorchBall(Ball):
    """A bound that the native library does not know, so that torch searches its cells."""


class Row(NamedTuple):
    """One cache; times in microseconds. The fields are the columns of the CSV."""

    heads: int
    n: int
    kind: str
    entropy: float
    k: float
    scored: float
    refused: float
    distance: float
    sdpa: float
    certified: float
    by_torch: float
    append: float
    build: float


def cache(heads: int, n: int, length: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (1, heads, 1, d), keys and values (1, heads, n, d)."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(1, heads, max(1, n // 64), D, generator=g)
    at = torch.randint(centres.shape[2], (n,), generator=g)
    keys = centres[:, :, at] + 0.1 * torch.randn(1, heads, n, D, generator=g)
    queries = length * centres[:, :, :1] + 0.1 * torch.randn(1, heads, 1, D, generator=g)
    return queries, keys, torch.randn(1, heads, n, D, generator=g)


def medians(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median microseconds of each call, one after the other in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats + 3):
        for spent, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            if i >= 3:
                spent.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(spent) for spent in times]


def measure(heads: int, n: int, kind: str, repeats: int) -> Row:
    """Time one cache."""
    q, k, v = cache(heads, n, SHARP[kind])
    start = time.perf_counter()
    cells = KeyCells(k)
    build = 1e6 * (time.perf_counter() - start)
    output, found = certified_attention(q, cells, v, epsilon=EPSILON)
    p = (q.double() @ k.double().mT * D**-0.5).softmax(-1)
    distance = float((output - p @ v.double()).norm(dim=-1).max())
    entropy = float(torch.special.entr(p).sum(-1).exp().mean())
    slow = KeyCells(k, bound=TorchBall)
    calls: list[Callable[[], Any]] = [lambda: scaled_dot_product_attention(q, k, v)]
    calls += [lambda c=c: certified_attention(q, c, v, epsilon=EPSILON) for c in (cells, slow)]
    sdpa, certified, by_torch = medians(calls, repeats)
    start = time.perf_counter()
    for i in range(APPENDS):
        cells.append(k[:, :, i % n : i % n + 1])
    append = 1e6 * (time.perf_counter() - start) / APPENDS
    means = [float(t.double().mean()) for t in (found.k, found.scored, found.refused)]
    return Row(heads, n, kind, entropy, *means, distance, sdpa, certified, by_torch, append, build)


def run(quick: bool) -> Iterator[Row]:
    for heads, n in ((1, 512),) if quick else CASES:
        for kind in SHARP:
            yield measure(heads, n, kind, 3 if quick else 25)


def report(rows: list[Any]) -> str:
    """Return the table: what was read, times, and when it pays."""
    heading = ["heads × keys", "heads are", "exp(entropy)", "k", "scored", "refused", "SDPA, µs", "certified, µs"]
    heading += ["by torch, µs", "one append, µs", "building, ms", "SDPA/certified", "pays after"]
    lines = []
    for row in rows:
        gain = row.sdpa - row.certified - row.append
        after = f"{math.ceil(row.build / gain):,} tokens" if gain > 0 else "never"
        numbers = [f"{row.entropy:.0f}", f"{row.k:.0f}", f"{row.scored:.0f}", f"{row.refused:.0%}"]
        times = [f"{t:.0f}" for t in (row.sdpa, row.certified, row.by_torch, row.append)] + [f"{row.build / 1000:.0f}"]
        lines.append([f"{row.heads} × {row.n}", row.kind, *numbers, *times, f"{row.sdpa / row.certified:.2f}", after])
    return f"<!-- Written by benchmarks/attention_speed.py; do not edit. -->\n\n{markdown_table(heading, lines)}\n"


def main() -> int:
    args = common.parser(__doc__, "512 keys, three calls").parse_args()
    at = common.places(args)
    torch.set_num_threads(1)
    rows: list[Any] = []
    is_interrupted = common.collect(run(args.quick), rows)
    if rows and not is_interrupted:
        common.write(at.results / "attention_speed.csv", common.to_csv(rows, digits=5))
        common.write_table(
            at.tables / "attention-speed.md", report(common.read_rows(at.results / "attention_speed.csv"))
        )
    common.show(args, [row if isinstance(row, Row) else vars(row) for row in rows], report(rows) if rows else "")
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
