"""Designs that use what is known of the items beforehand: balanced samples, and samples that are spread in space."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _check, ops
from .._math import balanced, noise
from .._torch import require_values
from ..relaxations import sigmoid_topk
from ._design import Design

Sampler = Callable[..., Tensor]
AT_ONCE = 1 << 22  # numbers to hold for draws that are made together


class Cube(Design):
    """Draw balanced samples, whose estimates of known totals are right: the cube method of Deville and Tillé.

    `E[x] = π`, `Σx = k`, and `Σ_{drawn} z_i/π_i ≈ Σ z_i` for each of the q variables z of `balance`: what the last few
    items leave over is the only error. So the estimate of any total that is nearly linear in z varies little. Blocks of
    items move in parallel along a binary tree; q = 0 would be `Pivotal`. O(n q²) work in O(q² log n) steps. Reference:
    Deville and Tillé, "Efficient balanced sampling: the cube method" (2004); Chauvet and Tillé (2006).

    Args:
        probs, k, logits, validate_args: as for `Design`; k may be fractional, as for `Pivotal`.
        balance: the variables z, (n, q) or (*batch, n, q), the most important first: near the end they are given up
            one by one, the last first. The size k is balanced before all of them.
        order: "random": an order of the items of its own for each draw; "given": as they come.

    Examples:
        >>> z = torch.arange(1.0, 101.0)[:, None]
        >>> design = Cube(torch.full((100,), 0.2), balance=z)
        >>> x = design.sample((1000,), generator=torch.Generator().manual_seed(0))
        >>> totals = khot.horvitz_thompson(z[:, 0], x, design.mean)  # of 5050
        >>> simple = khot.designs.Pivotal(design.probs).sample((1000,), generator=torch.Generator().manual_seed(0))
        >>> (totals.std() / khot.horvitz_thompson(z[:, 0], simple, design.mean).std()).round(decimals=2)
        tensor(0.2300)
    """

    takes_fractions = True

    def __init__(
        self,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        balance: Tensor,
        logits: Tensor | None = None,
        order: str = "random",
        validate_args: bool | None = None,
    ) -> None:
        _check.one_of("order", order, ("random", "given"))
        self.order = order
        super().__init__(probs, k, logits=logits, validate_args=validate_args)
        self.balance = _known("balance", balance, self.parameter, self._validate_args)

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        z = self.balance.expand(*self.parameter.shape, -1).mT
        return _draw_in_parts(self, ops.cube, z, z.shape[-2] + 2, draws, seed, self.order == "random")


class Budgeted(Cube):
    """Draw items that have costs, within a budget: on average it is spent exactly, and always nearly.

    `E[x] = π = sigmoid_topk(θ, budget, costs=c)`, so `E[Σ c·x] = budget`. Samples are balanced on the costs: the cost
    of none is off by more than the largest cost, and its size is ⌊Σπ⌋ or ⌈Σπ⌉. The mean has a gradient in θ and in
    the costs, for `straight_through_sample`.

    Args:
        logits: θ, (…, n). −inf is never drawn, +inf always.
        budget: 0 ≤ budget ≤ Σc, a number or a tensor that broadcasts with the batch.
        costs: c > 0, which broadcasts to (…, n).
        temperature: T > 0 of `sigmoid_topk`.
        order, validate_args: as for `Cube`.

    Examples:
        >>> costs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        >>> design = Budgeted(torch.zeros(5), 6.0, costs=costs)
        >>> x = design.sample((1000,), generator=torch.Generator().manual_seed(0))
        >>> (design.mean @ costs).round(decimals=4), (x @ costs - 6).abs().max() <= 5
        (tensor(6.), tensor(True))
    """

    def __init__(
        self,
        logits: Tensor,
        budget: float | Tensor,
        *,
        costs: Tensor,
        temperature: float | Tensor = 1.0,
        order: str = "random",
        validate_args: bool | None = None,
    ) -> None:
        _check.scores(logits, -1, "logits")
        _check.not_negative("budget", budget)
        _check.floating("costs", costs)
        require_values("`Budgeted`", logits)
        if ops.is_watched():
            raise NotImplementedError("`Budgeted` reads its size; make it outside of torch.compile and torch.func.")
        if not bool(((costs > 0) & costs.isfinite()).all()):
            raise ValueError("`costs` must be finite and > 0; got 0, a negative, NaN or inf.")
        probs = sigmoid_topk(logits, budget, costs=costs, temperature=temperature)
        if bool(probs.isnan().any()):
            most = float(costs.expand(probs.shape).sum(-1).min())
            got = f"got {budget}" if not isinstance(budget, Tensor) else f"got {float(budget.max()):g}"
            raise ValueError(f"`budget` must satisfy 0 ≤ budget ≤ {most:g} (all costs), and `logits` no NaN; {got}.")
        self.costs = costs.detach()
        spent = (self.costs * probs.detach())[..., None]
        size = probs.detach().sum(-1, dtype=torch.float64)
        super().__init__(probs, size, balance=spent, order=order, validate_args=validate_args)


class LocalPivotal(Design):
    """Draw samples that are spread in space: a random item duels with its nearest neighbour, and so on.

    `E[x] = π` and `Σx = k`. Two close items are hardly ever drawn together, so that totals of what varies smoothly in
    space have a small variance. O(n² d) and n steps, in which all draws go together; for more than some 10⁴ items use
    `Pivotal(order=khot.designs.spatial_order(places))`, which is close to it. Reference: Grafström, Lundström and
    Schelin, "Spatially balanced sampling through the pivotal method" (2012), the second of their methods.

    Args:
        probs, k, logits, validate_args: as for `Design`; k may be fractional, as for `Pivotal`.
        places: where the items are, (n, d) or (*batch, n, d). Distances are Euclidean: scale the coordinates first.

    Examples:
        >>> line = torch.arange(16.0)[:, None]
        >>> x = LocalPivotal(torch.full((16,), 0.25), places=line).sample(generator=torch.Generator().manual_seed(0))
        >>> x.nonzero()[:, 0]
        tensor([ 1,  5, 10, 13])
    """

    takes_fractions = True

    def __init__(
        self,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        places: Tensor,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(probs, k, logits=logits, validate_args=validate_args)
        self.places = _known("places", places, self.parameter, self._validate_args)

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        at = self.places.expand(*self.parameter.shape, -1)
        return _draw_in_parts(self, ops.local_pivotal, at, at.shape[-1] + 4, draws, seed)


def spatial_order(places: Tensor) -> Tensor:
    """Return an order of points in which neighbours are close, for `Pivotal(order=…)`: the leaves of a k-d tree.

    The points are halved at the median of the widest side, and each half again. A pivotal sample along this tree is
    spread in space, takes O(n), and has `joint_probs` and `log_prob`.

    Args:
        places: (…, n, d).

    Returns:
        Indices, (…, n).

    Examples:
        >>> spatial_order(torch.tensor([[0.0], [9.0], [1.0], [8.0]]))
        tensor([0, 2, 3, 1])
    """
    _check.vectors("places", places)
    require_values("`spatial_order`", places)
    if not bool(places.isfinite().all()):
        raise ValueError("`places` must be finite; got NaN or inf.")
    return balanced.tree_order(places.detach())


def _known(name: str, value: Any, parameter: Tensor, reads: bool) -> Tensor:
    """Return what is known of the items, (…, n, q); raise unless it fits the parameter, and is finite."""
    _check.instance(name, value, Tensor)
    n = parameter.shape[-1]
    if value.is_complex() or value.ndim < 2 or value.shape[-2] != n or value.shape[-1] == 0:
        raise ValueError(f"`{name}` must be real, of shape (…, {n}, q) with q ≥ 1; got {tuple(value.shape)}.")
    _check.broadcasts(name, value, (*parameter.shape, value.shape[-1]), "the batch")
    _check.same_device(name, value, parameter, "probs")
    if reads and not bool(value.isfinite().all()):
        raise ValueError(f"`{name}` must be finite; got NaN or inf.")
    known: Tensor = value.detach()
    return known


def _draw_in_parts(design: Any, op: Sampler, known: Tensor, width: int, draws: int, seed: Tensor, *more: Any) -> Tensor:
    """Call a sampler for so many draws at once that memory is bounded; each part has a seed of its own."""
    shape = design.parameter.shape
    p, is_integer = design._drawn.reshape(-1, shape[-1]), (design._sizes == design._sizes.round()).reshape(-1)
    known = known.reshape(-1, *known.shape[-2:])
    most = max(AT_ONCE // (p.numel() * width), 1)
    seeds = [noise.stream_key(seed, part) for part in range(-(-draws // most))]
    counts = [min(most, draws - part * most) for part in range(len(seeds))]
    parts: list[Tensor] = [
        op(p, known, is_integer, one, *more, count) for one, count in zip(seeds, counts, strict=True)
    ]
    return torch.cat(parts)
