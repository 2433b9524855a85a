"""How far an inexact root throws off σ_k and its gradient; writes `docs/tables/solver-error.md`.

The gradient of `sigmoid_topk` is that of the exact root. This measures what is lost when the root is not exact: when
the solver is stopped after m steps, and when the threshold is displaced by δ·T. Everything is seeded, in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

import khot
from benchmarks import common
from khot.bench import eager

N, K, SEED = 1000, 50, 0
CASES = (("normal", 1.0), ("normal", 0.1), ("normal", 0.01), ("Cauchy", 1.0))
MOST_STEPS = 5
DISPLACEMENTS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
ROUNDING = 1e-12  # smaller figures differ from machine to machine, so the table does not show them

TEMPLATE = """\
<!-- Written by benchmarks/solver_error.py; do not edit. -->

One row of n = {n} scores, k = {k}, in float64, and the gradient of ⟨g, σ_k(x)⟩ for a fixed random g. The columns are
|Σp − k|, max |p − p\\*| and ‖∇ − ∇\\*‖/‖∇\\*‖, where a star marks the converged values.

#### The solver stopped after m steps

| scores | m | sum | largest entry | gradient |
| :--- | ---: | ---: | ---: | ---: |
{rows_stopped}

Once the steps are Newton's, all three errors square from one to the next, and the gradient's is two to three times
that of the worst entry. A block that is not exact by m = {most} ends with the first m that is. How many steps it takes
depends on the scores, so a small fixed number is no substitute for a test of the sum.

#### The threshold displaced by δ·T

| scores | δ | sum | largest entry | gradient | C = gradient/δ |
| :--- | ---: | ---: | ---: | ---: | ---: |
{rows_moved}

All errors are proportional to δ, and C is at most {factor:.2f}: a root off by δ·T costs these gradients a relative
error below δ. The sum shows it, being off by δ·Σ p(1 − p) to first order.

In both tables (and for −δ) all entries of p err in the same direction, which the script checks: each is a monotone
function of the threshold. So max |p − p\\*| ≤ |Σp − k|: a sum that is right vouches for every entry.
"""


class Errors(NamedTuple):
    """What an inexact root does."""

    total: float
    """|Σp − k|."""
    entry: float
    """max|p − p*|."""
    gradient: float
    """‖∇ − ∇*‖/‖∇*‖ for the gradient of ⟨g, σ_k(x)⟩."""


class Row(NamedTuple):
    """A row of a table: what was done to the root, how much of it, and the errors."""

    part: str
    scores: str
    temperature: float
    amount: float
    errors: Errors

    def cells(self) -> list[str]:
        """Return the row as text."""
        is_moved = self.part == "moved"
        amount = f"{self.amount:.0e}" if is_moved else f"{self.amount:.0f}"
        factor = [f"{self.errors.gradient / self.amount:.2f}"] if is_moved else []
        return [f"{self.scores}, T = {self.temperature:g}", amount, *map(show, self.errors), *factor]


def converged(x: Tensor, g: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """σ_k(x) and the gradient of ⟨g, σ_k(x)⟩, both (n,), as the library gives them."""
    x = x.clone().requires_grad_()
    p = khot.sigmoid_topk(x, K, temperature=temperature)
    (gradient,) = torch.autograd.grad(p, x, g)
    return p.detach(), gradient


def with_gradient(p: Tensor, g: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """p, and the gradient that the formula of the backward pass makes of it."""
    v = p * (1 - p) / temperature
    return p, v * (g - (v * g).sum() / v.sum())


def compare(inexact: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Errors:
    """Errors of (p, gradient) against the converged ones."""
    (p, gradient), (p_exact, gradient_exact) = inexact, exact
    total, entry = abs(math.fsum(p.tolist()) - K), float((p - p_exact).abs().max())
    errors = Errors(total, entry, float((gradient - gradient_exact).norm() / gradient_exact.norm()))
    # All entries err in the same direction, so none errs by more than the sum does.
    one_sided = bool((p - p_exact >= -ROUNDING).all() or (p - p_exact <= ROUNDING).all())
    if not one_sided or entry > total + ROUNDING:
        raise ArithmeticError(f"entries err in both directions, or by more than the sum: {errors}")
    return errors


def stopped(name: str, x: Tensor, g: Tensor, temperature: float) -> list[Row]:
    """Rows for 0 to 5 steps, and for the first number of steps after which only rounding is left."""
    exact, rows = converged(x, g, temperature), []
    for steps in count():
        p = eager(x, K, temperature, steps=steps)  # whichever kernel the library prefers
        errors = compare(with_gradient(p, g, temperature), exact)
        is_exact = max(errors) < ROUNDING
        if steps <= MOST_STEPS or is_exact:
            rows.append(Row("stopped", name, temperature, steps, errors))
        if steps >= MOST_STEPS and is_exact:
            break
    return rows


def moved(name: str, x: Tensor, g: Tensor, temperature: float) -> list[Row]:
    """Rows for each displacement; the opposite ones are checked, but look the same."""
    exact, rows = converged(x, g, temperature), []
    z = (x - khot.threshold(x, K, temperature=temperature)) / temperature
    for delta in DISPLACEMENTS:
        compare(with_gradient(torch.sigmoid(z + delta), g, temperature), exact)
        errors = compare(with_gradient(torch.sigmoid(z - delta), g, temperature), exact)
        rows.append(Row("moved", name, temperature, delta, errors))
    return rows


def show(value: float) -> str:
    return f"< {ROUNDING:.0e}" if value < ROUNDING else f"{value:.1e}"


def measure(cases: Sequence[tuple[str, float]] = CASES) -> list[Row]:
    """Measure both parts."""
    generator = torch.Generator().manual_seed(SEED)
    scores = {
        "normal": torch.randn(N, dtype=torch.float64, generator=generator),
        "Cauchy": torch.empty(N, dtype=torch.float64).cauchy_(generator=generator),
    }
    g = torch.randn(N, dtype=torch.float64, generator=generator)
    rows: list[Row] = []
    for done, (name, temperature) in enumerate(cases, 1):
        for part in (stopped, moved):
            rows += part(name, scores[name], g, temperature)
        common.say(f"{name}, T = {temperature:g}", done, len(cases))
    return rows


def report(rows: Sequence[Row]) -> str:
    """Make the page."""
    lines = {
        f"rows_{part}": "\n".join("| " + " | ".join(row.cells()) + " |" for row in rows if row.part == part)
        for part in ("stopped", "moved")
    }
    factor = max(row.errors.gradient / row.amount for row in rows if row.part == "moved")
    return TEMPLATE.format(n=N, k=K, most=MOST_STEPS, factor=factor, **lines)


def main() -> int:
    args = common.parser(__doc__, "one kind of scores").parse_args()
    torch.set_num_threads(1)  # so that no order of summation depends on the machine's cores
    rows = measure(CASES[:1] if args.quick else CASES)
    text = report(rows)
    common.write_table(common.places(args).tables / "solver-error.md", text)
    common.show(args, ({**row._asdict(), "errors": row.errors._asdict()} for row in rows), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
