"""Two published shifted or scaled sigmoids without a solver, re-implemented for comparison. Autograd differentiates."""

from __future__ import annotations

import torch
from torch import Tensor


def ncpss(x: Tensor, k: float) -> Tensor:
    """The scaled sigmoid of NCPSS: sigmoids scaled towards 0 or towards 1 so that they sum to k.

    Our re-implementation of the scaling in Pervez, Lippe and Gavves, "Scalable subset sampling with neural conditional
    Poisson networks" (2023): with `p = σ(x)` and `s = Σp`, `k p/s` if `s ≥ k`, else `1 − (n − k)(1 − p)/(n − s)`. It is
    not translation invariant: there is no shift, and a common offset of the scores changes the result.

    Args:
        x: (…, n) scores.
        k: 0 < k < n, whole or fractional.
    """
    n = x.shape[-1]
    p = x.sigmoid()
    s = p.sum(-1, keepdim=True)
    is_above = s >= k
    # Both cases are affine in p. The branch not taken must not divide by 0, or its NaN would enter the gradient.
    scale = torch.where(is_above, k / s, (n - k) / torch.where(is_above, 1.0, n - s))
    return p * scale + torch.where(is_above, 0.0, 1 - scale)


def dftopk(x: Tensor, k: float, *, temperature: float = 1.0) -> Tensor:
    """The sigmoid around the middle between the k-th and the (k+1)-th score: `σ((x − (x₍k₎ + x₍k+1₎)/2)/T)`.

    Our re-implementation of DFTopK (Zhu et al., "Differentiable fast top-k selection for large-scale recommendation",
    2025). A selection in O(n) and no solver, but the result does not sum to k. The gradient
    reaches the two scores that make the threshold.

    Args:
        x: (…, n) scores.
        k: a whole number, 0 < k < n.
        temperature: T > 0.
    """
    # The k+1 greatest in any order, then the two least of them: on a CPU half the time of two calls of kthvalue.
    pair = x.topk(int(k) + 1, sorted=False).values.topk(2, largest=False, sorted=False).values
    return ((x - pair.mean(-1, keepdim=True)) / temperature).sigmoid()
