"""Systematic sampling: one uniform per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .._math import systematic
from ._design import Design


class Systematic(Design):
    """k-hot samples with exactly the inclusion probabilities asked for, from one uniform per sample.

    `x_i = ⌊c_i + u⌋ − ⌊c_{i−1} + u⌋`, with c the running sum of π. The fastest design, spread evenly along the index;
    but there are at most n + 1 different samples, and many pairs never occur, or always together.

    Args:
        probs: inclusion probabilities, (…, n), that sum to k over the last dim.
        k: how many, by default the nearest whole number to the sum; a number, or a tensor that broadcasts with the
            batch. If it is fractional, samples have ⌊k⌋ or ⌈k⌉ ones.
        logits: scores instead of `probs`, with `k`: then `probs = sigmoid_topk(logits, k)`.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> Systematic(torch.full((8,), 0.25)).sample(generator=torch.Generator().manual_seed(0))
        tensor([0., 0., 1., 0., 0., 0., 1., 0.])

    Reference: Madow, "On the theory of systematic sampling, II" (1949).
    """

    takes_fractions = True

    def joint_probs(self) -> Tensor:
        """The joint inclusion probabilities, (*batch, n, n), exactly; in O(n³) operations and O(n²) memory."""
        return systematic.joint(self._target, self._sizes).to(self._given.dtype)

    def _draw(self, draws: int, seed: Tensor, is_paired: bool = False) -> Tensor:
        p = self._sampled.reshape(-1, self._event_shape[0])
        sample: Tensor = ops.systematic(p, self._sizes.reshape(-1), seed, draws, is_paired)
        return sample.to(self._given.dtype)

    def _draw_pairs(self, draws: int, seed: Tensor) -> Tensor:
        return self._draw(draws, seed, is_paired=True)

    def _log_prob(self, value: Tensor) -> Tensor:
        target = self._target
        sums = target.cumsum(-1)
        with torch.no_grad():  # the sums that are sampled, exact where the sum of floats is not
            one = 1 << systematic.places(target.shape[-1])
            exact = systematic.quantised(target, self._sizes).cumsum(-1).to(torch.float64) / one
        lower, upper = systematic.bounds(sums + (exact - sums.detach()), value)
        is_nil = upper <= lower
        return torch.where(is_nil, -torch.inf, torch.where(is_nil, 1.0, upper - lower).log())
