"""Order sampling: each score gets a noise of its own, and the k largest sums are the sample.

With Gumbel noise on logits this is Plackett–Luce without its order; with logistic noise on logit π, Rosén's Pareto
sampling. A noise is a continuous law with cdf F whose F, 1 − F and hazard h = f/(1 − F) are log-concave, h rising. Each
quantity here is an integral over the place y of a threshold. The integrand is smooth and has one peak, so the trapezoid
rule on the window that holds its mass converges geometrically.

Scores are float64; −inf is never chosen and +inf always, and both drop out. The caller ensures that k is an integer and
that #(+inf) ≤ k ≤ #(> −inf). How many nodes the sums take is read on the host.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from torch.utils.checkpoint import checkpoint

from . import drawn_sets
from .counts import RARE, SIGNS, chance_of_others, terms_of
from .noise import Uniform, gumbel_quantile, inside

# (scores (…, n), k (…), mask) → k-hot (…, n): `khot.ops.hard_topk`, which the caller gives
HardTopK = Callable[[Tensor, Tensor, Tensor | None], Tensor]
FAR = 36.0  # e^−FAR of the mass may be lost, at each of: the window's ends, the spacing, the frequencies
# The trapezoid rule errs by e^(−2π a/step) on what is bounded for |Im y| ≤ a. The Gumbel cdf e^(−e^−y) is for a = π/2,
# and products of logistic ones tend to it.
STEP = math.pi**2 / FAR
RARE_SINGLE = 24.0  # as RARE, for results that are rounded to single precision
NODES, MOST_NODES = 128, 1 << 15
AT_ONCE = 1 << 17  # nodes times items of rows that are summed together
MANY = 300  # items
POLYNOMIALS = 1 << 22  # items times polynomials that are held
CLOSE = 0.03  # how exactly the ends of a window are found
CHUNK = 1 << 17  # how many numbers a tensor may hold while nodes are summed: few enough for the cache
GONE = 300.0  # so far out that log F(GONE), log(1 − F(−GONE)) and h(−GONE) are as good as 0, yet no underflow
OUT_OF_REACH = 1e4  # a gap that noise does not cross
LOG_2 = math.log(2.0)


class Noise(NamedTuple):
    """Describe a law of noise by functions of float64, elementwise, accurate in both tails, with finite derivatives."""

    log_cdf: Callable[[Tensor], Tensor]
    log_sf: Callable[[Tensor], Tensor]  # log(1 − F)
    log_hazard: Callable[[Tensor], Tensor]  # log(f/(1 − F))
    quantile: Callable[[Tensor], Tensor]  # F⁻¹; finite for u in (0, 1], as (j + ½)·2⁻⁵³ may round to 1
    parts: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # 1 − F, F, f


def _clock(z: Tensor) -> Tensor:
    """Return u = e^−z, kept finite: a Gumbel score is −log of the time at which an exponential clock rings."""
    return z.clamp(min=-700.0).neg().exp()


def _gumbel_logs(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return u; log(1 − e^−u) for u ≥ log 2; and log((1 − e^−u)/u) for u ≤ log 2, where log u is more exact than u."""
    u = _clock(z)
    small = u.clamp(1e-30, LOG_2)
    return u, torch.log1p(-torch.exp(-u.clamp(LOG_2, 700.0))), torch.log(-torch.expm1(-small) / small)


def _gumbel_log_sf(z: Tensor) -> Tensor:
    u, large, small = _gumbel_logs(z)
    return torch.where(u > LOG_2, large, small - z)


def _gumbel_log_hazard(z: Tensor) -> Tensor:
    u, large, small = _gumbel_logs(z)
    return -u - torch.where(u > LOG_2, large + z, small)


def _logistic_quantile(u: Tensor) -> Tensor:
    return torch.log(u) - torch.log1p(-u.clamp(max=1 - 2.0**-53))


