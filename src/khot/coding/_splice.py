"""Best-subset least squares: at most k columns, exactly."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _check
from .._math import best_subset
from .._math.best_subset import Fit, Problem
from .._torch import require_values, without_autocast
from ..relaxations import sigmoid_topk

ENUMERATED = 30_000_000  # supports that `exact=True` will look at; minutes
QUICK = 20_000  # supports that are enumerated rather than searched
BACKWARD = 300  # columns up to which backward elimination is a start
RELAXED = 500  # columns that take part in the relaxation, those with the highest correlation
ACTIVE = 100  # of them, those that a step of it solves for, with the largest weights
ROUNDING = 1e-24  # of ‖b‖²: smaller losses are 0, and do not differ
STEPS, HOT, COLD, RIDGE = 25, 0.3, 0.003, 0.003  # of the relaxation; temperatures are in units of ‖b‖


class Splice(NamedTuple):
    """Least squares on the chosen columns; with several targets, a column for each."""

    coef: Tensor
    """(p,) or (p, targets); 0 where not chosen."""
    support: Tensor
    """Which columns are chosen, boolean, like `coef`."""
    loss: Tensor
    """`Σ w(b − A·c)² + ridge·Σ c²`, () or (targets,)."""


class SplicePath(NamedTuple):
    """Hold the best subsets of 0, 1, …, K columns; the first dim counts the columns."""

    coef: Tensor
    """(K + 1, p) or (K + 1, p, targets)."""
    support: Tensor
    loss: Tensor
    """(K + 1,) or (K + 1, targets); never rises."""
    rows: float
    """The number of equations, which criteria need; the sum of the weights, if there are any."""

    def choose(self, criterion: "Criterion") -> Tensor:
        """Return the number of columns with the lowest criterion, () or (targets,)."""
        k = torch.arange(len(self.loss), dtype=torch.float64).view(-1, *[1] * (self.loss.ndim - 1))
        loss = self.loss.maximum(ROUNDING * self.loss[0])
        return criterion(loss, k, self.rows, self.coef.shape[1]).argmin(0)

    def at(self, k: Tensor | int) -> Splice:
        """Return the subset of k columns, an int, or (targets,) of them."""
        if self.loss.ndim == 1:
            return Splice(self.coef[k], self.support[k], self.loss[k])
        each = torch.as_tensor(k).expand(self.loss.shape[1])
        targets = torch.arange(len(each))
        return Splice(self.coef[each, :, targets].mT, self.support[each, :, targets].mT, self.loss[each, targets])


Criterion = Callable[[Tensor, Tensor, float, int], Tensor]
"""(loss, number of columns, equations, columns in all) → what to minimise."""


def aicc(loss: Tensor, k: Tensor, rows: float, columns: int) -> Tensor:
    """Return Akaike's criterion, corrected for few equations: `m·log(loss/m) + 2k + 2k(k + 1)/(m − k − 1)`."""
    loss, k = _numbers(loss, k)
    left = (rows - k - 1).clamp(min=0)
    return (
        rows * (loss / rows).clamp(min=1e-300).log() + 2 * k + torch.where(left > 0, 2 * k * (k + 1) / left, torch.inf)
    )


def bic(loss: Tensor, k: Tensor, rows: float, columns: int) -> Tensor:
    """Return the Bayesian criterion: `m·log(loss/m) + k·log m`."""
    loss, k = _numbers(loss, k)
    return rows * (loss / rows).clamp(min=1e-300).log() + k * math.log(rows)


def ebic(loss: Tensor, k: Tensor, rows: float, columns: int) -> Tensor:
    """Return the extended Bayesian criterion, `bic + 2·log C(p, k)`: for many more columns than are chosen."""
    loss, k = _numbers(loss, k)
    p = torch.tensor(float(columns), dtype=torch.float64)
    choices = torch.lgamma(p + 1) - torch.lgamma(k + 1) - torch.lgamma(p - k + 1)
    return bic(loss, k, rows, columns) + 2 * choices


