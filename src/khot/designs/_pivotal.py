"""Designs that go along the items once: tree pivotal sampling, the default, and systematic sampling."""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _check, ops
from .._math import noise, pivotal, systematic
from .._torch import has_values, require_values
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
            index (stratification), and gives `log_prob`, `joint_probs` and all that follows from them. A tensor of
            indices, (n) or (*batch, n): in that order, which is "given" then.
        strata: labels of the items, (n) integers, the same for all rows. Items of a stratum meet before any others do,
            so that each has ⌊Σπ⌋ or ⌈Σπ⌉ of its items in every sample.

    Examples:
        >>> design = Pivotal(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> design.sample(generator=torch.Generator().manual_seed(0))
        tensor([0., 0., 1., 1.])
        >>> Pivotal(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2).mean
        tensor([0.8176, 0.6225, 0.3775, 0.1824])
        >>> halves = Pivotal(torch.full((6,), 0.5), 3, strata=torch.tensor([0, 0, 1, 1, 1, 1]))
        >>> x = halves.sample((100,), generator=torch.Generator().manual_seed(0))
        >>> x[:, :2].sum(-1).unique(), x[:, 2:].sum(-1).unique()
        (tensor([1.]), tensor([2.]))
    """

    takes_fractions = has_pairs = True

    def __init__(
        self,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        logits: Tensor | None = None,
        order: str | Tensor = "random",
        strata: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(order, Tensor):
            _check.one_of("order", order, ("random", "shared", "given"))
        self.order = "given" if isinstance(order, Tensor) else order
        self._permutation: Tensor | None = None
        super().__init__(probs, k, logits=logits, validate_args=validate_args)
        if isinstance(order, Tensor):
            _check_order(order, self.parameter, has_values(order))
            self._permutation = order.to(torch.int64).expand(self.parameter.shape)
        self._strata = None if strata is None else _strata(strata, self.parameter)

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
        """Return Cov(x), (*batch, n, n), for the order "given"; no two items are positively correlated."""
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
        if self._strata is not None:
            return self._draw_strata(p, is_integer, seed, order, draws, is_paired)
        sample: Tensor = ops.pivotal(p, is_integer, seed, order, self.order == "random", draws, is_paired)
        return sample

    def _draw_strata(
        self, p: Tensor, is_integer: Tensor, seed: Tensor, order: Tensor | None, draws: int, is_paired: bool
    ) -> Tensor:
        """Draw as `_draw`, along a tree in which each stratum is a subtree; with an order for each draw if random."""
        assert self._strata is not None
        (rows, n), copies = p.shape, 1 + is_paired
        if self.order == "random":
            p, is_integer = p.repeat(draws // copies, 1), is_integer.repeat(draws // copies)
            order, draws = ops.order(noise.bits(noise.stream_key(seed, 1), len(p)), n), copies
        elif order is None:
            order = torch.arange(n, device=p.device)[None]
        full = pivotal.grouped(self._strata, order)
        leaves = pad(p, (0, self._strata.leaves - n))
        sample: Tensor = ops.pivotal(leaves, is_integer, seed, full, False, draws, is_paired)
        if self.order == "random" and is_paired:  # both of a pair, one after the other
            sample = sample.view(2, -1, rows, self._strata.leaves).transpose(0, 1).flatten(0, 2)
        return sample[:, :n]

    def _log_prob(self, value: Tensor) -> Tensor:
        return pivotal.log_prob(self._leaves(), self._ordered(value), self._sizes == self._sizes.round())

    def _covariance(self) -> Tensor:
        self._check_pairs()
        covariance, order = pivotal.covariance(self._leaves()), self._leaf_order()
        if order is None:
            return covariance
        n = self._event_shape[0]
        back = order.argsort(-1)[..., :n]
        rows = covariance.gather(-2, back[..., None].expand(*covariance.shape[:-2], n, covariance.shape[-1]))
        return rows.gather(-1, back[..., None, :].expand(*rows.shape[:-1], n))

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
        """Return t, which broadcasts with (*batch, n), in the order of the leaves; 0 for a leaf without an item."""
        t, order = t.expand(torch.broadcast_shapes(t.shape, self.parameter.shape)), self._leaf_order()
        if order is None:
            return t
        t = pad(t, (0, order.shape[-1] - t.shape[-1]))
        return t.gather(-1, order.expand(t.shape))

    def _leaf_order(self) -> Tensor | None:
        """Return the item at each leaf, (*batch, leaves), counting on from n where there is none; None for 0, …, n."""
        if self._strata is None:
            return self._permutation
        n = self._event_shape[0]
        order = torch.arange(n, device=self.parameter.device) if self._permutation is None else self._permutation
        return pivotal.grouped(self._strata, order.expand(self.parameter.shape))


def _check_order(order: Tensor, parameter: Tensor, reads: bool) -> None:
    """Raise unless `order` holds 0, …, n − 1 in each row, and fits the batch."""
    n = parameter.shape[-1]
    is_integer = not (order.is_floating_point() or order.is_complex() or order.dtype == torch.bool)
    if not is_integer or order.ndim == 0 or order.shape[-1] != n:
        raise ValueError(f"`order` must be integers of shape (…, {n}); got {order.dtype} of {tuple(order.shape)}.")
    _check.broadcasts("order", order, tuple(parameter.shape), "the parameter's shape")
    if reads and not bool((order.sort(-1).values == torch.arange(n, device=order.device)).all()):
        raise ValueError(f"`order` must hold each of 0, …, {n - 1} once in every row.")


def _strata(labels: Tensor, parameter: Tensor) -> pivotal.Strata:
    """Return the tree of strata; raise unless there is one label for each item."""
    n = parameter.shape[-1]
    _check.instance("strata", labels, Tensor)
    if tuple(labels.shape) != (n,) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"`strata` must be {n} integers, one for each item; got {tuple(labels.shape)}, {labels.dtype}."
        )
    require_values("A design with strata", labels)
    return pivotal.strata(labels.to(parameter.device))


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
        self._check_pairs()
        return systematic.joint(self._asked, self._sizes).to(self.parameter.dtype)

    def variance_of_sum(self, weights: Tensor) -> Tensor:
        """Return Var(Σ c_i x_i), (*batch), in O(n log n)."""
        return systematic.variance_of_sum(self._asked, self._sizes, weights).to(self.parameter.dtype)

    @property
    def mode(self) -> Tensor:
        """Return the likeliest of the n + 1 samples; (*batch, n)."""
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
