"""Totals, means and ratios from the items of a sample and their weights 1/π."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from .. import _check
from .._torch import is_shape_only
from ._variance import double, hajek

Variance = Callable[[Tensor, Tensor], Tensor]
"""(values (…, k), probs (…, k)) of a sample → the variance of Σ y/π, (…)."""


class Estimate(NamedTuple):
    """Hold an estimate and how far to trust it."""

    value: Tensor
    """The estimate, (…)."""
    variance: Tensor
    """Its estimated variance, (…); NaN if the sample is too small for one."""

    @property
    def error(self) -> Tensor:
        """Return the standard error, (…)."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of a confidence interval by the normal law, which needs a sample that is not small."""
        _check.fraction("level", level, is_open=True)
        half = Normal(0.0, 1.0).icdf(torch.tensor((1 + level) / 2, dtype=torch.float64)) * self.error
        return self.value - half, self.value + half


def total(values: Any, weights: Any, *, variance: Variance = hajek) -> Estimate:
    """Estimate the total of y over all items, without bias: Horvitz and Thompson's estimate, from the sample alone.

    `Σ_{sample} w y`, w = 1/π.

    Args:
        values: y of the items of the sample, (…, k); a tensor or an array.
        weights: their design weights 1/π, (…, k), such as `khot.sample_rows` returns.
        variance: `khot.survey.hajek`, `deville`, `successive_differences`, a `Balanced`, or a function of yours.

    Examples:
        >>> total([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
        Estimate(value=tensor(14., dtype=torch.float64), variance=tensor(14.0000, dtype=torch.float64))
    """
    y, w = sample_tensors(values=values, weights=weights)
    return Estimate((w * y).sum(-1), variance_by(variance, y, w))


def ratio(values: Any, others: Any, weights: Any, *, variance: Variance = hajek) -> Estimate:
    """Estimate the ratio of two totals, Σy/Σx over all items; nearly without bias.

    `R = Σ w y / Σ w x`, with the variance of the total of (y − R x)/Σ w x (linearisation).

    Args:
        values, weights, variance: as for `total`.
        others: x of the items of the sample, (…, k).

    Examples:
        >>> ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]).value
        tensor(2., dtype=torch.float64)
    """
    y, x, w = sample_tensors(values=values, others=others, weights=weights)
    size = (w * x).sum(-1)
    value = (w * y).sum(-1) / size
    return Estimate(value, variance_by(variance, (y - value[..., None] * x) / size[..., None], w))


def mean(values: Any, weights: Any, *, variance: Variance = hajek) -> Estimate:
    """Estimate the mean of y over all items by Hájek's ratio; the number of items need not be known.

    `Σ w y / Σ w`: the `ratio` to x = 1.

    Args:
        values, weights, variance: as for `total`.

    Examples:
        >>> mean([1.0, 2.0, 4.0], [2.0, 2.0, 4.0]).value
        tensor(2.7500, dtype=torch.float64)
    """
    y, w = sample_tensors(values=values, weights=weights)
    return ratio(y, torch.ones_like(y), w, variance=variance)


def variance_by(variance: Variance, values: Tensor, weights: Tensor) -> Tensor:
    """Return what a variance says of a sample; raise unless it is a function."""
    if not callable(variance):
        raise TypeError(f"`variance` must be a function, such as `khot.survey.hajek`; got {variance!r}.")
    return variance(values, 1 / weights)


def sample_tensors(**given: Any) -> list[Tensor]:
    """Return arrays over the items of a sample as float64 tensors (…, k); raise unless they fit, with weights ≥ 1."""
    tensors = {name: double(value, name) for name, value in given.items()}
    k = tensors["weights"].shape[-1:] or None
    for name, value in tensors.items():
        if k is None or value.shape[-1:] != k:
            got = tuple(value.shape)
            raise ValueError(f"`{name}` must have the shape (…, k), as `weights` have; got {got} and {k}.")
    w = tensors["weights"]
    if w.shape[-1] == 0:
        raise ValueError("`weights` must be those of at least one item; got none.")
    if not is_shape_only(w) and not bool(((w >= 1 - 1e-9) & w.isfinite()).all()):
        ends = f"from {float(w.min()):g} to {float(w.max()):g}"
        raise ValueError(f"`weights` must be 1/π, finite and ≥ 1, one for each item of the sample; got {ends}.")
    return list(tensors.values())
