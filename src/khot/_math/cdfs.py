"""The cdfs of the family: a relaxation y = F((x − τ)/T) is an F, and this is all that is needed of it.

Functions of F are elementwise torch, differentiable as often as F is; they see finite z only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

REACH = 700.0  # e^700 is about the largest float64
HALVINGS = 52
Elementwise = Callable[[Tensor], Tensor]


class Cdf(NamedTuple):
    """A distribution function F."""

    cdf: Elementwise
    """F(z), to all digits however small."""
    survival: Elementwise
    """1 − F(z), likewise."""
    density: Elementwise
    """F′(z); at a kink, one of the one-sided slopes."""
    quantile: Elementwise | None
    """F⁻¹ on (0, 1); None: found by bisection."""
    center: float = 0.0
    """The median, about: where it is better to sum 1 − F than F."""
    smooth: bool = True
    """Whether F′ is continuous."""
    symmetric: bool = False
    """Whether F is symmetric about 0, and F and F′ are 0 at −inf; then the solver needs them for z ≤ 0 only."""
    tail: Elementwise | None = None
    """F(z) for z ≤ 0, if that is simpler than F."""
    log_tail: Elementwise | None = None
    """log F(z) for z < 0, if F is symmetric with exponential tails: for rows in which F underflows."""
    log_density: Elementwise | None = None
    """log F′(z), if weights are wanted where F′ underflows."""
    steer: Elementwise | None = None
    """A rough F′ for the solver, if `density` differentiates, which cannot be done inside an op."""


def _laplace(z: Tensor) -> Tensor:
    # A clamp passes the gradient on at its bound, as |z| would not.
    return torch.where(z > 0, 1 - 0.5 * (-z.clamp(min=0)).exp(), 0.5 * z.clamp(max=0).exp())


def _laplace_quantile(p: Tensor) -> Tensor:
    return torch.where(p < 0.5, (2 * p).log(), -(2 * (1 - p)).log())


def _cauchy(z: Tensor) -> Tensor:
    return torch.atan2(torch.ones_like(z), -z) / math.pi  # not ½ + atan(z)/π, which cancels


def _sigmoid_density(z: Tensor) -> Tensor:
    tail = torch.sigmoid(-z.abs())
    return tail * (1 - tail)


SIGMOID = Cdf(
    torch.sigmoid,
    lambda z: torch.sigmoid(-z),
    _sigmoid_density,
    torch.logit,
    symmetric=True,
    log_tail=lambda z: z,
    log_density=lambda z: logsigmoid(z) + logsigmoid(-z),
)
LAPLACE = Cdf(
    _laplace,
    lambda z: _laplace(-z),
    lambda z: 0.5 * (-z.abs()).exp(),
    _laplace_quantile,
    symmetric=True,
    tail=lambda z: 0.5 * z.exp(),
    log_tail=lambda z: z - math.log(2),
)
NORMAL = Cdf(
    torch.special.ndtr,
    lambda z: torch.special.ndtr(-z),
    lambda z: (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi),
    torch.special.ndtri,
    symmetric=True,
)
CAUCHY = Cdf(
    _cauchy,
    lambda z: _cauchy(-z),
    lambda z: 1 / (math.pi * (1 + z.square())),
    lambda p: -1 / torch.tan(math.pi * p),
    symmetric=True,
)


def power(p: float) -> Cdf:
    """clip(z, 0, 1)^(1/(p − 1)), whose Ω is the p-norm; p = 2 is the Euclidean projection."""
    exponent = 1 / (p - 1)

    def between(z: Tensor) -> Tensor:
        """z in (0, 1), and elsewhere a number that harms no derivative."""
        return torch.where((z <= 0) | (z >= 1), 0.5, z)

    def extended(z: Tensor, inside: Tensor, below: float, above: float) -> Tensor:
        return torch.where(z >= 1, above, torch.where(z <= 0, below, inside))

    return Cdf(
        lambda z: extended(z, between(z) ** exponent, 0.0, 1.0),
        lambda z: extended(z, -torch.expm1(exponent * between(z).log()), 1.0, 0.0),
        lambda z: extended(z, exponent * between(z) ** (exponent - 1), 0.0, 0.0),
        lambda y: y ** (p - 1),
        center=0.5 ** (p - 1),
        smooth=False,
    )


EUCLIDEAN = power(2.0)

REGISTRY: list[Cdf] = [SIGMOID, LAPLACE, NORMAL, CAUCHY, EUCLIDEAN]
"""An op names a cdf by its place here, or by `POWER` and its p."""
POWER = -1


def find(place: int, p: float) -> Cdf:
    """The cdf that is so named."""
    return power(p) if place == POWER else REGISTRY[place]


def register(cdf: Cdf) -> int:
    """Its place in the registry, new if need be."""
    if cdf not in REGISTRY:
        REGISTRY.append(cdf)
    return REGISTRY.index(cdf)


def bisect(cdf: Elementwise, share: Tensor) -> Tensor:
    """F⁻¹ by halving, for shares in (0, 1); to some 1e-12 relative."""
    low, high = torch.full_like(share, -REACH), torch.full_like(share, REACH)

    def spread(t: Tensor) -> Tensor:
        return t.sign() * torch.expm1(t.abs())  # few halvings reach far

    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_below = cdf(spread(middle)) < share
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return spread((low + high) / 2)


def difference(cdf: Elementwise) -> Elementwise:
    """F′ by a central difference, to some 1e-5."""

    def slope(z: Tensor) -> Tensor:
        h = z.abs().clamp(min=1) * math.cbrt(torch.finfo(z.dtype).eps)
        return (cdf(z + h) - cdf(z - h)) / (2 * h)

    return slope


def value(cdf: Cdf, z: Tensor) -> Tensor:
    """F(z), where z may be infinite: then exactly 0 or 1, with gradient 0."""
    infinite = z.isinf()
    return torch.where(infinite, (z > 0).to(z.dtype), cdf.cdf(torch.where(infinite, cdf.center, z)))


def slope(cdf: Cdf, z: Tensor) -> Tensor:
    """F′(z), where z may be infinite: then 0."""
    infinite = z.isinf()
    density = cdf.density(torch.where(infinite, cdf.center, z))
    return torch.where(infinite, 0.0, density)
