"""Choices within a budget: greedy ones, and the root of a falling function that prices need."""

from collections.abc import Callable

import torch
from torch import Tensor

from .select import order


def falling_root(fn: Callable[[float], float], low: float, high: float, tolerance: float, most: int = 200) -> float:
    """Return a point of [low, high] where a falling function is at most 0 and at least −tolerance, or nearly so.

    fn(low) > 0 ≥ fn(high). False position with the Illinois rule, and a halving where that is slow.

    Returns:
        The best point with fn ≤ 0 that was found; where no float is better, the nearest one.
    """
    above, below = fn(low), fn(high)
    side, best = 0, high
    for turn in range(most):
        if -tolerance <= below <= 0:
            break
        guess = low + (high - low) * above / (above - below) if turn % 4 != 3 else (low + high) / 2
        if not low < guess < high:
            guess = (low + high) / 2
            if not low < guess < high:
                break
        value = fn(guess)
        if value > 0:
            low, above = guess, value
            below = below / 2 if side == 1 else below
            side = 1
        else:
            high = best = guess
            below = value
            above = above / 2 if side == -1 else above
            side = -1
            if value >= -tolerance:
                break
    return best


def greedy(x: Tensor, costs: Tensor, budget: float) -> Tensor:
    """Return the items (n,) bool that are taken by falling x, ties by lowest index, each if it still fits the budget.

    Nothing that is left out would fit. Costs are > 0; sums are float64, so integer costs are counted exactly.
    """
    kept = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    rest, costs = order(x), costs.to(torch.float64)
    while rest.numel():
        rest = rest[costs[rest] <= budget]
        spent = costs[rest].cumsum(0)
        count = int((spent <= budget).sum())
        if count:
            kept[rest[:count]] = True
            budget -= float(spent[count - 1])
        rest = rest[count:]
    return kept


def charged(x: Tensor, charge: Callable[[Tensor], Tensor], budget: float) -> Tensor:
    """Return the items (n,) bool that are taken by falling x, each if the charge of all that are taken is affordable.

    `charge` maps a mask (n,) to its cost. It rises with the mask and with what each item adds to others, and it is
    linear in each entry; so its gradient says what one more item costs, and nothing that is left out would fit.
    """
    rest = order(x)

    def taken(items: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=torch.float64, device=x.device).index_fill(0, items, 1.0)

    low, high = 0, len(rest) + 1  # the longest affordable start of the order has low ≤ length < high
    while high - low > 1:
        middle = (low + high) // 2
        is_affordable = float(charge(taken(rest[:middle]))) <= budget
        low, high = (middle, high) if is_affordable else (low, middle)
    kept, rest = taken(rest[:low]), rest[low:]
    while rest.numel():
        at = kept.clone().requires_grad_()
        with torch.enable_grad():
            cost = charge(at)
            (more,) = torch.autograd.grad(cost, at)
        rest = rest[more[rest] <= budget - float(cost.detach())]
        kept[rest[:1]] = 1.0
        rest = rest[1:]
    return kept > 0


def exchanged(kept: Tensor, x: Tensor, costs: Tensor, left: float, groups: list[slice]) -> Tensor:
    """Return kept (n,) bool after all exchanges within a group that raise Σ x and are paid from what is `left`.

    The exchange that gains most goes first.
    """
    kept = kept.clone()
    while True:
        best: tuple[float, int, int] | None = None
        for part in groups:
            here = torch.arange(part.start, part.stop)
            for old in here[kept[part].cpu()].tolist():
                for new in here[~kept[part].cpu()].tolist():
                    gain = float(x[new] - x[old])
                    if gain > 0 and float(costs[new] - costs[old]) <= left and (best is None or gain > best[0]):
                        best = gain, old, new
        if best is None:
            return kept
        _, old, new = best
        kept[old], kept[new] = False, True
        left -= float(costs[new] - costs[old])
