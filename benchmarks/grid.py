"""The robustness grid of `khot.sigmoid_topk`: kind of scores × temperature × k × n × dtype × kernel, and its promises.

Each case is one row. Its sum is taken exactly; in float32 its entries are compared with a float64 root found by other
means. `grid.csv` gets every case, `grid.md` the worst ones.

Limits: float32: |Σp − k|/max(k, 1) ≤ 1e-6 and |p − p_exact| ≤ 1e-6. float64: |Σp − k|/max(k, 1) ≤ 1e-12 where
max|x|/T ≤ 100, ≤ 1e-9 everywhere. Always finite and within [0, 1]. Exits with 1 if a case fails, 130 if interrupted.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from benchmarks import common
from khot.bench import eager
from khot.testing import SCORE_KINDS, score_vector

SEED = 0
SIZES = (64, 1024, 16_384, 1_000_000)
TEMPERATURES = (1e-3, 1e-2, 0.1, 1.0, 10.0)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cpu": lambda x, k, temperature: khot.sigmoid_topk(x, k, temperature=temperature),  # the one that users get
    "eager": eager,
}
SATURATED = 60  # e^−60·10⁶ < 1e-20: beyond this a probability is 0 or 1, even summed over a row


def counts(n: int) -> tuple[float, ...]:
    """The values of k tried for a row of n scores."""
    return (0.5, 1, 10, n / 2, n - 1, n - 0.5)


def reference(x: NDArray[np.float64], k: float, temperature: float) -> tuple[NDArray[np.float64], float]:
    """σ_k by bisection and Brent's method on c of Σ σ((x − a)/T − c) = k, with a the ⌈k⌉-th greatest score.

    Returns:
        The probabilities, and |Σp − k| summed exactly. All entries fall as c grows, so all err in the same direction,
        and the second number bounds the error of each.
    """
    place = x.size - math.ceil(k)
    z = (x - np.partition(x, place)[place]) / temperature
    logit = math.log(k) - math.log(x.size - k)
    low, high = z.min() - logit - 1, z.max() - logit + 1  # the root's range, and a margin for rounding
    live, ones = z, 0

    def excess(c: float) -> float:
        return float(expit(live - c).sum() + ones - k)

    while high - low > 1:  # what is saturated in all of the bracket need not be summed again
        middle = low + (high - low) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        ones += int((live - high > SATURATED).sum())
        live = live[(live - low > -SATURATED) & (live - high <= SATURATED)]
    # The margin again: with fewer terms the sum may round to the other side at an end.
    c = brentq(excess, low - 1, high + 1, xtol=1e-15, rtol=1e-15, maxiter=1000)
    p = expit(z - c)
    return p, abs(math.fsum(p.tolist()) - k)


class Row(NamedTuple):
    """One measured case; the fields are the columns of `grid.csv`."""

    scores: str
    n: int
    dtype: str
    kernel: str
    temperature: float
    k: float
    sum_error: float  # |Σp − k|/max(k, 1)
    p_error: float  # max|p − p_exact|; NaN in float64, where the reference is no better
    reference_residual: float
    not_finite: int
    out_of_range: int
    evaluations: int  # passes over the whole row; 0 if another kernel than the eager one ran
    sample_evaluations: int  # passes over the sample that gives a long row its start
    failure: str


class Passes(TorchDispatchMode):
    """Counts the evaluations of the eager solver, over rows of n scores and over shorter ones."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.counts = n, Counter[bool]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the one operation with an `out` that each evaluation begins with."""
        if func.name() == "aten::sub.out":
            self.counts[args[0].shape[-1] == self.n] += 1
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=1)
def solved(x: Tensor, k: float, temperature: float) -> tuple[NDArray[np.float64], float]:
    """`reference` of a tensor, kept for the next kernel."""
    return reference(x.double().numpy(), k, temperature)


def measure(name: str, x: Tensor, k: float, temperature: float, kernel: str) -> Row:
    """Solve one case, (n,) scores, and hold it against the limits."""
    n, dtype = x.numel(), str(x.dtype).removeprefix("torch.")
    with Passes(n) as passes:
        p = KERNELS[kernel](x, torch.tensor(k).double(), torch.tensor(temperature).double()).double()
    not_finite, out_of_range = int((~p.isfinite()).sum()), int(((p < 0) | (p > 1)).sum())
    sum_error = math.inf if not_finite else abs(math.fsum(p.tolist()) - k) / max(k, 1)
    p_error, residual = math.nan, math.nan
    if dtype == "float32":
        exact, residual = solved(x, k, temperature)
        p_error = math.inf if not_finite else float(np.abs(p.numpy() - exact).max())
    is_far = float(x.abs().max()) / temperature > 100
    limit = 1e-6 if dtype == "float32" else 1e-9 if is_far else 1e-12
    verdicts = {
        "not finite": not_finite > 0,
        "out of [0, 1]": out_of_range > 0,
        f"sum error above {limit:g}": sum_error > limit,
        "p error above 1e-06": p_error > 1e-6,
        "reference residual above 1e-08": residual > 1e-8,  # then the p error proves nothing
    }
    failure = "; ".join(what for what, is_broken in verdicts.items() if is_broken)
    errors = (sum_error, p_error, residual)
    counted_things = (not_finite, out_of_range, passes.counts[True], passes.counts[False])
    return Row(name, n, dtype, kernel, temperature, k, *errors, *counted_things, failure)


