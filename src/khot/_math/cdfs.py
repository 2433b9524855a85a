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

REACH = 69.0  # e^69 = 1e30: as far as F is looked at
HALVINGS = 52
Elementwise = Callable[[Tensor], Tensor]


class Tails(NamedTuple):
    """Both sides of F at margins z, not differentiable; all like z."""

    above: Tensor
    """1 above the median, else 0: arithmetic on floats is several times as fast as boolean masks."""
    tail: Tensor
    """1 − F above, F below; 0 at ±inf."""
    density: Tensor
    """F′; 0 at ±inf."""


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
    tails: Callable[[Tensor], Tails] | None = None
    """All that the solver needs, in few passes; z may be infinite. None: from the functions above."""
    log_tail: Elementwise | None = None
    """log F(z) for z < 0, if F is symmetric with exponential tails: for rows in which F underflows."""
    log_density: Elementwise | None = None
    """log F′(z), if weights are wanted where F′ underflows."""
    slope_at: Elementwise | None = None
    """F′ as a function of y = F(z), for y in (0, 1): then y alone is saved for backward."""
    steer: Elementwise | None = None
    """A rough F′ for the solver, if `density` differentiates, which cannot be done inside an op."""


def _about_zero(below: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tails]:
    """The tails of a symmetric F from those below 0: z ≤ 0, which may be overwritten, to F and F′."""
    return lambda z: Tails((z > 0).to(z.dtype), *below(z.abs().neg_()))


def _laplace(z: Tensor) -> Tensor:
    # A clamp passes the gradient on at its bound, as |z| would not.
    return torch.where(z > 0, 1 - 0.5 * (-z.clamp(min=0)).exp(), 0.5 * z.clamp(max=0).exp())


def _laplace_quantile(p: Tensor) -> Tensor:
    return torch.where(p < 0.5, (2 * p).log(), -(2 * (1 - p)).log())


def _normal_density(z: Tensor) -> Tensor:
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def _cauchy(z: Tensor) -> Tensor:
    return torch.atan2(torch.ones_like(z), -z) / math.pi  # not ½ + atan(z)/π, which cancels


def _sigmoid_density(z: Tensor) -> Tensor:
    tail = torch.sigmoid(-z.abs())
    return tail * (1 - tail)


def _cauchy_quantile(y: Tensor) -> Tensor:
    near = torch.minimum(y, 1 - y)  # sin and tan near π would round
    return torch.where(y < 0.5, -1.0, 1.0) / torch.tan(math.pi * near)


def _cauchy_density(z: Tensor) -> Tensor:
    return 1 / (math.pi * (1 + z.square()))


SIGMOID = Cdf(
    torch.sigmoid,
    lambda z: torch.sigmoid(-z),
    _sigmoid_density,
    torch.logit,
    tails=_about_zero(lambda z: (tail := z.sigmoid_(), torch.addcmul(tail, tail, tail, value=-1))),
    slope_at=lambda y: y * (1 - y),
    log_tail=lambda z: z,
    log_density=lambda z: logsigmoid(z) + logsigmoid(-z),
)
LAPLACE = Cdf(
    _laplace,
    lambda z: _laplace(-z),
    lambda z: 0.5 * (-z.abs()).exp(),
    _laplace_quantile,
    tails=_about_zero(lambda z: (z.exp_().mul_(0.5),) * 2),
    slope_at=lambda y: torch.minimum(y, 1 - y),
    log_tail=lambda z: z - math.log(2),
)
NORMAL = Cdf(
    torch.special.ndtr,
    lambda z: torch.special.ndtr(-z),
    _normal_density,
    torch.special.ndtri,
    tails=_about_zero(lambda z: (torch.special.ndtr(z), _normal_density(z))),
    slope_at=lambda y: _normal_density(torch.special.ndtri(y)),
)
CAUCHY = Cdf(
    _cauchy,
    lambda z: _cauchy(-z),
    _cauchy_density,
    _cauchy_quantile,
    tails=_about_zero(lambda z: (_cauchy(z), _cauchy_density(z))),
    slope_at=lambda y: torch.sin(math.pi * torch.minimum(y, 1 - y)).square() / math.pi,
)


def power(p: float) -> Cdf:
    """clip(z, 0, 1)^(1/(p − 1)), whose Ω is the p-norm; p = 2 is the Euclidean projection."""
    exponent, center = 1 / (p - 1), 0.5 ** (p - 1)

    def between(z: Tensor) -> Tensor:
        """z in (0, 1), and elsewhere a number that harms no derivative."""
        return torch.where((z <= 0) | (z >= 1), 0.5, z)

    def extended(z: Tensor, inside: Tensor, below: float, above: float) -> Tensor:
        return torch.where(z >= 1, above, torch.where(z <= 0, below, inside))

    def tails(z: Tensor) -> Tails:
        inside = z.clamp(0, 1)
        is_inside = ((z > 0) & (z < 1)).to(z.dtype)
        above = (z > center).to(z.dtype)
        if p == 2:
            return Tails(above, (above - inside).abs_(), is_inside)
        density = exponent * between(z) ** (exponent - 1)
        return Tails(above, (above - inside**exponent).abs_(), density.mul_(is_inside))

    return Cdf(
        lambda z: extended(z, between(z) ** exponent, 0.0, 1.0),
        lambda z: extended(z, -torch.expm1(exponent * between(z).log()), 1.0, 0.0),
        lambda z: extended(z, exponent * between(z) ** (exponent - 1), 0.0, 0.0),
        lambda y: y ** (p - 1),
        center=center,
        smooth=False,
        tails=tails,
        slope_at=lambda y: exponent * y ** (2 - p),
    )


EUCLIDEAN = power(2.0)

REGISTRY: list[Cdf] = [SIGMOID, LAPLACE, NORMAL, CAUCHY, EUCLIDEAN]
"""An op names a cdf by its place here, or by `POWER_PLACE` and its p."""
SIGMOID_PLACE, LAPLACE_PLACE, NORMAL_PLACE, CAUCHY_PLACE, EUCLIDEAN_PLACE = range(5)
POWER_PLACE = -1


def find(place: int, p: float) -> Cdf:
    """The cdf that is so named."""
    return power(p) if place == POWER_PLACE else REGISTRY[place]


def register(cdf: Cdf) -> int:
    """A new place in the registry."""
    REGISTRY.append(cdf)
    return len(REGISTRY) - 1


def bisect(cdf: Elementwise, share: Tensor) -> Tensor:
    """F⁻¹ by halving within ±1e30, for shares in (0, 1)."""
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
