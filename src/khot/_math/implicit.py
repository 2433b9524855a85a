"""Derivatives of y = F(z), z = (x − τ)/T with Σ y = k, in the last dim.

With v = F'(z), S = Σv and w = v/S, everything follows from one line:

    dz = u − ⟨w, u⟩ + dk/S,   u = (dx − z·dT)/T,   and   dy = v·dz.

All of it is plain differentiable torch, so that backward has a derivative too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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


def sigmoid_value(p: Tensor, temperature: Tensor) -> tuple[Tensor, Linear]:
    """v and the rest for p = σ(z), from p (…, n) and T (…) alone."""
    info = torch.finfo(p.dtype)
    inner = p.clamp(info.tiny, 1 - info.eps / 2)
    v = p * (1 - p)
    total = _sum(v)
    z = inner.log() - (-inner).log1p()
    return v, Linear(z, _ratio(v, total), total, temperature.to(p.dtype).unsqueeze(-1))


def sigmoid_margin(z: Tensor, temperature: Tensor) -> Linear:
    """The same from z (…, n), exact where p(1 − p) underflows."""
    finite = torch.where(z.isinf(), 0.0, z)
    log_v = torch.where(z.isinf(), -torch.inf, logsigmoid(finite) + logsigmoid(-finite))
    log_total = log_v.logsumexp(-1, keepdim=True)
    log_total = torch.where(log_total.isinf(), 0.0, log_total)
    return Linear(finite, (log_v - log_total).exp(), log_total.exp(), temperature.unsqueeze(-1))


def sigmoid_topk_pull(g: Tensor, p: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of x (…, n) and k (…) for that of p: what a training step needs, and what a kernel fuses."""
    v, at = sigmoid_value(p, temperature)
    dx, dk, _ = pull(v * g, at)
    return dx.contiguous(), dk.to(torch.float64).contiguous()


def _sum(t: Tensor) -> Tensor:
    return row_sum(t).to(t.dtype)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 for a saturated row, b = 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
