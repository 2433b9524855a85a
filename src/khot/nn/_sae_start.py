"""What a sparse autoencoder takes from its data before training."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def geometric_median(points: Tensor, steps: int = 100) -> Tensor:
    """The point with the least sum of distances to (points, d); (d,). Weiszfeld's iteration."""
    center: Tensor = points.mean(0)
    for _ in range(steps):
        distance = (points - center).norm(dim=1).clamp(min=1e-12)
        new: Tensor = (points / distance[:, None]).sum(0) / (1 / distance).sum()
        if (new - center).norm() <= 1e-6 * distance.mean():
            return new
        center = new
    return center


def power_of_two(value: float) -> float:
    """The nearest one, by ratio: to multiply by it rounds nothing."""
    return 2.0 ** round(math.log2(value)) if 0 < value < math.inf else 1.0


def unit_rows(count: int, d: int, generator: torch.Generator | None) -> Tensor:
    """Random directions, (count, d)."""
    rows = torch.randn(count, d, generator=generator)
    return torch.nn.functional.normalize(rows)
