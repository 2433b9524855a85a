"""What an epoch of weighted sampling costs: 10⁵ of 10⁷ items, beside torch's `WeightedRandomSampler`.

Each sampler runs in a process of its own, one thread: made once, then iterated for some epochs. Time is CPU time of
`list(sampler)`, memory the peak of the process above what it was before the sampler was made. Also how far the
probability of an item is from what was asked for, measured on a small set. Writes docs/tables/data-loading.md and
results/loading.csv.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

import khot
from benchmarks import common
from khot.bench import environment
from khot.data import DesignBatchSampler, DesignSampler
from khot.designs import Systematic

N, K, EPOCHS = 10_000_000, 100_000, 5
SMALL, DRAWS = 50, 4000
Makes = Callable[[Tensor, int], Any]
SAMPLERS: dict[str, Makes] = {
    "`WeightedRandomSampler(replacement=False)`": lambda w, k: WeightedRandomSampler(w, k, replacement=False),
    "`WeightedRandomSampler(replacement=True)`": lambda w, k: WeightedRandomSampler(w, k, replacement=True),
    "`DesignSampler`": DesignSampler,
    "`DesignSampler(design=Systematic)`": partial(DesignSampler, design=Systematic),
    "`DesignBatchSampler`, 100 batches": lambda w, k: in_batches(w, k),
}


def in_batches(w: Tensor, k: int) -> DesignBatchSampler:
    """Return a sampler of k items in all, in up to 100 batches of at least ten."""
    batch = max(k // 100, min(k, 10))
    return DesignBatchSampler(w, batch, num_batches=k // batch)


class Row(NamedTuple):
    """What one sampler costs."""

    sampler: str
    n: int
    k: int
    made: float
    epoch: float
    memory: float
    distinct: float
    error: float


def sizes(n: int) -> Tensor:
    """Return lognormal sizes, float32."""
    return torch.randn(n, generator=torch.Generator().manual_seed(0)).exp()


def measured(name: str, n: int, k: int, epochs: int) -> dict[str, float]:
    """Make and run a sampler; in a process of its own, for the memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    w = sizes(n)
    list(SAMPLERS[name](w[:1000], 10))  # what is loaded on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    sampler = SAMPLERS[name](w, k)
    made = time.process_time() - start
    times, chosen = [], []
    for _ in range(epochs):
        start = time.process_time()
        chosen = list(sampler)
        times.append(time.process_time() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    batches = chosen if isinstance(chosen[0], list) else [chosen]
    distinct = sum(len(set(batch)) for batch in batches) / k
    return {"made": made, "epoch": median(times), "memory": memory / 1024, "distinct": distinct}


def error(name: str) -> float:
    """Return the largest difference between the mean number of an item in an epoch and π, on a small set."""
    torch.manual_seed(0)
    w, k = 3 * sizes(SMALL), SMALL // 5
    sampler, counts = SAMPLERS[name](w, k), torch.zeros(SMALL)
    for _ in range(DRAWS):
        counts += torch.bincount(torch.tensor(list(sampler)).flatten(), minlength=SMALL)
    return float((counts / DRAWS - khot.inclusion_probs(w, k)).abs().max())


def rows(n: int, k: int, epochs: int) -> Iterator[Row]:
    """Measure each sampler in a new process."""
    for name in SAMPLERS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.loading", "--one", name, str(n), str(k), str(epochs)],
            capture_output=True,
            text=True,
            check=True,
        )
        got = json.loads(done.stdout)
        yield Row(name, n, k, got["made"], got["epoch"], got["memory"], got["distinct"], error(name))


def table(found: list[Row]) -> str:
    """Samplers, by time, memory and how far their probabilities are off."""
    lines = ["| sampler | made once | an epoch | memory | distinct items | largest error of π |"]
    lines += ["| :--- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r.sampler} | {r.made:.2f} s | {r.epoch:.2f} s | {r.memory:.0f} MB | {r.distinct:.1%} | {r.error:.3f} |"
        for r in found
    ]
    return (
        "<!-- Written by benchmarks/loading.py; do not edit. -->\n\n"
        + "\n".join(lines)
        + f"\n\n{found[0].k} of {found[0].n} items an epoch, float32 sizes, CPU time of one thread, "
        + "the median of some epochs; "
        + "memory is the peak above that of the process with its sizes; items are distinct within a batch. "
        + "The error is the largest difference between "
        + f"the mean number of an item in {DRAWS} epochs and π = min(1, c·size), on {SMALL} items of "
        + f"which {SMALL // 5} are drawn (noise of about 0.02); {environment()['cpu']}.\n"
    )


def main() -> int:
    parser = common.parser(__doc__, "10⁴ items")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "N", "K", "EPOCHS"), help="measure one, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one[0], *map(int, args.one[1:]))))
        return 0
    found: list[Row] = []
    is_broken = common.collect(rows(*((10_000, 100, 2) if args.quick else (N, K, EPOCHS))), found, len(SAMPLERS))
    text, places = table(found), common.places(args, is_broken)
    common.write_table(places.tables / "data-loading.md", text)
    common.write(places.results / "loading.csv", common.to_csv(found, digits=4))
    common.show(args, found, text)
    return 130 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
