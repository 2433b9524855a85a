"""Systematic sampling on the last dim: draw one uniform u, and take the items where the running sum passes integer − u.

The probabilities are rounded to integer multiples of 1/F, which sum to k exactly in any order of summation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import noise
from .subsets import safe_log


def places(n: int) -> int:
    """Return log2 of F: as fine as sums up to n allow in 64 bits."""
    return min(52, 62 - max(n, 1).bit_length())


def quantised(p: Tensor, k: Tensor) -> Tensor:
    """Return w with w/F = p to rounding and Σw = kF exactly; (…, n) int64. Items that are 0 or 1 stay so.

    What rounding leaves is spread in proportion to p(1 − p), the effect of a common shift of the logits. Where that
    would move an item beyond 0 or 1, it is spread in proportion to the room there is.
    """
    one = 1 << places(p.shape[-1])
    w, spread = units(p, one)
    lack = ((k * one).round().to(torch.int64) - w.sum(-1))[..., None]
    by_shift, by_room = spread.cumsum(-1), room(w, lack, one).cumsum(-1)
    measure = torch.where(lack.abs() <= by_shift[..., -1:], by_shift, by_room)
    given = share(measure, measure[..., -1:], lack)
    return w + given.diff(prepend=torch.zeros_like(given[..., :1]))


def units(p: Tensor, one: int) -> tuple[Tensor, Tensor]:
    """Return p and p(1 − p), rounded to integers in units of 1/one, whose sums are exact in any order."""
    p = p.to(torch.float64).clamp(0, 1)
    return (p * one).round().to(torch.int64), (p * (1 - p) * one).round().to(torch.int64)


def room(w: Tensor, lack: Tensor, one: int) -> Tensor:
    """Return how far each item may move towards what is lacking; those at 0 and 1 may not."""
    return torch.where(lack > 0, one - w, w).masked_fill((w == 0) | (w == one), 0)


def share(measure: Tensor, total: Tensor, lack: Tensor) -> Tensor:
    """Return how much of what is lacking the items up to each one get, in proportion to the running measure."""
    part = measure.to(torch.float64) * (lack.to(torch.float64) / total.clamp(min=1).to(torch.float64))
    part = part.floor().to(torch.int64).clamp(lack.clamp(max=0), lack.clamp(min=0))
    return torch.where(measure >= total, lack, part)


def draw(p: Tensor, k: Tensor, seed: Tensor, draws: int, is_paired: bool) -> Tensor:
    """Draw `draws` samples of each row of `p` (rows, n) → (draws · rows, n) in the dtype of `p`.

    The second of a pair begins half a turn after the first.
    """
    (rows, n), shift = p.shape, places(p.shape[-1])
    u = noise.row_keys(seed, draws, rows, is_paired)
    if is_paired:
        u = u + noise.is_second(draws, rows, p.device).to(torch.int64) * (1 << (shift - 1))
    u = u.view(draws, rows, 1) & ((1 << shift) - 1)
    passed = (quantised(p, k).cumsum(-1) + u) >> shift
    return passed.diff(prepend=torch.zeros_like(passed[..., :1])).to(p.dtype).view(draws * rows, n)


def draw_pivotal(passed: Tensor, k: int, u: Tensor) -> Tensor:
    """Draw a pivotal sample along the items, given running sums (n) of `quantised`; k indices, in O(k log n).

    Stratum j is [jF, (j + 1)F), and item h straddles its start, by a before it and b in it. If the stratum before took
    h, one of the others is drawn, in proportion; if not, h with the chance b/(F − a), else one of the others. Whether h
    was taken is what the last stratum says that did not leave it to the one before. `u` (2, k) is uniform. Reference:
    Chauvet, "On a characterization of ordered pivotal sampling" (2012).
    """
    one = 1 << places(len(passed))
    j = torch.arange(k, device=passed.device)
    start = j * one
    h = torch.searchsorted(passed, start, right=True)
    b = torch.where(j > 0, passed[h] - start, 0)
    a = torch.where(j > 0, start - torch.where(h > 0, passed[h - 1], 0), 0)
    other = torch.searchsorted(passed, start + b + (u[0] * (one - b)).floor().to(torch.int64), right=True)
    is_other = (u[1] * (one - a) >= b) | (j == 0)  # if h was not taken before
    takes_next = other == torch.cat((h[1:], h.new_full((1,), -1)))
    said = torch.where(takes_next & ~is_other, 0, j).cummax(0).values
    is_taken = torch.cat((takes_next.new_zeros(1), (takes_next & is_other)[said][:-1]))
    return torch.where(is_taken | is_other, other, h)


def log_prob(p: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """Return log P(x), differentiable in p: P is the length of the interval of u with all X_i ≤ c_i + u < X_i + 1."""
    c = p.cumsum(-1)
    with torch.no_grad():  # the sums that are sampled, exact where the sum of floats is not
        rounding = quantised(p, k).cumsum(-1).to(torch.float64) / (1 << places(p.shape[-1])) - c
    c, passed = c + rounding, x.to(torch.float64).cumsum(-1)
    return safe_log((passed + 1 - c).amin(-1).clamp(max=1) - (passed - c).amax(-1).clamp(min=0))


def joint(p: Tensor, k: Tensor) -> Tensor:
    """Return P(i and j are drawn), (…, n, n): the lengths of the intervals of u in which both are."""
    at = intervals(p, k)
    passed = (at.c[..., None, :] + at.starts[..., None]) >> places(p.shape[-1])
    member = passed.diff(prepend=torch.zeros_like(passed[..., :1])).to(torch.float64)  # (…, n + 1, n)
    return member.mT @ (at.length[..., None] * member)


def variance_of_sum(p: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return Var(Σ a_i x_i), (…), in O(n log n): there are n + 1 samples, and each differs from the last by one swap.

    Where c_i + u reaches an integer, what is drawn there moves from item i + 1 to item i; or begins at the last item.
    """
    at = intervals(p, k)
    passed = at.c >> places(p.shape[-1])
    first = passed.diff(prepend=torch.zeros_like(passed[..., :1]))  # the sample at u = 0
    a = weights.to(torch.float64).expand(torch.broadcast_shapes(weights.shape, p.shape))
    change = a - torch.cat((a[..., 1:], torch.zeros_like(a[..., :1])), -1)
    steps = change.gather(-1, at.order.expand(a.shape)) * (at.starts[..., 1:] > 0)  # at u = 0 is `first`
    sums = torch.cat((torch.zeros_like(a[..., :1]), steps.cumsum(-1)), -1) + (a * first).sum(-1, keepdim=True)
    mean = (at.length * sums).sum(-1, keepdim=True)
    return (at.length * (sums - mean).square()).sum(-1)


