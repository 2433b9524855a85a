"""The cdfs of the family: a relaxation y = F((x − τ)/T) is defined by its F, and a `Cdf` is all that it needs.

Functions of F are elementwise torch operations, differentiable as often as F is; they see finite z only. Ops and saved
programs name a cdf by a string, because a number would mean another cdf in another process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

REACH, HALVINGS = 69.0, 53  # of `bisect`: it looks for quantiles within ±e^69 = ±1e30
CHUNK = 512  # how many float32 numbers are summed before the sum goes on in float64
Elementwise = Callable[[Tensor], Tensor]
Pair = Callable[[Tensor], tuple[Tensor, Tensor]]


class Tails(NamedTuple):
    """Both sides of F at margins z, not differentiable; all like z."""

    above: Tensor  # 1 above the median, else 0: arithmetic on floats is several times as fast as boolean masks
    tail: Tensor  # 1 − F above the median, F below; 0 at ±inf
    density: Tensor  # F′; 0 at ±inf


@dataclass(frozen=True, eq=False)
class Cdf:
    """Describe a distribution function F."""

    name: str  # what ops and saved programs call it
    cdf: Elementwise  # F(z), to all digits however small
    survival: Elementwise  # 1 − F(z), to all digits however small
    density: Elementwise  # F′(z); at a kink, one of the one-sided slopes
    quantile: Elementwise | None  # F⁻¹ on (0, 1); if None, it is found by bisection
    center: float = 0.0  # the median, about: above it, 1 − F is summed instead of F
    smooth: bool = True  # whether F′ is continuous
    is_vertical: bool = False  # whether F′ is infinite somewhere: small y then need margins that only float64 has
    # All that the solver needs, in few passes; z may be infinite. If None, it is computed from the functions above.
    tails: Callable[[Tensor], Tails] | None = None
    # log F(z) for z < 0, if F is symmetric with exponential tails: for rows in which F underflows.
    log_tail: Elementwise | None = None
    log_density: Elementwise | None = None  # log F′(z), for weights where F′ underflows
    slope_at: Elementwise | None = None  # F′ as a function of y = F(z) in (0, 1): then backward needs y alone
    steer: Elementwise | None = None  # a rough F′ for the solver, if `density` differentiates: no op may do that


def _symmetric(
    name: str, cdf: Elementwise, density: Elementwise, quantile: Elementwise, both: Pair | None = None, **others: Any
) -> Cdf:
    """Make a Cdf with F(−z) = 1 − F(z); `both` gives F and F′ for z ≤ 0, which it may overwrite."""
    pair: Pair = both or (lambda z: (cdf(z), density(z)))

    def tails(z: Tensor) -> Tails:
        return Tails((z > 0).to(z.dtype), *pair(z.abs().neg_()))

    return Cdf(name, cdf, lambda z: cdf(-z), density, quantile, tails=tails, **others)


def _laplace(z: Tensor) -> Tensor:
    # A clamp passes the gradient on at its bound, as |z| would not.
    return torch.where(z > 0, 1 - 0.5 * (-z.clamp(min=0)).exp(), 0.5 * z.clamp(max=0).exp())


def _normal(z: Tensor) -> Tensor:
    tail: Tensor = torch.special.erfc(z * -math.sqrt(0.5))  # ndtr is ½ + ½erf below 0, which cancels
    return 0.5 * tail


def _normal_density(z: Tensor) -> Tensor:
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def _cauchy(z: Tensor) -> Tensor:
    return torch.atan2(torch.ones_like(z), -z) / math.pi  # not ½ + atan(z)/π, which cancels


SIGMOID = _symmetric(
    "sigmoid",
    torch.sigmoid,
    lambda z: (tail := torch.sigmoid(-z.abs())) * (1 - tail),
    torch.logit,
    lambda z: (tail := z.sigmoid_(), torch.addcmul(tail, tail, tail, value=-1)),
    slope_at=lambda y: y * (1 - y),
    log_tail=lambda z: z,
    log_density=lambda z: logsigmoid(z) + logsigmoid(-z),
)
LAPLACE = _symmetric(
    "laplace",
    _laplace,
    lambda z: 0.5 * (-z.abs()).exp(),
    lambda p: torch.where(p < 0.5, (2 * p).log(), -(2 * (1 - p)).log()),
    lambda z: (z.exp_().mul_(0.5),) * 2,
    slope_at=lambda y: torch.minimum(y, 1 - y),
    log_tail=lambda z: z - math.log(2),
    log_density=lambda z: -z.abs() - math.log(2),
)
NORMAL = _symmetric(
    "normal",
    _normal,
    _normal_density,
    torch.special.ndtri,
    log_density=lambda z: -0.5 * z.square() - 0.5 * math.log(2 * math.pi),
    slope_at=lambda y: _normal_density(torch.special.ndtri(y)),
)
CAUCHY = _symmetric(
    "cauchy",
    _cauchy,
    lambda z: 1 / (math.pi * (1 + z.square())),
    # The smaller of y and 1 − y, because sin and tan near π would round.
    lambda y: torch.where(y < 0.5, -1.0, 1.0) / torch.tan(math.pi * torch.minimum(y, 1 - y)),
    slope_at=lambda y: torch.sin(math.pi * torch.minimum(y, 1 - y)).square() / math.pi,
)


def power(p: float) -> Cdf:
    """Return the cdf clip(z, 0, 1)^(1/(p − 1)), whose Ω is the p-norm; p = 2 is the Euclidean projection."""
    exponent, center = 1 / (p - 1), 0.5 ** (p - 1)

    def between(z: Tensor) -> Tensor:
        """Return z in (0, 1), and elsewhere a number that harms no derivative."""
        return torch.where((z <= 0) | (z >= 1), 0.5, z)

    def extended(z: Tensor, inside: Tensor, below: float, above: float) -> Tensor:
        return torch.where(z >= 1, above, torch.where(z <= 0, below, inside))

    def tails(z: Tensor) -> Tails:
        inside, is_inside = z.clamp(0, 1), ((z > 0) & (z < 1)).to(z.dtype)
        above = (z > center).to(z.dtype)
        if p == 2:
            return Tails(above, (above - inside).abs_(), is_inside)
        density = exponent * between(z) ** (exponent - 1)
        return Tails(above, (above - inside**exponent).abs_(), density.mul_(is_inside))

    return Cdf(
        "euclidean" if p == 2 else f"power:{p!r}",
        lambda z: extended(z, between(z) ** exponent, 0.0, 1.0),
        lambda z: extended(z, -torch.expm1(exponent * between(z).log()), 1.0, 0.0),
        lambda z: extended(z, exponent * between(z) ** (exponent - 1), 0.0, 0.0),
        lambda y: y ** (p - 1),
        center=center,
        smooth=False,
        is_vertical=p > 2,
        tails=tails,
        slope_at=lambda y: exponent * y ** (2 - p),
    )


EUCLIDEAN = power(2.0)

# It keeps no cdf alive that nobody else uses.
_NAMED = WeakValueDictionary({cdf.name: cdf for cdf in (SIGMOID, LAPLACE, NORMAL, CAUCHY, EUCLIDEAN)})


def register(cdf: Cdf) -> Cdf:
    """Make a cdf known by its name for as long as it lives; return it, or an equal one that is known already."""
    return _NAMED.setdefault(cdf.name, cdf)


def cdf_by_name(name: str) -> Cdf:
    """Look up a cdf by its name."""
    cdf = power(float(name.removeprefix("power:"))) if name.startswith("power:") else _NAMED.get(name)
    if cdf is None:
        raise LookupError(
            f"The relaxation {name!r} does not exist in this process. If the program was exported or saved with a "
            "`khot.relaxation` of your own, make that relaxation, from the same functions and with the same `name`, "
            "before you run the program."
        )
    return cdf


def tails_at(cdf: Cdf, z: Tensor) -> Tails:
    """Return both sides of F at z, which may be infinite."""
    if cdf.tails is not None:
        return cdf.tails(z)
    infinite, is_above = z.isinf(), z > cdf.center
    finite = torch.where(infinite, cdf.center, z)
    tail = torch.where(is_above, cdf.survival(finite), cdf.cdf(finite)).masked_fill(infinite, 0.0)
    return Tails(is_above.to(z.dtype), tail, (cdf.steer or cdf.density)(finite).masked_fill(infinite, 0.0))


def tail_sums(at: Tails, k: Tensor, costs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return N − k, Σ F below and Σ 1 − F above the median, and Σ F′ below and above it; all (…, 1) float64.

    N is the number of scores above the median; everything is weighted with the costs. k is (…, 1).
    """
    count, tail, density = at if costs is None else (costs * part for part in at)
    upper, upper_slope = row_sum(tail * at.above), row_sum(density * at.above)
    lower, lower_slope = (row_sum(tail) - upper).clamp(min=0), (row_sum(density) - upper_slope).clamp(min=0)
    return row_sum(count) - k, lower, upper, lower_slope, upper_slope


