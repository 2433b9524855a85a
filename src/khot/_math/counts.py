"""How many of n independent events happen, but for one of them: the law of that count, for each that is left out.

Chances are float64, (n, m): n events, m cases side by side. How many terms the sums take is read on the host.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

RARE = 35.0  # a chance of e^−RARE may be lost
FEW = 64  # events, whose count varies too little for a short series
SLACK = 4.0  # bounds of spectra are not reached
SIGNS = 1, 1, -1, -1  # of Chebyshev's polynomials 0, 1, …, in recursions that add


def chance_of_others(
    above: Tensor, below: Tensor, k: Tensor, weight: Tensor | None = None, rare: float = RARE
) -> Tensor:
    """Return P(k − 1 of the others are above) for each i, given the chances of each, (n, m); k is (m).

    With a weight (n, m), each event counts so often; the variance of the count must then be large (`terms_of`).
    """
    n = len(above) if weight is None else round(float(weight.detach().sum(0).max()))
    is_many = 2 * k > n + 1  # then those below are fewer, n − k
    place = torch.where(is_many, n - k, k - 1)
    up, down = (above, below) if not bool(is_many.any()) else _swapped(above, below, is_many)
    if weight is None and n <= FEW:
        return by_products(up, down, place, int(place.max()) + 1)
    p, q = above.detach(), below.detach()
    mean, variance = ((t if weight is None else t * weight.detach()).sum(0) for t in (p, p * q))
    off = (mean - k).abs()
    reach = rare / 3 + ((rare / 3) ** 2 + 2 * rare * variance).sqrt()  # Bernstein's, then Newton towards Bennett's
    for _ in range(2):
        reach = (rare + reach) / (reach / variance).log1p() - variance
    # Modulo this, a count of variance v meets k − 1 by chance with at most e^−rare.
    modulus = (off + reach + 3).nan_to_num(3.0).clamp(max=n).ceil()
    terms = terms_of(float(variance.min()), n, rare)
    length = int(min(place.max() + 1, modulus.max() + 1))
    if terms < length or weight is not None:
        return by_spectrum(above, below, k, variance, modulus, terms, weight, rare)
    return by_products(up, down, place, length)


def _swapped(above: Tensor, below: Tensor, is_many: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(is_many, below, above), torch.where(is_many, above, below)


def by_products(up: Tensor, down: Tensor, place: Tensor, length: int) -> Tensor:
    """Return the coefficient of z^place in the product of all polynomials down + up z but the i-th, for each i; (n, m).

    Products of pairs, of pairs of pairs, and so on; then back, what is wanted from all outside a pair. All terms are
    positive, so no digit is lost. A `length` above all places cuts polynomials; a shorter one takes z^length as 1.
    """
    n, is_cut = len(up), bool(place.max() < length)
    levels, p = [], torch.stack((down, up), 1)  # (groups, coefficients, m)
    while len(p) > 1:
        if len(p) % 2:
            p = torch.cat((p, pad(torch.ones_like(p[:1, :1]), (0, 0, 0, p.shape[1] - 1))))
        levels.append(pairs := p.view(-1, 2, *p.shape[1:]))
        if len(pairs) == 1:
            break
        size = p.shape[1]
        product = pad(pairs[:, 0, :1] * pairs[:, 1], (0, 0, 0, size - 1))
        for i in range(1, size):
            product[:, i : i + size].addcmul_(pairs[:, 0, i, None], pairs[:, 1])
        p = product[:, :length]
        if not is_cut and 2 * size - 1 > length:
            p = p + pad(product[:, length:], (0, 0, 0, 2 * length - 2 * size + 1))
    top = levels.pop()[0]  # of the last pair, each is what the other wants
    index = place - torch.arange(top.shape[1], device=up.device)[:, None]
    index = index if is_cut else index % length
    is_there = (index >= 0) & (index < top.shape[1])
    wanted = torch.where(
        is_there, top.flip(0).gather(1, index.clamp(0, top.shape[1] - 1).long().expand(2, -1, -1)), 0.0
    )
    for pairs in reversed(levels):
        size = pairs.shape[2]
        keep = 1 if pairs is levels[0] else size
        more = 2 * size - 1 - wanted.shape[1]
        if more > 0:
            wanted = pad(wanted, (0, 0, 0, more)) if is_cut else torch.cat((wanted, wanted[:, :more]), 1)
        others = pairs.flip(1)
        result = wanted[: len(pairs), None, :keep] * others[:, :, :1]
        for j in range(1, size):
            result.addcmul_(wanted[: len(pairs), None, j : j + keep], others[:, :, j, None])
        wanted = result.flatten(0, 1)
    return wanted[:n, 0]


def terms_of(variance: float, n: int, rare: float = RARE) -> float:
    """Return how many terms of a series in tan(ω/4) it takes where e^(−v (1 − cos ω)) counts; inf if it does at π."""
    omega = torch.linspace(0, math.pi, 200)[1:-1]
    fall = rare - SLACK - variance * (1 - omega.cos())
    terms = torch.where(fall > 0, (fall + math.log(n)) / -(omega / 4).tan().log(), 0.0)
    return math.ceil(float(terms.max())) + 1 if fall[-1] < 0 else math.inf


def by_spectrum(
    above: Tensor,
    below: Tensor,
    k: Tensor,
    variance: Tensor,
    modulus: Tensor,
    terms: float,
    weight: Tensor | None = None,
    rare: float = RARE,
) -> Tensor:
    """Return P(k − 1 of the others are above) for each i, (n, m), where the variance of the count is large.

    The law of the count is the Fourier sum of its characteristic function Π φ_j, φ_j = 1 + q_j (e^iω − 1), at L
    frequencies, less those where |Π φ| ≤ e^(−v (1 − cos ω)) is as good as 0. With x = 2 q − 1, τ = −i tan(ω/4) and
    Chebyshev's T_c, 1/φ = e^(−iω/2) (1 + 2 Σ τ^c T_c(x)) and log φ = −Σ 2/c τ^c (T_c(x) − T_c(−1)): few sums over items
    give Π φ, and a polynomial in x gives Π φ/φ_i for all of them.
    """
    x = above - below
    n = len(x) if weight is None else weight.sum(0)
    half = (modulus / 2).ceil()
    length = 2 * half + 1
    highest = torch.minimum(half, (length * (1 - rare / variance).clamp(min=-1.0).acos() / (2 * math.pi)).ceil() + 1)
    t = torch.arange(int(highest.max()) + 1, dtype=x.dtype, device=x.device)[:, None]
    omega = 2 * math.pi * torch.minimum(t, half) / length  # (T, m)
    share = torch.where(t == 0, 1.0, torch.where(t <= half, 2.0, 0.0)) / length
    basis, double, tangent = [torch.ones_like(x), x], 2 * x, (omega / 4).tan()
    powers = [torch.ones_like(tangent), tangent]
    real, imag = torch.zeros_like(omega), -omega * (k - 0.5)
    for c in range(1, int(terms) + 1):  # signs of T_c: + + − − + + …, those of i^c
        sign, values = SIGNS[c % 4], basis[c] if weight is None else basis[c] * weight
        moment = 2 / c * (values.sum(0) - sign * (-1) ** c * n)
        if c % 2:
            imag = imag + powers[c] * moment
        else:
            real = real - powers[c] * moment
        basis.append(torch.addcmul(basis[c - 1], double, basis[c], value=sign * SIGNS[(c + 1) % 4]))
        powers.append(powers[c] * tangent)
    size = share * torch.minimum(real, variance * (omega.cos() - 1)).exp()  # where the series is too short, the bound
    parts = size * imag.cos(), 2 * size * imag.sin()
    result = (parts[0].sum(0)).expand_as(x).clone()
    for c in range(1, int(terms) + 1):
        result.addcmul_((powers[c] * (parts[1] if c % 2 else 2 * parts[0])).sum(0), basis[c])
    return result
