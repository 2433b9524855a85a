"""Conditional Poisson sampling: the maximum-entropy law of k-subsets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import register_kl
from torch.nn.functional import logsigmoid

from .._math import natural, rejective, subsets
from ..relaxations import hard_topk
from ._design import Design
from ._natural import log_normaliser, marginals, natural_parameters


class ConditionalPoisson(Design):
    """The law of k-hot vectors of greatest entropy: independent draws, given that they are k in number.

    `p(x) ∝ exp(θ·x)`. Linear in n: the normaliser, the inclusion probabilities and their derivatives take some 30
    evaluations of the characteristic function of the count, at any n and k.

    Args:
        probs: the inclusion probabilities wanted, (…, n), that sum to k; θ is then solved for. Items at 0 are never
            drawn, at 1 always.
        k: how many, a whole number or a tensor of them that broadcasts with the batch; by default the nearest whole
            number to the sum of `probs`.
        logits: the natural parameters θ instead, (…, n), with `k`. The inclusion probabilities are then `mean`, which
            is *not* `sigmoid_topk(θ, k)`: for that mean, give it as `probs`. −inf is never drawn, +inf always.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> design = ConditionalPoisson(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> design.mean
        tensor([0.8808, 0.6944, 0.3056, 0.1192])
        >>> ConditionalPoisson(design.mean).logits - design.logits  # the same, up to a constant
        tensor([-0.5000, -0.5000, -0.5000, -0.5000])
        >>> design.log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])).exp()
        tensor(0.5859)

    Reference: Chen, Dempster and Liu, "Weighted finite population sampling to maximize entropy" (1994); Hájek (1964).
    """

    @property
    def logits(self) -> Tensor:
        """θ, up to a constant; (*batch, n)."""
        return self._theta.to(self._given.dtype) if self._is_probs else self._given

    @property
    def probs(self) -> Tensor:
        """The inclusion probabilities, (*batch, n)."""
        return self._given if self._is_probs else marginals(self._theta, self._sizes).to(self._given.dtype)

    @property
    def _theta(self) -> Tensor:
        """θ in float64, differentiable in the parameter."""
        if self._is_probs:
            return natural_parameters(self._balanced, self._sizes, self._solution)
        return self._given.to(torch.float64)

    @cached_property
    def _solution(self) -> Tensor:
        """θ for the probabilities given: numbers, with nothing of autograd that a first backward would free."""
        with torch.inference_mode(False), torch.no_grad():  # they may be asked for again with gradients
            return natural.solve(self._balanced, self._sizes)

    @property
    def _target(self) -> Tensor:
        return super()._target if self._is_probs else marginals(self._theta, self._sizes)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same design over a larger batch."""
        new = super().expand(batch_shape, _instance)
        if "_solution" in self.__dict__:  # what was solved need not be again
            new._solution = self._solution.expand(*batch_shape, -1)
        return new

    def joint_probs(self) -> Tensor:
        """The joint inclusion probabilities, (*batch, n, n), in O(n²)."""
        return subsets.joint(self._counts()).to(self._given.dtype)

    def variance_of_sum(self, weights: Tensor) -> Tensor:
        """Var(Σ c_i x_i), (*batch), in O(n)."""
        c = weights.to(torch.float64)
        c = c.expand(torch.broadcast_shapes(c.shape, self._theta.shape))
        return (c * subsets.covariance_product(self._counts(), c)).sum(-1).to(self._given.dtype)

    @property
    def mode(self) -> Tensor:
        """The likeliest subset, the k greatest θ; (*batch, n), ties by lowest index."""
        return hard_topk(self._theta.detach(), self._sizes).to(self._given.dtype)

    def entropy(self) -> Tensor:
        """log e_k − θ·π, the greatest there is with these inclusion probabilities; (*batch)."""
        return -self._mean_log_prob(marginals(self._theta, self._sizes)).to(self._given.dtype)

    def _mean_log_prob(self, x: Tensor) -> Tensor:
        """log p of a subset; or its mean, for a law of subsets with the mean x.

        The value is that of independent draws with Σp = k, over the probability that they are k: θ·x − log e_k, which
        has the gradient, loses digits where θ is large.
        """
        theta, k = self._theta, self._sizes
        smooth = _dot(theta, x) - log_normaliser(theta, k)
        with torch.no_grad():
            z, _ = natural.tilt(theta, k)
            value = torch.where(x > 0, x * logsigmoid(z), 0.0) + torch.where(x < 1, (1 - x) * logsigmoid(-z), 0.0)
            value = value.sum(-1) - subsets.log_size(subsets.counts(z, k))
            rest = value - torch.where(smooth.isfinite(), smooth, 0.0)
        return torch.where(value.isfinite(), smooth + rest, value)

    def _counts(self) -> subsets.Counts:
        return subsets.counts(natural.tilt(self._theta, self._sizes)[0], self._sizes)

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._mean_log_prob(value)

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        n = self._event_shape[0]
        z, _ = natural.tilt(self._theta.detach(), self._sizes)
        rows = rejective.draw(z.reshape(-1, n), self._sizes.reshape(-1), seed, draws)
        return rows.to(self._given.dtype)


def _dot(theta: Tensor, x: Tensor) -> Tensor:
    """Σ θ x over the finite θ."""
    return (torch.where(theta.isfinite(), theta, 0.0) * x).sum(-1)


@register_kl(ConditionalPoisson, ConditionalPoisson)  # type: ignore[untyped-decorator]
def _kl(p: ConditionalPoisson, q: ConditionalPoisson) -> Tensor:
    """KL(p ‖ q) = E_p[log p − log q], which depends on the mean of p alone; +inf if q cannot draw what p can."""
    mean = marginals(p._theta, p._sizes)
    value = p._mean_log_prob(mean) - q._mean_log_prob(mean)
    return torch.where(p._sizes == q._sizes, value, torch.inf).to(p._given.dtype)
