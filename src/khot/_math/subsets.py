"""Subsets: independent 0/1 draws on the last dim given that their count is k; and lists of all k-subsets.

With p = σ(z) and S = Σ Bernoulli(p), the characteristic function is Φ(ω) = Π φ_i, φ_i = 1 + p_i(e^{iω} − 1). It is
inverted at L points. z is tilted, Σ p = k, so that k is the most likely count, and P(S = k) cannot underflow. L ~ √V
points keep the aliasing below e^{−42} (Bernstein), and at most `MOST` of them have |Φ| ≤ e^{−V(1 − cos ω)} above that.
"""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 30
NEGLIGIBLE = 42.0  # e^−42 is 6e-19
AT_ONCE = 1 << 18  # complex numbers per chunk: what stays in the cache
MOST_PAIRS = 1 << 22  # at a time


class Counts(NamedTuple):
    """Hold the characteristic function of S at the points that matter."""

    p: Tensor  # (…, n)
    step: Tensor  # (…, T) e^{iω} − 1
    weight: Tensor  # (…, T) complex, Φ(ω) e^{−iωk} times the factor of the inversion; Σ Re = P(S = k)


class Whole:
    """Join the results of the parts of a row, which is nothing if there is one part; and sum over the items."""

    is_one = True  # part

    def add(self, t: Tensor) -> Tensor:
        """Return the sum over all parts, real or complex."""
        return t

    def multiply(self, t: Tensor) -> Tensor:
        """Return the product over all parts, complex."""
        return t

    def largest(self, t: Tensor) -> Tensor:
        """Return the maximum over all parts."""
        return t

    def product(self, p: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        """Return Π (1 + p·step) over the items of all parts, (…, T); anything where the scale is 0."""
        value = torch.ones_like(step)
        for part in _parts(p, step):
            value = value * _product(_factors(p[..., part], step))
        return self.multiply(value)

    def rests(self, c: Counts) -> tuple[Tensor, Tensor]:
        """Return Σ Re of weight·e^{iω}/φ_i and of weight/φ_i; (…, n)."""
        less, same = [], []
        for part in _parts(c.p, c.step):
            terms = c.weight[..., None] / _factors(c.p[..., part], c.step)  # (…, T, m)
            less.append(((c.step + 1)[..., None] * terms).real.sum(-2))
            same.append(terms.real.sum(-2))
        return torch.cat(less, -1), torch.cat(same, -1)


HERE = Whole()


def counts(z: Tensor, k: Tensor, n: int | None = None, whole: Whole = HERE) -> Counts:
    """Return the characteristic function of Σ Bernoulli(σ(z)), for the count k; z (…, n) float64, k (…) integers.

    If z holds a part of each row, n is the length of the whole.
    """
    n, p = z.shape[-1] if n is None else n, z.sigmoid()
    variance = whole.add((p * torch.sigmoid(-z)).sum(-1).detach())
    length = (14 + (196 + 84 * variance).sqrt()).ceil().clamp(max=n + 1)
    length = length + (length + 1) % 2  # odd: no factor vanishes at p = ½, ω = π
    place = torch.arange(min(MOST, (n + 2) // 2 + 1), device=z.device)
    turns = place / length[..., None]
    step = torch.polar(torch.ones_like(turns), 2 * torch.pi * turns) - 1
    matters = (2 * place < length[..., None]) & (variance[..., None] * -step.real <= NEGLIGIBLE)
    # ω k to the last digit: full turns are dropped before they are rounded
    phase = -2 * torch.pi * ((place * k[..., None]) % length[..., None]) / length[..., None]
    scale = torch.where(matters, torch.where(place == 0, 1.0, 2.0) / length[..., None], 0.0)
    return Counts(p, step, whole.product(p, step, scale) * torch.polar(scale, phase))


def log_size(c: Counts) -> Tensor:
    """Return log P(S = k); (…)."""
    return c.weight.real.sum(-1).log()


def without(c: Counts, whole: Whole = HERE) -> tuple[Tensor, Tensor]:
    """Return P(S − x_i = k − 1) and P(S − x_i = k), both relative to P(S = k); (…, n)."""
    total = c.weight.real.sum(-1, keepdim=True)
    less, same = whole.rests(c)
    return less / total, same / total


def marginals(c: Counts, whole: Whole = HERE) -> Tensor:
    """Return P(x_i = 1 | S = k); (…, n)."""
    less, same = without(c, whole)
    chosen, left = c.p * less, (1 - c.p) * same
    return torch.where(chosen < left, chosen, 1 - left)


def spread(c: Counts, less: Tensor, same: Tensor) -> Tensor:
    """Return π(1 − π) of the marginals, to relative precision, from what `without` gives; (…, n)."""
    return c.p * less * (1 - c.p) * same


def covariance_product(c: Counts, v: Tensor, whole: Whole = HERE) -> Tensor:
    """Return Cov(x | S = k) v; (…, n). With u_i = p_i e^{iω}/φ_i, E[x_i x_j] = Σ weight u_i u_j off the diagonal."""
    total = c.weight.real.sum(-1, keepdim=True)
    share = c.p * (1 - c.p)
    pulled, mass = (whole.add(t.sum(-1, keepdim=True)) for t in (v * share, share))
    centre = pulled / mass.clamp(min=1e-300)
    v = v - centre  # a constant has no covariance with a fixed size, and would only cancel
    pull = torch.zeros_like(c.step)
    for part in _parts(c.p, c.step):
        pull = pull + (v[..., None, part] * _chosen(c, part)).sum(-1)
    pull = whole.add(pull)
    mean = (c.weight * pull).real.sum(-1, keepdim=True) / total
    result = []
    for part in _parts(c.p, c.step):
        u, w = _chosen(c, part), v[..., part]
        both = (c.weight[..., None] * u * (pull[..., None] + w[..., None, :] * (1 - u))).real.sum(-2) / total
        alone = (c.weight[..., None] * u).real.sum(-2) / total
        result.append(both - alone * mean)
    return torch.cat(result, -1)


def joint(c: Counts, extra: Tensor | None = None) -> Tensor:
    """Return E[x_i x_j | S = k], or with `extra` a (…, n) E[x_i x_j Σ a x | S = k]; (…, n, n), with the diagonal."""
    rows, n = c.p.shape[:-1].numel(), c.p.shape[-1]
    if rows > (width := max(MOST_PAIRS // (n * n), 1)):
        parts = zip(*(t.flatten(0, -2).split(width) for t in (*c, c.p if extra is None else extra)), strict=True)
        each = [joint(Counts(*part), None if extra is None else a) for *part, a in parts]
        return torch.cat(each).view(*c.p.shape, n)
    total = c.weight.real.sum(-1)[..., None, None]
    u = _chosen(c, slice(None))  # (…, T, n)
    weight = c.weight[..., None]
    if extra is None:
        both = (u.mT @ (weight * u)).real
        alone = (weight * u).real.sum(-2)
    else:
        rest = extra[..., None, :] * (1 - u)
        pull = (extra[..., None, :] * u).sum(-1, keepdim=True)
        mixed = (weight * u * rest).mT @ u
        both = (u.mT @ (weight * pull * u) + mixed + mixed.mT).real
        alone = (weight * u * (pull + rest)).real.sum(-2)
    diagonal = torch.eye(c.p.shape[-1], dtype=torch.bool, device=c.p.device)
    return torch.where(diagonal, alone[..., None], both) / total


def _factors(p: Tensor, step: Tensor) -> Tensor:
    return 1 + p[..., None, :] * step[..., None]  # (…, T, m)


def _chosen(c: Counts, part: slice) -> Tensor:
    """Return p e^{iω}/φ, for the items of the part; (…, T, m)."""
    p = c.p[..., part]
    return p[..., None, :] * (c.step + 1)[..., None] / _factors(p, c.step)


def _parts(p: Tensor, step: Tensor) -> Iterator[slice]:
    """Yield slices of the last dim, few enough items at once to stay in the cache."""
    width = max(AT_ONCE // max(step.numel(), 1), 1)
    yield from (slice(start, start + width) for start in range(0, p.shape[-1], width))


def _product(factors: Tensor) -> Tensor:
    """Multiply over the last dim, pairwise: its error grows with log n."""
    while factors.shape[-1] > 1:
        half = factors.shape[-1] // 2
        rest = factors[..., 2 * half :]
        factors = torch.cat((factors[..., :half] * factors[..., half : 2 * half], rest), -1)
    return factors[..., 0]


def safe_log(t: Tensor) -> Tensor:
    """Return log t; −inf, without a gradient, where t ≤ 0."""
    is_nil = t <= 0
    return torch.where(is_nil, -torch.inf, torch.where(is_nil, 1.0, t).log())


def log_number_of_subsets(n: int, k: float) -> float:
    """Return the decimal logarithm of how many subsets have the size k; the larger of ⌊k⌋ and ⌈k⌉ if fractional."""
    sizes = {math.floor(k), math.ceil(k)}
    return max(math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1) for m in sizes) / math.log(10)


def all_subsets(n: int, k: float, device: torch.device) -> Tensor:
    """List the subsets as k-hot rows, in lexical order; (count, n) float64."""
    rows = []
    for size in sorted({math.floor(k), math.ceil(k)}):
        chosen = torch.tensor(list(combinations(range(n), size)), dtype=torch.int64).view(math.comb(n, size), size)
        rows.append(torch.zeros(len(chosen), n, dtype=torch.float64).scatter_(1, chosen, 1.0))
    return torch.cat(rows).to(device)
