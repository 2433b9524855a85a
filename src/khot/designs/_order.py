"""Designs that add noise to scores and take the k greatest."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .._math import order_sampling
from ._design import Design


class OrderDesign(Design):
    """The k greatest of `_scores + noise`; abstract."""

    noise: ClassVar[order_sampling.Noise]

    @property
    def mean(self) -> Tensor:
        """The inclusion probabilities of this law, which are not `probs`; (*batch, n), without a gradient."""
        return order_sampling.inclusion(self.noise, self._scores.detach(), self._sizes).to(self._given.dtype)

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        scores = self._scores.detach().reshape(-1, self._event_shape[0])
        return order_sampling.draw(self.noise, scores, self._sizes.reshape(-1), seed, draws).to(self._given.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        return order_sampling.log_prob(self.noise, self._scores, self._sizes, value)
