"""k successive softmaxes on the last dim."""

from __future__ import annotations

import torch
from torch import Tensor


def softmaxes(x: Tensor, k: int, temperature: float) -> Tensor:
    """Sum k softmaxes of x/T, each with what was chosen before taken out in proportion: x += log(1 − previous).

    An entry of +inf is 1, and leaves one softmax less for the others; one of −inf is 0.
    """
    tiny = torch.finfo(x.dtype).tiny
    is_forced = x == torch.inf
    left = k - is_forced.sum(-1, keepdim=True)
    is_open = ~x.isinf()
    x = torch.where(is_open, x, -torch.inf)
    x = torch.where(is_open.any(-1, keepdim=True), x, 0.0)  # a row without choice goes along as zeros
    total = is_forced.to(x.dtype)
    for step in range(k):
        chosen = (x / temperature).softmax(-1)
        total = total + torch.where(step < left, chosen, 0.0)
        x = x + (1 - chosen).clamp(min=tiny).log()
    return total
