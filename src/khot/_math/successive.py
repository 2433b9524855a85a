"""k successive softmaxes on the last dim."""

from __future__ import annotations

import torch
from torch import Tensor


def softmaxes(x: Tensor, k: int, temperature: float) -> Tensor:
    """Σ of k softmaxes of x/T, each with what was chosen before taken out in proportion: x += log(1 − previous)."""
    tiny = torch.finfo(x.dtype).tiny
    chosen = (x / temperature).softmax(-1)
    total = chosen
    for _ in range(k - 1):
        x = x + (1 - chosen).clamp(min=tiny).log()
        chosen = (x / temperature).softmax(-1)
        total = total + chosen
    return total
