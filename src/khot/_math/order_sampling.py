"""Order sampling: each score gets a noise of its own, and the k largest sums are the sample.

With Gumbel noise on logits this is Plackett–Luce without its order; with logistic noise on logit π, Rosén's Pareto
sampling. A noise is a continuous law with cdf F whose F, 1 − F and hazard h = f/(1 − F) are log-concave, h rising. Each
quantity here is an integral over the place y of a threshold. The integrand is smooth and has one peak, so the trapezoid
rule on the window that holds its mass converges geometrically.

Scores are float64; −inf is never chosen and +inf always, and both drop out. The caller ensures that k is an integer and
that #(+inf) ≤ k ≤ #(> −inf). How many nodes the sums take is read on the host.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from torch.utils.checkpoint import checkpoint

from .noise import Uniform, gumbel_quantile, inside

# (scores (…, n), k (…), mask) → k-hot (…, n): `khot.ops.hard_topk`, which the caller gives
HardTopK = Callable[[Tensor, Tensor, Tensor | None], Tensor]
FAR = 36.0  # e^−FAR of the mass may be lost, at each of: the window's ends, the spacing, the frequencies
# The trapezoid rule errs by e^(−2π a/step) on what is bounded for |Im y| ≤ a. The Gumbel cdf e^(−e^−y) is for a = π/2,
# and products of logistic ones tend to it.
STEP = math.pi**2 / FAR
NODES, MOST_NODES = 128, 1 << 15
MOST_LISTED = 1 << 12  # sets, of items drawn so far
MOST_COUNTED = 48  # items to draw, above which a spectrum takes less time
COUNTED_AT_ONCE = 1 << 22  # numbers to hold
PANEL = 12.0  # of a window that one rule of Gauss covers
CLOSE = 0.1  # how exactly the ends of a window are found
CHUNK = 1 << 17  # how many numbers a tensor may hold while nodes are summed: few enough for the cache
GONE = 300.0  # so far out that log F(GONE), log(1 − F(−GONE)) and h(−GONE) are as good as 0, yet no underflow
OUT_OF_REACH = 1e4  # a gap that noise does not cross
LOG_2 = math.log(2.0)


class Noise(NamedTuple):
    """A law of noise; its functions take float64, elementwise, accurate in both tails, with finite derivatives."""

    log_cdf: Callable[[Tensor], Tensor]
    log_sf: Callable[[Tensor], Tensor]  # log(1 − F)
    log_hazard: Callable[[Tensor], Tensor]  # log(f/(1 − F))
    log_density: Callable[[Tensor], Tensor]  # log f
    quantile: Callable[[Tensor], Tensor]  # F⁻¹; finite for u in (0, 1], as (j + ½)·2⁻⁵³ may round to 1


def _clock(z: Tensor) -> Tensor:
    """Return u = e^−z, kept finite: a Gumbel score is −log of the time at which an exponential clock rings."""
    return z.clamp(min=-700.0).neg().exp()


def _gumbel_parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return u; log(1 − e^−u) for u ≥ log 2; and log((1 − e^−u)/u) for u ≤ log 2, where log u is more exact than u."""
    u = _clock(z)
    small = u.clamp(1e-30, LOG_2)
    return u, torch.log1p(-torch.exp(-u.clamp(LOG_2, 700.0))), torch.log(-torch.expm1(-small) / small)


def _gumbel_log_sf(z: Tensor) -> Tensor:
    u, large, small = _gumbel_parts(z)
    return torch.where(u > LOG_2, large, small - z)


def _gumbel_log_hazard(z: Tensor) -> Tensor:
    u, large, small = _gumbel_parts(z)
    return -u - torch.where(u > LOG_2, large + z, small)


def _logistic_quantile(u: Tensor) -> Tensor:
    return torch.log(u) - torch.log1p(-u.clamp(max=1 - 2.0**-53))


