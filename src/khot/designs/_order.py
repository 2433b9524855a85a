"""The design of Gumbel top-k: noise is added to scores, and the k largest are taken."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .. import _check, ops
from .._math import counts, noise, order_sampling, subsets
from .._torch import require_values
from ..relaxations import hard_topk
from ._design import Design

NOTHING = -1e300  # the logarithm of a weight that is none, with a gradient of 0 instead of NaN
OUT_OF_REACH = 1e3  # above all others, by more than noise can be


class PlackettLuce(Design):
    """Draw as Gumbel top-k and `torch.multinomial` without replacement do: one item after another ∝ e^θ.

    Its inclusion probabilities are not those asked for: with `probs`, the weights are proportional to them, and `mean`
    differs by up to 1/e = 0.37, for one item at 1 among many small ones. It is here to be compared with. Samples and
    probabilities are of sets; `sample_ranking` and `log_prob_of_ranking` are of the order in which items are drawn.
    Reference: Plackett (1975); Kool, van Hoof and Welling, "Stochastic beams and where to find them" (2019).

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
        >>> ranking = design.sample_ranking(generator=torch.Generator().manual_seed(0))
        >>> ranking, design.log_prob_of_ranking(ranking).exp()  # 0.2/2 · 0.8/1.8
        (tensor([0, 3]), tensor(0.0444))
    """

    @property
    def probs(self) -> Tensor:
        """Return the weights, scaled to sum to k; (*batch, n)."""
        if self._is_probs:
            return self.parameter
        return (self._sizes[..., None] * self._theta.softmax(-1)).to(self.parameter.dtype)

    @property
    def logits(self) -> Tensor:
        """Return θ, (*batch, n)."""
        return self.parameter.log() if self._is_probs else self.parameter

    @property
    def mean(self) -> Tensor:
        """Return the inclusion probabilities of this law, which are not `probs`; (*batch, n)."""
        theta, k = self._theta, self._sizes
        require_values("The mean of `PlackettLuce`", theta)
        rare = counts.RARE if self.parameter.dtype == torch.float64 else order_sampling.RARE_SINGLE
        solve = partial(order_sampling.inclusion, order_sampling.GUMBEL, theta, k, rare)
        if torch.is_grad_enabled() and (theta.requires_grad or self._is_moving()):
            return solve().to(self.parameter.dtype)
        return self._once("mean", solve).to(self.parameter.dtype)

    @property
    def mode(self) -> Tensor:
        """Return the likeliest subset, the k largest θ; (*batch, n), ties by lowest index."""
        return hard_topk(self._theta.detach(), self._sizes).to(self.parameter.dtype)

    @property
    def _theta(self) -> Tensor:
        """Return θ in float64; −inf, without a gradient, for weights of 0."""
        given = self.parameter.to(torch.float64)
        return subsets.safe_log(given) if self._is_probs else given

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        draw = partial(order_sampling.draw, order_sampling.GUMBEL)
        return self._draw_rows(draw, self._theta, seed, draws, ops.uniform, ops.hard_topk)

    def _log_prob(self, value: Tensor) -> Tensor:
        return order_sampling.log_prob(order_sampling.GUMBEL, self._theta, self._sizes, value)

    def sample_ranking(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw k items in order, the first ∝ e^θ, the next ∝ e^θ of the others, and so on.

        Returns indices, (*sample_shape, *batch, k), with −1 at the end where a row has fewer; the sets have the law of
        `sample`. Items with θ = +inf come first, in random order.
        """
        theta = self._open_theta.detach()
        noisy = theta + noise.gumbel(_check.sample_shape(sample_shape) + theta.shape, theta, generator, ops.uniform)
        most = int(self._sizes.max()) if self._sizes.numel() else 0
        ranking = noisy.topk(most).indices
        return ranking.masked_fill(torch.arange(most, device=theta.device) >= self._sizes[..., None], -1)

    def log_prob_of_ranking(self, ranking: Tensor) -> Tensor:
        """Return log P(these k items are drawn in this order), (…), for `ranking` (…, k); differentiable.

        `Σ_j θ_{r_j} − log Σ_{i not before j} e^{θ_i}`. −1 fills up where a row has fewer.
        """
        _check.instance("ranking", ranking, Tensor)
        if ranking.is_complex():
            raise ValueError(f"`ranking` must hold indices, (…, k); got {ranking.dtype}.")
        theta = self._open_theta
        n = theta.shape[-1]
        is_item = (ranking >= 0) & (ranking < n)
        sizes = is_item.sum(-1)
        if ranking.is_floating_point() or ranking.dtype == torch.bool or ranking.ndim == 0:
            raise ValueError(f"`ranking` must hold indices, (…, k); got {ranking.dtype} of {tuple(ranking.shape)}.")
        shape = torch.broadcast_shapes(ranking.shape[:-1], theta.shape[:-1])
        ranking, theta = ranking.expand(*shape, -1), theta.expand(*shape, n)
        at = torch.where(is_item, ranking, n)
        if self._validate_args and not bool(((ranking >= -1) & (ranking < n)).all()):
            raise ValueError(f"`ranking` must hold indices below {n}; got {int(ranking.max())}.")
        count = torch.zeros(*shape, n + 1, device=at.device).scatter_add(-1, at, torch.ones(at.shape, device=at.device))
        count = count[..., :-1]
        is_right = (count <= 1).all(-1) & (sizes == self._sizes)
        if self._validate_args and not bool(is_right.all()):
            raise ValueError(f"`ranking` must hold k different items in each row; k is {self.k}.")
        is_rest = (count == 0) & (theta > -torch.inf)
        has_rest = is_rest.any(-1, keepdim=True)
        rest = torch.where(is_rest | ~has_rest, theta, -torch.inf).logsumexp(-1, keepdim=True)
        rest = torch.where(has_rest, rest, NOTHING)
        chosen = theta.gather(-1, at.clamp(max=n - 1))
        is_out = (is_item & (chosen == -torch.inf)).any(-1)
        chosen = torch.where(is_item & (chosen > -torch.inf), chosen, NOTHING)
        from_here = torch.cat((rest, chosen.flip(-1)), -1).logcumsumexp(-1)[..., 1:].flip(-1)
        each = torch.where(is_item, chosen - from_here, 0.0)
        return torch.where(is_right & ~is_out, each.sum(-1), -torch.inf).to(self.parameter.dtype)

    @property
    def _open_theta(self) -> Tensor:
        """Return θ with +inf replaced by a number that no other can reach."""
        theta = self._theta
        top = torch.where(theta.isfinite(), theta, 0.0).detach().amax(-1, keepdim=True) + OUT_OF_REACH
        return torch.where(theta == torch.inf, top, theta)
