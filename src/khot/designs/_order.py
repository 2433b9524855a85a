"""Designs that add noise to scores and take the k largest."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from .. import ops
from .._math import order_sampling, subsets
from ..relaxations import hard_topk
from ._design import Design
from ._parameters import logit


class OrderDesign(Design):
    """Draw the k largest of `_theta + noise`; abstract."""

    noise: ClassVar[order_sampling.Noise]

    @property
    def _theta(self) -> Tensor:
        """The scores that noise is added to, (*batch, n) float64."""
        return logit(self._pi)

    @property
    def mean(self) -> Tensor:
        """The inclusion probabilities of this law, which are not `probs`; (*batch, n), without a gradient."""
        solve = partial(order_sampling.inclusion, self.noise, self._theta.detach(), self._sizes)
        return self._once("mean", solve).to(self.parameter.dtype)

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        draw = partial(order_sampling.draw, self.noise)
        return self._draw_rows(draw, self._theta, seed, draws, ops.uniform, ops.hard_topk)

    def _log_prob(self, value: Tensor) -> Tensor:
        return order_sampling.log_prob(self.noise, self._theta, self._sizes, value)


class Pareto(OrderDesign):
    """Draw k-hot samples with *approximately* the inclusion probabilities asked for, from logistic noise and a top-k.

    The k largest `logit π + noise`. As cheap as Gumbel top-k, and far closer: with more items the error falls as
    1/(Σπ(1 − π))², from 0.013 with six to some 4e-6 with a thousand. `mean` is what is sampled, `probs` what was asked
    for. Reference: Rosén, "On sampling with probability proportional to size" (1997).

    Args:
        probs, k, logits, validate_args: as for `Design`.

    Examples:
        >>> Pareto(torch.tensor([0.2, 0.5, 0.5, 0.8])).mean
        tensor([0.1882, 0.5000, 0.5000, 0.8118])
    """

    noise = order_sampling.LOGISTIC


class PlackettLuce(OrderDesign):
    """Draw as Gumbel top-k and `torch.multinomial` without replacement do: one item after another ∝ e^θ.

    Its inclusion probabilities are not those asked for: with `probs`, the weights are proportional to them, and `mean`
    differs by up to 0.28. It is here to be compared with, and for rankings, which it is the law of. Reference: Plackett
    (1975); Kool, van Hoof and Welling, "Stochastic beams and where to find them" (2019).

    Args:
        probs: weights, (…, n), that sum to k: θ = log probs. *Not* the inclusion probabilities: those are `mean`.
        logits: θ instead, (…, n), with `k`. −inf is never drawn, +inf always.
        k, validate_args: as for `Design`.

    Examples:
        >>> design = PlackettLuce(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> design.mean
        tensor([0.2333, 0.5278, 0.5278, 0.7111])
        >>> design.log_prob(torch.tensor([0.0, 1.0, 0.0, 1.0])).exp()
        tensor(0.3000)
    """

    noise = order_sampling.GUMBEL

    @property
    def probs(self) -> Tensor:
        """The weights, scaled to sum to k; (*batch, n)."""
        if self._is_probs:
            return self.parameter
        return (self._sizes[..., None] * self._theta.softmax(-1)).to(self.parameter.dtype)

    @property
    def logits(self) -> Tensor:
        """θ, (*batch, n)."""
        return self.parameter.log() if self._is_probs else self.parameter

    @property
    def mode(self) -> Tensor:
        """The likeliest subset, the k largest θ; (*batch, n), ties by lowest index."""
        return hard_topk(self._theta.detach(), self._sizes).to(self.parameter.dtype)

    @property
    def _theta(self) -> Tensor:
        """θ in float64; −inf, without a gradient, for weights of 0."""
        given = self.parameter.to(torch.float64)
        return subsets.safe_log(given) if self._is_probs else given
