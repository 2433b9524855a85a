"""Totals that are estimated from samples, under any design."""

from typing import Any

import torch
from torch import Tensor

from .._math import select
from .._torch import has_values
from ._design import outer


def horvitz_thompson(values: Tensor, sample: Tensor, probs: Tensor) -> Tensor:
    """Estimate the total of `values` from a sample, without bias under any design.

    `Σ_{i in the sample} y_i/π_i`. Reference: Horvitz and Thompson, "A generalization of sampling without replacement
    from a finite universe" (1952).

    Args:
        values: y, (…, n). What is not in the sample does not matter, and may be NaN.
        sample: k-hot, (…, n).
        probs: the inclusion probabilities π of the design, (…, n); its `mean`. All three broadcast, with the same n.
            What was drawn must have 0 < π ≤ 1.

    Returns:
        The estimate, (…); differentiable in `values`, `probs` and a straight-through `sample`.

    Examples:
        >>> design = khot.designs.Pivotal(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> y = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> samples = design.sample((1000,), generator=torch.Generator().manual_seed(0))
        >>> horvitz_thompson(y, samples, design.mean).mean()
        tensor(9.9970)
    """
    _check_items(values=values, sample=sample, probs=probs)
    is_drawn = sample != 0
    _check_chances(probs, is_drawn & (probs <= 0), "0 < π ≤ 1 for every item that was drawn")
    return (sample * torch.where(is_drawn, values, 0.0) / torch.where(is_drawn, probs, 1.0)).sum(-1)


def horvitz_thompson_variance(
    values: Tensor, probs: Tensor, joint_probs: Tensor, *, sample: Tensor | None = None
) -> Tensor:
    """Return the variance of `horvitz_thompson` for any design, exactly or estimated from a sample.

    `½ Σ_ij (π_i π_j − π_ij)(y_i/π_i − y_j/π_j)² + Σ_i c_i (y_i/π_i)²`, with c_i = Σ_j π_ij − π_i Σπ, the covariance of
    item i and the size: 0 if that is fixed. With a sample, over its pairs, each divided by π_ij, and its items, by π_i
    (Sen, Yates and Grundy).

    Args:
        values: y, (…, n).
        probs: the inclusion probabilities, (…, n).
        joint_probs: those of pairs, (…, n, n); a design's `joint_probs()`.
        sample: k-hot, (…, n), if `values` are known of the sample alone.

    Returns:
        The variance (…), or an estimate of it without bias if every pair can be drawn.

    Examples:
        >>> design = khot.designs.Sampford(torch.tensor([0.2, 0.5, 0.5, 0.8], dtype=torch.float64))
        >>> y = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        >>> horvitz_thompson_variance(y, design.mean, design.joint_probs())
        tensor(0.7576, dtype=torch.float64)
    """
    _check_items(values=values, probs=probs, **({} if sample is None else {"sample": sample}))
    n = values.shape[-1]
    if not isinstance(joint_probs, Tensor) or tuple(joint_probs.shape[-2:]) != (n, n):
        got = tuple(joint_probs.shape) if isinstance(joint_probs, Tensor) else type(joint_probs).__name__
        raise ValueError(f"`joint_probs` must have the shape (…, {n}, {n}); got {got}.")
    _check_chances(probs, probs < 0, "0 ≤ π ≤ 1")
    size = probs.sum(-1, keepdim=True)
    with_size = joint_probs.sum(-1) - joint_probs.diagonal(dim1=-2, dim2=-1) + probs * (1 - size)
    is_rounding = with_size.abs() <= 8 * torch.finfo(probs.dtype).eps * size.clamp(min=1) * probs
    with_size = torch.where(is_rounding, 0.0, with_size)
    drawn = torch.ones_like(probs)
    if sample is not None:  # only what was drawn, (…, k), with weight 0 where a row has fewer
        shape = torch.broadcast_shapes(values.shape, probs.shape, sample.shape, joint_probs.shape[:-1])
        place = select.indices((sample != 0).to(torch.int64).expand(shape))
        index = place.clamp(min=0)
        pairs = (index[..., :, None] * n + index[..., None, :]).flatten(-2)
        joint_probs = (
            joint_probs.flatten(-2).expand(*shape[:-1], -1).gather(-1, pairs).unflatten(-1, index.shape[-1:] * 2)
        )
        drawn, values, probs, with_size = (
            t.expand(shape).gather(-1, index) for t in (sample, values, probs, with_size)
        )
        drawn = torch.where(place >= 0, drawn, 0.0)
    chance = torch.where(probs > 0, probs, 1.0)
    ratio = torch.where((probs > 0) & (drawn != 0), values, 0.0) / chance
    less = outer(probs) - joint_probs
    if sample is not None:
        less = outer(drawn) * less / torch.where(joint_probs > 0, joint_probs, 1.0)
        with_size = drawn * with_size / chance
    apart = (ratio[..., :, None] - ratio[..., None, :]).square()
    return (less * apart).sum((-1, -2)) / 2 + (with_size * ratio.square()).sum(-1)


def _check_items(**tensors: Any) -> None:
    """Raise unless all are real tensors (…, n) of the same n items that broadcast."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`{name}` must be a real torch.Tensor; got {got}.")
    try:
        torch.broadcast_shapes(*(value.shape for value in tensors.values()))
        is_same = len({value.shape[-1:] for value in tensors.values()}) == 1 and next(iter(tensors.values())).ndim > 0
    except RuntimeError:
        is_same = False
    if not is_same:
        got = ", ".join(f"`{name}` {tuple(value.shape)}" for name, value in tensors.items())
        raise ValueError(f"These must broadcast, each (…, n) with the same n items: {got}.")


def _check_chances(probs: Tensor, is_wrong: Tensor, what: str) -> None:
    """Raise if probabilities are wrong, above 1 but for roundings, or NaN, unless they cannot be read."""
    most = 1 + 4 * torch.finfo(probs.dtype).eps if probs.is_floating_point() else 1
    if has_values(probs) and has_values(is_wrong) and bool((is_wrong | ~(probs <= most)).any()):
        raise ValueError(f"`probs` must be inclusion probabilities, {what}; got others, or NaN.")
