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
    """(…) float64."""
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
    if mask is not None:
        mask = last(mask.expand(x.shape), dim)
    x = last(x if x.dtype == dtype else x.to(dtype), dim)
    return Rows(x, _per_row(k, x), _positive(temperature, x), mask)


def per_entry(value: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A tensor that broadcasts to `x`, with `dim` last."""
    return last(value.to(dtype).expand(x.shape), dim)


def from_rows(y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Undo `to_rows` for a result of shape (…, n)."""
    if dim not in (-1, y.ndim - 1):
        y = y.movedim(-1, dim)
    return y if y.dtype == dtype else y.to(dtype)


def last(t: Tensor, dim: int) -> Tensor:
    """`dim` moved to the end."""
    return t if dim in (-1, t.ndim - 1) else t.movedim(dim, -1)


def _per_row(value: float | Tensor, x: Tensor) -> Tensor:
    """A number or a broadcastable tensor as float64 of the batch shape."""
    batch = x.shape[:-1]
    if isinstance(value, Tensor):
        return value.to(torch.float64).expand(batch)
    return torch.full(batch, float(value), dtype=torch.float64, device=x.device)


def normal(temperature: float, dtype: torch.dtype) -> float:
    """A positive number within the normal range of the dtype.

    1e-50 would round to 0 in float32, and (x − τ)/0 has no sign; the smallest normal number is hard enough.
    """
    info = torch.finfo(dtype)
    return min(max(float(temperature), info.tiny), info.max)


def _positive(temperature: float | Tensor, x: Tensor) -> Tensor:
    if not isinstance(temperature, Tensor):
        return _per_row(normal(temperature, x.dtype), x)
    rows, info = _per_row(temperature, x), torch.finfo(x.dtype)
    return torch.where(rows > 0, rows.clamp(info.tiny, info.max), torch.nan)
