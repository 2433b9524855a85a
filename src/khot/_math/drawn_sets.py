"""Items drawn one after another, each ∝ e^score among those that are left.

Few items of few: sums over the sets on the way. All terms are positive, so no digit is lost. Scores are float64.

How likely a set S is, and how likely without one or two of it (`ratios`): with p_i ∝ e^score_i,
P(S) = ∫ W t e^(−W t) Π_{i∈S} (1 − e^(−p_i t)) dy, t = e^−y, with W the probability outside S: all of S ring before the
others do. If an item is no longer there, its factor is left out, and W stays. All sets are summed at the same nodes.
"""

import math
from itertools import combinations

import torch
from torch import Tensor

MOST_SETS = 1 << 12
MOST_DRAWN = 8  # items, for a sum over all their subsets
AT_ONCE = 1 << 17  # sets times rows
FAR = 36.0  # e^−FAR of the mass may be lost
STEP = math.pi**2 / FAR  # as in order_sampling
NODES_AT_ONCE = 1 << 20  # numbers, over nodes
NOTHING = -1e300  # the logarithm of a weight that is none, with a gradient of 0 instead of NaN


def is_short(n: int, k: int) -> bool:
    """Tell whether few enough sets can be drawn on the way to k items; the weights of 12 do not underflow."""
    return k <= 12 and sum(math.comb(n, size) for size in range(k)) <= MOST_SETS


def inclusion(s: Tensor, k: Tensor) -> Tensor:
    """Return P(i is drawn), by all sets of fewer than k items; scores (r, n), the largest first, and k (r) → (r, n)."""
    n, levels = s.shape[-1], []
    place: dict[tuple[int, ...], int] = {}
    for count in range(int(k.max())):  # the sets of each size: their items, what they come from, what is not in them
        sets = list(combinations(range(n), count))
        items, before = _before(sets, count, place, s.device)
        outside = torch.ones(len(sets), n, dtype=s.dtype, device=s.device).scatter_(1, items, 0.0)
        levels.append((items, before, outside))
        place = {t: i for i, t in enumerate(sets)}
    parts = []
    width = max(AT_ONCE // max(len(outside) for *_, outside in levels), 1)
    for w, size in zip((s - s[:, :1]).exp().split(width), k.unsqueeze(-1).split(width), strict=True):
        total, ratio = torch.zeros_like(w), torch.ones_like(w[:, :1])
        for count, (items, origin, outside) in enumerate(levels):
            chance = (w[:, items] * ratio[:, origin]).sum(-1) if count else ratio  # (rows, sets)
            ratio = chance / (w @ outside.mT)
            total = total + torch.where(count < size, w * (ratio @ outside), 0.0)
        parts.append(total)
    return torch.cat(parts)


def log_prob(s: Tensor, is_item: Tensor, rest: Tensor) -> Tensor:
    """Return log P(these items are drawn before all others), for any order among them.

    `s` (m, r) holds the scores of the items, the first of them where `is_item`; `rest` (r) is log Σ e^score of
    all others.
    """
    m, left = len(s), rest.unsqueeze(0)
    for score in torch.where(is_item, s, NOTHING).flip(0):  # log Σ e^score of what is left, for each set in binary
        more = torch.stack((left, score.expand_as(left))).logsumexp(0)  # `logaddexp` has no second derivative here
        left = torch.stack((more, left), 1).flatten(0, 1)
    chance = [torch.zeros_like(left[:1])]
    place: dict[tuple[int, ...], int] = {(): 0}
    whole = [chance[0][0]]
    for count in range(1, m + 1):
        sets = list(combinations(range(m), count))
        items, before = _before(sets, count, place, s.device)
        number = torch.tensor([sum(1 << i for i in t) for t in place], device=s.device)
        ready = chance[-1] - left[number]
        chance.append((s[items] + ready[before]).logsumexp(1))  # (sets, r)
        place = {t: i for i, t in enumerate(sets)}
        whole.append(chance[-1][0])  # the first set of a size: items 0, …, size − 1
    return torch.stack(whole).gather(0, is_item.sum(0, keepdim=True))[0]


def _before(
    sets: list[tuple[int, ...]], count: int, place: dict[tuple[int, ...], int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the items of sets, and the places of what they come from, both (sets, count)."""
    before = [[place[t[:i] + t[i + 1 :]] for i in range(count)] for t in sets]
    items, origin = (torch.tensor(t, dtype=torch.int64, device=device).view(len(sets), count) for t in (sets, before))
    return items, origin


def ratios(log_p: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(S without i, i not there)/P(S), (r, m), and that of S without i and j, over that without i, (r, m, m).

    `log_p` (r, m) holds log p of the items of S, −inf where there is none; `rest` (r) is W. In the diagonal of the
    second there is 1; both are 1 where nothing is left outside.
    """
    m = log_p.shape[-1]
    end = m + 1 + math.sqrt(2 * FAR * (m + 1)) + FAR  # of W t
    step = min(STEP, 0.6 * math.pi * math.sqrt(2 / (FAR * (m + 1))))
    y = torch.arange(-math.log(end), FAR, step, dtype=log_p.dtype, device=log_p.device)  # of W t again
    rows = max(NODES_AT_ONCE // (m * len(y)), 1)
    parts = [_ratios(p, w, y) for p, w in zip(log_p.split(rows), rest.split(rows), strict=True)]
    one, two = (torch.cat(t) for t in zip(*parts, strict=True))
    return one, two


def _ratios(log_p: Tensor, rest: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_u = (log_p - torch.where(rest > 0, rest, 1.0).log()[:, None])[..., None] - y  # of p t, (r, m, nodes)
    factor = torch.where(log_u > -30, torch.log(-torch.expm1(-log_u.exp())), log_u)
    factor = torch.where(log_p[..., None] > -torch.inf, factor, 0.0)
    whole = factor.sum(1) - y - y.neg().exp()  # (r, nodes)
    whole = whole - whole.amax(-1, keepdim=True)
    without = (whole[:, None] / 2 - factor).exp()  # the root of what is left if it is left out twice
    both = without @ without.mT
    single = (without * (whole / 2).exp()[:, None]).sum(-1)
    one = single / whole.exp().sum(-1, keepdim=True)
    two = both / single[..., None]
    two.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    is_all = rest <= 0
    return one.masked_fill(is_all[:, None], 1.0), two.masked_fill(is_all[:, None, None], 1.0)
