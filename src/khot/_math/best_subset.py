"""Least squares on at most a budget of columns: `min ‖b − A·c‖²` such that the costs of {j: c_j ≠ 0} fit the budget.

The columns of A have norm 1. Supports are sorted lists of column numbers. Float64. With S = support, A_S = Q·R and
K = (A_SᵀA_S)⁻¹, everything that an exchange would change follows from K, B = AᵀA_S·K, the correlations α of all columns
with the residual and their squares outside the span of A_S: no least squares is solved to try one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

DEPENDENT = 1e-11  # a column of which a smaller share (of its square) lies outside the span of others is not added
GAIN = 1e-9  # smaller relative gains of an exchange are rounding
REMOVALS = 256  # of several columns at once: how many sets are tried, those that cost least first
PARTNERS = 24  # columns that are tried together, those that gain most alone
BLOCK = 4096  # supports that are enumerated at a time


@dataclass(frozen=True)
class Problem:
    """Hold a problem with one target."""

    a: Tensor  # (r, p), columns of norm 1 or 0
    b: Tensor  # (r,)
    costs: Tensor  # (p,), > 0
    budget: float

    def room(self, support: Sequence[int]) -> float:
        """Return what is left of the budget."""
        return self.budget * (1 + 1e-12) - float(self.costs[list(support)].sum())


class Fit(NamedTuple):
    """Least squares on a support."""

    support: list[int]
    coefs: Tensor  # (|S|,)
    loss: float


class _State(NamedTuple):
    """Hold what exchanges of a support are computed from."""

    fit: Fit
    inverse: Tensor  # K, (s, s)
    back: Tensor  # B, (p, s)
    alpha: Tensor  # (p,)
    outside: Tensor  # (p,); 0 in the support
    across: Tensor  # Qᵀ·A, (s, p)


def fit(problem: Problem, support: Sequence[int]) -> Fit:
    """Solve least squares on a support."""
    return _state(problem, support).fit


def _state(problem: Problem, support: Sequence[int]) -> _State:
    a, b, at = problem.a, problem.b, sorted(support)
    q, r = torch.linalg.qr(a[:, at])
    upper = torch.linalg.solve_triangular(r, torch.eye(len(at), dtype=a.dtype), upper=True)
    half = q.mT @ b
    residual = b - q @ half
    across = q.mT @ a
    outside = (a.square().sum(0) - across.square().sum(0)).clamp(min=0)
    outside[at] = 0.0
    found = Fit(at, upper @ half, float(residual.square().sum()))
    return _State(found, upper @ upper.mT, across.mT @ upper.mT, residual @ a, outside, across)


def improve(problem: Problem, support: Sequence[int], most: int) -> Fit:
    """Exchange up to `most` columns at a time, and add what fits, until nothing lowers the loss."""
    equal = bool((problem.costs == problem.costs[0]).all()) if len(problem.costs) else True
    moves = [(0, 1)]
    for size in range(1, most + 1):
        moves += [(size, size)] if equal else [(size, size), (size, size + 1), (size + 1, size)]
    state = _state(problem, support)
    while True:
        for removed, added in moves:
            found = _exchange(problem, state, removed, added)
            if found is None:
                continue
            better = _state(problem, found)
            if better.fit.loss < state.fit.loss * (1 - GAIN):
                state = better
                break
        else:
            return state.fit


def _exchange(problem: Problem, state: _State, removed: int, added: int) -> list[int] | None:
    """Return the support after the best exchange of `removed` columns for `added` others, or None if there is none.

    Exact for one column for one. For more, the removals that cost least and the partners that gain most are tried.
    """
    support, costs = state.fit.support, problem.costs
    if removed > len(support) or added > len(costs) - len(support):
        return None
    sets = _removals(state, removed)  # (r, removed)
    core = state.inverse[sets.unsqueeze(-1), sets.unsqueeze(-2)]  # K_RR, (r, removed, removed)
    back = state.back.mT[sets]  # (r, removed, p)
    tied = torch.linalg.solve(core, back)  # K_RR⁻¹·B_R
    coefs = state.fit.coefs[sets].unsqueeze(-2)  # (r, 1, removed)
    alpha = state.alpha + (coefs @ tied).squeeze(-2)  # (r, p): correlations after the removal
    outside = state.outside + (back * tied).sum(-2)
    paid = (coefs @ torch.linalg.solve(core, coefs.mT)).flatten()  # what the removal costs
    at = torch.tensor(support, dtype=torch.long)
    freed = costs[at[sets]].sum(-1) + problem.room(support)  # (r,)
    open_ = (outside > DEPENDENT) & (costs <= freed.unsqueeze(-1))
    open_[:, at] = False
    gains = torch.where(open_, alpha.square() / outside.clamp(min=DEPENDENT), -1.0)
    if added == 1:
        best, columns = gains.max(-1)
        columns = columns.unsqueeze(-1)
        best = torch.where(best > 0, best, -torch.inf)
    else:
        best, columns = _together(problem, state, gains, alpha, back, tied, freed, added)
    net, row = (best - paid).max(0)
    if not net > GAIN * state.fit.loss:
        return None
    gone = {support[i] for i in sets[row].tolist()}
    return [j for j in support if j not in gone] + columns[row].tolist()


def _removals(state: _State, size: int) -> Tensor:
    """Return sets of places in the support, (r, size); of many, those whose removal costs about least."""
    sets = torch.tensor(list(combinations(range(len(state.fit.support)), size)), dtype=torch.long)
    if size > 1 and len(sets) > REMOVALS:
        single = state.fit.coefs.square() / state.inverse.diagonal()
        sets = sets[single[sets].sum(-1).topk(REMOVALS, largest=False).indices]
    return sets


def _together(
    problem: Problem, state: _State, gains: Tensor, alpha: Tensor, back: Tensor, tied: Tensor, freed: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return the best gain of `size` columns together after each removal, (r,), and the columns, (r, size)."""
    best, near = gains.topk(min(PARTNERS, gains.shape[-1]), -1)  # (r, m)
    sets = torch.tensor(list(combinations(range(near.shape[-1]), size)), dtype=torch.long)  # (c, size)
    own, seen = problem.a.mT[near], state.across.mT[near]  # (r, m, rows), (r, m, s)
    gram = own @ own.mT - seen @ seen.mT
    some = near.unsqueeze(-2).expand(-1, back.shape[-2], -1)
    gram = gram + back.gather(-1, some).mT @ tied.gather(-1, some)  # (r, m, m), outside the span of what is left
    blocks = gram[:, sets.unsqueeze(-1), sets.unsqueeze(-2)]  # (r, c, size, size)
    right = alpha.gather(-1, near)[:, sets].unsqueeze(-1)
    solved, info = torch.linalg.solve_ex(blocks, right)
    total = (right * solved).sum((-1, -2))
    det = torch.linalg.det(blocks) / blocks.diagonal(dim1=-2, dim2=-1).prod(-1)
    fits = (problem.costs[near][:, sets].sum(-1) <= freed.unsqueeze(-1)) & (best[:, sets] > 0).all(-1)
    total = torch.where(fits & (info == 0) & (det > DEPENDENT), total, -torch.inf)
    value, place = total.max(-1)
    return value, near.gather(-1, sets[place])