def run(sizes: list[int], dtypes: list[str]) -> Iterator[Row]:
    """Every case of the grid, short rows first if `sizes` are."""
    for n, name in product(sizes, SCORE_KINDS):
        x = score_vector(name, n, seed=SEED)
        for dtype in dtypes:
            row = x.to(DTYPES[dtype])
            for temperature, k, kernel in product(TEMPERATURES, counts(n), KERNELS):
                yield measure(name, row, k, temperature, kernel)


def report(rows: list[Row], total: int) -> str:
    """`grid.md`: the worst of each kind of scores, a column for each dtype and n."""
    columns = sorted({(r.dtype, r.n) for r in rows})
    singles = [c for c in columns if c[0] == "float32"]
    failures = [r for r in rows if r.failure]
    residual = max((r.reference_residual for r in rows if r.dtype == "float32"), default=math.nan)

    def passes(cell: list[Row]) -> str:
        seen = [r.evaluations for r in cell]
        return f"{sum(seen) / len(seen):.1f} / {max(seen)}"

    def table(title: str, kernel: str, show: Callable[[list[Row]], str], columns: list[tuple[str, int]]) -> str:
        lines = [
            "| scores | " + " | ".join(f"{d}, n = {n}" for d, n in columns) + " |",
            "| --- |" + " ---: |" * len(columns),
        ]
        for name in SCORE_KINDS:
            cells = ([r for r in rows if (r.kernel, r.scores, r.dtype, r.n) == (kernel, name, *c)] for c in columns)
            lines.append(f"| {name} | " + " | ".join(show(cell) if cell else "–" for cell in cells) + " |")
        return f"## {title}\n\n" + "\n".join(lines)

    parts = [
        "# Robustness grid of σ_k",
        f"torch {torch.__version__}, CPU, one thread, seed {SEED}; reproduce with `make grid`. The kernel users get "
        f"here is: {khot.kernels.status()['cpu'].partition(' (')[0]}; the eager reference is measured beside it. "
        f"**{len(rows)} of {total} cases measured, {len(failures)} failed.** Each cell is over "
        f"T ∈ {{{', '.join(f'{t:g}' for t in TEMPERATURES)}}} and k ∈ {{0.5, 1, 10, n/2, n − 1, n − 0.5}}.",
    ]
    for kernel in KERNELS:
        sums, entries = f"Worst |Σp − k| / max(k, 1), {kernel}", f"Worst |p − p_exact|, {kernel}"
        parts.append(table(sums, kernel, lambda cell: f"{max(r.sum_error for r in cell):.1e}", columns))
        parts.append(table(entries, kernel, lambda cell: f"{max(r.p_error for r in cell):.1e}", singles))
    parts += [
        "The reference is a float64 root by bisection and Brent's method. "
        f"Its own |Σp − k|, which bounds its error, is at most {residual:.1e}.",
        table("Evaluations of a whole row by the eager reference, mean / most", "eager", passes, columns),
        "A long row starts from the root of a sample; evaluations of the sample are in `grid.csv`, not here.",
    ]
    where = "- {0.scores}, n = {0.n}, {0.dtype}, T = {0.temperature:g}, k = {0.k:.8g}: {0.failure}"
    parts += ["## Failures", "\n".join(map(where.format, failures))] if failures else []
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = common.parser(__doc__, "rows of 64 scores in float32")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="row lengths > 10 (64 to a million)"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="dtypes (both)")
    args = parser.parse_args()
    if min(args.sizes) <= 10:
        parser.error(
            f"`--sizes` must be greater than 10, the largest k that does not depend on n; got {min(args.sizes)}"
        )
    torch.set_num_threads(1)  # so that no order of summation depends on the machine's cores
    sizes, dtypes = ([64], ["float32"]) if args.quick else (args.sizes, args.dtypes)
    total = len(sizes) * len(dtypes) * len(SCORE_KINDS) * len(TEMPERATURES) * len(counts(64)) * len(KERNELS)
    rows: list[Row] = []
    is_interrupted = common.collect(run(sizes, dtypes), rows, total)
    failures, places = [row for row in rows if row.failure], common.places(args)
    if rows:
        common.write(places.results / "grid.csv", common.to_csv(rows))
        common.write(places.results / "grid.md", report(rows, total))
    text = f"{len(rows)} of {total} cases measured, {len(failures)} failed; see {places.results}"
    common.show(args, rows, "\n".join([*map(str, failures), text]))
    return 130 if is_interrupted else int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
