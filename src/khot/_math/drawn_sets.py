"""Few items drawn one after another, each ∝ e^score among those that are left: sums over the sets on the way.

All terms are positive, so no digit is lost. Scores are float64.
"""

import math
from itertools import combinations

import torch
from torch import Tensor

MOST_SETS = 1 << 12
MOST_DRAWN = 8  # items, for a sum over all their subsets
AT_ONCE = 1 << 17  # sets times rows
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
