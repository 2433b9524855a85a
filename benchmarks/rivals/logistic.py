"""Two published solvers of Σ σ(x + c) = k, re-implemented for comparison. Both differentiate implicitly."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .implicit import implicit


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