def gcv(loss: Tensor, k: Tensor, rows: float, columns: int) -> Tensor:
    """Return generalised cross-validation: `m·loss/(m − k)²`."""
    loss, k = _numbers(loss, k)
    left = (rows - k).clamp(min=0)
    return torch.where(left > 0, rows * loss / left.square(), torch.inf)


def _numbers(loss: float | Tensor, k: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of columns as tensors; raise unless both are numbers or tensors of them."""
    for name, value in (("loss", loss), ("k", k)):
        _check.not_negative(name, value)
    loss, k = (t if isinstance(t, Tensor) else torch.tensor(float(t), dtype=torch.float64) for t in (loss, k))
    return loss, k


@without_autocast
def splice(
    a: Tensor,
    b: Tensor,
    k: float | Tensor | Sequence[float],
    *,
    costs: Tensor | None = None,
    ridge: float = 0.0,
    weights: Tensor | None = None,
    exchange: int = 2,
    exact: bool | None = None,
) -> Splice:
    """Solve least squares on the best k columns: `min ‖b − A·c‖²` such that at most k of c differ from 0.

    Starts are the annealed σ_k relaxation, forward selection and, for few columns, backward elimination. From each,
    columns are exchanged until no exchange of up to `exchange` of them lowers the loss. That is the optimum nearly
    always, but no proof of it: enumeration is (`exact`).

    Args:
        a: A, (m, p).
        b: (m,), or (m, targets): each target has a support of its own.
        k: the most columns; a number, or one for each target. With `costs`, the budget.
        costs: what each column costs, (p,), > 0; if omitted, 1.
        ridge: adds `ridge·‖c‖²` to the loss.
        weights: of the equations, (m,), ≥ 0.
        exchange: how many columns are exchanged at once; 1 is faster, 3 is slow.
        exact: True enumerates all supports, for p up to about 25, and so proves the optimum; False never does; if
            omitted, it is done where it is quicker than the search.

    Returns:
        A `Splice` (coef, support, loss), float64. Fewer than k columns are chosen only if no further one is independent
        of those chosen, or affordable.

    Examples:
        >>> a = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.1]])
        >>> splice(a, torch.tensor([1.0, 1.0, 0.0]), 2).support
        tensor([ True,  True, False])

    Reference: Zhu et al., "A polynomial algorithm for best-subset selection problem" (2020), whose splicing exchanges
    the columns that rank lowest and highest; Moka et al., "COMBSS" (2024), for the relaxation.
    """
    _check.at_least("exchange", exchange, 0)
    reduced = _Reduced(a, b, costs, ridge, weights)
    budgets = reduced.budgets(k)
    count = reduced.supports(max(budgets, default=0.0))
    if exact is not None:
        _check.instance("exact", exact, bool)
    if exact and count > ENUMERATED:
        raise ValueError(
            f"`exact` enumerates at most {ENUMERATED:,} supports; {reduced.p} columns and k = {max(budgets):g} have "
            f"{count:,}. Use exact=False, or fewer columns."
        )
    exact = count <= QUICK if exact is None else exact
    problems = [reduced.problem(target, budget) for target, budget in enumerate(budgets)]
    if exact:
        return reduced.restore([best_subset.exhaustive(q) for q in problems])
    return reduced.restore([_search(q, exchange, [best_subset.forward(q), _backward(q)]) for q in problems])


@without_autocast
def splice_path(
    a: Tensor,
    b: Tensor,
    k: int,
    *,
    ridge: float = 0.0,
    weights: Tensor | None = None,
    exchange: int = 2,
) -> SplicePath:
    """Solve `splice` for 0, 1, …, k columns, each with warm starts from its neighbours.

    Args:
        a, b, ridge, weights, exchange: as for `splice`.
        k: the largest number of columns.

    Returns:
        A `SplicePath`; `path.at(path.choose(khot.coding.bic))` is the subset of the size with the lowest BIC.

    Examples:
        >>> a = torch.randn(100, 10, generator=torch.Generator().manual_seed(0))
        >>> path = splice_path(a, a[:, 3] - a[:, 7] + 0.1 * a[:, :3].sum(-1) * a[:, 9], 5)
        >>> path.choose(ebic), path.support[2].nonzero().flatten()
        (tensor(2), tensor([3, 7]))
    """
    _check.at_least("exchange", exchange, 0)
    reduced = _Reduced(a, b, None, ridge, weights)
    _check.integer_at_most("k", k, a.shape[1], "columns of `a`")
    paths = [_path(partial(reduced.problem, t), k, exchange) for t in range(reduced.b.shape[1])]
    found = [reduced.restore([fits[size] for fits in paths]) for size in range(k + 1)]
    coef, support, loss = (torch.stack(values) for values in zip(*found, strict=True))
    return SplicePath(coef, support, loss, len(a) if weights is None else float(weights.sum()))


def _path(problem: Callable[[int], Problem], k: int, exchange: int) -> list[Fit]:
    """Return the best fits of 0 to k columns found upwards, and then downwards where that is better."""
    left, added = [_backward(problem(k))], list[int]()
    for size in range(k - 1, 0, -1):
        left.append(_backward(problem(size), left[-1]))
    fits = [best_subset.fit(problem(0), [])]
    for size in range(1, k + 1):
        q = problem(size)
        added = best_subset.forward(q, added)
        found = _search(q, exchange, [added, left[k - size], best_subset.forward(q, fits[-1].support)])
        fits.append(min(found, fits[-1], key=lambda fit: fit.loss))
    for size in range(k - 1, 0, -1):
        q, larger = problem(size), fits[size + 1].support
        start = best_subset.backward(q, larger) or larger
        fits[size] = min(fits[size], best_subset.improve(q, start, min(exchange, 1)), key=lambda fit: fit.loss)
    return fits


def _backward(problem: Problem, support: Sequence[int] | None = None) -> list[int] | None:
    """Return what backward elimination leaves; None if there are too many columns for it, or they are dependent."""
    if support is None and problem.a.shape[1] > min(BACKWARD, problem.a.shape[0]):
        return None
    return best_subset.backward(problem, support)


def _search(problem: Problem, exchange: int, starts: Sequence[Sequence[int] | None]) -> Fit:
    """Return the best of what exchanges lead to from several starts and from the relaxation."""
    found = dict[tuple[int, ...], Fit]()
    candidates = [*starts, best_subset.forward(problem, _relaxed(problem))]
    for start in {tuple(sorted(s)) for s in candidates if s is not None}:
        found[start] = best_subset.improve(problem, start, exchange)
    return min(found.values(), key=lambda fit: (fit.loss, fit.support))


def _relaxed(problem: Problem) -> list[int]:
    """Return the columns with the largest weights of the relaxation, as many as fit.

    In turn, while T falls: weights w = σ_k(|c + Aᵀ(b − A·c)|/(‖b‖·T)), and c = argmin ‖b − A·c‖² + ridge·Σ c²/w.
    """
    a, b, size = problem.a, problem.b, float(torch.linalg.vector_norm(problem.b)) or 1.0
    near = (b @ a).abs().topk(min(RELAXED, a.shape[1])).indices.sort().values
    a, costs = a[:, near], problem.costs[near]
    price = None if bool((costs == 1).all()) else costs
    budget = min(problem.budget, float(costs.sum()))
    scores, gram, right = (b @ a).abs(), a.mT @ a, b @ a
    for step in range(STEPS):
        heat = HOT * (COLD / HOT) ** (step / (STEPS - 1))
        weights = sigmoid_topk(scores / size, budget, temperature=heat, costs=price)
        active = weights.topk(min(ACTIVE, len(near))).indices
        half = weights[active].sqrt()
        system = half.unsqueeze(-1) * gram[active][:, active] * half + RIDGE * torch.eye(len(half), dtype=a.dtype)
        coefs = half * torch.linalg.solve(system, half * right[active])
        scores = (right - gram[:, active] @ coefs).index_add(0, active, coefs).abs()
    chosen: list[int] = []
    for j in near[weights.argsort(descending=True)].tolist():
        if problem.room([*chosen, j]) < 0:
            break
        chosen.append(j)
    return chosen


class _Reduced:
    """The data of `splice`: checked, weighted, rotated to few rows, with columns of norm 1."""

    def __init__(self, a: Any, b: Any, costs: Any, ridge: float, weights: Any) -> None:
        require_values("A search for a subset", a)
        _check.vectors("a", a)
        if a.ndim != 2:
            raise ValueError(f"`a` must be a matrix (m, p); got the shape {tuple(a.shape)}.")
        if not isinstance(b, Tensor) or b.ndim not in (1, 2) or len(b) != len(a):
            got = tuple(b.shape) if isinstance(b, Tensor) else type(b).__name__
            raise ValueError(f"`b` must be a tensor ({len(a)},) or ({len(a)}, targets); got {got}.")
        _check.not_negative("ridge", ridge)
        self.squeeze, self.p = b.ndim == 1, a.shape[1]
        a, b = a.detach().double(), b.detach().double().reshape(len(b), -1)
        for name, value in (("a", a), ("b", b)):
            if not bool(value.isfinite().all()):
                raise ValueError(f"`{name}` must be finite; got NaN or infinite entries.")
        if weights is not None:
            if not isinstance(weights, Tensor) or weights.shape != a.shape[:1] or not bool((weights >= 0).all()):
                raise ValueError(f"`weights` must be a tensor ({len(a)},) of numbers ≥ 0.")
            half = weights.double().sqrt().unsqueeze(-1)
            a, b = half * a, half * b
        if ridge:
            a = torch.cat([a, ridge**0.5 * torch.eye(self.p, dtype=a.dtype)])
            b = torch.cat([b, b.new_zeros(self.p, b.shape[1])])
        self.scale = torch.linalg.vector_norm(a, dim=0)
        self.scale = torch.where(self.scale > 0, self.scale, 1.0)
        a = a / self.scale
        if len(a) > self.p + b.shape[1]:
            small = torch.linalg.qr(torch.cat([a, b], 1), mode="r").R
            a, b = small[:, : self.p], small[:, self.p :]
        self.a, self.b = a, b
        self.costs = torch.ones(self.p, dtype=torch.float64)
        if costs is not None:
            if not isinstance(costs, Tensor) or costs.shape != (self.p,) or not bool((costs > 0).all()):
                raise ValueError(f"`costs` must be a tensor ({self.p},) of numbers > 0.")
            self.costs = costs.detach().double()
        self.is_count = costs is None

    def budgets(self, k: Any) -> list[float]:
        """Return the budget of each target."""
        targets = self.b.shape[1]
        given = k.tolist() if isinstance(k, (Tensor, np.ndarray)) else k
        each = list(given) if isinstance(given, (list, tuple)) else [given] * targets
        if len(each) != targets:
            raise ValueError(f"`k` must be one number, or {targets}, one for each target; got {len(each)}.")
        for value in each:
            if self.is_count:
                _check.integer_at_most("k", value, self.p, "columns of `a`")
            else:
                _check.not_negative("k", value)
        return [float(value) for value in each]

    def supports(self, budget: float) -> int:
        """Return how many supports an enumeration visits."""
        most = int(budget / float(self.costs.min())) if budget else 0
        return sum(math.comb(self.p, size) for size in range(min(most, self.p + 1)))

    def problem(self, target: int, budget: float) -> Problem:
        """Return the problem of one target."""
        return Problem(self.a, self.b[:, target], self.costs, budget)

    def restore(self, fits: Sequence[Fit]) -> Splice:
        """Return the result in the user's units."""
        coef = torch.zeros(self.p, len(fits), dtype=torch.float64)
        for target, fit in enumerate(fits):
            coef[fit.support, target] = fit.coefs / self.scale[fit.support]
        support = torch.zeros_like(coef, dtype=torch.bool)
        for target, fit in enumerate(fits):
            support[fit.support, target] = True
        loss = torch.tensor([fit.loss for fit in fits], dtype=torch.float64)
        if self.squeeze:
            return Splice(coef[:, 0], support[:, 0], loss[0])
        return Splice(coef, support, loss)
