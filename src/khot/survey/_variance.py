"""Variances of estimated totals from one sample, of designs whose pairs are not known.

All are sums of squares of y/π about a fit, weighted by 1 − π. They approximate: a design of large entropy with these
inclusion probabilities has nearly this variance, and one that is spread or balanced has less.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _check
from .._torch import has_values

Values = Tensor
"""(…, k) of the items of the sample."""


def hajek(values: Values, probs: Tensor) -> Tensor:
    """Estimate the variance of Σ y/π by Hájek's approximation, for designs of large entropy and a fixed size.

    `k/(k − 1) Σ (1 − π)(y/π − B)²`, with B the mean of y/π weighted by 1 − π. For `Pivotal` with the order "random",
    `Sampford`, `ConditionalPoisson`, `Brewer` and `Pareto`. Reference: Hájek, "Asymptotic theory of rejective sampling"
    (1964).

    Args:
        values: y of the sample, (…, k).
        probs: π of the sample, (…, k).

    Returns:
        (…); 0 if all items are certain, and NaN if just one is not: one item says nothing of a variance.

    Examples:
        >>> hajek(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.5]))
        tensor(14.)
    """
    _check_sample(values, probs)
    return _spread(values, probs, values.shape[-1] / max(values.shape[-1] - 1, 1))


def deville(values: Values, probs: Tensor) -> Tensor:
    """Estimate the variance of Σ y/π by Deville's approximation, which differs from `hajek` in the factor.

    `Σ (1 − π)(y/π − B)²/(1 − Σ a²)`, with a = (1 − π)/Σ(1 − π) and B = Σ a y/π. Items that are nearly certain do not
    count as observations. Reference: Deville, "Estimation de la variance pour les enquêtes en deux phases" (1993).

    Args:
        values, probs: as for `hajek`, and so is what it returns.

    Examples:
        >>> deville(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.5]))
        tensor(14.0000)
    """
    _check_sample(values, probs)
    share = _shares(probs)
    rest = 1 - share.square().sum(-1)
    return _spread(values, probs, torch.where(rest > 0, 1 / torch.where(rest > 0, rest, 1.0), 0.0))


def _check_sample(values: Any, probs: Any) -> None:
    """Raise unless values and probabilities are floating tensors (…, k) of the same k ≥ 1 items."""
    _check.scores(values, -1, "values")
    _check.scores(probs, -1, "probs")
    if values.shape[-1] != probs.shape[-1] or not values.shape[-1]:
        got = f"{tuple(values.shape)} and {tuple(probs.shape)}"
        raise ValueError(f"`values` and `probs` must have the shape (…, k) with the same k ≥ 1 items; got {got}.")
    _check.batch(values=values.shape[:-1], probs=probs.shape[:-1])
    if has_values(probs) and not bool(((probs > 0) & (probs <= 1 + 1e-6)).all()):
        raise ValueError("`probs` must be π of the sample, 0 < π ≤ 1; got others, or NaN.")


def _shares(probs: Tensor) -> Tensor:
    """Return (1 − π)/Σ(1 − π), (…, k); 0 if all are certain."""
    left = 1 - probs
    whole = left.sum(-1, keepdim=True)
    return left / torch.where(whole > 0, whole, 1.0)


def _spread(values: Tensor, probs: Tensor, factor: float | Tensor) -> Tensor:
    ratio = values / probs
    centre = (_shares(probs) * ratio).sum(-1, keepdim=True)
    return known_from(factor * ((1 - probs) * (ratio - centre).square()).sum(-1), probs, 1)


def known_from(variance: Tensor, probs: Tensor, fitted: int | Tensor) -> Tensor:
    """Return a variance about a fit; NaN where no more items are open than it has coefficients, unless none is."""
    count = (probs < 1).sum(-1)
    return torch.where((count > 0) & (count <= fitted), torch.nan, variance)


def successive_differences(values: Values, probs: Tensor) -> Tensor:
    """Estimate the variance of Σ y/π from neighbours in the sample, for samples that are spread along an order.

    `k/(2(k − 1)) Σ (1 − π̄_i)(y_i/π_i − y_{i−1}/π_{i−1})²`, with π̄ the mean of the two. For `Systematic`, and `Pivotal`
    with the order "given", with the sample in the order of the design: `sample_rows` and `sample_indices` return it so.
    Reference: Wolter, "Introduction to Variance Estimation" (2007), chapter 8.

    Args:
        values, probs: as for `hajek`, and so is what it returns.

    Examples:
        >>> successive_differences(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.5]))
        tensor(7.5000)
    """
    _check_sample(values, probs)
    k = values.shape[-1]
    left = 1 - (probs[..., 1:] + probs[..., :-1]) / 2
    return known_from(k / (2 * max(k - 1, 1)) * (left * (values / probs).diff(dim=-1).square()).sum(-1), probs, 1)


class Balanced:
    """Estimate the variance of Σ y/π under a design that is balanced on variables z, such as `khot.designs.Cube`.

    `k/(k − p) Σ (1 − π)(y/π − z·b/π)²`, with b the fit of y on z, weighted by (1 − π)/π², and p the rank of z with π:
    only what z does not explain counts. Reference: Deville and Tillé, "Variance approximation under balanced sampling"
    (2005).

    Args:
        balance: z of the sample, (…, k, q); a tensor or an array. The size, z = π, is added. The variance is NaN if
            there are as many variables as items, as with one item in each stratum.

    Examples:
        >>> y = torch.tensor([1.0, 2.0, 4.0, 3.0])
        >>> Balanced(y[:, None])(y, torch.full((4,), 0.5))  # explained altogether
        tensor(0.)
    """

    def __init__(self, balance: Any) -> None:
        self.balance = double(balance, "balance")
        if self.balance.ndim < 2 or not bool(self.balance.isfinite().all()):
            got = tuple(self.balance.shape)
            raise ValueError(f"`balance` must be finite, of shape (…, k, q) with the k items of the sample; got {got}.")

    def __call__(self, values: Values, probs: Tensor) -> Tensor:
        """Return the variance of Σ y/π; (…)."""
        if self.balance.shape[-2] != values.shape[-1]:
            got = tuple(self.balance.shape)
            raise ValueError(f"`balance` must be (…, {values.shape[-1]}, q), as the sample has items; got {got}.")
        z = torch.cat((probs[..., None], self.balance.to(probs.dtype)), -1) / probs[..., None]
        weight = (1 - probs).clamp(min=0).sqrt()[..., None]
        left, right = weight * z, weight * (values / probs)[..., None]
        scale = left.norm(dim=-2, keepdim=True)
        left = left / torch.where(scale > 0, scale, 1.0)
        u, s, _ = torch.linalg.svd(left, full_matrices=False)
        is_used = (s > 1e3 * torch.finfo(s.dtype).eps * s[..., :1]) & (s > 0)
        u = torch.where(is_used[..., None, :], u, 0.0)
        residual = right - u @ (u.mT @ right)
        k, p = values.shape[-1], is_used.sum(-1)
        result = k / (k - p).clamp(min=1) * residual.square().sum((-1, -2))
        noise = 1e3 * torch.finfo(s.dtype).eps ** 2 * right.square().sum((-1, -2))
        return known_from(torch.where(result > noise, result, 0.0), probs, p)


def double(values: Any, name: str = "values") -> Tensor:
    """Return a tensor, an array or a list of numbers as a float64 tensor, without rounding to float32 first."""
    if isinstance(values, Tensor):
        _check.real(name, values)
        return values.to(torch.float64)
    try:
        return torch.from_numpy(np.asarray(values, dtype=np.float64).copy())
    except (TypeError, ValueError):
        what = f"`{name}` must be real numbers in a tensor, an array or a list"
        raise TypeError(f"{what}; got {type(values).__name__}.") from None
