"""Statistical top-k: torch's own operations, which have every derivative, and a kernel for plain rows without one."""

import torch
from torch import Tensor

from .._math import statistical
from .._shape import Mask, PerRow
from ..kernels import cpu as _native
from ._topk import HAS_NATIVE, _differentiates, hard_topk, is_plain


def statistical_cutoff(x: Tensor, k: PerRow, mask: Mask, *, exact: bool) -> Tensor:
    """Return θ (…, 1) in float64, or in x's dtype if `exact`; k is a number or (…) float64."""
    if exact:
        return statistical.exact_cutoff(x, mask, hard_topk(x.detach(), k, mask))
    return statistical.cutoff(x, k, mask)


def statistical_topk(x: Tensor, k: PerRow, mask: Mask, *, exact: bool, smooth: float) -> Tensor:
    """Return max(x − θ, 0), or its smooth form, along the last dim of x (…, n); differentiable in x and k."""
    n = x.shape[-1]
    if HAS_NATIVE and not exact and mask is None and isinstance(k, float) and 0 < k < n:
        if x.numel() and not _differentiates(x) and is_plain(x):
            y, theta = _native.statistical(x, statistical.multiplier_of(k / n), smooth)
            if bool(torch.isfinite(theta).all()):  # else scores of −inf are left out, or a row is NaN
                return y
    return statistical.above(x, statistical_cutoff(x, k, mask, exact=exact), mask, smooth)