GUMBEL = Noise(lambda z: -_clock(z), _gumbel_log_sf, _gumbel_log_hazard, lambda z: -_clock(z) - z, gumbel_quantile)
LOGISTIC = Noise(
    logsigmoid, lambda z: logsigmoid(-z), logsigmoid, lambda z: logsigmoid(z) + logsigmoid(-z), _logistic_quantile
)


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
        peak, left, right = _peak_and_window(log_bound, scores, FAR + k.to(scores.dtype).clamp(min=1.0).log())
        width = torch.where(is_random, left + right, 1.0)
        nodes = min(max(NODES, math.ceil(float(width.max()) / STEP)), MOST_NODES) if width.numel() else NODES
        spacing = width / nodes
    s = scores - peak.unsqueeze(-1)  # near the peak this is exact
    parts, chunks = [], _chunks(nodes + 1, s)
    for node in chunks:
        y = spacing.unsqueeze(-1) * node - left.unsqueeze(-1)
        parts.append(made_anew(log_integrand, len(chunks), s, y).logsumexp(-1))
    integral = (torch.stack(parts, -1).logsumexp(-1) + spacing.log()).clamp(max=0.0)
    return torch.where(is_random, integral, torch.where(possible, 0.0, -torch.inf))


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


def inclusion(noise: Noise, scores: Tensor, k: Tensor) -> Tensor:
    """Return P(i is in the sample) for each i, accurate to 1e-12, differentiable; scores (…, n), k (…) → (…, n).

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
        is_short = noise is GUMBEL and _is_short(scores.shape[-1], most)
        law = _listed if is_short else _counted if most <= MOST_COUNTED else _inclusion
        result[rows] += law(noise, random, size)
    return result


def _is_short(n: int, k: int) -> bool:
    """Tell whether few enough sets can be drawn on the way to k items; the weights of 12 do not underflow."""
    return k <= 12 and sum(math.comb(n, size) for size in range(k)) <= MOST_LISTED


def _listed(noise: Noise, scores: Tensor, k: Tensor) -> Tensor:
    """Compute `_inclusion` of Gumbel noise by all sets of fewer than k items: the next item is drawn ∝ e^score."""
    s, order = _close_gaps(scores, k)
    n, levels = s.shape[-1], []
    place: dict[tuple[int, ...], int] = {}
    for count in range(int(k.max())):  # the sets of each size: their items, what they come from, what is not in them
        sets = list(combinations(range(n), count))
        before = torch.tensor([[place[t[:i] + t[i + 1 :]] for i in range(count)] for t in sets], dtype=torch.int64)
        items = torch.tensor(sets, dtype=torch.int64).view(len(sets), count)
        outside = torch.ones(len(sets), n, dtype=s.dtype).scatter_(1, items, 0.0)
        levels.append([t.to(s.device) for t in (items, before.view(len(sets), count), outside)])
        place = {t: i for i, t in enumerate(sets)}
    parts = []
    width = max(CHUNK // max(len(outside) for *_, outside in levels), 1)
    for w, size in zip((s - s[:, :1]).exp().split(width), k.unsqueeze(-1).split(width), strict=True):
        total, ratio = torch.zeros_like(w), torch.ones_like(w[:, :1])
        for count, (items, origin, outside) in enumerate(levels):
            chance = (w[:, items] * ratio[:, origin]).sum(-1) if count else ratio  # (rows, sets)
            ratio = chance / (w @ outside.mT)
            total = total + torch.where(count < size, w * (ratio @ outside), 0.0)
        parts.append(total)
    return torch.empty_like(s).scatter_(-1, order, torch.cat(parts).clamp(0.0, 1.0))


def _counted(noise: Noise, scores: Tensor, k: Tensor) -> Tensor:
    """Compute `_inclusion` item by item, O(nk) for each node, without a difference: for small k.

    π_i = ∫ f(y − s_i) P(fewer than k of the others are above y) dy. The chance goes from 0 to 1 in a window, in which
    Gauss' rule takes the integral; right of it there is 1 − F. The number above is counted forth up to item i, and back
    from the last one.
    """
    s, order = _close_gaps(scores, k)
    most, n = int(k.max()), s.shape[-1]
    with torch.no_grad():
        low, high = _window(noise, s, k)
    wide = (high - low).argsort(descending=True)  # rows of a part have about as many nodes

    def at(y: Tensor, s: Tensor, k: Tensor) -> Tensor:
        """Return the density times that chance, (n, m), for m nodes y, the k of each, and the scores (n, m)."""
        z = y - s
        log_below = noise.log_cdf(z)
        below, above = log_below.exp(), -torch.expm1(log_below)
        count = torch.arange(most, device=s.device)[:, None]
        before = [(count == 0).to(s.dtype).expand(most, len(y))]
        for q, p in zip(below[:-1], above[:-1], strict=True):
            before.append(q * before[-1])
            before[-1][1:].addcmul_(p, before[-2][:-1])
        fewer, chance = (count < k).to(s.dtype), []  # of those after i, than k less the count
        for q, p, counted in zip(below.flip(0), above.flip(0), before[::-1], strict=True):
            chance.append((counted * fewer).sum(0))
            after = q * fewer
            after[:-1].addcmul_(p, fewer[1:])
            fewer = after
        return torch.stack(chance[::-1]) * noise.log_density(z).exp()

    parts: list[Tensor] = []
    while (start := sum(map(len, parts))) < len(s):
        place, weight = _gauss_rule(float((high - low)[wide[start]]))
        rows = wide[start : start + max(COUNTED_AT_ONCE // (n * most * len(place)), 1)]
        part, reach = s[rows], (high - low)[rows]
        y = (low[rows, None] + reach[:, None] * place.to(s.device)).flatten()
        nodes = (part.mT.repeat_interleave(len(place), 1), k[rows].repeat_interleave(len(place)))
        each = made_anew(at, 1 + (len(rows) < len(s)), y, *nodes)
        inside = (each.view(n, len(rows), -1) @ weight.to(s.device) * reach).mT
        parts.append(inside + noise.log_sf(high[rows, None] - part).exp())
    result = torch.cat(parts)[wide.argsort()]
    return torch.empty_like(s).scatter_(-1, order, result.clamp(0.0, 1.0))


def _gauss_rule(width: float) -> tuple[Tensor, Tensor]:
    """Return nodes in [0, 1] and weights of Gauss' rule, in equal panels, for an interval as wide as that.

    In a panel of half-width h it errs by ρ^(−2 nodes), log ρ = asinh(a/h), for what is bounded for |Im y| ≤ a = π/2;
    and FAR nodes do for a bell curve that falls by e^−FAR.
    """
    panels = math.ceil(width / PANEL)
    nodes = math.ceil(math.hypot(FAR, FAR / (2 * math.asinh(math.pi * panels / width))))
    at, weight = (torch.from_numpy(t) / 2 for t in leggauss(nodes))
    starts = torch.arange(panels, dtype=torch.float64)[:, None]
    return ((starts + at + 0.5) / panels).flatten(), (weight / panels).repeat(panels)


def _inclusion(noise: Noise, scores: Tensor, k: Tensor) -> Tensor:
    """Compute `inclusion` for (r, n) rows of which more than k ≥ 1 are random; the others are −inf."""
    s, order = _close_gaps(scores, k)
    total, mass = torch.zeros_like(s), torch.zeros_like(s)
    with torch.no_grad():
        row, y = _inclusion_nodes(noise, s, k)

    def at(y: Tensor, s: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        z = y.unsqueeze(-1) - s
        log_below = noise.log_cdf(z)
        above = -torch.expm1(log_below)
        density = _kth_of_others(noise.log_density(z).exp(), above, log_below.exp(), k)
        return density, above * density

    chunks = _chunks(len(row), s[0].expand(min(s.shape[-1], 50), -1))
    for part in chunks:
        r = row[part]
        density, both = made_anew(at, len(chunks), y[part], s[r], k[r])
        mass.index_add_(0, r, density)
        total.index_add_(0, r, both)
    # The mass is 1/spacing, but for the rounding of Π φ, which `total` shares.
    return torch.empty_like(total).scatter_(-1, order, (total / mass).clamp(0.0, 1.0))


def _close_gaps(scores: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores in falling order, relative to the k-th, with gaps cut to what noise may cross; and that order.

    Then no window is wider than a few gaps, however far apart the scores are, and no chance changes by e^−FAR.
    """
    s, order = scores.sort(-1, descending=True)
    gaps = (s[:, :-1] - s[:, 1:]).clamp(max=FAR + 10 + math.log(s.shape[-1])).nan_to_num(0.0)  # NaN: −inf − −inf
    depth = pad(gaps.cumsum(-1), (1, 0))
    closed = depth.gather(-1, k.long().unsqueeze(-1) - 1) - depth
    return torch.where(s.isfinite(), closed, s), order


