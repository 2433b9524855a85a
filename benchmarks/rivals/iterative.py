"""Two published relaxations that choose k times, one softmax after another; re-implemented for comparison."""

from __future__ import annotations

import torch
from torch import Tensor


def goyal(x: Tensor, k: float, *, alpha: float = 1.0) -> Tensor:
    """k softmaxes, each peaked at the greatest score that is left.

    Our re-implementation of Goyal et al., "A continuous relaxation of beam search" (2018), as the sum of its k rows:
    `softmax(−α(v − max v)²)`, after which the greatest score is set to −10000. Sums to k, but entries may exceed 1.
    O(nk); differentiated by autograd.

    Args:
        x: (…, n) scores.
        k: a whole number, 1 ≤ k ≤ n.
        alpha: inverse temperature.
    """
    left = x.clone()
    total = torch.zeros_like(x)
    for _ in range(int(k)):
        top, place = left.max(-1, keepdim=True)
        total = total + (left - top).square().mul(-alpha).softmax(-1)
        left = left.scatter_(-1, place, -10000.0)
    return total


def xie_ermon(x: Tensor, k: float, *, tau: float = 1.0) -> Tensor:
    """k successive softmaxes, each with what was chosen before taken out in proportion.

    Our re-implementation of the relaxation in Xie and Ermon, "Reparameterizable subset sampling via continuous
    relaxations" (2019), without its Gumbel noise: `softmax(w/τ)` k times, with `w += log(1 − previous)` in between.
    Sums to k, but entries may exceed 1. O(nk); differentiated by autograd.

    Args:
        x: (…, n) scores.
        k: a whole number, 1 ≤ k ≤ n.
        tau: temperature.
    """
    tiny = torch.finfo(x.dtype).tiny
    chosen = (x / tau).softmax(-1)
    total = chosen
    for _ in range(int(k) - 1):
        x = x + (1 - chosen).clamp(min=tiny).log()
        chosen = (x / tau).softmax(-1)
        total = total + chosen
    return total
