"""Prices of experts: the dual variables of their capacities."""

from __future__ import annotations

import torch
from torch import Tensor

from ...relaxations._threshold import sigmoid_topk, threshold

ITERATIONS = 100
CLOSE, ROUGHLY = 1e-4, 0.05
"""How far a load may be from its capacity, in shares of it: at the end, and on the way."""
COOLING = 4.0
ENOUGH = 0.5
"""Newton's step is taken if it divides the excess by two at least."""


def prices(x: Tensor, k: int, capacity: float, temperature: float) -> Tensor:
    """(n): such that the columns of `σ_k((x − prices)/T)`, x of (tokens, n), sum to the capacity, or less at price 0.

    With the least capacity there is, all columns sum to it; then prices may be negative, and have mean 0. The problem
    is convex. Sharp scores make it flat nearly everywhere, so it is solved at high temperatures first.
    """
    found = x.new_zeros(x.shape[-1])
    if not x.numel():
        return found
    spread = float((x - x.mean(-1, keepdim=True)).abs().mean())
    current = max(temperature, spread) if spread < float("inf") else temperature
    while current > temperature:
        found = _at(found, x, k, capacity, current, ROUGHLY)
        current = max(temperature, current / COOLING)
    return _at(found, x, k, capacity, temperature, CLOSE)


def _at(start: Tensor, x: Tensor, k: int, capacity: float, temperature: float, close: float) -> Tensor:
    """Newton's method at one temperature; where a step does not pay, the exact price for the thresholds there are."""
    is_equal = capacity <= k * len(x) / x.shape[-1]

    def loads(prices: Tensor) -> tuple[Tensor, Tensor]:
        probs = sigmoid_topk(x - prices, k, temperature=temperature)
        excess = probs.sum(0) - capacity
        return probs, excess if is_equal else torch.where(prices > 0, excess, excess.clamp(min=0))

    def allowed(prices: Tensor) -> Tensor:
        return prices - prices.mean() if is_equal else prices.clamp(min=0)

    found = start
    probs, excess = loads(found)
    for _ in range(ITERATIONS):
        if bool((excess.abs() <= close * capacity).all()):
            break
        step = _newton(probs, excess, temperature, (found > 0) | (excess > 0) | is_equal)
        tried = allowed(found + step)
        at_tried = loads(tried)
        if bool(at_tried[1].abs().sum() <= ENOUGH * excess.abs().sum()):
            found, (probs, excess) = tried, at_tried
            continue
        tokens = threshold(x - found, k, temperature=temperature)
        found = allowed(threshold(x - tokens[:, None], capacity, dim=0, temperature=temperature))
        probs, excess = loads(found)
    return found


def _newton(probs: Tensor, excess: Tensor, temperature: float, is_free: Tensor) -> Tensor:
    """The change of the free prices that takes the excess away, to first order: `J⁻¹ excess`, (n)."""
    slope = probs * (1 - probs) / temperature  # of π in its margin
    each = slope.sum(-1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)
    jacobian = torch.diag(slope.sum(0)) - (slope / each).mT @ slope  # a common price changes nothing: singular
    free = is_free.to(slope.dtype)
    jacobian = jacobian * free[:, None] * free
    ridge = 1e-9 * jacobian.diagonal().max() + torch.finfo(slope.dtype).tiny
    step: Tensor = torch.linalg.solve(jacobian + torch.diag(1 - free + ridge), excess * free)
    return step
