"""Designs and estimators; what tensors hold is read here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._tensors import broadcasts, count, same_device, scores
from ._values import extremes, number


def losses(value: Any, x: Tensor) -> None:
    """Raise unless an objective gave a loss for each sample."""
    if not isinstance(value, Tensor) or value.shape != x.shape[:-1]:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"`fn` must give one loss for each sample, the shape {tuple(x.shape[:-1])} for samples of shape "
            f"{tuple(x.shape)}; got {got}."
        )


def baseline(name: str, value: Any, shape: torch.Size) -> None:
    """Raise unless `value` is a number or broadcasts to the shape."""
    if isinstance(value, Tensor):
        broadcasts(name, value, tuple(shape), "the design's shape")
    else:
        number(name, value)


def feasible(soft: Tensor, dim: int) -> None:
    """Raise if a row of a relaxation is NaN, because a sample cannot be."""
    is_bad = soft.detach().isnan().any(dim)
    if is_bad.any():
        first = tuple(is_bad.nonzero()[0].tolist())
        raise ValueError(
            "`k` must satisfy 0 ≤ k ≤ the number of entries of its row that are neither masked nor −inf, and `x` must "
            f"not hold NaN; got {int(is_bad.sum())} rows of {is_bad.numel()} that cannot be drawn from"
            + (f", the first at index {first}." if first else ".")
        )


def pairs(joint: Any, n: int) -> None:
    """Raise unless `joint` has a value for each pair of n items."""
    if not isinstance(joint, Tensor) or joint.ndim < 2 or tuple(joint.shape[-2:]) != (n, n):
        got = tuple(joint.shape) if isinstance(joint, Tensor) else type(joint).__name__
        raise ValueError(f"`joint_probs` must have the shape (…, {n}, {n}); got {got}.")


def one_parameter(probs: Any, logits: Any, k: Any) -> None:
    """Raise unless one of the two parameters of a design is given, with a count that fits."""
    if (probs is None) == (logits is None):
        raise ValueError("Give one of `probs` and `logits`; got " + ("both." if probs is not None else "neither."))
    name, value = ("probs", probs) if logits is None else ("logits", logits)
    scores(value, -1, name)
    if value.shape[-1] == 0:
        raise ValueError(f"`{name}` must have at least one item in its last dim; got {tuple(value.shape)}.")
    if k is None:
        if logits is not None:
            raise ValueError("`k` must be given with `logits`; only `probs` have a sum.")
    elif isinstance(k, Tensor):
        if k.dtype == torch.bool or k.is_complex():
            raise TypeError(f"`k` must be an integer or floating tensor; got {k.dtype}.")
        try:
            torch.broadcast_shapes(k.shape, value.shape[:-1])
        except RuntimeError:
            got = f"{tuple(k.shape)} and {tuple(value.shape[:-1])}"
            raise ValueError(f"`k` must broadcast with the batch of `{name}`; got {got}.") from None
        same_device("k", k, value, name)
    else:
        count(k, value, -1)


def sizes(k: Tensor, n: int, design: str, takes_fractions: bool) -> None:
    """Raise unless a design of n items can have the sizes k."""
    if not ((k >= 0) & (k <= n)).all():
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (number of items); got {extremes(k)}.")
    if not takes_fractions and not (k == k.round()).all():
        raise ValueError(
            f"`k` must be a whole number for `{design}`; got {k[k != k.round()][0].item():.9g}. "
            "`Pivotal` and `Systematic` take fractions."
        )


def natural_parameters(logits: Tensor, k: Tensor, name: str = "logits") -> None:
    """Raise unless k of the items can be drawn and no more than k must be."""
    if logits.isnan().any():
        raise ValueError("`logits` must not hold NaN.")
    least, most = ("−inf", "+inf") if name == "logits" else ("0", "1")
    possible = (logits > -torch.inf).sum(-1)
    if not (possible >= k).all():
        got = _worst(possible, possible - k)
        raise ValueError(f"`{name}` must exceed {least} for at least k items; got a row with {got}.")
    forced = (logits == torch.inf).sum(-1)
    if not (forced <= k).all():
        got = _worst(forced, k - forced)
        raise ValueError(f"`{name}` must be {most} for at most k items; got a row with {got}.")


def probabilities(probs: Tensor) -> None:
    """Raise unless all lie in [0, 1], within what their dtype allows."""
    least, most = torch.aminmax(probs) if probs.numel() else (probs.new_zeros(()), probs.new_zeros(()))
    tolerance = _tolerance(probs.dtype)
    if not (least >= -tolerance and most <= 1 + tolerance):
        raise ValueError(f"`probs` must lie in [0, 1]; got values from {least.item():g} to {most.item():g}.")


def total(probs: Tensor, total: Tensor, k: Tensor) -> None:
    """Raise unless the probabilities sum to k, within what their dtype allows."""
    tolerance = _tolerance(probs.dtype)
    error = (total - k).abs()
    if (error >= 0.5).any():  # within the tolerance of a large k there is room for an item too few or too many
        natural_parameters(torch.where(probs >= 1, torch.inf, torch.where(probs > 0, 0.0, -torch.inf)), k, "probs")
    if not (error <= tolerance * k.clamp(min=1)).all():
        where = error.argmax()
        raise ValueError(
            f"`probs` must sum to k, within {tolerance:g}·max(k, 1) for {probs.dtype}; got the sum "
            f"{total.flatten()[where].item():.9g} where k = {k.flatten()[where].item():g}. "
            "Use `logits=` with `k=`, or, for a fractional size, give `k=` too."
        )


def fixed_order(order: str) -> None:
    """Raise unless a pivotal design has one order for all draws."""
    if order != "given":
        raise NotImplementedError(
            f"A pivotal design with the order {order!r} is a mixture over all orders; its probabilities of subsets and "
            'pairs are known for a given one. Use `order="given"`, or `.fix_order(generator)` to draw an order once.'
        )


def few(name: str, value: Tensor, most: int, what: str) -> None:
    """Raise if a size is beyond what is computed."""
    if not (value <= most).all():
        raise NotImplementedError(f"{what} up to {name} = {most}; got {name} = {value.max().item():g}.")


def enumerable(n: int, subsets: int, most: int) -> None:
    """Raise if there are too many subsets to go through."""
    if subsets > most:
        raise NotImplementedError(f"At most {most} subsets are enumerated; {n} items have {subsets} of that size.")


def one_size(sizes: Tensor) -> None:
    """Raise unless all rows have one size, given the different ones."""
    if len(sizes) != 1:
        got = extremes(sizes) if len(sizes) else "no row"
        raise NotImplementedError(f"All rows must have the same k to enumerate subsets; got {got}.")


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 1e-3)


def _worst(values: Tensor, slack: Tensor) -> str:
    return str(values.flatten()[slack.argmin()].item())
