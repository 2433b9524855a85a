"""From the layout of a call to rows on the last dim, and back: the only `movedim`."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch import is_traced_number

PerRow = float | Tensor  # a number, or a tensor that broadcasts to the batch shape: the shape of `x` without `dim`
Mask = Tensor | None  # booleans that broadcast to the shape of `x`; True = may be chosen
Costs = Tensor | None  # positive numbers that broadcast to the shape of `x`
Group = Any  # None, or the torch.distributed.ProcessGroup whose processes hold the parts of a row; or a list of them
_NORMAL = {dtype: (torch.finfo(dtype).tiny, torch.finfo(dtype).max) for dtype in (torch.float32, torch.float64)}
_COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_NORMAL |= {dtype: _NORMAL[compute] for dtype, compute in _COMPUTE.items()}


class Rows(NamedTuple):
    """Hold a call in the layout that `ops` works on."""

    x: Tensor  # (…, n) scores in the compute dtype
    k: PerRow  # a number, or (…) float64
    # A number or (…) float64, within the positive range of the compute dtype; NaN where it was not positive.
    temperature: PerRow
    mask: Tensor | None  # (…, n) bool, a view, or None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: half precision is computed in float32 and rounded once."""
    return _COMPUTE.get(dtype, dtype)


def to_rows(
    x: Tensor,
    k: PerRow,
    temperature: PerRow,
    mask: Mask,
    dim: int,
    dtype: torch.dtype,
    range_of: torch.dtype | None = None,
) -> Rows:
    """Put `dim` last and bring every argument to that layout; all of it differentiable.

    T is brought into the normal range of `range_of`, or if None of `dtype`.
    """
    if mask is not None:
        mask = last(_expanded(mask, x.shape), dim)
    x = last(x if x.dtype == dtype else x.to(dtype), dim)
    is_tensor = type(k) is not int and (isinstance(k, Tensor) or is_traced_number(k))  # isinstance is slow
    k = per_row(k, x) if is_tensor else float(k)
    return Rows(x, k, _positive(temperature, x, range_of or dtype), mask)


def per_entry(value: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor that broadcasts to `x` with `dim` last."""
    return last(value.to(dtype).expand(x.shape), dim)


def per_row(value: PerRow, x: Tensor) -> Tensor:
    """Return a number, or a tensor that broadcasts to the rows of x (…, n), as float64 (…); a view."""
    if isinstance(value, Tensor):
        value = value if value.dtype == torch.float64 else value.to(torch.float64)
    elif type(value) is not float and is_traced_number(value):
        value = torch.as_tensor(value, dtype=torch.float64, device=x.device)
    else:
        value = torch.full((), value, dtype=torch.float64, device=x.device)
    return _expanded(value, x.shape[:-1])


def _expanded(t: Tensor, shape: torch.Size) -> Tensor:
    """Return `t.expand(shape)`, which costs time where it changes nothing.

    Shapes of unequal lengths are not compared, because torch.export would demand of a dynamic size that it differs.
    """
    return t if t.ndim == len(shape) and t.shape == shape else t.expand(shape)


def with_one_more(z: Tensor, rows: Rows, fill: float) -> tuple[Tensor, Rows]:
    """Return z (…, n) and its rows with one more entry, which is `fill` in both."""
    z, x = (torch.cat((t, t.new_full((*t.shape[:-1], 1), fill)), -1) for t in (z, rows.x))
    mask = None if rows.mask is None else torch.cat((rows.mask, torch.ones_like(x[..., :1], dtype=torch.bool)), -1)
    return z, rows._replace(x=x, mask=mask)


def from_rows(y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Undo `to_rows` for a result of shape (…, n); contiguous, as from torch's own functions."""
    if dim not in (-1, y.ndim - 1):
        y = y.movedim(-1, dim).contiguous()
    return y if y.dtype == dtype else y.to(dtype)


def last(t: Tensor, dim: int) -> Tensor:
    """Move `dim` to the end."""
    return t if dim in (-1, t.ndim - 1) else t.movedim(dim, -1)


def _positive(temperature: PerRow, x: Tensor, dtype: torch.dtype) -> PerRow:
    """Return T within the normal range of a dtype; a tensor is NaN where it is not positive.

    1e-50 would round to 0 in float32, and (x − τ)/0 has no sign; the smallest normal number is hard enough.
    """
    least, most = _NORMAL[dtype]
    if type(temperature) is not float and (isinstance(temperature, Tensor) or is_traced_number(temperature)):
        rows = per_row(temperature, x)
        return torch.where(rows > 0, rows.clamp(least, most), torch.nan)
    temperature = float(temperature)
    return min(max(temperature, least), most) if temperature > 0 else math.nan
