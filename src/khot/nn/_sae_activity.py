"""What a sparse autoencoder remembers of its training: who is active, how often, and above which value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from . import _sae_axes
from ._sae_axes import Block, Encoder
from ._sae_budgets import apportion, zipf

RATE = 0.01
"""Of the running means, after some time; at first they are plain means of what there was."""
SPAN = 10
"""At first, the threshold is the mean of the last tenth or so of the batches: it moves fast then."""


class Activity(nn.Module):
    """Running counts and means of a hard selection, whatever the selector.

    The means are in float32, or in float64, whatever the module is cast to: in half precision they would stop moving.

    Args:
        latents: how many.
        kind: the axis of the selection.
        exponent: of Zipf's law for the budgets, 0 for equal ones.
    """

    threshold: Tensor
    """The mean of the least value kept, in model units; () for "batch", (latents,) for "feature"."""
    since: Tensor
    """Tokens since a latent was last active, (latents,)."""
    density: Tensor
    """The running fraction of tokens for which a latent is active, (latents,)."""
    energy: Tensor
    """The running mean of ReLU(a)², (latents,): what ranks latents for their budgets. Not their density: under a budget
    that is the budget, and the first ranks would stay for ever."""
    batches: Tensor

    def __init__(self, latents: int, kind: str, exponent: float) -> None:
        super().__init__()
        self.kind, self.exponent = kind, exponent
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("threshold", torch.zeros(latents if kind == "feature" else (), dtype=wide))
        self.register_buffer("since", torch.zeros(latents, dtype=torch.int64))
        self.register_buffer("density", torch.zeros(latents, dtype=wide))
        self.register_buffer("energy", torch.zeros(latents if exponent else 0, dtype=wide))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def wide(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype.itemsize >= 4 else t.to(new.device, torch.float32)

        result: Self = super()._apply(wide, recurse)
        return result

    def budgets(self, k: float | Tensor, count: int) -> Tensor:
        """How many of `count` tokens each latent chooses, k·count in all; (latents,), whole unless k is learned."""
        n = len(self.since)
        flat = torch.full((n,), 1 / n, dtype=torch.float64, device=self.since.device)
        shares = zipf(self.energy, self.exponent) if self.exponent else flat
        if isinstance(k, Tensor):
            return (shares * k * count).clamp(1, count).to(k.dtype)
        return apportion(shares, round(k * count), count)

    @torch.no_grad()
    def update(self, blocks: list[Block], encoder: Encoder) -> None:
        """With the entries of a batch that selection was among; an empty one changes nothing."""
        count, before = len(encoder.x), int(self.batches)
        if not count:
            return
        rate, faster = (max(RATE, span / (span + before)) for span in (1, SPAN))
        active = torch.zeros_like(self.since)
        least = torch.full_like(self.threshold, torch.inf)
        for block in blocks:
            kept = _sae_axes.kept(block)
            active += torch.bincount(block.latents[kept], minlength=len(active))
            if self.kind != "topk":
                of = block.latents[:, 0] if self.kind == "feature" else ...
                least[of] = torch.where(kept, block.values, torch.inf).amin(-1).to(least.dtype).view_as(least[of])
        self.batches += 1
        self.since += count
        self.since[active > 0] = 0
        self.density.lerp_((active / count).to(self.density.dtype), rate)
        is_new = (self.threshold == 0) & least.isfinite()
        moved = self.threshold.lerp(least, faster)
        self.threshold.copy_(torch.where(is_new, least, torch.where(least.isfinite(), moved, self.threshold)))
        if self.exponent:
            self.energy.lerp_(_sae_axes.energies(encoder).to(self.energy.dtype), rate)
