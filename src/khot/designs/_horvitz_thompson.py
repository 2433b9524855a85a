"""Totals from samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def horvitz_thompson(values: Tensor, sample: Tensor, probs: Tensor) -> Tensor:
    """Estimate the total of `values` from a sample, without bias under any design.

    `Σ_{i in the sample} y_i/π_i`.

    Args:
        values: y, (…, n). What is not in the sample does not matter, and may be NaN.
        sample: k-hot, (…, n).
        probs: the inclusion probabilities π of the design, (…, n); its `mean`. All three broadcast.

    Returns:
        The estimate, (…); differentiable in `values`, `probs` and a straight-through `sample`.

    Examples:
        >>> design = khot.designs.Pivotal(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> y = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> samples = design.sample((1000,), generator=torch.Generator().manual_seed(0))
        >>> horvitz_thompson(y, samples, design.mean).mean()
        tensor(9.9970)

    Reference: Horvitz and Thompson, "A generalization of sampling without replacement from a finite universe" (1952).
    """
    _check_broadcast(values=values, sample=sample, probs=probs)
    is_drawn = sample != 0
    return (sample * torch.where(is_drawn, values, 0.0) / torch.where(is_drawn, probs, 1.0)).sum(-1)


def horvitz_thompson_variance(
    values: Tensor, probs: Tensor, joint_probs: Tensor, *, sample: Tensor | None = None
) -> Tensor:
    """Return the variance of `horvitz_thompson` for a design of fixed size, exactly or estimated from a sample.

    `½ Σ_ij (π_i π_j − π_ij)(y_i/π_i − y_j/π_j)²`; with a sample, over its pairs, each divided by π_ij (Sen, Yates and
    Grundy).

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
    _check_broadcast(values=values, probs=probs)
    n = values.shape[-1]
    if not isinstance(joint_probs, Tensor) or tuple(joint_probs.shape[-2:]) != (n, n):
        got = tuple(joint_probs.shape) if isinstance(joint_probs, Tensor) else type(joint_probs).__name__
        raise ValueError(f"`joint_probs` must have the shape (…, {n}, {n}); got {got}.")
    if sample is not None:
        values = torch.where(sample != 0, values, 0.0)
    is_possible = probs > 0
    ratio = torch.where(is_possible, values, 0.0) / torch.where(is_possible, probs, 1.0)
    apart = (ratio[..., :, None] - ratio[..., None, :]).square()
    less = probs[..., :, None] * probs[..., None, :] - joint_probs
    if sample is not None:
        both = sample[..., :, None] * sample[..., None, :]
        less = torch.where(both != 0, both * less / torch.where(both != 0, joint_probs, 1.0), 0.0)
    return (less * apart).sum((-1, -2)) / 2


def _check_broadcast(**tensors: Any) -> None:
    """Raise unless all are real tensors that broadcast."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`{name}` must be a real torch.Tensor; got {got}.")
    try:
        torch.broadcast_shapes(*(value.shape for value in tensors.values()))
    except RuntimeError:
        got = ", ".join(f"`{name}` {tuple(value.shape)}" for name, value in tensors.items())
        raise ValueError(f"These must broadcast: {got}.") from None
