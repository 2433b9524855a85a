"""The design of Gumbel top-k: noise is added to scores, and the k largest are taken."""

from functools import partial

import torch
from torch import Tensor

from .. import ops
from .._math import order_sampling, subsets
from ..relaxations import hard_topk
from ._design import Design


class PlackettLuce(Design):
    """Draw as Gumbel top-k and `torch.multinomial` without replacement do: one item after another ∝ e^θ.

    Its inclusion probabilities are not those asked for: with `probs`, the weights are proportional to them, and `mean`
    differs by up to 1/e = 0.37, for one item at 1 among many small ones. It is here to be compared with. Samples and
    probabilities are of sets: the order in which items were drawn is not kept. Reference: Plackett (1975); Kool, van
    Hoof and Welling, "Stochastic beams and where to find them" (2019).

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
    def mean(self) -> Tensor:
        """The inclusion probabilities of this law, which are not `probs`; (*batch, n)."""
        theta, k = self._theta, self._sizes
        if torch.is_grad_enabled() and (theta.requires_grad or self._is_moving()):
            return order_sampling.inclusion(order_sampling.GUMBEL, theta, k).to(self.parameter.dtype)
        solve = partial(order_sampling.inclusion, order_sampling.GUMBEL, theta, k)
        return self._once("mean", solve).to(self.parameter.dtype)

    @property
    def mode(self) -> Tensor:
        """The likeliest subset, the k largest θ; (*batch, n), ties by lowest index."""
        return hard_topk(self._theta.detach(), self._sizes).to(self.parameter.dtype)

    @property
    def _theta(self) -> Tensor:
        """θ in float64; −inf, without a gradient, for weights of 0."""
        given = self.parameter.to(torch.float64)
        return subsets.safe_log(given) if self._is_probs else given

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        draw = partial(order_sampling.draw, order_sampling.GUMBEL)
        return self._draw_rows(draw, self._theta, seed, draws, ops.uniform, ops.hard_topk)

    def _log_prob(self, value: Tensor) -> Tensor:
        return order_sampling.log_prob(order_sampling.GUMBEL, self._theta, self._sizes, value)
