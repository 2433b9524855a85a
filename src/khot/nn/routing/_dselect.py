"""DSelect-k: k smooth binary codes."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _check
from ._routing import Routing, scores

GAMMA = 1.0
"""The width of the smooth step."""


def dselect_bits(n: int) -> int:
    """Binary digits for n experts."""
    return max(1, (n - 1).bit_length())


def dselect_k(logits: Tensor, k: int, *, num_experts: int) -> Routing:
    """k slots, each with a smooth binary code of an expert, mixed by a softmax: at most k experts once codes are sharp.

    `g = Σ_s softmax(w)_s r(z_s)`, `r(z)_i = Π_b S(z_b)` or `1 − S(z_b)` by the binary digits of i, where S is a smooth
    step, exactly 0 and 1 outside [−½, ½].

    Args:
        logits: (…, k·m + k): codes z of m = ⌈log₂ n⌉ digits for each slot, then the slots' weights w.
        k: slots.
        num_experts: n.

    Returns:
        `Routing` with the n gates as `probs` and `logits`, and as many slots as have a positive gate: until codes are
        sharp, that may be all experts. Gates sum to 1 if n is a power of two; else to less, by what the codes of no
        expert have.

    Reference: Hazimeh et al., "DSelect-k" (2021).
    """
    _check.at_least("num_experts", num_experts, 1)
    _check.at_least("k", k, 1)
    m = dselect_bits(num_experts)
    _check.last_dim("logits", logits, k * m + k)
    x = scores(logits)
    codes = smooth_step(x[..., : k * m].unflatten(-1, (k, m)))  # (…, k, m)
    digits = torch.arange(num_experts, device=x.device)[:, None] >> torch.arange(m, device=x.device) & 1  # (n, m)
    each = torch.where(digits.bool(), codes[..., None, :], 1 - codes[..., None, :]).prod(-1)  # (…, k, n)
    gates = (x[..., k * m :].softmax(-1)[..., None] * each).sum(-2)
    slots = max(1, int((gates > 0).sum(-1).max())) if gates.numel() else k
    weights, indices = gates.topk(slots, -1)
    return Routing(gates, weights, torch.where(weights > 0, indices, num_experts), gates)


def smooth_step(t: Tensor) -> Tensor:
    """0 below −γ/2, 1 above γ/2, a cubic between: `−2t³/γ³ + 3t/(2γ) + ½`."""
    t = t.clamp(-GAMMA / 2, GAMMA / 2)
    return -2 * t**3 / GAMMA**3 + 3 * t / (2 * GAMMA) + 0.5
