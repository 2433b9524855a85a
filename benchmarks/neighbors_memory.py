"""Memory and time of neighbours at size: `SoftNeighbors` with 10⁵ keys, `KHotNeighborhood` at 10⁴ × 10³ beside NCA.

Each case runs in a process of its own, on one thread. Memory is the peak of that process less what it had after imports
and data. A step of `SoftNeighbors` is a forward and a backward pass to queries, keys and temperature; `dropped` is the
largest weight of a query (of k = 10) that its candidates leave out. NCA does one iteration, which is a few evaluations
of its loss; `KHotNeighborhood` its whole training. Writes results/neighbors_memory.csv and
docs/tables/neighbors-memory.md; some minutes.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.neighbors import NeighborhoodComponentsAnalysis

from benchmarks import common
from khot.bench import markdown_table
from khot.nn import SoftNeighbors
from khot.sklearn import KHotNeighborhood

K, DIMS = 10, 32


class Row(NamedTuple):
    """One case; the fields are the columns of the CSV."""

    case: str
    size: str
    peak_mb: float
    seconds: float
    dropped: float


def soft_neighbors(queries: int, keys: int, candidates: int | None) -> Callable[[], float]:
    """Prepare a training step; calling it returns the largest weight that was dropped."""
    torch.manual_seed(0)
    q, x = torch.randn(queries, DIMS, requires_grad=True), torch.randn(keys, DIMS, requires_grad=True)
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    layer, values = SoftNeighbors(K, temperature=temperature, candidates=candidates), torch.randn(keys, DIMS)

    def step() -> float:
        found = layer(q, x, values)
        found.values.square().sum().backward()
        return 0.0 if found.dropped is None else float(found.dropped.max())

    return step


def estimator(make: Callable[[], Any], rows: int, features: int) -> Callable[[], float]:
    """Prepare the training of a map on ten classes, of which a few features tell."""
    random = np.random.default_rng(0)
    y = random.integers(10, size=rows)
    x = random.standard_normal((rows, features))
    x[:, :10] += 2 * np.eye(10)[y]
    model = make()

    def fit() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x, y)
        return float("nan")

    return fit


def cases(is_quick: bool) -> dict[tuple[str, str], Callable[[], Callable[[], float]]]:
    """Return what prepares each case, by name and size."""
    q, m, rows, features = (64, 2000, 300, 50) if is_quick else (4096, 100_000, 10_000, 1000)
    size, table = f"{q} × {m} × {DIMS}", f"{rows} × {features}"
    khot_map = partial(KHotNeighborhood, 10, random_state=0)
    nca = partial(NeighborhoodComponentsAnalysis, 10, random_state=0, max_iter=1)
    return {
        **{(f"SoftNeighbors, {c} candidates", size): partial(soft_neighbors, q, m, c) for c in (32, 64, 256) if c <= m},
        ("SoftNeighbors, all keys", f"{q // 4} × {m} × {DIMS}"): partial(soft_neighbors, q // 4, m, None),
        ("KHotNeighborhood, 200 steps", table): partial(estimator, khot_map, rows, features),
        ("NCA, 1 iteration", table): partial(estimator, nca, rows, features),
    }


def measure(prepare: Callable[[], Callable[[], float]]) -> tuple[float, float, float]:
    """Return peak MB above the start, seconds of the processor, and what the case returns."""
    torch.set_num_threads(1)
    step = prepare()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    dropped = step()
    seconds = time.process_time() - start
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds, dropped


def report(rows: list[Row]) -> str:
    table = [
        [
            row.case,
            row.size,
            f"{row.peak_mb:.0f} MB",
            f"{row.seconds:.1f} s",
            "–" if np.isnan(row.dropped) else f"{row.dropped:.2g}",
        ]
        for row in rows
    ]
    return markdown_table(["case", "size", "peak", "time", "dropped"], table) + "\n"


def main() -> int:
    args = common.parser(__doc__, "small sizes").parse_args()
    at, rows = common.places(args), []
    for (case, size), prepare in cases(args.quick).items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(Row(case, size, *pool.apply(measure, (prepare,))))
        common.say(case, len(rows), len(rows))
    common.write(at.results / "neighbors_memory.csv", common.to_csv(rows, digits=5))
    common.write_table(at.tables / "neighbors-memory.md", report(rows))
    common.show(args, rows, report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
