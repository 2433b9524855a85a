"""Plackett–Luce, the law of Gumbel top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from .._math import order_sampling
from ..relaxations import hard_topk
from ._order import OrderDesign


class PlackettLuce(OrderDesign):
    """The law of Gumbel top-k, and of `torch.multinomial` without replacement: one item after another ∝ e^θ.

    Its inclusion probabilities are not those asked for: with `probs`, the weights are proportional to them, and `mean`
    differs by up to 0.28. It is here to be compared with, and for rankings, which it is the law of.

    Args:
        probs: weights, (…, n), that sum to k: θ = log probs. *Not* the inclusion probabilities: those are `mean`.
        k: how many, a whole number or a tensor of them that broadcasts with the batch; by default the nearest whole
            number to the sum of `probs`.
        logits: θ instead, (…, n), with `k`. −inf is never drawn, +inf always.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> design = PlackettLuce(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> design.mean
        tensor([0.2333, 0.5278, 0.5278, 0.7111])
        >>> design.log_prob(torch.tensor([0.0, 1.0, 0.0, 1.0])).exp()
        tensor(0.3000)

    Reference: Plackett (1975); Kool, van Hoof and Welling, "Stochastic beams and where to find them" (2019).
    """

    noise = order_sampling.GUMBEL

    @property
    def probs(self) -> Tensor:
        """The weights, scaled to sum to k; (*batch, n)."""
        if self._is_probs:
            return self._given
        return (self._sizes[..., None] * self._scores.softmax(-1)).to(self._given.dtype)

    @property
    def logits(self) -> Tensor:
        """θ, (*batch, n)."""
        return self._given.log() if self._is_probs else self._given

    @property
    def mode(self) -> Tensor:
        """The likeliest subset, the k greatest θ; (*batch, n), ties by lowest index."""
        return hard_topk(self._scores.detach(), self._sizes).to(self._given.dtype)

    @property
    def _scores(self) -> Tensor:
        """θ in float64; −inf, without a gradient, for weights of 0."""
        given = self._given.to(torch.float64)
        if not self._is_probs:
            return given
        is_open = given > 0
        return torch.where(is_open, torch.where(is_open, given, 1.0).log(), -torch.inf)
