"""k slots instead of one mask: ordered soft top-k, Successive Halving, and the iterative softmax that preceded it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check, _shape
from .._math import halving, select
from .._shape import Mask, PerRow
from .._torch import no_autocast
from ..boosts import Boost, double_exp
from ._family import sigmoid_topk


def ordered_topk(
    x: Tensor,
    k: int,
    *,
    relaxation: Callable[..., Tensor] = sigmoid_topk,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
) -> Tensor:
    """Return k soft slots: row j is a distribution over the entries with its peak at the j-th largest score.

    `P_j = f(x, j) − f(x, j − 1)`, j = 1 … k, for a relaxation f. σ_k needs a temperature well below the spacing of the
    scores for this.

    Args:
        x: scores, (…, n) with n at `dim`.
        k: how many slots, an integer 0 ≤ k ≤ n.
        relaxation: the f, a function like `sigmoid_topk`.
        dim, temperature, mask: as for `sigmoid_topk`.

    Returns:
        (…, k, n), whatever `dim` was: nonnegative, rows sum to 1 (to a rounding of k), columns to `f(x, k)`; for T → 0
        row j is one-hot at the j-th largest score. One solve of k rows for each row of `x`.

    Examples:
        >>> ordered_topk(torch.tensor([0.0, 2.0, 1.0]), 2, temperature=0.1)
        tensor([[3.0590e-07, 9.9331e-01, 6.6927e-03],
                [6.6927e-03, 6.6927e-03, 9.8661e-01]])
    """
    _check.integer("k", k)
    _check.call(x, k, dim, temperature, mask)
    _check.function("relaxation", relaxation)
    return _ladder(x, k, relaxation, dim, temperature, mask).to(x.dtype)


def _ladder(x: Tensor, k: int, relaxation: Callable[..., Tensor], dim: int, temperature: PerRow, mask: Mask) -> Tensor:
    """Return the slots in the compute dtype: in half precision they would be differences of rounded numbers."""
    rows = _shape.last(x.to(_shape.compute_dtype(x.dtype)), dim).unsqueeze(-2)
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
    """Hold the result of `soft_topk`."""

    values: Tensor
    """The soft sorted values, with k in the place of n."""
    indices: Tensor
    """Where the k largest scores are, as from `torch.topk`; ties by lowest index."""
    weights: Tensor
    """(…, k, n), the slots: values are weights times scores."""


def soft_topk(x: Tensor, k: int, *, dim: int = -1, temperature: PerRow = 1.0, mask: Mask = None) -> SoftTopK:
    """Return the k largest scores in falling order, like `torch.topk`, but soft: differentiable in all scores.

    `values = P x` with `P = ordered_topk(x, k)`. Each value is a mean of scores, and the default temperature 1 suits
    scores that lie about 10 apart: for closer ones set `temperature` to a tenth of their spacing, as in the examples.

    Args:
        x, k, dim, mask: as for `ordered_topk`; x is (…, n).
        temperature: T > 0; about a tenth of the spacing of the scores gives values near those of `torch.topk`.

    Returns:
        values, indices and weights. The values tend to those of `torch.topk` as T → 0. A score of −inf weighs nothing,
        and a slot in which +inf has a share is +inf.

    Examples:
        >>> x = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])  # spacing 1
        >>> soft_topk(x, 2, temperature=0.1).values  # torch.topk: 3, 2
        tensor([2.9933, 2.0000])
        >>> soft_topk(x, 2).values  # at the default temperature the slots are means of all five scores
        tensor([2.2315, 1.6679])
    """
    _check.integer("k", k)
    _check.call(x, k, dim, temperature, mask)
    weights = _ladder(x, k, sigmoid_topk, dim, temperature, mask)
    rows = _shape.last(x.to(weights.dtype), dim)
    if mask is not None:
        rows = rows.masked_fill(~_shape.last(mask.expand(x.shape), dim), -torch.inf)
    finite = torch.where(rows.isinf(), 0.0, rows)
    forced = (weights * (rows == torch.inf).unsqueeze(-2)).sum(-1) > 0
    with no_autocast(x):
        values = (weights @ finite.unsqueeze(-1)).squeeze(-1).masked_fill(forced, torch.inf)
    indices = _shape.from_rows(select.order(rows)[..., :k], dim, torch.int64)
    return SoftTopK(_shape.from_rows(values, dim, x.dtype), indices, weights.to(x.dtype))


class Selection(NamedTuple):
    """Hold k soft choices among n embeddings."""

    values: Tensor
    """(…, k, d), the chosen embeddings: weights times embeddings."""
    scores: Tensor
    """(…, k), their scores: weights times scores."""
    weights: Tensor | None
    """(…, k, n), rows that sum to 1; None if they were not asked for."""


def successive_halving_topk(
    embeddings: Tensor, scores: Tensor, k: int, *, boost: Boost | None = None, with_weights: bool = True
) -> Selection:
    """Select by Successive Halving: pair the i-th best and the i-th worst, replace pairs by means until k are left.

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
    _check_selection(embeddings, scores, k)
    if boost is not None:
        _check.function("boost", boost)
    dtype, inner = scores.dtype, _shape.compute_dtype(scores.dtype)
    played = halving.tournament(embeddings.to(inner), scores.to(inner), int(k), boost or double_exp(20.0))
    values, left, members, shares = played
    weights, n = None, scores.shape[-1]
    if with_weights:
        weights = shares.new_zeros(*shares.shape[:-1], n)
        weights = weights.scatter_add(-1, members.clamp(max=n - 1), torch.where(members < n, shares, 0.0)).to(dtype)
    return Selection(values.to(dtype), left.to(dtype), weights)


