"""khot's time over that of the torch operator it is held against, beside the ratio that khot aims at.

Two tables: with this machine's widest vectors, and with both libraries held to AVX2, which a child process measures
(torch reads ATEN_CPU_CAPABILITY when it starts). Times are medians of one interleaved run a shape, one thread, process
CPU time. The speed-ups compare one thread with two, in turns, wall time. Writes docs/tables/targets.md and
results/targets.csv.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import khot
from benchmarks import common, worst
from benchmarks.sampling import samplers
from benchmarks.speed import BUSY
from khot.bench import Contender, Settings, environment, markdown_table, measure
from khot.kernels import cpu

AVX2 = "avx2"
BINARY = "binary_cross_entropy_with_logits"
Fn = Callable[[Tensor, Any], Tensor]


class Target(NamedTuple):
    """A call of khot, what it is held against, and the largest ratios aimed at: forward, forward and backward."""

    name: str
    shape: tuple[int, int]
    k: int
    ours: Fn
    base: str
    forward: float | None
    both: float | None
    dtype: torch.dtype = torch.float32


class Row(NamedTuple):
    """What was measured of a target; the fields are the columns of the CSV."""

    name: str
    case: str
    base: str
    vectors: str
    forward: float | None
    both: float | None
    forward_aim: float | None
    both_aim: float | None
    speedup: float | None
    base_speedup: float | None

    @property
    def missed(self) -> list[str]:
        """Which of the two ratios are larger than aimed at."""
        pairs = {"forward": (self.forward, self.forward_aim), "with backward": (self.both, self.both_aim)}
        return [name for name, (got, aim) in pairs.items() if got is not None and aim is not None and got > aim]


def _cross_entropy(loss: Callable[[Tensor, Tensor], Tensor]) -> Fn:
    targets: dict[tuple[int, ...], Tensor] = {}

    def call(x: Tensor, k: int) -> Tensor:
        if x.shape not in targets:
            targets[x.shape] = khot.hard_topk(x.detach().flip(-1), k)
        return loss(x, targets[x.shape])

    return call


BASES: dict[str, Fn] = {
    "torch.sigmoid": lambda x, k: torch.sigmoid(x),
    "torch.softmax": lambda x, k: torch.softmax(x, -1),
    "torch.topk": lambda x, k: torch.topk(x, k).values,
    BINARY: _cross_entropy(lambda x, y: binary_cross_entropy_with_logits(x, y)),
}
LONG = ((1, 1_000_000), 100_000)


def _with_costs(fn: Callable[..., Tensor]) -> Fn:
    """Return the call with costs from 0.5 to 1.5, and with the budget k: the mean cost is 1."""
    costs: dict[int, Tensor] = {}

    def call(x: Tensor, k: int) -> Tensor:
        n = x.shape[-1]
        if n not in costs:
            costs[n] = torch.rand(n, generator=torch.Generator().manual_seed(1)) + 0.5
        return fn(x, k, costs=costs[n])

    return call


TARGETS = [
    Target("sigmoid_topk", *LONG, khot.sigmoid_topk, "torch.sigmoid", 1.0, 1.1),
    Target("sigmoid_topk", (512, 16384), 64, khot.sigmoid_topk, "torch.softmax", 0.8, 0.9),
    Target("sigmoid_topk", (512, 16384), 1638, khot.sigmoid_topk, "torch.softmax", 0.8, 0.9),
    Target("sigmoid_topk", (4096, 64), 6, khot.sigmoid_topk, "torch.sigmoid", 2.0, 1.6),
    Target("sigmoid_topk", (64, 1024), 102, khot.sigmoid_topk, "torch.sigmoid", 1.3, 1.3),
    *(Target("sigmoid_topk", (16, n), 4, khot.sigmoid_topk, "torch.topk", 1.0, 1.0) for n in (16, 64, 256)),
    Target("sigmoid_topk", (512, 16384), 1638, khot.sigmoid_topk, "torch.softmax", 1.0, 1.0, torch.bfloat16),
    Target("laplace_topk", *LONG, khot.laplace_topk, "torch.sigmoid", 2.0, 2.0),
    Target("euclidean_topk", *LONG, khot.euclidean_topk, "torch.sigmoid", 2.0, 2.0),
    Target("normal_topk", *LONG, khot.normal_topk, "torch.sigmoid", 8.0, 8.0),
    Target("cauchy_topk", *LONG, khot.cauchy_topk, "torch.sigmoid", 8.0, 8.0),
    Target("power_topk", *LONG, khot.power_topk, "torch.sigmoid", 8.0, 8.0),
    # Calls with costs are held to what the members of the family without a quick way are.
    *(
        Target(f"{fn.__name__}, costs", shape, k, _with_costs(fn), "torch.sigmoid", 8.0, 8.0)
        for shape, k in (LONG, ((4096, 64), 6))
        for fn in (khot.sigmoid_topk, khot.normal_topk)
    ),
    Target("khot_cross_entropy", *LONG, _cross_entropy(khot.khot_cross_entropy), BINARY, None, 2.0),
]  # fmt: skip
SAMPLES = {"Pivotal": 0.5, "Systematic": 0.25}
SAMPLED = (((1, 1_000_000), 32), LONG, ((64, 1024), 32))
WORST = 5.0
MOST_SECONDS = 2.0  # for the speed-up of one call
LEAST = 32768  # numbers from which several threads may be worth waking


def case_of(shape: tuple[int, int], k: int, dtype: torch.dtype = torch.float32) -> str:
    """The words for a shape."""
    short = {10**6: "10⁶", 10**5: "10⁵"}
    n, of_dtype = short.get(shape[1], shape[1]), "" if dtype == torch.float32 else f", {dtype}".replace("torch.", "")
    return f"{shape[0]}×{n}, k = {short.get(k, k)}{of_dtype}"


def speedup(call: Callable[[], object], rounds: int) -> float:
    """Return the wall time with one thread over that with two."""
    times: dict[int, list[float]] = {1: [], 2: []}
    begin = time.perf_counter()
    for done in range(rounds):
        if done > 2 and time.perf_counter() - begin > MOST_SECONDS:
            break
        for count, samples in times.items():
            torch.set_num_threads(count)
            call()
            start, calls = time.perf_counter(), 0
            while time.perf_counter() - start < 2e-3:
                call()
                calls += 1
            samples.append((time.perf_counter() - start) / calls)
    torch.set_num_threads(1)
    one, two = (statistics.median(samples) for samples in times.values())
    return one / two


def compare(targets: list[Target], budget: float, rounds: int) -> Iterator[Row]:
    """Measure targets of one shape, k and dtype in one interleaved run."""
    first = targets[0]
    fns = {t.base: BASES[t.base] for t in targets} | {t.name: t.ours for t in targets}
    contenders = {name: Contender(fn=fn, what="", kind="reference") for name, fn in fns.items()}
    settings = Settings(shape=first.shape, k=first.k, dtype=first.dtype, budget=budget)
    results = {result.name: result for result in measure(contenders, settings).results}
    x = torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first.dtype)
    gains = {name: speedup(lambda fn=fn: fn(x, first.k), rounds) for name, fn in fns.items()} if rounds else {}
    for t in targets:
        mine, base = results[t.name], results[t.base]
        pairs = ((mine.forward, base.forward), (mine.both, base.both))
        forward, both = (None if a is None or b is None else a.median / b.median for a, b in pairs)
        yield Row(t.name, case_of(t.shape, t.k, t.dtype), t.base, common.vectors(), forward, both, t.forward, t.both,
                  gains.get(t.name), gains.get(t.base))  # fmt: skip


def compare_samples(shape: tuple[int, int], k: int, budget: float, rounds: int) -> Iterator[Row]:
    """Measure samples of one shape."""
    base = "torch.multinomial"
    fns = {name: one for name, one in samplers(shape, k).items() if name in (*SAMPLES, base)}
    report = measure(fns, Settings(shape=shape, k=k, backward=False, budget=budget))
    times = {result.name: result.forward.median for result in report.results if result.forward}
    x = torch.empty(0)
    gains = {name: speedup(lambda one=one: one.fn(x, k), rounds) for name, one in fns.items()} if rounds else {}
    for name, aim in SAMPLES.items():
        yield Row(name, case_of(shape, k), base, common.vectors(), times[name] / times[base], None, aim, None,
                  gains.get(name), gains.get(base))  # fmt: skip


def run(quick: bool, budget: float) -> list[Row]:
    """Measure everything with the vectors that are in use."""
    torch.set_num_threads(1)
    most = 0 if (os.cpu_count() or 1) < 2 else 15
    rows: list[Row] = []
    groups: dict[Any, list[Target]] = {}
    for target in TARGETS:
        shape = (min(target.shape[0], 8), min(target.shape[1], 512)) if quick else target.shape
        k = min(target.k, shape[1] // 8) if quick else target.k
        groups.setdefault((shape, k, target.dtype, target.base), []).append(target._replace(shape=shape, k=k))
    for done, targets in enumerate(groups.values(), 1):
        rows += compare(targets, budget, most if math.prod(targets[0].shape) >= LEAST else 0)
        common.say(rows[-1].case, done, len(groups))
    n, times = (1000, 1) if quick else (10**6, 5)
    slowest = max(worst.measure(n, times), key=lambda row: row.times_sigmoid)
    where = f"worst of the grid: {slowest.scores}, T = {slowest.temperature:g}, k = {slowest.k:g}"
    rows.append(
        Row(
            "sigmoid_topk",
            where,
            "torch.sigmoid",
            common.vectors(),
            slowest.times_sigmoid,
            None,
            WORST,
            None,
            None,
            None,
        )
    )
    for shape, k in (((1, 1000), 32), ((4, 64), 8)) if quick else SAMPLED:
        rows += compare_samples(shape, k, budget, most if math.prod(shape) >= LEAST else 0)
    return rows


def run_held(quick: bool, budget: float) -> list[Row]:
    """Measure everything in a child process in which both libraries are held to AVX2."""
    command = [sys.executable, "-m", "benchmarks.targets", "--held", "--json", f"--budget={budget}"]
    child = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        env={**os.environ, "ATEN_CPU_CAPABILITY": AVX2}, cwd=common.ROOT, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return [Row(**row) for row in json.loads(child.stdout)]


def _pair(*values: float | None) -> str:
    def form(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"

    return " / ".join("–" if value is None else form(value) for value in values)


def _verdict(row: Row) -> str:
    return f"**missed: {' and '.join(row.missed)}**" if row.missed else "met"


def table(rows: list[Row], load: float = 0.0) -> str:
    """The tables, one for each width; `load` is the machine's load average before the first measurement."""
    parts = ["<!-- Written by benchmarks/targets.py; do not edit. -->"]
    for name in dict.fromkeys(row.vectors for row in rows):
        lines = [
            [f"`{row.name}`", row.case, f"`{row.base}`", _pair(row.forward, row.both),
             _pair(row.forward_aim, row.both_aim), _verdict(row),
             _pair(row.speedup, row.base_speedup)]
            for row in rows if row.vectors == name
        ]  # fmt: skip
        heading = ["call", "case", "over", "measured", "aim, at most", "", "two threads, khot / other"]
        parts += [f"{name}:", markdown_table(heading, lines)]
    parts.append(
        "Time of khot over that of the operator named: forward / forward and backward, one thread, process CPU time, "
        "medians of one interleaved run a case. The last column is the wall time with one thread over that with two, "
        f"forward. float32 and T = 1 unless said. {environment()['cpu']}, torch {torch.__version__}."
    )
    if load > BUSY:
        parts.append(f"Other work ran beside it (load average {load:.1f} at the start): speed-ups mean nothing.")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = common.parser(__doc__, "small shapes, 0.01 seconds each")
    parser.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds per contender and shape (1)")
    parser.add_argument("--held", action="store_true", help="measure once, with khot held to AVX2, and write no file")
    args = parser.parse_args()
    budget = 0.01 if args.quick else args.budget
    if args.held:
        cpu.LIBRARY.khot_hold(cpu.AVX2)
        rows = run(args.quick, budget)
        common.show(args, rows, table(rows))
        return 0
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    rows = run(args.quick, budget)
    if cpu.LIBRARY.khot_path() == cpu.AVX512:
        rows += run_held(args.quick, budget)
    places = common.places(args)
    common.write(places.results / "targets.csv", common.to_csv(rows, digits=4))
    common.write_table(places.tables / "targets.md", table(rows, load))
    common.show(args, rows, table(rows, load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
