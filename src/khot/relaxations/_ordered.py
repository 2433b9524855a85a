"""Ordered soft top-k: k slots instead of one mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check, _shape
from .._math import select
from ._threshold import sigmoid_topk


def ordered_topk(
    x: Tensor,
    k: int,
    *,
    relaxation: Callable[..., Tensor] = sigmoid_topk,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Soft slots: row j is a distribution over the entries that is peaked at the j-th greatest score.

    The ladder `P_j = f(x, j) − f(x, j − 1)`, j = 1 … k, of a relaxation f. For σ_k it needs a temperature well below
    the spacing of the scores.

    Args:
        x: scores, (…, n) with n at `dim`.
        k: how many slots, a whole number 0 ≤ k ≤ n.
        relaxation: the f, a function like `sigmoid_topk`.
        dim, temperature, mask: as for `sigmoid_topk`.

    Returns:
        (…, k, n), whatever `dim` was: nonnegative, rows sum to 1 (to a rounding of k), columns to `f(x, k)`; for T → 0
        row j is one-hot at the j-th greatest score. One solve of k rows for each row of `x`.

    Examples:
        >>> ordered_topk(torch.tensor([0.0, 2.0, 1.0]), 2, temperature=0.1)
        tensor([[3.0590e-07, 9.9331e-01, 6.6927e-03],
                [6.6927e-03, 6.6927e-03, 9.8661e-01]])
    """
    _check.scores(x, dim)
    _check.whole("k", k, x.shape[dim], f"size of dim {dim}")
    _check.temperature(temperature, x, dim)
    _check.mask(mask, x)
    rows = _shape.last(x, dim).unsqueeze(-2)
    steps = torch.arange(1, k + 1, dtype=torch.float64, device=x.device)
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    if mask is not None:
        mask = _shape.last(mask.expand(x.shape), dim).unsqueeze(-2)
    ladder = relaxation(rows.expand(*rows.shape[:-2], k, -1), steps, temperature=temperature, mask=mask)
    below = torch.cat((torch.zeros_like(ladder[..., :1, :]), ladder[..., :-1, :]), -2)[..., :k, :]
    # f rises in k; where it is 1 to rounding it may fall by one.
    return (ladder - below).clamp(min=0)


class SoftTopK(NamedTuple):
    """The result of `soft_topk`."""

    values: Tensor
    """The soft sorted values, with k in the place of n."""
    indices: Tensor
    """Where the k greatest scores are, as from `torch.topk`; ties by lowest index."""
    weights: Tensor
    """(…, k, n), the slots: values are weights times scores."""


def soft_topk(
    x: Tensor, k: int, *, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None
) -> SoftTopK:
    """`torch.topk` with soft values: the k greatest scores in falling order, differentiable in all of them.

    `values = P x` with `P = ordered_topk(x, k)`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k: how many, a whole number 0 ≤ k ≤ n.
        dim, temperature, mask: as for `ordered_topk`.

    Returns:
        values, indices and weights. The values tend to those of `torch.topk` as T → 0. A score of −inf weighs nothing,
        and a slot in which +inf has a share is +inf.

    Examples:
        >>> soft_topk(torch.tensor([0.0, 2.0, 1.0]), 2, temperature=0.1)[:2]
        (tensor([1.9933, 1.0000]), tensor([1, 2]))
    """
    weights = ordered_topk(x, k, dim=dim, temperature=temperature, mask=mask)
    rows = _shape.last(x, dim)
    if mask is not None:
        rows = rows.masked_fill(~_shape.last(mask.expand(x.shape), dim), -torch.inf)
    finite = torch.where(rows.isinf(), 0.0, rows)
    forced = (weights * (rows == torch.inf).unsqueeze(-2)).sum(-1) > 0
    values = (weights @ finite.unsqueeze(-1)).squeeze(-1).masked_fill(forced, torch.inf)
    indices = select.order(rows)[..., :k]
    return SoftTopK(_shape.from_rows(values, dim, x.dtype), _shape.from_rows(indices, dim, indices.dtype), weights)