def _gumbel_parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u = z.clamp(min=-80.0).neg_().exp_()
    below = torch.exp(-u)
    return torch.expm1(-u).neg(), below, u * below


def _logistic_parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    below, above = torch.sigmoid(z), torch.sigmoid(-z)
    return above, below, above * below


GUMBEL = Noise(lambda z: -_clock(z), _gumbel_log_sf, _gumbel_log_hazard, gumbel_quantile, _gumbel_parts)
LOGISTIC = Noise(logsigmoid, lambda z: logsigmoid(-z), logsigmoid, _logistic_quantile, _logistic_parts)


def log_prob(noise: Noise, scores: Tensor, k: Tensor, subset: Tensor) -> Tensor:
    """Return log P(the sample is `subset`), with derivatives in the scores.

    P = ∫ Π_{j∉S} F(y − s_j) · Π_{i∈S} (1 − F(y − s_i)) · Σ_{i∈S} h(y − s_i) dy: the least of the chosen scores is at y.
    Scores and the boolean or 0/1 subset are (…, n), k and the result (…). Accurate to a few roundings of the sum of the
    logarithms, unless a plateau of the integrand needs more than `MOST_NODES`: scores 9000 apart.
    """
    scores, chosen = torch.broadcast_tensors(scores, subset.bool())
    forbidden = (chosen & (scores == -torch.inf)) | (~chosen & (scores == torch.inf))
    possible = (chosen.sum(-1) == k) & ~forbidden.any(-1)
    inside, outside = chosen & scores.isfinite(), ~chosen & scores.isfinite()
    # A score so far off that noise does not bring it near is as good as −inf or +inf, a mask of finfo.min for example.
    low = torch.where(inside, scores, torch.inf).amin(-1, keepdim=True)
    outside = outside & (scores >= low - OUT_OF_REACH)
    high = torch.where(outside, scores, -torch.inf).amax(-1, keepdim=True)
    inside = inside & (scores <= high + OUT_OF_REACH)
    is_random = possible & inside.any(-1) & outside.any(-1)
    inside, outside = inside & is_random.unsqueeze(-1), outside & is_random.unsqueeze(-1)
    scores = torch.where(inside | outside, scores, 0.0)  # a row that is not random goes along as zeros
    n, most = scores.shape[-1], int(inside.sum(-1).max()) if inside.numel() else 0
    is_few = noise is GUMBEL and 0 < most <= drawn_sets.MOST_DRAWN
    law = partial(_log_few, most) if is_few else partial(_log_integral, noise)
    rows = max((CHUNK >> most if is_few else CHUNK // max(n, 1)), 1)
    given = (t.expand_as(scores).reshape(-1, n).split(rows) for t in (scores, inside, outside))
    parts = [made_anew(law, 1 + (is_random.numel() > rows), *part) for part in zip(*given, strict=True)]
    result = torch.cat(parts).view(is_random.shape).clamp(max=0.0)
    return torch.where(is_random, result, torch.where(possible, 0.0, -torch.inf))


def _log_few(most: int, scores: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Compute `log_prob` of Gumbel noise for rows (r, n) of which at most so many are inside."""
    items = inside.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
    scores = scores - scores.detach().amax(-1, keepdim=True)
    rest = torch.where(outside, scores, drawn_sets.NOTHING).logsumexp(-1)
    return drawn_sets.log_prob(scores.gather(-1, items).mT, inside.gather(-1, items).mT, rest)


def _log_integral(noise: Noise, scores: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Compute `log_prob` for rows (r, n)."""
    is_random = inside.any(-1)

    def log_integrand(s: Tensor, y: Tensor, is_bound: bool = False) -> Tensor:
        """Return it at y (…, m); or a concave bound at most log k below, with the largest hazard for the sum of all."""
        z = y.unsqueeze(-1) - s.unsqueeze(-2)
        z_inside = torch.where(inside.unsqueeze(-2), z, -GONE)
        z_outside = torch.where(outside.unsqueeze(-2), z, GONE)
        log_product = noise.log_cdf(z_outside).sum(-1) + noise.log_sf(z_inside).sum(-1)
        hazard = noise.log_hazard(z_inside.amax(-1)) if is_bound else noise.log_hazard(z_inside).logsumexp(-1)
        return log_product + hazard

    with torch.no_grad():
        log_bound = partial(log_integrand, is_bound=True)
        size = inside.sum(-1).to(scores.dtype)
        peak, left, right = _peak_and_window(log_bound, scores, FAR + size.clamp(min=1.0).log())
        width = torch.where(is_random, left + right, 1.0)
        nodes = min(max(NODES, math.ceil(float(width.max()) / STEP)), MOST_NODES) if len(width) else NODES
        spacing = width / nodes
    s = scores - peak.unsqueeze(-1)  # near the peak this is exact
    parts, chunks = [], _chunks(nodes + 1, s)
    for node in chunks:
        y = spacing.unsqueeze(-1) * node - left.unsqueeze(-1)
        parts.append(made_anew(log_integrand, len(chunks), s, y).logsumexp(-1))
    return torch.stack(parts, -1).logsumexp(-1) + spacing.log()


def made_anew(fn: Callable[..., Any], chunks: int, *arguments: Tensor) -> Any:
    """Call a function of one of several chunks, and again in backward: autograd would keep all of them."""
    is_kept = chunks == 1 or not torch.is_grad_enabled() or not any(t.requires_grad for t in arguments)
    return fn(*arguments) if is_kept else checkpoint(fn, *arguments, use_reentrant=False, preserve_rng_state=False)


def _chunks(count: int, each: Tensor) -> list[Tensor]:
    """Split 0, …, count − 1 into pieces, for work that holds a few tensors like `each` per number."""
    return list(torch.arange(count, device=each.device).split(max(1, CHUNK // max(1, each.numel()))))


def _peak_and_window(
    log_bound: Callable[[Tensor, Tensor], Tensor], s: Tensor, fall: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find where a concave function is largest, and how far left and right it has fallen by `fall`; all (…)."""
    margin = 5 + math.log(s.shape[-1])
    low, high = s.amin(-1) - margin, s.amax(-1) + margin
    reach = high - low + 2 * fall
    slope_step = 1e-4 + 1e-15 * torch.maximum(low.abs(), high.abs())
    for _ in range(32):
        middle = (low + high) / 2
        here, beyond = log_bound(s, torch.stack([middle, middle + slope_step], -1)).unbind(-1)
        rises = beyond >= here  # a tie is a plateau, or both are −inf and lie too far left
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    peak = (low + high) / 2
    s = s - peak.unsqueeze(-1)
    least = log_bound(s, torch.zeros_like(peak).unsqueeze(-1)) - fall.unsqueeze(-1)
    sides = torch.tensor([-1.0, 1.0], dtype=s.dtype, device=s.device)
    # By halving the logarithm of the distance a few steps find it to a percent, be it 1e-3 or 1e6.
    near, far = torch.full_like(least, 1e-6).log().expand(*least.shape[:-1], 2), reach.log().unsqueeze(-1)
    for _ in range(12):
        middle = (near + far) / 2
        is_far = log_bound(s, sides * middle.exp()) < least
        near, far = torch.where(is_far, near, middle), torch.where(is_far, middle, far)
    return peak, far[..., 0].exp(), far[..., 1].exp()


def inclusion(noise: Noise, scores: Tensor, k: Tensor, rare: float = RARE) -> Tensor:
    """Return P(i is in the sample) for each i, differentiable; scores (…, n), k (…) → (…, n).

    Accurate to 1e-12, or to some e^−rare if that is larger.

    π_i = ∫ (1 − F(y − s_i)) g_i(y) dy, where g_i is the density of the k-th largest score among the others.
    """
    k = k.expand(scores.shape[:-1]) - (scores == torch.inf).sum(-1)
    is_random = scores.isfinite()
    sizes = is_random.sum(-1)
    result = ((scores == torch.inf) | (is_random & (k >= sizes).unsqueeze(-1))).to(scores.dtype)
    result = result + 0 * torch.where(is_random, scores, 0.0)  # a gradient, of 0, where nothing is left to chance
    rows = (k > 0) & (k < sizes)
    if scores.numel() and bool(rows.any()):
        random, size = torch.where(is_random, scores, -torch.inf)[rows], k[rows].to(scores.dtype)
        most = int(size.max())
        is_short = noise is GUMBEL and drawn_sets.is_short(scores.shape[-1], most)
        law = _listed if is_short else _integrated
        result[rows] += law(noise, random, size, rare)
    return result


def _listed(noise: Noise, scores: Tensor, k: Tensor, rare: float = RARE) -> Tensor:
    """Compute `inclusion` of Gumbel noise by all sets of fewer than k items: the next item is drawn ∝ e^score."""
    s, order = _close_gaps(scores, k, rare)
    return torch.empty_like(s).scatter_(-1, order, drawn_sets.inclusion(s, k).clamp(0.0, 1.0))


def _integrated(noise: Noise, scores: Tensor, k: Tensor, rare: float = RARE) -> Tensor:
    """Compute `inclusion` for (r, n) rows of which more than k ≥ 1 are random; the others are −inf.

    With g_i(y) = P(k − 1 of the others are above y), h = Σ f_i g_i is the density of the k-th largest score, and
    π_i = ∫ P(i is above y) (f_i g_i + h) dy.
    """
    s, order = _close_gaps(scores, k, rare)
    rare = RARE if _is_smooth(s) else rare  # few scores are fast enough
    parts = [_in_rows(noise, *part, rare) for part in _split(s, k, rare)]
    return torch.empty_like(s).scatter_(-1, order, torch.cat(parts).clamp(0.0, 1.0))


def _split(s: Tensor, k: Tensor, rare: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Split rows, so that the polynomials of many items fit."""
    count = max(POLYNOMIALS // (s.shape[-1] * max(_degree(s, rare), 1)), 1) if _is_smooth(s, rare) else len(s)
    return zip(s.split(count), k.split(count), strict=True)


def _in_rows(noise: Noise, s: Tensor, k: Tensor, rare: float) -> Tensor:
    """Take the integrals; those of many items at few scores, if the count varies enough for that.

    A sum over items of a smooth function of s, and π itself, are polynomials in s but for e^−rare. So few scores with
    weights stand for all, and the items get what the polynomial through π at these scores says.
    """
    if not _is_smooth(s, rare):
        return _by_nodes(noise, s, None, k, rare)
    size = _degree(s, rare)
    middle, half = (s.amax(-1, keepdim=True) + s.amin(-1, keepdim=True)).detach() / 2, _half_width(s) * 1.001
    x = (s - middle) / half
    basis = [torch.ones_like(x), x]
    for d in range(1, size - 1):
        basis.append(torch.addcmul(basis[d - 1], 2 * x, basis[d], value=SIGNS[d % 4] * SIGNS[(d + 1) % 4]))
    polynomials = torch.stack(basis, 1)  # (r, size, n): Chebyshev's, with signs
    angle = math.pi * (torch.arange(size, dtype=s.dtype, device=s.device) + 0.5) / size
    order = torch.arange(size, device=s.device)
    sign = torch.tensor(SIGNS, dtype=s.dtype, device=s.device)[order % 4]
    turn = (2 / size) * torch.cos(order[:, None] * angle) * sign[:, None]
    turn[0] /= 2
    few, weight = middle + half * angle.cos(), polynomials.sum(-1) @ turn
    with torch.no_grad():
        *_, variance = _nodes(noise, few, weight, k, rare)
        is_fit = bool(terms_of(float(variance), s.shape[-1], rare) < size)
    if not is_fit:
        return _by_nodes(noise, s, None, k, rare)
    at_few = _by_nodes(noise, few.expand_as(weight), weight, k, rare)
    return ((at_few @ turn.mT).unsqueeze(-2) @ polynomials).squeeze(-2)


def _half_width(s: Tensor) -> float:
    return float((s.amax(-1) - s.amin(-1)).detach().max()) / 2 + 1.0


def _degree(s: Tensor, rare: float = RARE) -> int:
    """Return how many polynomials stand for what is bounded for |Im s| ≤ π/2."""
    return math.ceil(rare / math.asinh(math.pi / 2 / _half_width(s))) + 8


def _is_smooth(s: Tensor, rare: float = RARE) -> bool:
    """Tell whether a row has many more items than polynomials that they need."""
    return s.shape[-1] > MANY and bool(s.isfinite().all()) and 4 * _degree(s, rare) < s.shape[-1]


def _by_nodes(noise: Noise, s: Tensor, weight: Tensor | None, k: Tensor, rare: float) -> Tensor:
    """Sum over nodes; each score may count several times. Rows with about as many nodes are taken together."""
    with torch.no_grad():
        low, high, counts, _ = _nodes(noise, s, weight, k, rare)
        counted = counts.argsort(descending=True)
    parts: list[Tensor] = []
    while (start := sum(map(len, parts))) < len(s):
        count = int(counts[counted[start]])
        rows = counted[start : start + max(AT_ONCE // (s.shape[-1] * count), 1)]
        place = torch.linspace(0, 1, count, dtype=s.dtype, device=s.device)
        y = torch.lerp(low[rows, None], high[rows, None], place)
        given = y, s[rows], k[rows], *(() if weight is None else (weight[rows],))
        parts.append(made_anew(partial(_summed, noise, rare), 1 + (len(rows) < len(s)), *given))
    return torch.cat(parts)[counted.argsort()]


def _summed(noise: Noise, rare: float, y: Tensor, s: Tensor, k: Tensor, weight: Tensor | None = None) -> Tensor:
    """Take the integral for each i at the nodes y (r, m); (r, n)."""
    count = y.shape[-1]
    z = (y - s.mT.unsqueeze(-1)).flatten(1)  # (n, r m): long rows for each item
    above, below, f = noise.parts(z)
    weight = None if weight is None else weight.mT.repeat_interleave(count, 1)
    both = f * chance_of_others(above, below, k.repeat_interleave(count), weight, rare)
    kth = (both if weight is None else both * weight).sum(0)
    total = (above * (both + kth)).view(len(z), *y.shape).sum(-1)
    # The mass is 1/spacing, but for roundings that `total` shares.
    return (total / kth.view(y.shape).sum(-1)).mT


def _nodes(
    noise: Noise, s: Tensor, weight: Tensor | None, k: Tensor, rare: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return from where to where nodes stand for each row, and how many, all (r); and the least variance of a count."""
    each = torch.ones_like(k).unsqueeze(-1).expand_as(s) if weight is None else weight
    if weight is None and s.shape[-1] <= MANY:  # bounds need few digits
        s, each, k = s.float(), each.float(), k.float()
    low, high = _window(noise, s, each, k, rare)
    # The peak is as wide as the inverse root of Fisher's information about y in who is above it. On a bell curve of
    # width w the rule errs by e^(−2 (πw/h)²), and where the density is e^−r, an error e^r times as large will do.
    points = 10 + math.ceil(float((high - low).max()))
    need, least = torch.zeros_like(low), torch.full_like(low, torch.inf)
    for i in _chunks(points + 1, s):
        z = (low.unsqueeze(-1) + ((high - low) / points).unsqueeze(-1) * i).unsqueeze(-1) - s.unsqueeze(-2)
        above, below, f = noise.parts(z)
        information = _over(f.square() / (above * below).clamp(min=1e-30), each)
        variance, rarity = _over(above * below, each), _rarity(above, below, each, k.unsqueeze(-1))[1]
        bell = 0.6 + 0.3 * variance.square() / (variance.square() + 16)  # a peak of few items is less of a bell
        need = torch.maximum(need, (information * (rare - rarity).clamp(min=0.0) / bell.square()).amax(-1))
        least = torch.minimum(least, variance.amin(-1))
    spacing = (math.pi * (2 / need).sqrt()).clamp(max=math.pi**2 / rare)
    return low.double(), high.double(), ((high - low) / spacing).ceil().long() + 1, least.min()


def _over(values: Tensor, weight: Tensor) -> Tensor:
    """Sum over items, each as often as it counts."""
    return (values @ weight.unsqueeze(-1)).squeeze(-1)


def _close_gaps(scores: Tensor, k: Tensor, rare: float = RARE) -> tuple[Tensor, Tensor]:
    """Return the scores in falling order, relative to the k-th, with gaps cut to what noise may cross; and that order.

    Then no window is wider than a few gaps, however far apart the scores are, and no chance changes by e^−rare.
    """
    s, order = scores.sort(-1, descending=True)
    gaps = (s[:, :-1] - s[:, 1:]).clamp(max=rare + 10 + math.log(s.shape[-1])).nan_to_num(0.0)  # NaN: −inf − −inf
    depth = pad(gaps.cumsum(-1), (1, 0))
    closed = depth.gather(-1, k.long().unsqueeze(-1) - 1) - depth
    return torch.where(s.isfinite(), closed, s), order


def _window(noise: Noise, s: Tensor, weight: Tensor, k: Tensor, rare: float) -> tuple[Tensor, Tensor]:
    """Return where the k-th largest of each row (r, n) lies but for a chance of e^−rare: from y to y, both (r)."""
    reach = (
        torch.where(s.isfinite(), s.abs(), 0.0).amax(-1, keepdim=True)
        + rare
        + math.log(float(weight.sum(-1).max()))
        + 5
    )
    sides = torch.tensor([-1.0, 1.0], dtype=s.dtype, device=s.device)
    outer, inner = sides * reach, -sides * reach
    for _ in range(math.ceil(math.log2(float(reach.max()) / CLOSE))):
        y = (outer + inner) / 2
        above, below, _ = noise.parts(y.unsqueeze(-1) - s.unsqueeze(-2))
        excess, rarity = _rarity(above, below, weight, k.unsqueeze(-1))
        is_far = (rarity > rare) & (excess * sides < 0)
        outer, inner = torch.where(is_far, y, outer), torch.where(is_far, inner, y)
    low, high = outer.unbind(-1)
    return low, high


def _rarity(above: Tensor, below: Tensor, weight: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the mean of the count above y is from k, and a bound of −log P(the count is as far off as k)."""
    mean, rest, variance = (_over(t, weight).clamp(min=0.0) for t in (above, below, above * below))
    off = (mean - k).abs()
    bennett = torch.xlogy(variance + off, 1 + off / variance) - off
    hoeffding = torch.xlogy(k, k / mean) + torch.xlogy(mean + rest - k, (mean + rest - k) / rest)
    return mean - k, torch.maximum(bennett.nan_to_num(0.0), hoeffding)  # NaN: a count that is certainly k


def draw(
    noise: Noise, scores: Tensor, k: Tensor, seed: Tensor, draws: int, uniform: Uniform, hard: HardTopK, stream: int = 0
) -> Tensor:
    """Draw `draws` k-hot samples of each row of the scores (rows, n); (draws, rows, n) float64."""
    shape = (draws, *scores.shape)
    u = inside(uniform(seed, stream, math.prod(shape))).view(shape)
    return hard(scores + noise.quantile(u), k.expand(shape[:-1]), None)
