"""Zipf's law: how often each latent should be active, and whole budgets that keep to it."""

from __future__ import annotations

import torch
from torch import Tensor


def zipf(importance: Tensor, exponent: float) -> Tensor:
    """Shares r^−exponent that sum to 1, r = 1, 2, … in the order of falling importance; (n,), float64."""
    n = len(importance)
    shares = torch.empty(n, dtype=torch.float64, device=importance.device)
    ranks = torch.arange(1, n + 1, dtype=torch.float64, device=importance.device)
    shares[importance.argsort(descending=True, stable=True)] = ranks**-exponent
    return shares / shares.sum()


def apportion(shares: Tensor, total: int, most: int) -> Tensor:
    """Whole numbers from 1 to `most` that sum to `total`, near total·shares, by largest remainders; (n,) int64."""
    n = len(shares)
    total = min(max(total, n), n * most)
    ideal = _within(shares * total, total, most)
    whole = ideal.floor()
    missing = total - int(whole.sum())
    rest = torch.where(whole < most, ideal - whole, -1.0)
    whole[rest.argsort(descending=True, stable=True)[:missing]] += 1
    return whole.long()


def _within(ideal: Tensor, total: int, most: int) -> Tensor:
    """c·ideal cut to [1, most], with c such that the sum is `total`; by bisection."""
    low, high = 0.0, most / float(ideal.min().clamp(min=1e-300))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle * ideal).clamp(1, most).sum() <= total else (low, middle)
    return (low * ideal).clamp(1, most)
