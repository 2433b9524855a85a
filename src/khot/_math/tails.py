"""What the largest scores of a row leave of its softmax: tail masses, and bounds on them, for every size of the head.

A head of mass H and a tail of mass T (sums of e^s) give the tail mass T/(H + T), which rises with T and falls with H.
"""

import torch
from torch import Tensor

from .select import order

ROUNDING = 2.0**-40  # of e^(s − max) in float64, where |s − max| < 745, with room to spare
TINY = torch.finfo(torch.float64).tiny


def falling(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores in float64 by falling value, their indices, and how many are above −inf: (…, n), (…, n), (…).

    A row that holds NaN or +inf, or nothing above −inf, has no softmax: its scores become NaN.
    """
    x = x.to(torch.float64)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    indices = order(x)
    s = x.gather(-1, indices)
    count = (s > -torch.inf).sum(-1)
    is_bad = s.isnan().any(-1) | (s == torch.inf).any(-1) | (count == 0)
    return s.masked_fill(is_bad.unsqueeze(-1), torch.nan), indices, count


def bounds(s: Tensor, total: Tensor, further: int | None) -> Tensor:
    """Return a bound on the tail mass for heads of k = 1, …, m of the falling scores s; (…, m).

    T ≤ Σ_{i=k+1}^{k+r} e^{s_i} + (N − k − r) e^{s_(k+r)} for r known scores after the head, and none above the last of
    them. With r = None all m are used; if they are all N, the result is exact.

    Args:
        s: (…, m), the largest scores in falling order; −inf at the end for none.
        total: (…), N, of all scores above −inf.
        further: r.
    """
    m = s.shape[-1]
    e = (s - s[..., :1].detach()).exp()
    head = e.cumsum(-1)
    tail = after(e)[..., 1:]  # after the k-th
    k = torch.arange(1, m + 1, device=s.device)
    last = torch.full_like(k, m) if further is None else (k + further).clamp(max=m)  # k + r
    others = (total.unsqueeze(-1) - last).clamp(min=0)
    left = (tail - tail[..., last - 1]).clamp(min=0) + others * e[..., last - 1]
    return left / (head + left)


def gap_bounds(s: Tensor, total: Tensor) -> Tensor:
    """Return (N − k)/(N − k + k e^Δ) for k = 1, …, m, where Δ is the gap after the k-th of the falling scores; (…, m).

    Where the next score is not known, Δ is 0.
    """
    following = torch.cat((s[..., 1:], s[..., -1:]), -1)
    k = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
    others = (total.unsqueeze(-1) - k).clamp(min=0)
    gap = torch.where(others > 0, s - following, 0.0)
    return torch.sigmoid(others.log() - k.log() - gap) + 0 * s[..., :1]  # NaN stays NaN


def after(masses: Tensor) -> Tensor:
    """Return the sums of all but the first 0, …, m masses; (…, m) gives (…, m + 1)."""
    return torch.cat((masses.flip(-1).cumsum(-1).flip(-1), torch.zeros_like(masses[..., :1])), -1)


def read_bounds(s: Tensor, unread: Tensor, delta: Tensor) -> Tensor:
    """Return a bound on the tail mass for heads of k = 1, …, m of the falling scores s, where others were not read.

    Args:
        s: (a, m), float64.
        unread: (a), a bound on the log of the mass of all other keys.
        delta: (a), what a score of s may be off.
    """
    top = torch.maximum(s[:, 0], unread).unsqueeze(-1)
    e, up = (s - top).exp(), delta.exp().unsqueeze(-1)
    left = after(e)[:, 1:] * up + (unread.unsqueeze(-1) - top).exp()
    return rounded_up(left / (e.cumsum(-1) / up + left), e.shape[-1])


def rounded_up(bound: Tensor, n: int, total: Tensor | None = None, slack: float | Tensor = 0.0) -> Tensor:
    """Return a bound that rounding cannot have brought below the truth; a tail that underflows is not 0.

    Args:
        bound: a ratio T/(H + T) of sums of at most n terms, computed in float64.
        n: the number of terms.
        total: (…), of all scores, if the bounds (…, m) are those of heads of 1, …, m: where k ≥ total, 0 is the truth.
        slack: δ such that the scores are known up to ±δ: T is at most e^δ times, H at least e^−δ times what was found.
    """
    more = bound * (1 + n * 2.0**-51 + ROUNDING) + TINY
    if not isinstance(slack, float) or slack:
        more = more / (more + (1 - more).clamp(min=0) * torch.exp(torch.as_tensor(-2.0 * slack, dtype=more.dtype)))
        more = more * (1 + ROUNDING)
    more = more.clamp(max=1.0)
    if total is None:
        return more
    has_tail = total.unsqueeze(-1) > torch.arange(1, bound.shape[-1] + 1, device=bound.device)
    return torch.where(has_tail, more, bound)


def first_within(bound: Tensor, epsilon: Tensor, count: Tensor) -> Tensor:
    """Return the smallest k with bound_k ≤ ε, or `count` if there is none; (…, m), (…) and (…) give int64 (…)."""
    is_within = bound <= epsilon.unsqueeze(-1)
    first = is_within.to(torch.uint8).argmax(-1) + 1
    return torch.where(is_within.any(-1), torch.minimum(first, count), count)
