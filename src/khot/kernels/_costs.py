"""The native kernels of a soft top-k with costs."""

from typing import Any

import torch
from torch import Tensor

from .._math import threshold
from .._math.cdfs import Cdf
from .._shape import Mask, PerRow, per_row
from ._native import WIDE, call


def topk(
    x: Tensor,
    k: PerRow,
    temperature: PerRow,
    mask: Mask,
    costs: Tensor,
    cdf: str,
    *,
    gives_margins: bool = False,
    path: int = WIDE,
) -> tuple[Tensor, Tensor]:
    """Return y = F((x/c − τ)/T) with Σ c·y = k, like x (…, n), and which rows (rows) are left to another method.

    With `gives_margins`, x holds the scores per cost, and the result is (x − τ)/T. Rows that are left are junk.
    """
    x = x.contiguous()
    out, is_left = torch.empty_like(x), torch.empty(x.shape[:-1].numel(), dtype=torch.bool, device="cpu")
    if x.numel():
        rest = (gives_margins, out.data_ptr(), is_left.data_ptr())
        call("khot_cost_topk", x, k, temperature, mask, path, cdf, *rest, costs=costs)
    return out, is_left


def margin(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Tensor, cdf: Cdf, path: int = WIDE) -> Tensor:
    """Return z as `_math.threshold.margin` does with costs, of scores x (…, n) per cost."""
    z, is_left = topk(x, k, temperature, mask, costs, cdf.name, gives_margins=True, path=path)
    if bool(is_left.any()):
        scores, size, heat, allowed, prices = some((x, per_row(k, x), per_row(temperature, x), mask, costs), is_left)
        rest = threshold.margin(scores, size, heat, allowed, prices, cdf, early_stop=True)
        z.view(-1, x.shape[-1])[is_left] = rest
    return z


def some(arguments: tuple[Any, ...], which: Tensor) -> tuple[Any, ...]:
    """Return the arguments x, k, T, mask and costs of some of the rows."""
    x, k, temperature, mask, costs = arguments
    numbers = (per_row(t, x).reshape(-1)[which] if isinstance(t, Tensor) else t for t in (k, temperature))
    entries = (None if t is None else t.reshape(-1, x.shape[-1])[which] for t in (mask, costs))
    return x.reshape(-1, x.shape[-1])[which], *numbers, *entries


def pull(g: Tensor, y: Tensor, temperature: PerRow, costs: Tensor, cdf: str, *, path: int = WIDE) -> Tensor:
    """Return the cotangent of x for that of y; all like y (…, n)."""
    g, y = g.to(y.dtype).contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    if y.numel():
        call("khot_topk_pull", y, 0.0, temperature, None, path, cdf, g.data_ptr(), dx.data_ptr(), None, costs=costs)
    return dx
