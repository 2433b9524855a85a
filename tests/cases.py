"""The table that drives the battery: every relaxation, with what it promises; and the scores of the robustness grid."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from torch import Tensor

import khot
from khot.testing._laws import Relaxation


class Case(NamedTuple):
    fn: Relaxation
    promises: dict[str, Any]


RELAXATIONS = {
    "sigmoid_topk": Case(khot.sigmoid_topk, {"quantile": torch.logit}),
}

TEMPERATURES = (1e-3, 1e-2, 0.1, 1.0, 10.0)
DISTRIBUTIONS = (
    "normal",
    "uniform",
    "cauchy",
    "constant",
    "ties",
    "bimodal",
    "offset",
    "sorted",
    "exponential",
    "outlier",
)


def counts(n: int) -> tuple[float, ...]:
    return 0.5, 1, 10, n / 2, n - 1, n - 0.5


def scores(name: str, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A named vector of the robustness grid, the same at every call."""
    generator = torch.Generator().manual_seed(DISTRIBUTIONS.index(name))
    normal = torch.randn(n, generator=generator, dtype=torch.float64)
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    match name:
        case "normal":
            x = normal
        case "uniform":
            x = uniform
        case "cauchy":
            x = torch.tan(math.pi * (uniform - 0.5))
        case "constant":
            x = torch.full_like(normal, 0.7)
        case "ties":
            x = torch.floor(4 * uniform)
        case "bimodal":
            x = normal + torch.where(uniform > 0.5, 10.0, -10.0)
        case "offset":
            x = normal + 1000
        case "sorted":
            x = normal.sort().values
        case "exponential":
            x = -torch.log1p(-uniform)
        case "outlier":
            x = normal.index_fill(0, torch.tensor([n // 3]), 1e4)
    return x.to(dtype)


def exact(x: Tensor, k: float, temperature: float) -> np.ndarray:
    """σ_k of one row in float64, its root found by bisection and Brent's method: nothing in common with khot's solver.

    The shift is measured from the ⌈k⌉-th greatest score, so that (x − τ)/T keeps its digits when |x|/T is large.
    """
    values = x.double().numpy()
    n = len(values)
    anchor = np.partition(values, n - math.ceil(k))[n - math.ceil(k)]
    u = (values - anchor) / temperature

    def excess(shift: float) -> float:
        return float(expit(u - shift).sum()) - k

    low, high = u.min() - logit(k / n) - 1e-9, u.max() - logit(k / n) + 1e-9
    while high - low > 1 and low < (middle := low / 2 + high / 2) < high:
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    shift = low
    if excess(low) > 0 > excess(high):
        shift = brentq(excess, low, high, xtol=1e-15, rtol=1e-15)
    return expit(u - shift)
