"""Which latents of a sparse autoencoder are active, how often, and above which value: in training, and measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._precision import KeepsPrecision, wide_dtype
from ._axes import Axis, Block, Encoder, kept

RATE = 0.01
"""The rate of the running means after some time; at first they are plain means of all batches so far."""
SPAN = 10
"""At first, the threshold is the mean of the last tenth or so of the batches, because it moves fast then."""
EDGES = torch.arange(-6, 0.01, 0.25, device="cpu")
"""The edges of the histogram of densities, log10."""


class Activity(KeepsPrecision):
    """Running counts and means of a hard selection, whatever the selector.

    The means stay in float32 or wider whatever the module is cast to: in half precision they would stop moving.

    Args:
        latents: how many.
        axis: the axis of the selection.
        exponent: of Zipf's law for the budgets, 0 for equal ones.
    """

    threshold: Tensor
    """The mean of the smallest value kept, in model units; (latents,) for "feature", else ()."""
    since: Tensor
    """Tokens since a latent was last active, (latents,)."""
    density: Tensor
    """The running fraction of tokens for which a latent is active, (latents,)."""
    energy: Tensor
    """The running mean of ReLU(a)², (latents,), which ranks latents for their budgets. Their density cannot: under a
    budget it is the budget, and the first ranks would stay for ever."""
    batches: Tensor

    def __init__(self, latents: int, axis: Axis, exponent: float) -> None:
        super().__init__()
        self.axis, self.exponent = axis, exponent
        self.register_buffer("threshold", torch.zeros(axis.threshold_shape(latents), dtype=wide_dtype()))
        self.register_buffer("since", torch.zeros(latents, dtype=torch.int64))
        self.register_buffer("density", torch.zeros(latents, dtype=wide_dtype()))
        self.register_buffer("energy", torch.zeros(latents if exponent else 0, dtype=wide_dtype()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def budgets(self, k: float | Tensor, count: int) -> Tensor:
        """Return how many of `count` tokens each latent chooses, k·count in all; (latents,)."""
        n = len(self.since)
        flat = torch.full((n,), 1 / n, dtype=torch.float64, device=self.since.device)
        shares = zipf(self.energy, self.exponent) if self.exponent else flat
        if isinstance(k, Tensor):
            return (shares * k * count).clamp(1, count).to(k.dtype)
        return apportion(shares, round(k * count), count)

    @torch.no_grad()
    def update(self, blocks: list[Block], encoder: Encoder) -> None:
        """Count the entries of a batch that the selection was among; an empty batch changes nothing."""
        count = len(encoder.x)
        if not count:
            return
        before = self.batches.to(self.density.dtype)
        rate, faster = ((span / (span + before)).clamp(min=RATE) for span in (1, SPAN))
        active = torch.zeros_like(self.since)
        least = torch.full_like(self.threshold, torch.inf)
        for block in blocks:
            is_kept = kept(block)
            active.scatter_add_(0, block.latents.flatten(), is_kept.flatten().long())
            self.axis.lower(least, block, is_kept)
        self.batches += 1
        self.since += count
        self.since.masked_fill_(active > 0, 0)
        self.density.lerp_((active / count).to(self.density.dtype), rate)
        is_new = (self.threshold == 0) & least.isfinite()
        moved = self.threshold.lerp(least, faster)
        self.threshold.copy_(torch.where(is_new, least, torch.where(least.isfinite(), moved, self.threshold)))
        if self.exponent:
            self.energy.lerp_(energies(encoder).to(self.energy.dtype), rate)


def energies(encoder: Encoder) -> Tensor:
    """Return the mean of ReLU(x·W + b)², (latents,): how much a latent could explain, chosen or not."""
    sums = [a.relu().square().sum(0) for _, a in encoder.pieces()]
    return torch.stack(sums).sum(0) / max(1, len(encoder.x))


def zipf(importance: Tensor, exponent: float) -> Tensor:
    """Return shares r^−exponent that sum to 1, r = 1, 2, … in the order of falling importance; (n,), float64."""
    n = len(importance)
    shares = torch.empty(n, dtype=torch.float64, device=importance.device)
    ranks = torch.arange(1, n + 1, dtype=torch.float64, device=importance.device)
    shares[importance.argsort(descending=True, stable=True)] = ranks**-exponent
    return shares / shares.sum()


def apportion(shares: Tensor, total: int, most: int) -> Tensor:
    """Return integers from 1 to `most` that sum to `total`, near total·shares, by largest remainders; (n,) int64."""
    n = len(shares)
    total = min(max(total, n), n * most)
    ideal = _within(shares * total, total, most)
    floor = ideal.floor()
    rest = torch.where(floor < most, ideal - floor, -1.0)
    gets_more = torch.arange(n, device=shares.device) < total - floor.sum()
    floor[rest.argsort(descending=True, stable=True)] += gets_more.to(floor.dtype)
    return floor.long()


def _within(ideal: Tensor, total: int, most: int) -> Tensor:
    """Return c·ideal cut to [1, most], with c such that the sum is `total`; by bisection, without reading c."""
    low, high = torch.zeros_like(ideal[0]), most / ideal.min().clamp(min=1e-300)
    for _ in range(60):
        middle = (low + high) / 2
        is_low = (middle * ideal).clamp(1, most).sum() <= total
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return (low * ideal).clamp(1, most)


class SparseAutoencoderMetrics:
    """Measure L0, FVU, cosine, bias of size and activity of an autoencoder in evaluation mode, batch by batch.

    Sums are in float64, and the batches may be of any size: the result is that of all tokens at once.

    Examples:
        >>> metrics = khot.nn.SparseAutoencoderMetrics()
        >>> config = khot.nn.SparseAutoencoderConfig(d_in=8, latents=32, k=2)
        >>> sae = khot.nn.SparseAutoencoder(config).eval()
        >>> for x in torch.randn(100, 8).split(30):
        ...     metrics.update(sae, x)
        >>> metrics.result()["l0"]
        2.0
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, sae: Callable[[Tensor], Any], x: Tensor) -> None:
        """Add a batch (…, d_in) and what an autoencoder, or a function like one, makes of it."""
        out = sae(x)
        code = out.code
        n, d = code.shape[-1], x.shape[-1]
        x, y = x.reshape(-1, d).double(), out.reconstruction.reshape(-1, d).double()
        is_active = code.values > 0
        self.tokens += len(x)
        self._add("error", (x - y).square().sum())
        self._add("mean", x.sum(0))
        self._add("square", x.square().sum())
        self._add("size", y.square().sum())
        self._add("product", (x * y).sum())
        self._add("cosine", torch.nn.functional.cosine_similarity(x, y, dim=1).sum())
        self._add("active", torch.bincount(code.latents[is_active], minlength=n).double())
        per_token = torch.bincount(code.tokens[is_active], minlength=len(x)).clamp(max=n)
        self._add("l0", torch.bincount(per_token, minlength=n + 1).double())

    def result(self) -> dict[str, Any]:
        """Return numbers and lists, as JSON takes them.

        `fvu` and `explained_variance` (1 − fvu); `l0`, active latents a token, with percentiles; `cosine`, the mean
        over tokens; `relative_reconstruction_bias`, E‖x̂‖²/E⟨x, x̂⟩, below 1 where reconstructions are too small;
        `alive`, the fraction of latents that were active at all; `density_histogram`, latents by log10 of the fraction
        of tokens they are active for, dead ones left out.
        """
        density, sums, tokens = self.density(), self._sums, self.tokens
        variance = sums["square"] - sums["mean"].square().sum() / tokens
        fvu = float(sums["error"] / variance)
        logs = density[density > 0].log10().float()
        return {
            "tokens": self.tokens,
            "fvu": fvu,
            "explained_variance": 1 - fvu,
            "l0": float(sums["active"].sum() / tokens),
            "l0_percentiles": {str(p): self._percentile(p) for p in (5, 50, 95)},
            "cosine": float(sums["cosine"] / tokens),
            "relative_reconstruction_bias": float(sums["size"] / sums["product"]),
            "alive": float((density > 0).double().mean()),
            "dead": int((density == 0).sum()),
            "density_histogram": {
                "log10_edges": EDGES.tolist(),
                "latents": torch.histogram(logs.clamp(min=EDGES[0].item()), EDGES).hist.long().tolist(),
            },
        }

    def density(self) -> Tensor:
        """Return the fraction of tokens for which each latent is active, (latents,)."""
        if not self.tokens:
            raise ValueError("Metrics need at least one token; got none: call `update` first.")
        return self._sums["active"] / self.tokens

    def _percentile(self, p: float) -> int:
        counts = self._sums["l0"].cumsum(0)
        return int((counts < p / 100 * counts[-1]).sum())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value
