"""Sparse linear regression by subset selection, n = 50, k = 5: scores θ learned by each estimator at one budget.

`y = Xβ + noise`, 60 examples with AR(1) correlation 0.5, five features in truth, signal three times the noise. Minimise
E[f(x)] over θ, where f is ridge regression on the subset x, extended to [0, 1]ⁿ as a convex function,

`f(x) = min_w ‖y − Xw‖²/N + (λ/N) Σ w_i²/x_i = yᵀ(I + X diag(x) Xᵀ/λ)⁻¹y/N`.

What is measured is the subset of the five greatest θ, the same for all, whatever law they were trained with.

Reference: Pilanci, Wainwright and El Ghaoui, "Sparse learning via Boolean relaxations" (2015); Bertsimas and Van Parys,
"Sparse high-dimensional regression" (2020).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.learners import Make, Objective
from benchmarks.learning import Effort, Measures, Problem, Row, Study
from benchmarks.learning_report import main
from khot import hard_topk

N, K = 50, 5
EXAMPLES = 60
CORRELATION = 0.5
SIGNAL = 3.0
"""Variance of Xβ; that of the noise is 1."""
RIDGE = 1.0
"""λ"""
DRAWS = 32
"""Samples behind `RegressionRow.expected`."""


@dataclass(frozen=True, kw_only=True)
class RegressionRow(Row):
    """Of the subset of the five greatest scores, but for `expected`."""

    train: float
    """The objective f."""
    test: float
    """Mean squared error on new data, exactly; that of the noise alone is 1."""
    recovery: float
    """Share of the true features in it."""
    expected: float
    """E[f(x)] under the design of the estimator, a mean of 32 samples."""


class Data(NamedTuple):
    """m sets of data, by what is needed of them."""

    gram: Tensor
    """XᵀX, (m, n, n)"""
    cross: Tensor
    """Xᵀy, (m, n)"""
    power: Tensor
    """yᵀy, (m)"""
    beta: Tensor
    """(m, n)"""


def data(seeds: Sequence[int]) -> Data:
    """One set for each seed; |β_i| is uniform in [½, 3/2] before it is scaled to `SIGNAL`."""
    return Data(*(torch.stack(each) for each in zip(*map(_one, seeds), strict=True)))


def _one(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    covariance = _covariance()
    x = torch.randn(EXAMPLES, N, dtype=torch.float64, generator=generator) @ torch.linalg.cholesky(covariance).mT
    support = torch.randperm(N, generator=generator)[:K]
    size = torch.rand(K, dtype=torch.float64, generator=generator) + 0.5
    sign = torch.randint(2, (K,), generator=generator) * 2 - 1
    beta = torch.zeros(N, dtype=torch.float64).index_put((support,), sign * size)
    beta = beta * (SIGNAL / (beta @ covariance @ beta)).sqrt()
    y = x @ beta + torch.randn(EXAMPLES, dtype=torch.float64, generator=generator)
    return x.mT @ x, x.mT @ y, y @ y, beta


def _covariance() -> Tensor:
    place = torch.arange(N, dtype=torch.float64)
    result: Tensor = CORRELATION ** (place[:, None] - place).abs()
    return result


def weights(d: Data, x: Tensor) -> Tensor:
    """The ridge solution w for x in [0, 1], (…, m, n): `diag(x) (λI + XᵀX diag(x))⁻¹ Xᵀy`."""
    matrix = RIDGE * torch.eye(N, dtype=x.dtype) + d.gram * x[..., None, :]
    solved: Tensor = torch.linalg.solve(matrix, d.cross.expand(x.shape)[..., None])
    return x * solved[..., 0]


def objective(d: Data) -> Objective:
    """f, (…, m, n) → (…, m)."""
    return lambda x: (d.power - (d.cross * weights(d, x)).sum(-1)) / EXAMPLES


def risk(d: Data, x: Tensor) -> Tensor:
    """The mean squared error on new data of the model on the subset x, (…, m, n) → (…, m)."""
    error = weights(d, x) - d.beta
    return 1 + ((error @ _covariance()) * error).sum(-1)


def problem(seeds: Sequence[int]) -> Problem:
    """Scores for each seed, zero at first."""
    d = data(seeds)
    fn = objective(d)

    def step(parameters: list[Tensor]) -> tuple[Tensor, Objective, Tensor]:
        return parameters[0], fn, torch.zeros(())

    def measure(parameters: list[Tensor], make: Make) -> Measures:
        (theta,) = parameters
        best = hard_topk(theta, K)
        samples = make(theta, K).sample((DRAWS,), generator=torch.Generator().manual_seed(0))
        return {
            "train": fn(best),
            "test": risk(d, best),
            "recovery": recovery(d, best),
            "expected": fn(samples).mean(0),
        }

    def choose(parameters: list[Tensor], make: Make) -> Tensor:
        return fn(hard_topk(parameters[0], K))

    return Problem(K, [torch.zeros(len(seeds), N, dtype=torch.float64)], step, measure, choose)


def recovery(d: Data, x: Tensor) -> Tensor:
    """The share of true features in k-hot x, (…, m, n) → (…, m)."""
    return (x * (d.beta != 0)).sum(-1) / K


def references(seeds: Sequence[int]) -> dict[str, Measures]:
    """The true support, and greedy forward selection by the same objective, which evaluates it 240 times; (m) each."""
    d = data(seeds)
    fn = objective(d)
    chosen = torch.zeros(len(seeds), N, dtype=torch.float64)
    for _ in range(K):
        tries = (chosen + torch.eye(N, dtype=torch.float64)[:, None]).clamp(max=1)  # (n, m, n)
        losses = fn(tries).masked_fill(chosen.mT == 1, torch.inf)
        chosen = chosen + torch.nn.functional.one_hot(losses.argmin(0), N)
    subsets = {"true features": (d.beta != 0).to(torch.float64), "greedy": chosen}
    return {
        name: {"train": fn(x), "test": risk(d, x), "recovery": recovery(d, x), "expected": fn(x)}
        for name, x in subsets.items()
    }


STUDY = Study(
    name="regression",
    row=RegressionRow,
    problem=problem,
    full=Effort(
        seeds=tuple(range(40)), steps=500, points=50, rates=(0.1, 0.03, 0.3), tuning_seeds=10, tuning_steps=500
    ),
    quick=Effort(seeds=tuple(range(10)), steps=150, points=15, rates=(0.1,), tuning_seeds=0, tuning_steps=0),
    panels={
        "test": "test loss of the top 5",
        "recovery": "true features in the top 5",
        "expected": "training objective, mean over samples",
    },
    ranked="test loss",
    columns={
        "true features": ("recovery", ".1%"),
        "objective": ("train", ".3f"),
        "objective, samples": ("expected", ".3f"),
    },
    references=references,
    tuned="the best by the training objective on ten other seeds",
    notes="Test loss, true features and objective are those of the five greatest scores; the noise alone has a test "
    "loss of 1. “Objective, samples” is its mean over samples of the design. Greedy forward selection evaluates the "
    "same objective 240 times in all.",
)


if __name__ == "__main__":
    sys.exit(main(STUDY, __doc__))
