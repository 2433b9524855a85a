"""What does a Sparsifier add to a training step? The step of a dense network and of masked ones, in turns.

An MLP 1024-2816-2560-10 (10.1 million weights), 256 rows, SGD with momentum, one thread (process CPU time) and all
(wall time). A step is forward, backward, the optimiser and `Sparsifier.step()`, with masks computed anew in each.
Medians of one interleaved run. Writes docs/tables/sparsity-overhead.md and results/sparsity_overhead.csv.
"""

import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import common
from khot.bench import environment, markdown_table
from khot.nn import sparsity
from khot.nn.sparsity import Sparsifier

DENSE = "dense"
WIDTHS, ROWS, BUDGET, STEPS = (1024, 2816, 2560, 10), 256, 0.05, 10**6
SETTINGS: dict[str, dict[str, Any] | None] = {
    DENSE: None,
    "soft (the default)": {},
    "straight-through": {"mask": sparsity.straight_through},
    "learned scores": {"score": sparsity.learned},
}


class Row(NamedTuple):
    """One kind of step; the fields are the columns of the CSV."""

    step: str
    threads: int
    milliseconds: float
    """The median."""
    ratio: float
    """The median over that of the dense step."""


def stepper(widths: tuple[int, ...], rows: int, options: dict[str, Any] | None) -> Callable[[], None]:
    """Return a function that takes one training step of a masked network, or of a dense one for None."""
    torch.manual_seed(0)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())][:-1]
    model, x, y = nn.Sequential(*layers), torch.randn(rows, widths[0]), torch.randint(widths[-1], (rows,))
    # The budget falls over a million steps: it is in between all the while, which is the dearest case.
    sparsifier = None if options is None else Sparsifier(model, BUDGET, steps=STEPS, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step()

    return step


def run(widths: tuple[int, ...], rows: int, threads: int, rounds: int) -> list[Row]:
    """Time all kinds of steps in turns."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    steps = {name: stepper(widths, rows, options) for name, options in SETTINGS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, rounds):  # two turns to warm up
        for name, step in steps.items():
            start = clock()
            step()
            if turn >= 0:
                times[name].append(clock() - start)
        common.say(f"{threads} threads", max(turn + 1, 0), rounds)
    middle = {name: statistics.median(own) for name, own in times.items()}
    return [Row(name, threads, 1e3 * each, each / middle[DENSE]) for name, each in middle.items()]


def table(rows: list[Row], widths: tuple[int, ...], batch: int) -> str:
    counts = list(dict.fromkeys(row.threads for row in rows))
    cells = {(row.step, row.threads): row for row in rows}
    lines = [
        [name, *(f"{cells[name, count].ratio:.2f}" for count in counts)]
        for name in dict.fromkeys(row.step for row in rows)
    ]
    heading = ["step", *(f"{count} thread{'s' * (count > 1)}" for count in counts)]
    weights = sum(a * b for a, b in pairwise(widths))
    return (
        "<!-- Written by benchmarks/sparsity_overhead.py; do not edit. -->\n\n"
        + markdown_table(heading, lines)
        + f"\n\nTime of a training step over that of a dense network: {weights:,} weights, {batch} rows, SGD with "
        + f"momentum. Medians of one interleaved run; {environment()['cpu']}.\n"
    )


def main() -> int:
    parser = common.parser(__doc__, "a small network, one thread, three rounds")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind (15)")
    args = parser.parse_args()
    widths, batch = ((16, 24, 4), 8) if args.quick else (WIDTHS, ROWS)
    counts = [1] if args.quick else sorted({1, torch.get_num_threads()})
    rows = [row for count in counts for row in run(widths, batch, count, 3 if args.quick else args.rounds)]
    text, places = table(rows, widths, batch), common.places(args)
    common.write(places.results / "sparsity_overhead.csv", common.to_csv(rows, digits=4))
    common.write_table(places.tables / "sparsity-overhead.md", text)
    common.show(args, rows, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
