"""Statistical top-k on the last dim: a threshold from the mean and the deviation of a row, and what exceeds it."""

from statistics import NormalDist

import torch
from torch import Tensor

from .._shape import Mask, PerRow

_NORMAL = NormalDist()


def multiplier_of(share: float) -> float:
    """Return Φ⁻¹(1 − share) for a number in (0, 1)."""
    return -_NORMAL.inv_cdf(share)


def multipliers(k: Tensor, count: Tensor) -> Tensor:
    """Return Φ⁻¹(1 − k/count) by row; +inf for k = 0, NaN outside 0 ≤ k < count."""
    is_inside = (k > 0) & (k < count)
    share = torch.where(is_inside, k / count.clamp(min=1), 0.5)
    outside = torch.where((k == 0) & (count > 0), torch.inf, torch.nan)
    return torch.where(is_inside, -torch.special.ndtri(share), outside)


def allowed(x: Tensor, mask: Mask) -> Tensor:
    """Return which scores count: not masked, and above −inf."""
    is_finite = x != -torch.inf
    return is_finite if mask is None else mask & is_finite


def cutoff(x: Tensor, k: PerRow, mask: Mask) -> Tensor:
    """Return θ = mean + std·Φ⁻¹(1 − k/m) over the m allowed scores of each row, (…, 1) float64; differentiable.

    k is a number or (…) float64. A row with NaN or +inf is NaN, and so is one whose k is outside [0, m).
    """
    valid = allowed(x, mask)
    count = valid.sum(-1, keepdim=True).double()
    values = torch.where(valid, x, 0.0)
    mean = values.sum(-1, keepdim=True, dtype=torch.float64) / count
    centred = torch.where(valid, values - mean.to(x.dtype), 0.0)
    # The norm has gradient 0 where all scores are equal.
    deviation = torch.linalg.vector_norm(centred, dim=-1, keepdim=True, dtype=torch.float64) / count.sqrt()
    k = k.unsqueeze(-1) if isinstance(k, Tensor) else torch.full_like(count, k)
    z = multipliers(k, count)
    theta = mean + deviation * torch.where(z == torch.inf, 0.0, z)
    return torch.where((z == torch.inf) & theta.isfinite(), torch.inf, theta)


def exact_cutoff(x: Tensor, mask: Mask, chosen: Tensor) -> Tensor:
    """Return the largest allowed score that is not chosen, (…, 1); NaN where there is none."""
    rest = chosen == 0  # false where a row of NaN could not be satisfied
    largest = torch.where(rest if mask is None else rest & mask, x, -torch.inf).amax(-1, keepdim=True)
    return torch.where(largest > -torch.inf, largest, torch.nan)


def above(x: Tensor, theta: Tensor, mask: Mask, smooth: float) -> Tensor:
    """Return max(x − θ, 0), which is 0 where masked; with `smooth` = δ > 0 its C¹ form, u²/2δ up to u = δ.

    θ is (…, 1); a row whose θ is NaN is NaN.
    """
    valid = allowed(x, mask) | theta.isnan()
    # Where θ is infinite nothing exceeds it, and x − θ would have no gradient to speak of.
    is_finite = theta != torch.inf
    u = torch.where(valid & is_finite, x - torch.where(is_finite, theta, 0.0).to(x.dtype), 0.0).relu()
    if not smooth:
        return u
    low = u.clamp(max=smooth)
    return low * (u - low / 2) / smooth