def quantile(cdf: Cdf, share: Tensor) -> Tensor:
    """Return F⁻¹(share); shares that round to 0 or 1 are moved inside."""
    info = torch.finfo(share.dtype)
    share = share.clamp(info.tiny, 1 - info.eps)
    return bisect(cdf.cdf, share) if cdf.quantile is None else cdf.quantile(share)


def bisect(cdf: Elementwise, share: Tensor) -> Tensor:
    """Return F⁻¹ by halving within ±1e30, for shares in (0, 1)."""
    low, high = torch.full_like(share, -REACH), torch.full_like(share, REACH)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        z = middle.sign() * torch.expm1(middle.abs())  # few halvings reach far
        is_below = cdf(z) < share
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return z


def difference(cdf: Elementwise) -> Elementwise:
    """Return F′ by a central difference, to about 1e-5."""

    def slope(z: Tensor) -> Tensor:
        h = z.abs().clamp(min=1) * math.cbrt(torch.finfo(z.dtype).eps)
        return (cdf(z + h) - cdf(z - h)) / (2 * h)

    return slope


def value(cdf: Cdf, z: Tensor) -> Tensor:
    """Return F(z); where z is infinite, exactly 0 or 1 with gradient 0."""
    infinite = z.isinf()
    return torch.where(infinite, (z > 0).to(z.dtype), cdf.cdf(torch.where(infinite, cdf.center, z)))


def row_sum(t: Tensor) -> Tensor:
    """Sum over the last dim in float64, shape (…, 1).

    A float32 row is summed in float32 chunks whose sums are added in float64: as accurate as `sum(dtype=float64)` to
    within a rounding of a chunk, and several times as fast.
    """
    n = t.shape[-1]
    if t.dtype == torch.float64 or n <= CHUNK:
        return t.sum(-1, keepdim=True, dtype=torch.float64)
    in_chunks = n // CHUNK * CHUNK
    chunks: Tensor = t.narrow(-1, 0, in_chunks).unflatten(-1, (-1, CHUNK)).sum(-1)
    total = chunks.sum(-1, keepdim=True, dtype=torch.float64)
    if in_chunks == n:
        return total
    return total + t.narrow(-1, in_chunks, n - in_chunks).sum(-1, keepdim=True, dtype=torch.float64)
