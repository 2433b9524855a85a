"""Three published solvers of Σ σ(x + c) = k, re-implemented for comparison. All differentiate implicitly."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ._implicit import implicit


def halley(x: Tensor, k: float) -> Tensor:
    """The solver of the paper that introduced the sigmoid top-k: Halley's method guarded by bisection, in float64.

    Our re-implementation of the method of Wijk et al., "From one-hot to k-hot" (2025). It starts at the better of
    `logit(k/n) − mean x` and minus a quantile of x, which costs a full sort. Each iteration tries a Halley step and the
    middle of the bracket `±(max|x| + 10)` and keeps the one that leaves the smaller residual. It ends when the largest
    residual of the batch is below 1e-6, after 50 iterations at the latest.

    Args:
        x: (…, n) scores.
        k: 0 < k < n, whole or fractional.
    """
    return implicit(x, partial(_solve_halley, k=k))


def _solve_halley(x: Tensor, k: float) -> Tensor:
    scores = x.to(torch.float64)
    n = scores.shape[-1]
    high = scores.abs().amax(-1, keepdim=True) + 10
    low = -high
    by_mean = math.log(k / (n - k)) - scores.mean(-1, keepdim=True)
    by_quantile = -_quantile(scores, (n - k) / n)
    p, spare = torch.empty_like(scores), torch.empty_like(scores)
    shift, residual = _better(scores, k, by_mean, by_quantile, p, spare)
    for _ in range(50):
        if residual.abs().max() < 1e-6:
            break
        high, low = torch.where(residual > 0, shift, high), torch.where(residual > 0, low, shift)
        v = torch.addcmul(p, p, p, value=-1, out=spare)
        slope = v.sum(-1, keepdim=True)
        curvature = slope - 2 * v.mul_(p).sum(-1, keepdim=True)  # Σ v(1 − 2p)
        step = 2 * residual * slope / (2 * slope.square() - residual * curvature)
        shift, residual = _better(scores, k, shift - step, (low + high) / 2, p, spare)
    return p.to(x.dtype)


def _better(scores: Tensor, k: float, first: Tensor, second: Tensor, p: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """The shift with the smaller |Σp − k|, the second if the first is NaN; and its Σp − k. Its p is left in `p`."""
    a = torch.add(scores, first, out=p).sigmoid_().sum(-1, keepdim=True) - k
    b = torch.add(scores, second, out=spare).sigmoid_().sum(-1, keepdim=True) - k
    wins = a.abs() <= b.abs()
    torch.where(wins, p, spare, out=p)
    return torch.where(wins, first, second), torch.where(wins, a, b)


def _quantile(x: Tensor, q: float) -> Tensor:
    """As torch.quantile, which refuses more than 16 million scores; (…, 1)."""
    place = q * (x.shape[-1] - 1)
    low, ordered = math.floor(place), x.sort(-1).values
    pair = ordered[..., low : low + 2]  # one element if the place is the last
    return torch.lerp(pair[..., :1], pair[..., -1:], place - low)


def bisection(x: Tensor, k: float) -> Tensor:
    """Plain bisection: 64 halvings of `[−max x − 10, −min x + 10]` in the dtype of the scores.

    Our re-implementation of what public code does most often. The margin of 10 is part of it, and too narrow where
    |logit(k/n)| > 10: it then returns a wrong sum without a word.

    Args:
        x: (…, n) scores.
        k: 0 < k < n, whole or fractional.
    """
    return implicit(x, partial(_solve_bisection, k=k))


def _solve_bisection(x: Tensor, k: float) -> Tensor:
    low, high = -x.amax(-1, keepdim=True) - 10, -x.amin(-1, keepdim=True) + 10
    p = torch.empty_like(x)
    for _ in range(64):
        middle = (low + high) / 2
        is_low = torch.add(x, middle, out=p).sigmoid_().sum(-1, keepdim=True) < k
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return torch.add(x, (low + high) / 2, out=p).sigmoid_()


def lml(x: Tensor, k: float) -> Tensor:
    """The limited multi-label projection: a bracket cut into nine by ten shifts that are evaluated at once.

    Our re-implementation of Amos, Koltun and Kolter, "The limited multi-label projection layer" (2019). It sorts x,
    brackets the shift by `[−x₍k₎ − 7, −x₍k+1₎ + 7]` and keeps the part with the change of sign until that is
    narrower than 1e-4, for 100 rounds at the most: so the shift is right to 5e-5, and the sum to 5e-5·Σ p(1 − p).

    Args:
        x: (…, n) scores.
        k: 0 < k < n, a whole number.
    """
    return implicit(x, partial(_solve_lml, k=int(k)))


def _solve_lml(x: Tensor, k: int) -> Tensor:
    ordered = x.sort(-1, descending=True).values
    low, high = -ordered[..., k - 1 : k] - 7, -ordered[..., k : k + 1] + 7
    del ordered
    places = torch.linspace(0, 1, 10, dtype=x.dtype, device=x.device)
    p = x.new_empty((*x.shape[:-1], 10, x.shape[-1]))
    for _ in range(100):
        shifts = low + (high - low) * places  # (…, 10)
        sums = torch.add(x.unsqueeze(-2), shifts.unsqueeze(-1), out=p).sigmoid_().sum(-1)
        part = ((sums < k).sum(-1, keepdim=True) - 1).clamp_(0, 8)
        low, high = shifts.gather(-1, part), shifts.gather(-1, part + 1)
        if (high - low).max() < 1e-4:
            break
    return (x + (low + high) / 2).sigmoid_()
