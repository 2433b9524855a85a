"""SOFT top-k, re-implemented for comparison."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .implicit import implicit

EPSILON = 0.1
ITERATIONS = 200


def soft(x: Tensor, k: float, *, epsilon: float = EPSILON, iterations: int = ITERATIONS) -> Tensor:
    """Top-k as entropic optimal transport of the scores to two anchors, by Sinkhorn's iteration.

    Our re-implementation of Xie et al., "Differentiable top-k with optimal transport" (2020): anchors 0 and 1, squared
    cost divided by its maximum M over the row, entropic weight ε, target marginals ((n − k)/n, k/n). The plan's column
    at the anchor 1, times n, is the soft k-hot.

    The paper differentiates the converged plan implicitly. With two anchors the plan depends on the costs through their
    difference `(2x − 1)/M` alone, it is σ(((2x − 1)/M − τ)/ε), and the gradient is that of the threshold family: hence
    σ_k at the temperature εM/2. The gradient through M is included.

    Args:
        x: (…, n) scores.
        k: 0 < k < n, whole or fractional.
        epsilon: ε > 0.
        iterations: how many sweeps.
    """
    largest = torch.maximum(x.square(), (x - 1).square()).amax(-1, keepdim=True)
    return implicit((2 * x - 1) / (largest * epsilon), partial(_sinkhorn, k=k, iterations=iterations))


def _sinkhorn(difference: Tensor, k: float, iterations: int) -> Tensor:
    """n times the second column of the plan for costs (difference, 0) in units of ε.

    Sinkhorn is indifferent to a constant per row of the plan, so one cost may be taken off the other. The difference is
    halved between the two columns, which keeps both kernels within e^{±1/2ε}.
    """
    n = difference.shape[-1]
    off, on = (difference / -2).exp_(), (difference / 2).exp_()  # the kernel's columns, (…, n)
    on_weight = off_weight = torch.ones_like(difference[..., :1])
    u, spare = torch.empty_like(difference), torch.empty_like(difference)
    for _ in range(iterations):
        torch.mul(off, off_weight, out=u).addcmul_(on, on_weight).reciprocal_()  # row sums 1: all is times n
        off_weight = (n - k) / torch.mul(off, u, out=spare).sum(-1, keepdim=True)
        on_weight = k / torch.mul(on, u, out=spare).sum(-1, keepdim=True)
    return u.mul_(on).mul_(on_weight)
