"""The time and memory of `khot.coding.omp` beside scikit-learn's and SPAMS', in one interleaved run on one thread.

10,000 signals of length 64, 256 atoms, k = 5, float32 and float64. SPAMS is a C++ library (`pip install spams-bin`;
left out where it is missing). Its `omp` takes the atom that lowers the error most, not the one with the largest
correlation. Writes results/pursuit_speed.csv and docs/tables/pursuit-speed.md; a minute. Wants a quiet machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.decomposition import sparse_encode
from threadpoolctl import threadpool_limits

from benchmarks import common
from khot.bench import markdown_table, peak_memory
from khot.coding import omp, thresholding_pursuit

SIGNALS, D, ATOMS, K = 10_000, 64, 256, 5


class Row(NamedTuple):
    """One function at one dtype."""

    name: str
    dtype: str
    milliseconds: float
    ratio: float
    error: float
    mebibytes: float


def calls(x: np.ndarray, atoms: np.ndarray, k: int) -> dict[str, tuple[Callable[[], Any], Callable[[Any], np.ndarray]]]:
    """Return what is timed, and how its result becomes a dense code."""
    signals, dictionary = torch.from_numpy(x), torch.from_numpy(atoms)
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], np.ndarray]]] = {
        "khot `omp`": (lambda: omp(signals, dictionary, k), lambda code: code.dense().numpy()),
        "khot `thresholding_pursuit`": (
            lambda: thresholding_pursuit(signals, dictionary, k),
            lambda code: code.dense().numpy(),
        ),
        "scikit-learn `sparse_encode`": (
            lambda: sparse_encode(x, atoms, algorithm="omp", n_nonzero_coefs=k),
            lambda code: code,
        ),
    }
    if find_spec("spams"):
        import spams

        columns, basis = np.asfortranarray(x.T), np.asfortranarray(atoms.T)
        # Without `eps`, SPAMS 2.6 returns empty codes of float32 signals, quickly, in a process that has loaded torch.
        found["SPAMS `omp`"] = (
            lambda: spams.omp(columns, basis, L=k, eps=0.0, numThreads=1),
            lambda code: code.toarray().T,
        )
    return found


def measure(signals: int, rounds: int) -> Iterator[Row]:
    """Yield medians, functions in turn within each round."""
    random = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        x = random.standard_normal((signals, D)).astype(dtype)
        atoms = random.standard_normal((ATOMS, D)).astype(dtype)
        atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
        todo = calls(x, atoms, K)
        for name, (call, dense) in todo.items():
            if not ((dense(call()) != 0).sum(1) == K).all():
                raise RuntimeError(f"{name}, {dtype}: a code has not {K} entries, so its time would mean nothing")
        times: dict[str, list[float]] = {name: [] for name in todo}
        for i in range(rounds + 1):
            for name, (call, _) in todo.items():
                start = time.process_time()
                call()
                if i:  # the first round warms up
                    times[name].append(time.process_time() - start)
        middle = {name: statistics.median(values) for name, values in times.items()}
        for name, (call, dense) in todo.items():
            left = np.square(x - dense(call()) @ atoms).sum() / np.square(x).sum()
            _, resident = peak_memory(call, torch.from_numpy(x))
            # khot.bench counts in bytes of the input
            used = float("nan") if resident is None else resident * x.nbytes / 2**20
            yield Row(name, dtype, 1000 * middle[name], middle[name] / middle["khot `omp`"], float(left), used)


def table(rows: list[Row], signals: int) -> str:
    """Milliseconds, and the ratio to ours."""
    lines = [
        [
            row.name,
            row.dtype,
            f"{row.milliseconds:.3g}",
            f"{row.ratio:.2g}",
            f"{row.error:.4f}",
            f"{row.mebibytes:.0f}",
        ]
        for row in rows
    ]
    bound = signals * ATOMS * 16 / 2**20
    return (
        "<!-- Written by benchmarks/pursuit_speed.py; do not edit. -->\n\n"
        + markdown_table(["", "dtype", "milliseconds", "of khot's `omp`", "error", "peak MiB"], lines)
        + f"\n\nMedians of CPU time on one thread, interleaved; {signals:,} signals of length {D}, {ATOMS} atoms, k = "
        f"{K}. The error is the share of the signals' squares that is left. Memory is what the process grew by at most "
        f"during a call; signals × atoms × 16 bytes would be {bound:.0f} MiB. SPAMS chooses by another rule (the "
        "lowest error after the step), so its error differs.\n"
    )


def main() -> int:
    args = common.parser(__doc__, "500 signals, three rounds").parse_args()
    torch.set_num_threads(1)
    signals, rounds = (500, 3) if args.quick else (SIGNALS, 15)
    with threadpool_limits(1):
        rows = list(measure(signals, rounds))
    places = common.places(args)
    common.write(places.results / "pursuit_speed.csv", common.to_csv(rows, digits=4))
    common.write_table(places.tables / "pursuit-speed.md", table(rows, signals))
    common.show(args, rows, table(rows, signals))
    return 0


if __name__ == "__main__":
    sys.exit(main())