def forward(problem: Problem, support: Sequence[int] = ()) -> list[int]:
    """Add the column that lowers the loss most while one fits; of a support with dependent columns, drop the last."""
    at = list(support)[: len(problem.a)]
    new = torch.linalg.qr(problem.a[:, at], mode="r").R.diagonal().square() > DEPENDENT
    state = _state(problem, [j for j, is_new in zip(at, new.tolist(), strict=True) if is_new])
    while (found := _exchange(problem, state, 0, 1)) is not None:
        state = _state(problem, found)
    return state.fit.support


def backward(problem: Problem, support: Sequence[int] | None = None) -> list[int] | None:
    """Start from a support, or all columns, and drop the one whose loss a unit of cost is least, until the rest fits.

    None if the columns are dependent.
    """
    left = list(range(problem.a.shape[1])) if support is None else sorted(support)
    state = _state(problem, left)
    inverse, coefs = state.inverse, state.fit.coefs
    if left and not bool(inverse.diagonal().amax() * DEPENDENT < 1):
        return None
    while problem.room(left) < 0:
        loss = coefs.square() / inverse.diagonal() / problem.costs[left]
        i = int(loss.argmin())
        keep = [j for j in range(len(left)) if j != i]
        coefs = (coefs - inverse[:, i] * (coefs[i] / inverse[i, i]))[keep]
        inverse = (inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i])[keep][:, keep]
        del left[i]
    return left


def exhaustive(problem: Problem) -> Fit:
    """Find the best support of all, by enumeration.

    Supports grow by columns of rising number. The Gram matrix of [A b], swept by the columns of a support, holds the
    loss and what each further column would gain, so that the last column needs no state of its own.
    """
    p, both = problem.a.shape[1], torch.cat([problem.a, problem.b.unsqueeze(-1)], 1)
    whole = both.mT @ both
    best, winner = float(whole[p, p]), list[int]()
    none = torch.zeros(1, p, dtype=torch.bool)
    stack = [(whole.unsqueeze(0), none, torch.full((1,), -1), torch.full((1,), problem.room(())))]
    columns = torch.arange(p)
    while stack:
        swept, members, last, room = stack.pop()
        outside, alpha = swept.diagonal(dim1=-2, dim2=-1)[:, :p], swept[:, :p, p]
        open_ = (outside > DEPENDENT) & (columns > last.unsqueeze(-1)) & (problem.costs <= room.unsqueeze(-1))
        loss = swept[:, p, p].unsqueeze(-1) - torch.where(open_, alpha.square() / outside.clamp(min=DEPENDENT), 0.0)
        low, flat = loss.flatten().min(0)
        if bool(low < best):
            best, row, column = float(low), int(flat) // p, int(flat) % p
            winner = [*members[row].nonzero().flatten().tolist(), column]
        after = room.unsqueeze(-1) - problem.costs  # a child is kept if a column beyond its own would still fit
        cheapest = problem.costs.flip(0).cummin(0).values.flip(0).roll(-1)
        cheapest[-1:] = torch.inf
        rows, added = (open_ & (cheapest <= after)).nonzero(as_tuple=True)
        for start in range(0, len(rows), BLOCK):
            part, j = rows[start : start + BLOCK], added[start : start + BLOCK]
            parent = swept[part]
            pivot = parent[torch.arange(len(part)), j]  # (block, p + 1)
            scale = pivot.gather(-1, j.unsqueeze(-1))
            child = parent - (pivot / scale).unsqueeze(-1) * pivot.unsqueeze(-2)
            taken = members[part].clone()
            taken[torch.arange(len(part)), j] = True
            stack.append((child, taken, j, after[part, j]))
    return fit(problem, winner)
