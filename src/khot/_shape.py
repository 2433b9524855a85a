"""From the user's layout to rows on the last dim, and back: the only `movedim`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A call in the layout that `_math` works on."""

    x: Tensor
    """(…, n) scores in the compute dtype."""
    k: Tensor
    """(…) float64, a view where it can be one."""
    temperature: Tensor
    """(…) float64, within the positive range of the compute dtype; NaN where it was not positive."""
    mask: Tensor | None
    """(…, n) bool, a view, or None."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32 and rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_rows(
    x: Tensor,
    k: float | Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    dim: int,
    dtype: torch.dtype,
) -> Rows:
    """Put `dim` last and bring every argument to its place there; all of it differentiable."""
    batch = list(x.shape)
    del batch[dim]
    return Rows(
        x.to(dtype).movedim(dim, -1),
        per_row(k, batch, x.device),
        _positive(per_row(temperature, batch, x.device), dtype),
        None if mask is None else mask.expand(x.shape).movedim(dim, -1),
    )


def from_rows(y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Undo `to_rows` for a result of shape (…, n)."""
    return y.movedim(-1, dim).to(dtype)


def per_row(value: float | Tensor, batch: list[int], device: torch.device) -> Tensor:
    """A number or a broadcastable tensor as a float64 view of the batch shape."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=device)
    return value.to(torch.float64).expand(batch)


def _positive(temperature: Tensor, dtype: torch.dtype) -> Tensor:
    # 1e-50 would round to 0 in float32, and (x − τ)/0 has no sign; the smallest normal number is hard enough.
    info = torch.finfo(dtype)
    clamped = temperature.clamp(info.tiny, info.max)
    return torch.where(temperature > 0, clamped, torch.nan)
