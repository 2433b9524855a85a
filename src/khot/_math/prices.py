"""Prices of columns: the dual variables of their capacities, where each row shares k by σ_k.

σ_k itself is passed in: it is a public function of a room above this one.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

SigmoidTopK = Callable[..., Tensor]  # (x, k, *, temperature)
ITERATIONS, HALVINGS = 100, 40
CLOSE, ROUGHLY = 1e-4, 0.05  # how far a load may be from its capacity, in shares of it: at the end, and on the way
COOLING = 4.0  # the factor between temperatures on the way to the one asked for


class Total(Protocol):
    """Bring the numbers of all processes together, if each has some of the rows."""

    def sum(self, t: Tensor) -> Tensor:
        """Return Σ over the processes."""

    def max(self, t: Tensor) -> Tensor:
        """Return the maximum over the processes."""


class Here:
    """All rows are here."""

    def sum(self, t: Tensor) -> Tensor:
        return t

    max = sum


HERE = Here()


def prices(
    sigmoid_topk: SigmoidTopK, x: Tensor, k: int, capacity: float | None, temperature: float, total: Total = HERE
) -> Tensor:
    """Return (n) prices with which the columns of `σ_k((x − prices)/T)` sum to the capacity, or to less at price 0.

    x is (rows, n). With the smallest possible capacity, k·rows/n (None), all columns sum to it; then prices may be
    negative, and have mean 0. With `total`, the rows of all processes count, and all of them get the same prices.
    Prices maximise a concave function, whose gradient is load − capacity. Sharp scores make it nearly piecewise linear,
    so it is solved at high temperatures first. Rows with NaN are left out.
    """
    found = x.new_zeros(x.shape[-1])
    x = x[~x.isnan().any(-1)]
    rows = float(total.sum(torch.tensor(float(len(x)), dtype=torch.float64, device=x.device)))
    least = k * rows / x.shape[-1]
    capacity = least if capacity is None else max(capacity, least)
    finite = torch.where(x.isfinite(), x, torch.nan)
    away = (finite - finite.nanmean(-1, keepdim=True)).abs()
    if total is HERE:
        spread = float(away.nanmean())  # NaN if nothing is finite
    else:
        size, number = total.sum(torch.stack((away.nansum(), (~away.isnan()).sum().to(x.dtype)))).tolist()
        spread = size / number if number else float("nan")
    current = max(temperature, spread)
    while current > temperature:
        found = _at(sigmoid_topk, found, x, k, capacity, capacity == least, current, ROUGHLY, total)
        current = max(temperature, current / COOLING)
    return _at(sigmoid_topk, found, x, k, capacity, capacity == least, temperature, CLOSE, total)


def _at(
    sigmoid_topk: SigmoidTopK,
    found: Tensor,
    x: Tensor,
    k: int,
    capacity: float,
    is_equal: bool,
    temperature: float,
    close: float,
    total: Total,
) -> Tensor:
    """Improve prices by Newton's method at one temperature, with a search along each step."""
    inner = x[x.isfinite()]
    ends = torch.stack((-inner.min(), inner.max())) if len(inner) else x.new_full((2,), -torch.inf)
    below, above = total.max(ends).tolist()
    span = above + below + temperature if above >= -below else temperature

    def loads(prices: Tensor) -> tuple[Tensor, Tensor]:
        probs = sigmoid_topk(x - prices, k, temperature=temperature)
        return probs, total.sum(probs.sum(0)) - capacity

    probs, excess = loads(found)
    for _ in range(ITERATIONS):
        is_free = torch.ones_like(found, dtype=torch.bool) if is_equal else (found > 0) | (excess > 0)
        wrong = torch.where(is_free, excess, 0.0)
        if bool((wrong.abs() <= close * capacity).all()):
            break
        is_least = (found <= 1e-12 * span) & (not is_equal)
        newton = _newton(probs, wrong, temperature, is_free, is_least, total).clamp(-span, span)
        bound = torch.full_like(found, -torch.inf) if is_equal else -found
        whole = min(1.0, float((bound / newton)[newton < 0].min())) if bool((newton < 0).any()) else 1.0
        for step in (newton, whole * newton, wrong * (span / wrong.abs().max())):
            step = torch.maximum(step, bound)
            slope = float(excess @ step)
            if slope > 0:
                break
        low, high, share = 0.0, 1.0, 1.0
        for _ in range(HALVINGS):  # until the slope along the step, which falls, is half of what it was
            probs, excess = loads(found + share * step)
            left = float(excess @ step)
            if -slope / 100 <= left <= slope / 2 or (share == 1 and left > 0):
                break
            low, high = (low, share) if left < 0 else (share, high)
            share = (low + high) / 2
        found = found + share * step
        found = found - (found.mean() if is_equal else found.min())  # a common price changes nothing
    return found


def _newton(
    probs: Tensor, excess: Tensor, temperature: float, is_free: Tensor, is_least: Tensor, total: Total
) -> Tensor:
    """Return the change of the free prices that removes the excess, to first order: `J⁻¹ excess`, (n)."""
    slope = probs * (1 - probs) / temperature  # of π in its margin
    tiny = torch.finfo(slope.dtype).tiny
    jacobian = torch.diag(slope.sum(0)) - (slope / slope.sum(-1, keepdim=True).clamp(min=tiny)).mT @ slope
    jacobian = total.sum(jacobian)
    while True:
        free = is_free.to(slope.dtype)
        part = jacobian * free[:, None] * free
        size = part.diagonal().max() + tiny
        common = size / len(free) if bool(is_free.all()) else 0.0  # singular without
        step: Tensor = torch.linalg.solve(part + common + torch.diag(1 - free + 1e-9 * size), excess * free)
        falls = is_free & is_least & (step < 0)  # prices that are 0 and would fall are not free
        if not bool(falls.any()):
            return step.nan_to_num(0.0)
        is_free = is_free & ~falls