def mode(p: Tensor, k: Tensor) -> Tensor:
    """Return the sample of the longest interval; (…, n) int64."""
    at = intervals(p, k)
    u = at.starts.gather(-1, at.length.argmax(-1, keepdim=True))
    passed = (at.c + u) >> places(p.shape[-1])
    return passed.diff(prepend=torch.zeros_like(passed[..., :1]))


class Intervals(NamedTuple):
    """Hold the intervals of u that have one sample each: it changes where c_i + u is an integer."""

    c: Tensor  # (…, n) int64, running sums of π in units of 1/F
    starts: Tensor  # (…, n + 1) int64, rising from 0
    length: Tensor  # (…, n + 1) float64, with a gradient in π
    order: Tensor  # (…, n) at which c_i all but the first start


def intervals(p: Tensor, k: Tensor) -> Intervals:
    """Return the intervals of u and their samples."""
    one = 1 << places(p.shape[-1])
    c = quantised(p.detach(), k).cumsum(-1)
    starts, order = ((-c) & (one - 1)).sort(-1)
    moving = p.cumsum(-1).gather(-1, order)
    exact = starts.to(torch.float64) / one - (moving - moving.detach())
    ends = torch.cat((exact, torch.ones_like(exact[..., :1])), -1)
    length = ends.diff(prepend=torch.zeros_like(exact[..., :1]))
    return Intervals(c, torch.cat((torch.zeros_like(starts[..., :1]), starts), -1), length, order)
