"""Derivatives of y = F(z), z = (x − τ)/T with Σ c·y = k, in the last dim; costs c are 1 where there are none.

With v = c·F'(z), S = Σv and w = v/S, everything follows from one line:

    dz = u − ⟨w, u⟩ + (dk − ⟨y, dc⟩)/S,   u = (dx − z·dT)/T,   and   dy = F'(z)·dz.

All of it is plain differentiable torch, so that backward has a derivative too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cdfs import Cdf, find, slope
from .sums import row_sum


class Linear(NamedTuple):
    """What the derivative at a point needs."""

    z: Tensor
    """(…, n) margins, finite: where one is infinite its v is 0."""
    weight: Tensor
    """(…, n) w; 0 in a saturated row."""
    total: Tensor
    """(…, 1) S."""
    scale: Tensor
    """(…, 1) T."""


def push(dx: Tensor, dk: Tensor, dt: Tensor, at: Linear) -> Tensor:
    """dz for tangents dx (…, n), dk and dT (…, 1)."""
    u = (dx - at.z * dt) / at.scale
    return u - _sum(at.weight * u) + _ratio(dk, at.total)


def pull(dz: Tensor, at: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """The transpose of `push`: cotangents of x (…, n), k and T (…)."""
    mass = _sum(dz)
    dx = (dz - at.weight * mass) / at.scale
    return dx, _ratio(mass, at.total).squeeze(-1), -_sum(dx * at.z).squeeze(-1)


def value(y: Tensor, temperature: Tensor, cdf: Cdf) -> tuple[Tensor, Linear]:
    """v and the rest for y = F(z), from y (…, n) and T (…) alone; F has a quantile and F′ as a function of y."""
    assert cdf.slope_at is not None
    assert cdf.quantile is not None
    info = torch.finfo(y.dtype)
    inner = y.clamp(info.tiny, 1 - info.eps / 2)
    v = torch.where((y <= 0) | (y >= 1), 0.0, cdf.slope_at(inner))
    total = _sum(v)
    return v, Linear(cdf.quantile(inner), _ratio(v, total), total, temperature.to(y.dtype).unsqueeze(-1))


def margin(z: Tensor, temperature: Tensor, costs: Tensor | None, cdf: Cdf) -> Linear:
    """The same for any F from z (…, n), with v·c for v where there are costs."""
    infinite = z.isinf()
    finite = torch.where(infinite, cdf.center, z)
    scale = temperature.to(z.dtype).unsqueeze(-1)
    if cdf.log_density is None:
        v = slope(cdf, z) if costs is None else costs * slope(cdf, z)
        total = _sum(v)
        return Linear(finite, _ratio(v, total), total, scale)
    log_v = cdf.log_density(finite) if costs is None else costs.log() + cdf.log_density(finite)
    log_v = torch.where(infinite, -torch.inf, log_v)
    log_total = log_v.logsumexp(-1, keepdim=True)
    log_total = torch.where(log_total.isinf(), 0.0, log_total)
    return Linear(finite, (log_v - log_total).exp(), log_total.exp(), scale)


def topk_pull(g: Tensor, y: Tensor, temperature: Tensor, cdf: int, p: float) -> tuple[Tensor, Tensor]:
    """Cotangents of x (…, n) and k (…) for that of y: what a training step needs, and what a kernel fuses."""
    v, at = value(y, temperature, find(cdf, p))
    dx, dk, _ = pull(v * g, at)
    return dx.contiguous(), dk.to(torch.float64).contiguous()


def _sum(t: Tensor) -> Tensor:
    return row_sum(t).to(t.dtype)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 for a saturated row, where b is 0 or so small that 1/b overflows."""
    is_saturated = b < torch.finfo(b.dtype).tiny
    return torch.where(is_saturated, 0.0, a / torch.where(is_saturated, 1.0, b))
