"""DTop-K of Differentiable Model Scaling (2024), which HiDrop (2026) uses for tokens; our re-implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def dtopk(scores: Tensor, ratio: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return 1 for the tokens that are kept and 0 for others, with the gradient of the soft mask to `ratio` alone.

    `m = σ(N·(c′ − a))`, c′ the rank over N in (0, 1], a the ratio that is dropped; a token is kept where m ≥ ½. Ranks
    are piecewise constant, so that scores get no gradient.

    Args:
        scores: (batch, n).
        ratio: a, in [0, 1]; a number or (batch,).
        mask: boolean (batch, n); N counts these.
    """
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    count = mask.sum(-1, keepdim=True).to(scores.dtype)
    values = scores.detach().masked_fill(~mask, torch.inf)
    below = (values.unsqueeze(-2) <= values.unsqueeze(-1)) & mask.unsqueeze(-2)  # (batch, n, n)
    rank = below.sum(-1).to(scores.dtype) / count
    soft = torch.where(mask, torch.sigmoid(count * (rank - ratio.reshape(-1, 1))), 0.0)
    return (soft >= 0.5).to(soft.dtype) + (soft - soft.detach())
