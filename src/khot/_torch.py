"""Private and version-dependent names of torch, each with a fallback."""

from __future__ import annotations

import torch
from torch import Tensor


def standard_gamma(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gamma(concentration, 1) variables, of the shape and dtype of `concentration`.

    `torch.distributions.Gamma` takes no generator, so this calls the function beneath it. Where torch has none, the
    method of Marsaglia and Tsang (2000) draws from the same law, with other bits.
    """
    sample = getattr(torch, "_standard_gamma", None)
    if sample is not None:
        result: Tensor = sample(concentration, generator=generator)
        return result

    def random(draw: str) -> Tensor:
        noise: Tensor = getattr(torch, draw)(
            concentration.shape, dtype=concentration.dtype, device=concentration.device, generator=generator
        )
        return noise

    d = concentration + 2 / 3  # of a + 1, as the method needs a ≥ 1; times U^(1/a) in the end
    result = torch.full_like(d, torch.nan)
    while bool((is_left := result.isnan()).any()):
        x = random("randn")
        v = (1 + x / (9 * d).sqrt()) ** 3
        is_accepted = (v > 0) & (random("rand").log() < x * x / 2 + d - d * v + d * v.clamp(min=1e-300).log())
        result = torch.where(is_left & is_accepted, d * v, result)
    return result * random("rand") ** (1 / concentration)
