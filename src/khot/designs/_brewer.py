"""Brewer's draw-by-draw design."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from .._math import brewer
from ._design import Design

MOST = 12
"""The largest k for which subsets have probabilities: they take 2^k steps."""


class Brewer(Design):
    """k-hot samples with exactly the inclusion probabilities asked for, drawn one item after another.

    The next item has odds `π(R − π)/(R − mπ)`, with R the probability and m the number that are left. Close to the
    greatest entropy, without solving for anything; sequential, O(nk).

    Args:
        probs: inclusion probabilities, (…, n), that sum to k. Items at 0 are never drawn, at 1 always.
        k: how many, a whole number or a tensor of them that broadcasts with the batch; by default the nearest whole
            number to the sum.
        logits: scores instead of `probs`, with `k`: then `probs = sigmoid_topk(logits, k)`.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> Brewer(torch.tensor([0.2, 0.5, 0.5, 0.8])).log_prob(torch.tensor([0.0, 1.0, 0.0, 1.0])).exp()
        tensor(0.3394)

    Reference: Brewer, "A simple procedure for sampling πpswor" (1975).
    """

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        p = self._balanced.detach().reshape(-1, self._event_shape[0])
        return brewer.draw(p, self._sizes.reshape(-1), seed, draws).to(self._given.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        p = self._balanced
        _check.few("k", (value * (p < 1)).sum(-1), MOST, "`Brewer` has probabilities of subsets")
        shape = torch.broadcast_shapes(value.shape, p.shape)
        log = brewer.log_prob(p.expand(shape), self._sizes.expand(shape[:-1]), value.expand(shape))
        return torch.where(self._is_out(p, value), -torch.inf, log)