def iterative_topk(embeddings: Tensor, scores: Tensor, k: int, *, alpha: PerRow = 1.0) -> Selection:
    """Select by the iterative softmax of Goyal et al.: slot i is a softmax around the i-th largest score and below it.

    `softmax(−α(v − v₍ᵢ₎)²)` over the entries of rank ≥ i.

    Args:
        embeddings: (…, n, d).
        scores: (…, n), of the same batch shape.
        k: how many, 1 ≤ k ≤ n.
        alpha: α > 0, the sharpness: of the order of the inverse squared spacing of the scores. At 1, with scores in
            [0, 1], the result is almost a plain mean. A tensor must broadcast to the batch shape.

    Returns:
        values, scores, weights. Differentiable in both inputs where no scores tie; O(nk).

    Examples:
        >>> scores = torch.tensor([0.9, 0.1, 0.4, 0.8])
        >>> iterative_topk(torch.eye(4), scores, 2, alpha=1e3).scores
        tensor([0.9000, 0.8000])

    Reference: Goyal et al., "A continuous relaxation of beam search for end-to-end training of neural sequence models"
    (2018).
    """
    _check_selection(embeddings, scores, k)
    _check.temperature(alpha, scores, -1, "alpha")
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
    with no_autocast(scores):
        values, left = weights @ embeddings, (weights @ finite.unsqueeze(-1)).squeeze(-1)
    return Selection(values.to(dtype), left.to(dtype), weights.to(dtype))


def _check_selection(embeddings: Tensor, scores: Tensor, k: int) -> None:
    """Raise unless (…, n, d) embeddings, (…, n) scores and 1 ≤ k ≤ n go together."""
    _check.vectors("embeddings", embeddings)
    _check.floating("scores", scores)
    if scores.shape != embeddings.shape[:-1]:
        want, got = tuple(embeddings.shape[:-1]), tuple(scores.shape)
        raise ValueError(f"`scores` must have the shape of `embeddings` without its last dim, {want}; got {got}.")
    if scores.dtype != embeddings.dtype:
        raise TypeError(f"`scores` must have the dtype of `embeddings`, {embeddings.dtype}; got {scores.dtype}.")
    _check.same_device("scores", scores, embeddings, "embeddings")
    _check.at_least("k", k, 1)
    _check.integer_at_most("k", k, scores.shape[-1], "number of embeddings")
