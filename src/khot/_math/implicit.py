"""Derivatives of y = F(z), z = (x − τ)/T with Σ c·y = k, along the last dim; costs c are 1 where there are none.

With v = F'(z), S = Σ c·v and w = c·v/S, everything follows from one line:

    dz = u − ⟨w, u⟩ + (dk − ⟨y, dc⟩)/S,   u = (dx − z·dT)/T,   and   dy = v·dz.

All functions are differentiable torch operations, so that a backward has a derivative too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .cdfs import Cdf, row_sum


class Linear(NamedTuple):
    """The quantities of the formula at one point."""

    z: Tensor  # (…, n) margins, finite: where one is infinite its v is 0
    slope: Tensor  # (…, n) v
    weight: Tensor  # (…, n) w, which sums to 1; 0 in a saturated row
    total: Tensor  # (…, 1) S
    scale: Tensor  # (…, 1) T, or one number


def at_value(y: Tensor, temperature: Tensor | float, cdf: Cdf) -> Linear:
    """Return the quantities from y = F(z) (…, n) and T (…) alone; F has a `quantile` and a `slope_at`.

    An entry that has rounded to 0 or 1 has no slope.
    """
    assert cdf.slope_at is not None
    assert cdf.quantile is not None
    is_open = (y > 0) & (y < 1)
    inner = torch.where(is_open, y, 0.5)  # a number that harms no derivative
    v = torch.where(is_open, cdf.slope_at(inner), 0.0 * y)  # NaN stays NaN
    total = _sum(v)
    return Linear(cdf.quantile(inner), v, _ratio(v, total), total, _scale(temperature, y))


def at_margin(z: Tensor, temperature: Tensor | float, costs: Tensor | None, cdf: Cdf) -> Linear:
    """Return the quantities for any F from z (…, n): exact where y rounds to 0 or 1, unless F′ underflows."""
    infinite = z.isinf()
    finite = torch.where(infinite, cdf.center, z)
    if cdf.log_density is None:
        v = torch.where(infinite, 0.0, cdf.density(finite))
        weighted = v if costs is None else costs * v
        total = _sum(weighted)
        return Linear(finite, v, _ratio(weighted, total), total, _scale(temperature, z))
    log_v = cdf.log_density(finite)
    v = torch.where(infinite, 0.0, log_v.exp())
    if costs is not None:
        log_v = costs.log() + log_v
    is_saturated = infinite.all(-1, keepdim=True)
    log_v = torch.where(is_saturated, 0.0, torch.where(infinite, -torch.inf, log_v))
    weight = torch.where(is_saturated, 0.0, log_v.softmax(-1))  # sums to 1 however small v is
    total = torch.where(is_saturated, 0.0, log_v.logsumexp(-1, keepdim=True).exp())
    return Linear(finite, v, weight, total, _scale(temperature, z))


def push(dx: Tensor, dk: Tensor, dt: Tensor, at: Linear) -> Tensor:
    """Return dz for tangents dx (…, n), dk and dT (…, 1)."""
    return _centered(dx, dt, at) + _ratio(dk, at.total)


def push_value(dx: Tensor, dk: Tensor, dt: Tensor, at: Linear) -> Tensor:
    """Return dy = v·dz for the same tangents, with w·dk for v·dk/S: finite in rows however sharp."""
    return at.slope * _centered(dx, dt, at) + at.weight * dk


def pull(dz: Tensor, at: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of x (…, n), k and T (…) for that of z: the transpose of `push`."""
    mass = _sum(dz)
    dx = (dz - at.weight * mass) / at.scale
    return dx, _ratio(mass, at.total).squeeze(-1), -_sum(dx * at.z).squeeze(-1)


def pull_value(g: Tensor, at: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of x (…, n), k and T (…) for that of y: the transpose of `push_value`.

    An entry without slope and weight counts as deleted: its g, NaN or infinite, must not reach the others.
    """
    is_deleted = (at.slope == 0) & (at.weight == 0)
    mean = _sum(at.weight * torch.where(is_deleted, 0.0, g))
    dx = at.slope * torch.where(is_deleted, 0.0, g - mean) / at.scale
    return dx, mean.squeeze(-1), -_sum(dx * at.z).squeeze(-1)


def _centered(dx: Tensor, dt: Tensor, at: Linear) -> Tensor:
    u = (dx - at.z * dt) / at.scale
    return u - _sum(at.weight * u)


def _scale(temperature: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(like.dtype).unsqueeze(-1)
    return torch.full((), temperature, dtype=like.dtype, device=like.device)


def _sum(t: Tensor) -> Tensor:
    return row_sum(t).to(t.dtype)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a/b, and 0 for a saturated row, where b is 0 or so small that 1/b overflows."""
    is_saturated = b < torch.finfo(b.dtype).tiny
    return torch.where(is_saturated, 0.0, a / torch.where(is_saturated, 1.0, b))
