"""How good a sparse autoencoder is, over more data than fits at once."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _check
from ._sae_config import SparseAutoencoderOutput

EDGES = torch.arange(-6, 0.01, 0.25)
"""Of the histogram of densities, log10."""


class Reconstructs(Protocol):
    """What is measured."""

    def __call__(self, x: Tensor, /) -> SparseAutoencoderOutput: ...


class SparseAutoencoderMetrics:
    """L0, FVU, cosine, bias of size and activity of an autoencoder in evaluation mode, batch by batch.

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
    def update(self, sae: Reconstructs, x: Tensor) -> None:
        """Add a batch (…, d_in)."""
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
        """Numbers and lists, as JSON takes them.

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
        """The fraction of tokens for which each latent is active, (latents,)."""
        _check.measured(self.tokens)
        return self._sums["active"] / self.tokens

    def _percentile(self, p: float) -> int:
        counts = self._sums["l0"].cumsum(0)
        return int((counts < p / 100 * counts[-1]).sum())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value
