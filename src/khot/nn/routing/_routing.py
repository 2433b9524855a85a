"""What every router gives, and what they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Which experts each token goes to, and with what weight."""

    logits: Tensor
    """(…, n) scores, in float32 or better"""
    weights: Tensor
    """(…, k) of the experts' outputs"""
    indices: Tensor
    """(…, k) experts; n stands for none, with weight 0"""
    probs: Tensor
    """(…, n) how much each expert is wanted, differentiable; what it sums to depends on the router"""


def scores(logits: Tensor) -> Tensor:
    """In float32 at least: routing in half precision is unstable."""
    return logits if logits.dtype == torch.float64 else logits.float()