def _window(noise: Noise, s: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the k-th largest of each row (r, n) lies but for a chance of e^−FAR: from y to y, both (r)."""
    reach = torch.where(s.isfinite(), s.abs(), 0.0).amax(-1, keepdim=True) + FAR + math.log(s.shape[-1]) + 5
    sides = torch.tensor([-1.0, 1.0], dtype=s.dtype, device=s.device)
    outer, inner = sides * reach, -sides * reach
    for _ in range(math.ceil(math.log2(float(reach.max()) / CLOSE))):
        y = (outer + inner) / 2
        excess, rarity = _rarity(noise, y.unsqueeze(-1) - s.unsqueeze(-2), k.unsqueeze(-1))
        is_far = (rarity > FAR) & (excess * sides < 0)
        outer, inner = torch.where(is_far, y, outer), torch.where(is_far, inner, y)
    low, high = outer.unbind(-1)
    return low, high


def _inclusion_nodes(noise: Noise, s: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """List the nodes of all rows: the row of each, and its y."""
    low, high = _window(noise, s, k)
    k = k.unsqueeze(-1)
    # The peak is as wide as the inverse root of Fisher's information about y in who is above it. On a bell curve of
    # width w the rule errs by e^(−2 (πw/h)²), and where the density is e^−r, an error e^r times as large will do.
    need = torch.zeros_like(low)
    points = 32 + math.ceil(float((high - low).max()))
    for i in _chunks(points + 1, s):
        z = (low.unsqueeze(-1) + ((high - low) / points).unsqueeze(-1) * i).unsqueeze(-1) - s.unsqueeze(-2)
        below = noise.log_cdf(z)
        spread = (below.exp() * -torch.expm1(below)).clamp(min=1e-300)
        information = ((2 * noise.log_density(z)).exp() / spread).sum(-1)
        need = torch.maximum(need, (information * (FAR - _rarity(noise, z, k)[1]).clamp(min=0.0)).amax(-1))
    spacing = (0.6 * math.pi * (2 / need).sqrt()).clamp(max=STEP)  # 0.6: no peak is quite a bell
    counts = ((high - low) / spacing).ceil().long() + 1
    row = torch.arange(len(counts), device=s.device).repeat_interleave(counts)
    place = torch.arange(len(row), device=s.device) - (counts.cumsum(0) - counts)[row]
    return row, low[row] + place * spacing[row]


def _rarity(noise: Noise, z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the mean of the count above y is from k, and a bound of −log P(the count is as far off as k)."""
    log_below = noise.log_cdf(z)
    below, above = log_below.exp(), -torch.expm1(log_below)
    mean, rest, variance = (t.sum(-1) for t in (above, below, above * below))
    off = (mean - k).abs()
    bennett = torch.xlogy(variance + off, 1 + off / variance) - off
    hoeffding = torch.xlogy(k, k / mean) + torch.xlogy(z.shape[-1] - k, (z.shape[-1] - k) / rest)
    return mean - k, torch.maximum(bennett.nan_to_num(0.0), hoeffding)  # NaN: a count that is certainly k


def _kth_of_others(f: Tensor, above: Tensor, below: Tensor, k: Tensor) -> Tensor:
    """Return, at each of m nodes and for each i, the density of the k-th largest score among the others; (m, n).

    It is Σ_{j≠i} f_j P(k − 1 of the others but j are above), and the count's law is the Fourier sum of its
    characteristic function Π φ_j, φ_j(ω) = 1 + q_j (e^iω − 1), at L frequencies: so many that the count, of variance v,
    wraps onto k − 1 with a chance of at most e^−FAR, less those where |Π φ| ≤ e^(−v (1 − cos ω)) is as small.
    """
    variance = (above * below).sum(-1, keepdim=True)
    reach = FAR / 3 + ((FAR / 3) ** 2 + 2 * FAR * variance).sqrt()  # Bernstein's, then Newton towards Bennett's
    for _ in range(2):
        reach = (FAR + reach) / (reach / variance).log1p() - variance
    off = (above.sum(-1, keepdim=True) - k.unsqueeze(-1)).abs()
    half = ((off + reach + 3).clamp(max=f.shape[-1]) / 2).ceil()
    length = 2 * half + 1
    highest = torch.minimum(half, (length * (1 - FAR / variance).clamp(min=-1.0).acos() / (2 * math.pi)).ceil() + 1)
    t = torch.arange(int(highest.max()) + 1, dtype=f.dtype, device=f.device)
    omega = 2 * math.pi * torch.minimum(t, half) / length  # (m, T)
    weight = torch.where(t == 0, 1.0, torch.where(t <= half, 2.0, 0.0)) / length
    # With l = 1 − cos ω, φ = 1 − q l + i q sin ω and |φ|² = 1 − 2 q (1 − q) l: sums over ω of real numbers are enough.
    less, sine, one = 1 - omega.cos(), omega.sin(), f.new_ones(())
    inverse = torch.baddbmm(one, less[..., None], (above * below)[:, None], alpha=-2).reciprocal()  # (m, T, n)
    phi = torch.complex(torch.baddbmm(one, less[..., None], above[:, None], alpha=-1), sine[..., None] @ above[:, None])
    spectrum = phi.prod(-1) * torch.polar(weight, -omega * (k.unsqueeze(-1) - 1))
    plain, tilted = (inverse @ torch.stack((f, f * above), -1)).unbind(-1)
    whole = spectrum * torch.complex(plain - less * tilted, -sine * tilted)  # Π φ Σ f/φ
    first = torch.stack((whole.real, whole.imag * sine - whole.real * less), -2) @ inverse  # Re(whole/φ)
    real, imag = spectrum.real, spectrum.imag * sine
    second = torch.stack((real, 2 * (imag - less * real), 2 * less * ((less - 1) * real - imag)), -2)  # Re(Π φ/φ²)
    second = second @ inverse.square()
    own = second[:, 0] + above * (second[:, 1] + above * second[:, 2])
    return first[:, 0] + above * first[:, 1] - f * own


def draw(
    noise: Noise, scores: Tensor, k: Tensor, seed: Tensor, draws: int, uniform: Uniform, hard: HardTopK, stream: int = 0
) -> Tensor:
    """Draw `draws` k-hot samples of each row of the scores (rows, n); (draws, rows, n) float64."""
    shape = (draws, *scores.shape)
    u = inside(uniform(seed, stream, math.prod(shape))).view(shape)
    return hard(scores + noise.quantile(u), k.expand(shape[:-1]), None)
