"""Soft selection of k embeddings by their scores: Successive Halving, and the iterative softmax before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check, _shape
from .._math import halving, select
from ..boosts import Boost, double_exp


class Selection(NamedTuple):
    """k soft choices among n embeddings."""

    values: Tensor
    """(…, k, d), the chosen embeddings: weights times embeddings."""
    scores: Tensor
    """(…, k), theirs: weights times scores."""
    weights: Tensor | None
    """(…, k, n), rows that sum to 1; None if they were not asked for."""


def successive_halving_topk(
    embeddings: Tensor,
    scores: Tensor,
    k: int,
    *,
    boost: Boost | None = None,
    with_weights: bool = True,
) -> Selection:
    """Successive Halving: pair the i-th best with the i-th worst, replace pairs by weighted means, until k are left.

    A pair's weights are `σ(boost(a, b))` and the rest; the order is not differentiated.

    Args:
        embeddings: (…, n, d).
        scores: (…, n), of the same batch shape; for the default boost in [0, 1]. −inf weighs nothing beside another.
        k: how many, 1 ≤ k ≤ n. n need not be k times a power of two: absent partners weigh nothing.
        boost: how sharply pairs are told apart, from `khot.boosts`; the released code's `double_exp(20)` if not given.
        with_weights: whether to write out the (…, k, n) weights, which take far more memory than the rest.

    Returns:
        values, scores, weights, by falling score. Differentiable in both inputs where no scores tie; O(n) besides the
        sorting and the weights.

    Examples:
        >>> scores = torch.tensor([0.9, 0.1, 0.4, 0.8])
        >>> successive_halving_topk(torch.eye(4), scores, 2).scores
        tensor([0.9000, 0.7998])

    Reference: Pietruszka, Borchmann and Garncarek, "Successive Halving Top-k Operator" (2021).
    """
    _check.selection(embeddings, scores, k)
    dtype, inner = scores.dtype, _shape.compute_dtype(scores.dtype)
    played = halving.tournament(embeddings.to(inner), scores.to(inner), k, boost or double_exp(20.0))
    values, left, members, shares = played
    if not with_weights:
        return Selection(values.to(dtype), left.to(dtype), None)
    n = scores.shape[-1]
    weights = shares.new_zeros(*shares.shape[:-1], n)
    weights = weights.scatter_add(-1, members.clamp(max=n - 1), torch.where(members < n, shares, 0.0))
    return Selection(values.to(dtype), left.to(dtype), weights.to(dtype))


def iterative_topk(embeddings: Tensor, scores: Tensor, k: int, *, alpha: float | Tensor = 1.0) -> Selection:
    """The iterative softmax of Goyal et al.: slot i is a softmax around the i-th greatest score, without those before.

    `softmax(−α(v − v₍ᵢ₎)²)` over the entries of rank ≥ i.

    Args:
        embeddings: (…, n, d).
        scores: (…, n), of the same batch shape.
        k: how many, 1 ≤ k ≤ n.
        alpha: α > 0, the sharpness: of the order of the inverse squared spacing of the scores. At 1, with scores in
            [0, 1], it is all but a plain mean. A tensor must broadcast to the batch shape.

    Returns:
        values, scores, weights. Differentiable in both inputs where no scores tie; O(nk).

    Examples:
        >>> scores = torch.tensor([0.9, 0.1, 0.4, 0.8])
        >>> iterative_topk(torch.eye(4), scores, 2, alpha=1e3).scores
        tensor([0.9000, 0.8000])

    Reference: Goyal et al., "A continuous relaxation of beam search for end-to-end training of neural sequence models"
    (2018).
    """
    _check.selection(embeddings, scores, k)
    _check.sharpness(alpha, scores)
    dtype, inner = scores.dtype, _shape.compute_dtype(scores.dtype)
    embeddings, scores = embeddings.to(inner), scores.to(inner)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(inner)[..., None, None]
    order = select.order(scores)
    rank = select.ranks(order).unsqueeze(-2)
    slots = torch.arange(k, device=scores.device).unsqueeze(-1)
    peaks = scores.gather(-1, order[..., :k]).unsqueeze(-1)
    logits = -alpha * (scores.unsqueeze(-2) - peaks).square()
    weights = logits.masked_fill(rank < slots, -torch.inf).softmax(-1)
    finite = torch.where(scores.isneginf(), 0.0, scores)
    values, left = weights @ embeddings, (weights @ finite.unsqueeze(-1)).squeeze(-1)
    return Selection(values.to(dtype), left.to(dtype), weights.to(dtype))
