"""Statistical top-k: torch's own operations, which have every derivative, and a kernel for plain rows without one."""

import torch
from torch import Tensor

from .._math import statistical
from .._shape import Mask, PerRow
from ..kernels import cpu as _native
from ._topk import HAS_NATIVE, _differentiates, hard_topk, is_plain


def statistical_cutoff(x: Tensor, k: PerRow, mask: Mask, *, exact: bool) -> Tensor:
    """Return θ (…, 1) in float64, or in x's dtype if `exact`; k is a number or (…) float64."""
    theta = quick_cutoff(x, k, mask, exact=exact)
    if theta is not None:
        return theta
    if exact:
        return statistical.exact_cutoff(x, mask, hard_topk(x.detach(), k, mask))
    return statistical.cutoff(x, k, mask)


def statistical_topk(x: Tensor, k: PerRow, mask: Mask, *, exact: bool, smooth: float) -> Tensor:
    """Return max(x − θ, 0), or its smooth form, along the last dim of x (…, n); differentiable in x and k."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if quick_cutoff(x, k, mask, y, exact=exact, smooth=smooth) is not None:
        return y
    return statistical.above(x, statistical_cutoff(x, k, mask, exact=exact), mask, smooth)


def quick_cutoff(
    x: Tensor, k: PerRow, mask: Mask, y: Tensor | None = None, *, exact: bool = False, smooth: float = 0.0
) -> Tensor | None:
    """Return θ by the CPU's kernel, which writes the result to `y`; None where it does not serve.

    It does not where there are masks, gradients, or scores that are not finite.
    """
    n = x.shape[-1]
    if not HAS_NATIVE or mask is not None or not isinstance(k, float) or not 0 < k < n or not x.numel():
        return None
    if not is_plain(x) or _differentiates(x):  # in this order: torch.compile cannot trace the second
        return None
    theta = _native.statistical(x, k if exact else statistical.multiplier_of(k / n), y, smooth=smooth, exact=exact)
    return theta if bool(torch.isfinite(theta).all()) else None
