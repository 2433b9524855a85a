"""Systematic sampling on the last dim: draw one uniform u, and take the items where the running sum passes integer − u.

The probabilities are rounded to integer multiples of 1/F, which sum to k exactly in any order of summation.
"""

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
    p = p.to(torch.float64).clamp(0, 1)
    w = (p * one).round().to(torch.int64)
    left = (k * one).round().to(torch.int64) - w.sum(-1)
    lack = left[..., None].to(torch.float64)
    measure = (p * (1 - p)).cumsum(-1)
    room = torch.where(lack > 0, 1 - p, p).masked_fill((w == 0) | (w == one), 0).cumsum(-1)
    measure = torch.where(lack.abs() <= measure[..., -1:] * one, measure, room)
    total = measure[..., -1:]
    share = (measure * (lack / torch.where(total > 0, total, 1.0))).floor()
    share = share.clamp(lack.clamp(max=0), lack.clamp(min=0))
    share = torch.where(measure >= total, lack, share).to(torch.int64)
    return w + share.diff(prepend=torch.zeros_like(share[..., :1]))


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


def log_prob(p: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """Return log P(x), differentiable in p: P is the length of the interval of u with all X_i ≤ c_i + u < X_i + 1."""
    c = p.cumsum(-1)
    with torch.no_grad():  # the sums that are sampled, exact where the sum of floats is not
        rounding = quantised(p, k).cumsum(-1).to(torch.float64) / (1 << places(p.shape[-1])) - c
    c, passed = c + rounding, x.to(torch.float64).cumsum(-1)
    return safe_log((passed + 1 - c).amin(-1).clamp(max=1) - (passed - c).amax(-1).clamp(min=0))


def joint(p: Tensor, k: Tensor) -> Tensor:
    """Return P(i and j are drawn); (…, n, n): the lengths of the intervals of u in which both are."""
    shift, c = places(p.shape[-1]), quantised(p, k).cumsum(-1)
    one = 1 << shift
    # The sample changes where c_i + u is an integer.
    starts = torch.cat((torch.zeros_like(c[..., :1]), (-c) & (one - 1)), -1).sort(-1).values  # (…, n + 1)
    ends = torch.cat((starts[..., 1:], torch.full_like(starts[..., :1], one)), -1)
    passed = (c[..., None, :] + starts[..., None]) >> shift
    member = passed.diff(prepend=torch.zeros_like(passed[..., :1])).to(torch.float64)  # (…, n + 1, n)
    length = (ends - starts).to(torch.float64) / one
    return member.mT @ (length[..., None] * member)
