"""Sparse linear regression by subset selection, n = 50, k = 5: scores θ learned by each estimator at one budget.

`y = Xβ + noise`, N = 60 rows with AR(1) correlation 0.5, five features in truth, signal three times the noise. Minimise
E[f(x)] over θ, where f is ridge regression on the subset x, extended to [0, 1]ⁿ as a convex function:

`f(x) = min_w ‖y − Xw‖²/N + (λ/N) Σ w_i²/x_i = yᵀ(I + X diag(x) Xᵀ/λ)⁻¹y/N`,

as Pilanci, Wainwright and El Ghaoui (2015) and Bertsimas and Van Parys (2020) do. What is measured is the subset of the
five greatest θ, the same for all, whatever the law it was trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..relaxations._hard import hard_topk
from ._learning import Measures, Objective, Problem, Row, poisson

N, K = 50, 5
EXAMPLES = 60
CORRELATION = 0.5
SIGNAL = 3.0
"""Variance of Xβ; that of the noise is 1."""
RIDGE = 1.0


@dataclass(frozen=True, kw_only=True)
class RegressionRow(Row):
    """Of the subset of the five greatest scores."""

    train: float
    """The objective f."""
    test: float
    """Mean squared error on new data, exactly; at least 1, the noise."""
    recovery: float
    """Share of the true features in it."""
    expected: float
    """E[f(x)] under conditional Poisson with these scores, a mean of 32 samples."""


class Data(NamedTuple):
    """m data sets, by what is needed of them."""

    gram: Tensor
    """XᵀX, (m, n, n)."""
    cross: Tensor
    """Xᵀy, (m, n)."""
    power: Tensor
    """yᵀy, (m)."""
    beta: Tensor
    """(m, n)"""
