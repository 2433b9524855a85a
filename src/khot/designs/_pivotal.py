"""Designs that go along the items once: tree pivotal sampling, the default, and systematic sampling."""

from typing import Self

import torch
from torch import Tensor

from .. import _check, ops
from .._math import noise, pivotal, systematic
from ._design import Design, outer


class Pivotal(Design):
    """Draw k-hot samples with exactly the inclusion probabilities asked for: pairs of items duel along a binary tree.

    `E[x] = π`, and `Σx = k` on every draw. Of two neighbours with the probabilities a + b = s, a coin makes one 0 (if
    s < 1) or 1 (if s ≥ 1), and the other goes on with what is left. O(n), in ⌈log2 n⌉ rounds. Reference: Deville and
    Tillé, "Unequal probability sampling without replacement through a splitting method" (1998); Srinivasan (2001).

    Args:
        probs, k, logits, validate_args: as for `Design`; if k is fractional, samples have ⌊k⌋ or ⌈k⌉ ones, still with
            `E[x] = π`.
        order: which items meet first. "random": an order of its own for each draw, so that every subset can occur.
            "shared": one random order for all draws of a call. "given": as they come, which spreads samples along the
            index (stratification), and gives `log_prob`, `joint_probs` and all that follows from them.

    Examples:
        >>> design = Pivotal(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> design.sample(generator=torch.Generator().manual_seed(0))
        tensor([0., 1., 0., 1.])
        >>> Pivotal(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2).mean
        tensor([0.8176, 0.6225, 0.3775, 0.1824])
    """

    takes_fractions = has_pairs = True

    def __init__(
        self,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        logits: Tensor | None = None,
        order: str = "random",
        validate_args: bool | None = None,
    ) -> None:
        _check.one_of("order", order, ("random", "shared", "given"))
        self.order = order
        self._permutation: Tensor | None = None
        super().__init__(probs, k, logits=logits, validate_args=validate_args)

    def fix_order(self, generator: torch.Generator | None = None) -> Self:
        """Return the same design with the order "given": one is drawn here, once, for each row of the batch."""
        new = self.expand(self._batch_shape)
        keys = noise.bits(noise.seed(generator, self.parameter.device), self._batch_shape.numel())
        new.order, new._permutation = "given", ops.order(keys, self._event_shape[0]).view(self.parameter.shape)
        return new

    def joint_probs(self) -> Tensor:
        """Return the joint inclusion probabilities (*batch, n, n), in closed form; for the order "given"."""
        return (self._covariance() + outer(self._pi)).to(self.parameter.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        """Cov(x), (*batch, n, n); no two items are positively correlated. For the order "given"."""
        return self._covariance().to(self.parameter.dtype)

    def variance_of_sum(self, weights: Tensor) -> Tensor:
        """Return Var(Σ c_i x_i), (*batch), in O(n); for the order "given"."""
        leaves, c = self._leaves(), self._ordered(weights.to(torch.float64))
        return pivotal.variance_of_sum(leaves, c).to(self.parameter.dtype)

    def _draw(self, draws: int, seed: Tensor, is_paired: bool = False) -> Tensor:
        n = self._event_shape[0]
        order = None if self._permutation is None else self._permutation.reshape(-1, n)
        if self.order == "shared":
            order = ops.order(noise.stream_key(seed, 1)[None], n)
        p, is_integer = self._drawn.reshape(-1, n), (self._sizes == self._sizes.round()).reshape(-1)
        sample: Tensor = ops.pivotal(p, is_integer, seed, order, self.order == "random", draws, is_paired)
        return sample

    def _log_prob(self, value: Tensor) -> Tensor:
        return pivotal.log_prob(self._leaves(), self._ordered(value), self._sizes == self._sizes.round())

    def _covariance(self) -> Tensor:
        covariance = pivotal.covariance(self._leaves())
        if self._permutation is None:
            return covariance
        back = self._permutation.argsort(-1)
        rows = covariance.gather(-2, back[..., None].expand(covariance.shape))
        return rows.gather(-1, back[..., None, :].expand(covariance.shape))

    def _leaves(self) -> Tensor:
        """Return π in the order of the leaves; raise unless there is one for all draws."""
        if self.order != "given":
            raise NotImplementedError(
                f"A pivotal design with the order {self.order!r} is a mixture over all orders; its probabilities of "
                'subsets and pairs are known for a given one. Use `order="given"`, or `.fix_order(generator)` to draw '
                "an order once."
            )
        return self._ordered(self._pi)

    def _ordered(self, t: Tensor) -> Tensor:
        """Return t, which broadcasts with (*batch, n), in the order of the leaves."""
        t = t.expand(torch.broadcast_shapes(t.shape, self.parameter.shape))
        return t if self._permutation is None else t.gather(-1, self._permutation.expand(t.shape))


class Systematic(Design):
    """Draw k-hot samples with exactly the inclusion probabilities asked for, from one uniform per sample.

    `x_i = ⌊c_i + u⌋ − ⌊c_{i−1} + u⌋`, with c the running sum of π. The fastest design, spread evenly along the index;
    but there are at most n + 1 different samples, and many pairs never occur, or always together. Reference: Madow, "On
    the theory of systematic sampling, II" (1949).

    Args:
        probs, k, logits, validate_args: as for `Pivotal`.

    Examples:
        >>> Systematic(torch.full((8,), 0.25)).sample(generator=torch.Generator().manual_seed(0))
        tensor([0., 0., 1., 0., 0., 0., 1., 0.])
    """

    takes_fractions = has_pairs = True

    def joint_probs(self) -> Tensor:
        """Return the joint inclusion probabilities, (*batch, n, n), exactly; in O(n³) operations and O(n²) memory."""
        return systematic.joint(self._asked, self._sizes).to(self.parameter.dtype)

    def variance_of_sum(self, weights: Tensor) -> Tensor:
        """Return Var(Σ c_i x_i), (*batch), in O(n log n)."""
        return systematic.variance_of_sum(self._asked, self._sizes, weights).to(self.parameter.dtype)

    @property
    def mode(self) -> Tensor:
        """The likeliest of the n + 1 samples; (*batch, n)."""
        return systematic.mode(self._asked, self._sizes).to(self.parameter.dtype)

    def entropy(self) -> Tensor:
        """Return −Σ p log p in nats over the n + 1 samples, (*batch), in O(n log n)."""
        length = systematic.intervals(self._asked, self._sizes).length
        each: Tensor = torch.special.entr(torch.where(length > 0, length, 1.0))
        return each.sum(-1).to(self.parameter.dtype)

    def _draw(self, draws: int, seed: Tensor, is_paired: bool = False) -> Tensor:
        return self._draw_rows(ops.systematic, self._drawn, seed, draws, is_paired)

    def _log_prob(self, value: Tensor) -> Tensor:
        return systematic.log_prob(self._asked, self._sizes, value)
