"""Is this checkout faster than another one? The same calls in both, in turns.

Each checkout has a process of its own, which times one call when it is told to. The two take turns, call by call, so
that what else the machine does falls on both alike. A case's figure is the ratio of the two medians, new to old. The
native library of the other checkout must have been built, for example by `make check` in it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common

SHAPES = {
    "8×16": (8, 16, 2), "16×64": (16, 64, 6), "16×256": (16, 256, 16), "4096×64": (4096, 64, 6),
    "64×1024": (64, 1024, 100), "512×16384": (512, 16384, 64), "1×10⁶": (1, 10**6, 10**5),
}  # fmt: skip
SMALL = 1 << 14
KINDS = ("plain", "mask", "tensor k", "tensor T", "layer", "laplace", "euclidean", "normal", "log", "hard")


class Ratio(NamedTuple):
    """One case; the fields are the columns of the CSV."""

    shape: str
    call: str
    threads: int
    forward: float
    both: float
    """Forward and backward; NaN for a call without a gradient."""


def calls(shape: str) -> dict[str, Callable[[Any], Any]]:
    """The calls that are timed on a shape, by name; all public."""
    import torch

    import khot

    rows, n, k = SHAPES[shape]
    mask = torch.arange(n).expand(rows, n) % 10 > 0
    count, one, layer = torch.tensor(float(k)), torch.tensor(1.0), khot.nn.SigmoidTopK(k)
    every: dict[str, Callable[[Any], Any]] = {
        "plain": lambda x: khot.sigmoid_topk(x, k),
        "mask": lambda x: khot.sigmoid_topk(x, k, mask=mask),
        "tensor k": lambda x: khot.sigmoid_topk(x, count),
        "tensor T": lambda x: khot.sigmoid_topk(x, k, temperature=one),
        "layer": layer,
        "laplace": lambda x: khot.laplace_topk(x, k),
        "euclidean": lambda x: khot.euclidean_topk(x, k),
        "normal": lambda x: khot.normal_topk(x, k),
        "log": lambda x: khot.log_sigmoid_topk(x, k),
        "hard": lambda x: khot.hard_topk(x, k),
    }
    return every if rows * n <= SMALL else {name: every[name] for name in ("plain", "mask", "layer", "laplace", "hard")}


def work() -> None:
    """Time what is asked for on standard input: a shape, a call, a direction, the threads; answer in seconds."""
    import torch

    ready: dict[tuple[str, str], tuple[Any, Any]] = {}
    for line in sys.stdin:
        shape, call, direction, threads = line.rstrip("\n").split("\t")
        torch.set_num_threads(int(threads))
        rows, n, _ = SHAPES[shape]
        if (shape, call) not in ready:
            x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
            ready[shape, call] = calls(shape)[call], x.requires_grad_()
        fn, x = ready[shape, call]

        def once(fn: Any = fn, x: Any = x, both: bool = direction == "both") -> None:
            if both:
                fn(x).sum().backward()
            else:
                fn(x.detach())

        once()
        repeats = 200 if rows * n <= SMALL else 20 if rows * n <= 1 << 18 else 1
        start = time.perf_counter()
        for _ in range(repeats):
            once()
        print((time.perf_counter() - start) / repeats, flush=True)


class Worker:
    """A process that has one of the checkouts; use it in a `with`."""

    def __init__(self, checkout: Path) -> None:
        path = os.pathsep.join((str(checkout / "src"), str(common.ROOT)))
        command = [sys.executable, "-c", "from benchmarks.checkouts import work; work()"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=os.environ | {"PYTHONPATH": path}
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.__exit__(*error)  # closes its input, at which it ends

    def time(self, *case: object) -> float:
        """Return the seconds that one call of a case takes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*case, sep="\t", file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def measure(new: Worker, old: Worker, shapes: list[str], threads: list[int], rounds: int) -> list[Ratio]:
    """Time every case in both checkouts, in turns."""
    cases = [(shape, call, count) for count in threads for shape in shapes for call in calls(shape)]
    found = []
    for done, (shape, call, count) in enumerate(cases, 1):
        ratios = []
        for direction in ("forward", "both"):
            if direction == "both" and call == "hard":
                ratios.append(float("nan"))
                continue
            pairs = [[worker.time(shape, call, direction, count) for worker in (new, old)] for _ in range(rounds)]
            ratios.append(statistics.median(p[0] for p in pairs) / statistics.median(p[1] for p in pairs))
        found.append(Ratio(shape, call, count, *ratios))
        common.say(f"{shape} {call}, {count} threads", done, len(cases))
    return found


def report(rows: list[Ratio]) -> str:
    """Return a table for each number of threads: shapes down, calls across."""
    from khot.bench import environment, markdown_table

    parts = ["<!-- Written by benchmarks/checkouts.py; do not edit. -->\n"]
    for count in dict.fromkeys(row.threads for row in rows):
        here = [row for row in rows if row.threads == count]
        cells = {(row.shape, row.call): f"{row.forward:.2f} / {row.both:.2f}".removesuffix(" / nan") for row in here}
        names = [name for name in KINDS if any(row.call == name for row in here)]
        lines = [[s, *(cells.get((s, name), "") for name in names)] for s in dict.fromkeys(row.shape for row in here)]
        parts.append(f"{count} thread{'s' * (count > 1)}:\n\n" + markdown_table(["shape", *names], lines) + "\n")
    parts.append(
        "Time of this version over that of the other one, forward / forward and backward: the ratio of two medians in "
        f"one interleaved run. Below 1 is faster. {environment()['cpu']}.\n"
    )
    return "\n".join(parts)


def main() -> int:
    parser = common.parser(__doc__, "two small shapes, three rounds")
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=11, help="times through each case (11)")
    args = parser.parse_args()
    if not (args.before / "src" / "khot").is_dir():
        parser.error(f"{args.before} must be a checkout of khot, with src/khot in it")
    shapes = ["8×16", "16×64"] if args.quick else list(SHAPES)
    threads = [1] if args.quick else sorted({1, os.cpu_count() or 1})
    with Worker(common.ROOT) as new, Worker(args.before.resolve()) as old:
        rows, places = measure(new, old, shapes, threads, 3 if args.quick else args.rounds), common.places(args)
    common.write(places.results / "checkouts.csv", common.to_csv(rows, digits=4))
    common.write_table(places.tables / "checkouts.md", report(rows))
    common.show(args, rows, report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
