"""The siblings of σ_k: y = F((x − τ)/T) with τ such that Σ y = k, for other F, and a way to bring one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .. import _check
from .._math import cdfs
from ._implicit import check_call, relax


def laplace_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """Soft top-k with the Laplace cdf: the relaxation of LapSum.

    `F(z) = ½e^z` for z ≤ 0, `1 − ½e^{−z}` above; `τ` such that `Σ F((x − τ)/T) = k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask, costs: as for `sigmoid_topk`.

    Returns:
        As `sigmoid_topk`. Exponential tails, as σ_k's; F′ has a corner at the threshold, so second derivatives jump
        where a score crosses it.

    Examples:
        >>> laplace_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8884, 0.6967, 0.3033, 0.1116])

    Reference: Struski et al., "LapSum: one method to differentiate them all" (2025).
    """
    check_call(x, k, dim, temperature, mask, costs)
    return relax(cdfs.LAPLACE_PLACE, x, k, dim, temperature, mask, costs)


def normal_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """Soft top-k with the normal cdf, "probit top-k".

    `F = Φ`; `τ` such that `Σ Φ((x − τ)/T) = k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask, costs: as for `sigmoid_topk`.

    Returns:
        As `sigmoid_topk`. Smooth; light tails, so that scores far from the threshold get no gradient. A row whose
        scores span more than the range of its dtype in units of T may be NaN.

    Examples:
        >>> normal_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.9332, 0.6915, 0.3085, 0.0668])
    """
    check_call(x, k, dim, temperature, mask, costs)
    return relax(cdfs.NORMAL_PLACE, x, k, dim, temperature, mask, costs)


def cauchy_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """Soft top-k with the Cauchy cdf: heavy tails, and gradients that reach far.

    `F(z) = ½ + atan(z)/π`; `τ` such that `Σ F((x − τ)/T) = k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask, costs: as for `sigmoid_topk`.

    Returns:
        As `sigmoid_topk`. Smooth; y falls as 1/|z| and its gradient as 1/z², so that a hard result needs a far smaller
        temperature. The gradient is 0 only where y rounds to 0 or 1. A row whose scores span more than the range of
        its dtype in units of T may be NaN.

    Examples:
        >>> cauchy_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8128, 0.6476, 0.3524, 0.1872])
    """
    check_call(x, k, dim, temperature, mask, costs)
    return relax(cdfs.CAUCHY_PLACE, x, k, dim, temperature, mask, costs)


def euclidean_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """The Euclidean projection of x/T on the capped simplex: sparse, with exact zeros and ones.

    `argmin_{y ∈ Δ_k} ‖y − x/T‖²`, which is `clip((x − τ)/T, 0, 1)` with `Σ y = k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask, costs: as for `sigmoid_topk`.

    Returns:
        As `sigmoid_topk`, but piecewise linear. Differentiable where no entry is at a corner, z = 0 or 1; there the
        gradient is the element of the generalised Jacobian that counts the entry as fixed. Entries that are exactly 0
        or 1 get no gradient; where all are, the gradient is 0.

    Examples:
        >>> euclidean_topk(torch.tensor([2.0, 1.2, 1.0, -1.0]), 2)
        tensor([1.0000, 0.6000, 0.4000, 0.0000])

    Reference: Wang and Lu, "Projection onto the capped simplex" (2015); it is also the budget layer of entmax.
    """
    check_call(x, k, dim, temperature, mask, costs)
    return relax(cdfs.EUCLIDEAN_PLACE, x, k, dim, temperature, mask, costs)


def power_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    p: float = 4 / 3,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """Soft top-k regularised with the p-norm: sparse, and for p < 2 smooth where it meets 0.

    `argmax_{y ∈ Δ_k} ⟨x, y⟩ − (T/p)·Σ y^p`, which is `clip((x − τ)/T, 0, 1)^{1/(p−1)}` with `Σ y = k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask, costs: as for `sigmoid_topk`.
        p: the norm, > 1; 2 is `euclidean_topk`.

    Returns:
        As `euclidean_topk`, with a corner at z = 1, and at z = 0 if p ≥ 2 (a vertical one if p > 2).

    Examples:
        >>> power_topk(torch.tensor([2.0, 1.2, 1.0, -1.0]), 2)
        tensor([1.0000, 0.6840, 0.3160, 0.0000])

    Reference: Sander et al., "Fast, differentiable and sparse top-k: a convex analysis perspective" (2023).
    """
    _check.above("p", p, 1)
    check_call(x, k, dim, temperature, mask, costs)
    place = cdfs.EUCLIDEAN_PLACE if p == 2 else cdfs.POWER_PLACE
    return relax(place, x, k, dim, temperature, mask, costs, float(p))


UNDERFLOW = 1e-37  # of a cdf of one's own: less is nothing, in float32 and float64 alike


class Relaxation(Protocol):
    """A function like `sigmoid_topk`."""

    def __call__(
        self,
        x: Tensor,
        k: float | Tensor,
        /,
        *,
        dim: int = -1,
        temperature: float | Tensor = 1.0,
        mask: Tensor | None = None,
        costs: Tensor | None = None,
    ) -> Tensor: ...


def relaxation(
    cdf: Callable[[Tensor], Tensor],
    *,
    survival: Callable[[Tensor], Tensor] | None = None,
    density: Callable[[Tensor], Tensor] | None = None,
    quantile: Callable[[Tensor], Tensor] | None = None,
    symmetric: bool = False,
    smooth: bool = True,
) -> Relaxation:
    """A relaxation of your own from its cdf: `y = F((x − τ)/T)` with `Σ y = k`.

    Args:
        cdf: F, an elementwise function of a float tensor in torch operations; continuous, rising from 0 to 1, accurate
            where it is small.
        survival: 1 − F, accurate where that is small; if not given, `F(−z)` if `symmetric`, else `1 − F(z)`, which
            cannot tell numbers below a rounding of 1.
        density: F′; if not given, by differentiating `cdf`.
        quantile: F⁻¹ on (0, 1), which saves a bisection at each call.
        symmetric: whether F(−z) = 1 − F(z).
        smooth: whether F′ is continuous.

    Returns:
        A function of scores (…, n) with the signature and the promises of `sigmoid_topk`;
        `khot.testing.check_relaxation` tells whether your F keeps them. Make it once, not at each call: it is kept for
        good.

    Examples:
        >>> student = relaxation(lambda z: 0.5 + 0.5 * z / (2 + z.square()).sqrt(), symmetric=True)
        >>> student(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8638, 0.6667, 0.3333, 0.1362])
    """
    _check.is_cdf(cdf(torch.tensor([-1e30, -1e3, -10.0, -1.0, 0.0, 1.0, 10.0, 1e3, 1e30], dtype=torch.float64)))

    rest = survival or ((lambda z: cdf(-z)) if symmetric else (lambda z: 1 - cdf(z)))
    # Where F is 0 or 1 to rounding its formula may overflow in the derivative, as exp(−exp(−z)) does: not asked there.
    low = _quantile(cdf, UNDERFLOW)
    high = -_quantile(lambda z: rest(-z), UNDERFLOW if symmetric or survival else torch.finfo(torch.float64).eps)

    def bounded(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda z: fn(z.clamp(low, high))

    def default_density(z: Tensor) -> Tensor:
        slope: Tensor = torch.func.vjp(bounded(cdf), z)[1](torch.ones_like(z))[0]
        return slope

    def given_density(z: Tensor) -> Tensor:
        assert density is not None
        return torch.where((z < low) | (z > high), 0.0, density(z.clamp(low, high)))

    place = cdfs.register(
        cdfs.Cdf(
            bounded(cdf),
            bounded(rest),
            given_density if density else default_density,
            quantile,
            0.0 if symmetric else _quantile(cdf, 0.5),
            smooth,
            steer=None if density else cdfs.difference(bounded(cdf)),
        )
    )

    def custom_topk(
        x: Tensor,
        k: float | Tensor,
        /,
        *,
        dim: int = -1,
        temperature: float | Tensor = 1.0,
        mask: Tensor | None = None,
        costs: Tensor | None = None,
    ) -> Tensor:
        """Made by `khot.relaxation`; arguments as for `khot.sigmoid_topk`."""
        check_call(x, k, dim, temperature, mask, costs)
        return relax(place, x, k, dim, temperature, mask, costs)

    return custom_topk


def _quantile(cdf: Callable[[Tensor], Tensor], share: float) -> float:
    return float(cdfs.bisect(cdf, torch.tensor([share], dtype=torch.float64)))
