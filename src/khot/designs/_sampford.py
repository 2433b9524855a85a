"""Sampford's design: exact inclusion probabilities near the greatest entropy, with nothing to solve for."""

from __future__ import annotations

import torch
from torch import Tensor

from .._math import sampford, subsets
from ._design import Design
from ._natural import log_normaliser, marginals


class Sampford(Design):
    """k-hot samples with exactly the inclusion probabilities asked for, within 0.003 nats of the greatest entropy.

    `p(x) ∝ Π_{x_i = 1} π_i/(1 − π_i) · Σ x_i (1 − π_i)`. Samples of `Pareto` are drawn, and nearly all accepted.

    Args:
        probs: inclusion probabilities, (…, n), that sum to k. Items at 0 are never drawn, at 1 always.
        k: how many, a whole number or a tensor of them that broadcasts with the batch; by default the nearest whole
            number to the sum.
        logits: scores instead of `probs`, with `k`: then `probs = sigmoid_topk(logits, k)`.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> design = Sampford(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> design.log_prob(torch.tensor([0.0, 1.0, 0.0, 1.0])).exp()
        tensor(0.3394)
        >>> design.joint_probs()[1, 3]
        tensor(0.3394)

    Reference: Sampford, "On sampling without replacement with unequal probabilities of selection" (1967).
    """

    def joint_probs(self) -> Tensor:
        """The joint inclusion probabilities, (*batch, n, n), in O(n²)."""
        p = self._balanced
        logits, size = self._scores, self._sizes
        counts = subsets.counts(logits, size)
        joint = subsets.joint(counts, 1 - p) / _norm(p, logits, size)[..., None, None]
        is_certain = (p == 1).sum(-1) == size  # nothing is left to chance
        return torch.where(is_certain[..., None, None], p[..., :, None] * p[..., None, :], joint).to(self._given.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        p = self._balanced
        logits = self._scores
        theta = torch.where(logits.isfinite(), logits, 0.0)
        away = (value * (1 - p)).sum(-1)
        is_certain = (p == 1).sum(-1) == self._sizes
        norm = torch.where(is_certain, 1.0, _norm(p, logits, self._sizes))
        size = log_normaliser(logits, self._sizes) + norm.log()
        is_nil = away <= 0
        log = (value * theta).sum(-1) + torch.where(is_nil, 1.0, away).log() - size
        log = torch.where(is_nil, -torch.inf, log)
        return torch.where(self._is_out(p, value), -torch.inf, torch.where(is_certain, 0.0, log))

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        p = self._balanced.detach().reshape(-1, self._event_shape[0])
        return sampford.draw(p, self._sizes.reshape(-1), seed, draws).to(self._given.dtype)


def _norm(p: Tensor, logits: Tensor, size: Tensor) -> Tensor:
    """E[Σ x (1 − π)] under the law ∝ Π w."""
    return (marginals(logits, size) * (1 - p)).sum(-1)
