"""Ranking losses through σ_k."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from ._implicit import check_call, reduced
from ._threshold import sigmoid_topk


def precision_at_k_loss(
    x: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """1 − the share of relevant entries among the k chosen, softly.

    `1 − Σ y·σ_k(x)/k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        target: like `x`, of any real dtype; 1 where relevant, 0 elsewhere, or between.
        k: how many are chosen, > 0.
        dim, temperature, mask: as for `sigmoid_topk`.
        reduction: "mean" (over rows), "sum", or "none" (the shape of `x` without `dim`).

    Returns:
        The loss, in [0, 1]; it tends to 1 − precision@k as T → 0.

    Examples:
        >>> precision_at_k_loss(torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([1, 0, 1, 0]), 2, temperature=0.1)
        tensor(0.4967)
    """
    if not isinstance(k, Tensor):
        _check.above("k", k, 0)
    hits, count, _ = _hits(x, target, k, dim, temperature, mask, reduction)
    return reduced(1 - hits / count, reduction, x.dtype)


def recall_at_k_loss(
    x: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """1 − the share of the relevant entries that are among the k chosen, softly.

    `1 − Σ y·σ_k(x)/Σ y`.

    Args:
        x: scores, (…, n) with n at `dim`.
        target, k, dim, temperature, mask, reduction: as for `precision_at_k_loss`.

    Returns:
        The loss, in [0, 1]; it tends to 1 − recall@k as T → 0. A row with nothing relevant has loss 0.

    Examples:
        >>> recall_at_k_loss(torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([1, 0, 1, 1]), 2, temperature=0.1)
        tensor(0.6644)
    """
    hits, _, relevant = _hits(x, target, k, dim, temperature, mask, reduction)
    loss = 1 - hits / torch.where(relevant == 0, 1.0, relevant)
    return reduced(torch.where(relevant == 0, 0.0, loss), reduction, x.dtype)


def _hits(
    x: Tensor,
    target: Tensor,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ y·σ_k, k and Σ y by row."""
    check_call(x, k, dim, temperature, mask)
    _check.same_shape("target", target, x, "x")
    _check.reduction(reduction)
    y = target.to(torch.float64)
    if mask is not None:
        y = torch.where(mask, y, 0.0)
    hits = (y * sigmoid_topk(x, k, dim=dim, temperature=temperature, mask=mask)).sum(dim)
    return hits, torch.as_tensor(k, dtype=torch.float64, device=x.device), y.sum(dim)
