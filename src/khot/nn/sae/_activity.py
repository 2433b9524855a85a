"""Running counts and means of what an autoencoder selects, and the latents' budgets that follow from them."""

import torch
from torch import Tensor

from .._precision import KeepsPrecision, wide_dtype
from ._axes import Axis, Block, Encoder

RATE = 0.01  # of the running means after some time; at first they are plain means of all batches so far
SPAN = 10  # at first, the threshold is the mean of the last tenth or so of the batches, because it moves fast then


class Activity(KeepsPrecision):
    """Keep running counts and means of a hard selection by any selector; budgets by Zipf's law, or equal at 0."""

    # The mean of the smallest value kept, in model units, if it is not learned; (latents,) for "feature", else ().
    threshold: Tensor
    since: Tensor  # tokens since a latent was last active, (latents,)
    density: Tensor  # the running fraction of tokens for which a latent is active, (latents,)
    # The running mean of ReLU(a)², (latents,), which ranks latents for their budgets. Their density cannot: under a
    # budget it is the budget, and the first ranks would stay for ever.
    energy: Tensor
    batches: Tensor

    def __init__(self, latents: int, axis: Axis, exponent: float) -> None:
        super().__init__()
        self.axis, self.exponent = axis, exponent
        self.register_buffer("threshold", torch.zeros(latents if axis.has_budgets else (), dtype=wide_dtype()))
        self.register_buffer("since", torch.zeros(latents, dtype=torch.int64))
        self.register_buffer("density", torch.zeros(latents, dtype=wide_dtype()))
        self.register_buffer("energy", torch.zeros(latents if exponent else 0, dtype=wide_dtype()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def budgets(self, k: float | Tensor, count: int) -> Tensor:
        """Return how many of `count` tokens each latent chooses, k·count in all; (latents,)."""
        shares = zipf(self.energy if self.exponent else self.density, self.exponent)  # equal if there is no exponent
        if isinstance(k, Tensor):
            return (shares * k * count).clamp(1, count).to(k.dtype)
        return apportion(shares, round(k * count), count)

    @torch.no_grad()
    def update(self, blocks: list[Block], encoder: Encoder) -> None:
        """Count the entries of a batch that the selection was among; an empty batch changes nothing."""
        if not (count := encoder.tokens):
            return
        ranks, own = encoder.ranks, encoder.ranks.part(encoder.latents)
        before = self.batches.to(self.density.dtype)
        rate, faster = ((span / (span + before)).clamp(min=RATE) for span in (1, SPAN))
        active = torch.zeros_like(self.since)
        least = torch.full_like(self.threshold, torch.inf)
        for block in blocks:
            kept = block.kept()
            active[own].scatter_add_(0, block.latents.flatten(), kept.flatten().long())
            if (
                self.axis.has_threshold and not self.axis.learns_threshold and kept.numel()
            ):  # the smallest value kept of each row
                lowest = torch.where(kept, block.values, torch.inf).amin(-1).to(least.dtype)
                least[block.latents[:, 0] + own.start if self.axis.has_budgets else ...] = lowest
        active, least = ranks.sum(active), ranks.least(least)
        self.batches += 1
        self.since += count
        self.since.masked_fill_(active > 0, 0)
        self.density.lerp_((active / count).to(self.density.dtype), rate)
        is_new = (self.threshold == 0) & least.isfinite()
        moved = self.threshold.lerp(least, faster)
        self.threshold.copy_(torch.where(is_new, least, torch.where(least.isfinite(), moved, self.threshold)))
        if self.exponent:  # what each could explain, chosen or not
            sums = [a.to(encoder.x.dtype).relu().square().sum(0) for _, a in encoder.pieces()]
            energy = torch.zeros_like(self.energy)
            energy[own] = (torch.stack(sums).sum(0) / count).to(energy.dtype)
            self.energy.lerp_(ranks.sum(energy), rate)


def zipf(importance: Tensor, exponent: float) -> Tensor:
    """Return shares r^−exponent that sum to 1, r = 1, 2, … in the order of falling importance; (n,), float64."""
    ranks = torch.arange(1, len(importance) + 1, dtype=torch.float64, device=importance.device)
    shares = torch.empty_like(ranks)
    shares[importance.argsort(descending=True, stable=True)] = ranks**-exponent
    return shares / shares.sum()


def apportion(shares: Tensor, total: int, most: int) -> Tensor:
    """Return integers from 1 to `most` that sum to `total`, near total·shares, by largest remainders; (n,) int64."""
    n = len(shares)
    total = min(max(total, n), n * most)
    ideal = shares * total
    low, high = torch.zeros_like(ideal[0]), most / ideal.min().clamp(min=1e-300)
    for _ in range(60):  # bisection, on the device, for the multiple that sums to the total within the bounds
        middle = (low + high) / 2
        is_low = (middle * ideal).clamp(1, most).sum() <= total
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    ideal = (low * ideal).clamp(1, most)
    floor = ideal.floor()
    rest = torch.where(floor < most, ideal - floor, -1.0)
    gets_more = torch.arange(n, device=shares.device) < total - floor.sum()
    floor[rest.argsort(descending=True, stable=True)] += gets_more.to(floor.dtype)
    return floor.long()
