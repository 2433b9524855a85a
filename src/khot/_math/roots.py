"""A safeguarded root finder for thresholds, one root per row, all rows at once.

A threshold τ is carried as a **point** `anchor + T·shift`: the anchor is a number of the scores' own dtype (the one
nearest to τ within the range of the scores), the shift is the small rest in units of T, in float64. Then

    z = (x − anchor)/T − shift

has a relative error of a few roundings for every x, T and offset: `x − anchor` is one correctly rounded operation, and
no cancellation can follow, since a score on the shift's side of the anchor is at least twice as far away as τ is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NEAR = 1e-3  # a ρ that rounding may leave where F is steep


class Point(NamedTuple):
    """The threshold `anchor + T·shift`; both (…, 1) float64."""

    anchor: Tensor
    shift: Tensor


class Residual(NamedTuple):
    """What an evaluation at a point says; all (…, 1) float64."""

    ratio: Tensor
    """ρ, a logarithm that is > 0 where the sum is above k, < 0 below, 0 at the root."""
    slope: Tensor
    """−T·∂ρ/∂τ > 0, so that ρ/slope is Newton's step in units of T."""
    excess: Tensor
    """Σ F − k."""
    noise: Tensor
    """What ρ may be off by through rounding."""


def find_root(
    evaluate: Callable[[Point], Residual],
    *,
    start: Point,
    bracket: tuple[Point, Point],
    excess: tuple[Tensor, Tensor],
    bounds: tuple[Tensor, Tensor],
    temperature: Tensor,
    dtype: torch.dtype,
    active: Tensor,
    steps: int,
    early_stop: bool,
    tolerance: float,
    finest: float,
) -> tuple[Point, Tensor]:
    """Newton's method on ρ inside a bracket that only shrinks; the last evaluation is at the returned point.

    A Newton step is taken when it stays in the bracket and is at most half as long as the step before; otherwise the
    bracket is divided, in turn in the middle and where a straight line through Σ F − k would vanish. A row is done when
    ρ **as summed at its own point** is so small that a Newton step, which errs by its square, would end within rounding
    (the caller takes that last step), or when its bracket has no room left; never because a step was short.

    Args:
        evaluate: gives the residual at a point.
        start: the first point, moved into the bracket if it lies outside.
        bracket: two points with the root between them.
        excess: (…, 1) Σ F − k at the bracket's ends, or a bound of it.
        bounds: (…, 1) least and greatest finite score, the range of anchors.
        temperature: (…, 1) float64.
        dtype: the scores' dtype, of which anchors are.
        active: (…, 1) bool, the rows to solve; the others stay at their start.
        steps: how many steps to take at the most.
        early_stop: read on the host whether all rows are done. Without it exactly `steps` steps are taken.
        tolerance: the ρ at which a row is done.
        finest: in units of T, what is so small that a rounding of it tells no points apart.

    Returns:
        The points, and (…, 1) bool, the rows whose bracket has no room left: solved as well as points differ.
    """
    eps = torch.finfo(dtype).eps
    (low, high), (excess_low, excess_high) = bracket, excess
    to_low, to_high = _distance(start, low, temperature), _distance(start, high, temperature)
    inside = Point(start.anchor, start.shift + torch.zeros_like(to_low).clamp(to_low, to_high))
    point = nearest(inside, temperature, dtype, bounds)
    last_step = torch.full_like(start.shift, torch.inf)
    halve = torch.ones_like(active)  # how a row's next division goes
    residual = evaluate(point)
    collapsed, last_ratio = torch.zeros_like(active), torch.full_like(start.shift, torch.nan)
    for _ in range(steps):
        above = residual.ratio > 0  # the root lies above this point
        low, high = _where(above, point, low), _where(above, high, point)
        excess_low = torch.where(above, residual.excess, excess_low)
        excess_high = torch.where(above, excess_high, residual.excess)
        to_low, to_high = _distance(point, low, temperature), _distance(point, high, temperature)

        width = to_high - to_low
        # Two points near the root with the same ρ are as good as one.
        is_same = (residual.ratio == last_ratio) & (residual.ratio.abs() <= NEAR)
        collapsed = (width <= eps * point.shift.abs().clamp(min=finest)) | is_same
        last_ratio = residual.ratio
        done = (residual.ratio.abs() <= tolerance + residual.noise) | collapsed | ~active
        if early_stop and bool(done.all()):
            break

        newton = residual.ratio / residual.slope
        rounding = 8 * eps * newton.abs()  # a step that long may overshoot an end of the bracket by this much
        is_safe = (newton > to_low - rounding) & (newton < to_high + rounding) & (newton.abs() <= last_step / 2)
        newton = newton.clamp(to_low, to_high)
        line = (excess_low / (excess_low - excess_high)).nan_to_num(0.5).clamp(1e-3, 1 - 1e-3)
        share = torch.where(halve, 0.5, line)
        halve = halve ^ ~is_safe
        divided = _divide(low, high, share, temperature, dtype)
        moved = _where(is_safe, Point(point.anchor, point.shift + newton), divided)
        last_step = torch.where(is_safe, newton.abs(), torch.inf)
        point = _where(done, point, nearest(moved, temperature, dtype, bounds))
        residual = evaluate(point)
    return point, collapsed


def nearest(point: Point, temperature: Tensor, dtype: torch.dtype, bounds: tuple[Tensor, Tensor]) -> Point:
    """The same threshold with the anchor nearest to it."""
    threshold = point.anchor + temperature * point.shift
    anchor = threshold.to(dtype).to(torch.float64).clamp(*bounds)
    return Point(anchor, point.shift - (anchor - point.anchor) / temperature)


def _divide(low: Point, high: Point, share: Tensor, temperature: Tensor, dtype: torch.dtype) -> Point:
    """The point at `share` of the way from low to high, exact even when the anchors are neighbours or far apart."""
    rest = 1 - share
    anchor = (rest * low.anchor + share * high.anchor).to(dtype).to(torch.float64)
    here = Point(anchor, torch.zeros_like(anchor))
    shift = rest * _distance(here, low, temperature) + share * _distance(here, high, temperature)
    # Far-apart anchors over a tiny T overflow; then the anchor alone is a point well inside.
    return Point(anchor, torch.where(shift.isfinite(), shift, 0.0))


def _distance(start: Point, end: Point, temperature: Tensor) -> Tensor:
    return (end.anchor - start.anchor) / temperature + (end.shift - start.shift)


def _where(condition: Tensor, a: Point, b: Point) -> Point:
    return Point(torch.where(condition, a.anchor, b.anchor), torch.where(condition, a.shift, b.shift))
