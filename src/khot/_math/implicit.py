"""The root τ of Σ c·F((x − τ)/T) = k as an implicit function: how it is found, and its derivatives.

Σ c·F(z) = k says that two sums of small numbers agree, with N the costs of the scores above the median of F:

    Σ_{below} c·F(z) + (N − k)⁺  =  Σ_{above} c·(1 − F(z)) + (N − k)⁻

No number near 1 is summed, so saturated rows keep all their digits. Newton's method looks for the zero of
ρ = log(left) − log(right), which is nearly linear in τ even where Σ c·F(z) − k is flat: one step crosses a plateau,
where every y is 0 or 1 to machine precision.

A threshold is kept as a **point** `anchor + T·shift`. The anchor is a number of the scores' own dtype: the one nearest
to τ within the range of the scores. The shift is the small rest in units of T, in float64. Then
`z = (x − anchor)/T − shift` has a relative error of a few roundings for every x, T and offset: `x − anchor` is one
correctly rounded operation, and no cancellation can follow, because a score on the shift's side of the anchor is at
least twice as far away as τ is.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import cdfs
from .cdfs import Cdf, row_sum

FEW = 64  # with fewer rows than this, rows that are done are not dropped
NEAR = 1e-3  # a ρ that rounding may leave where F is steep


# ── rows and points ──────────────────────────────────────────────────────────────────────────────────────────────────
class Point(NamedTuple):
    """Hold the threshold `anchor + T·shift`; both (rows, 1) float64."""

    anchor: Tensor
    shift: Tensor  # +inf where nothing is left to choose, −inf where all are chosen, NaN where no threshold exists


class Rows(NamedTuple):
    """Hold the equations to solve, one for each row."""

    x: Tensor  # (rows, n) scores, −inf where masked
    k: Tensor  # (rows, 1) float64
    temperature: Tensor  # (rows, 1) float64, NaN where it was not positive
    costs: Tensor | None  # (rows, n), or None if each entry costs 1


class Survey(NamedTuple):
    """Hold what is known of the rows at first; all (rows, 1) float64."""

    low: Tensor  # the smallest finite score
    high: Tensor  # the largest finite score
    free: Tensor  # the number (or costs) of finite scores; NaN in a row that holds NaN
    forced: Tensor  # the number (or costs) of scores +inf


class Across(Protocol):
    """Say how sums go over a row of which each process holds a part."""

    votes: Tensor | None  # (rows, 1) bool, since the last sums: rows that are done, of which nothing else is asked

    def sums_at(self, cdf: Cdf, rows: Rows, point: Point) -> tuple[Tensor, ...]:
        """Return what `cdfs.tail_sums` does at a point, for the whole row."""

    def logsumexp(self, *sides: Tensor) -> list[Tensor]:
        """Return log Σ e^t of the whole row for each tensor (rows, n); (rows, 1)."""


class Residual(NamedTuple):
    """Hold what an evaluation at a point says; all (rows, 1), float64 or bool."""

    ratio: Tensor  # ρ, a logarithm: > 0 where the sum is above k, < 0 below, 0 at the root
    excess: Tensor  # Σ c·F − k
    step: Tensor  # Newton's step in units of T
    noise: Tensor  # how much rounding may change ρ
    is_solved: Tensor  # whether the row is certainly solved at this point
    is_near: Tensor  # whether the row counts as solved if no other point lies nearer; `value` corrects the rest


class End(NamedTuple):
    """One end of the bracket that holds the root."""

    point: Point
    excess: Tensor  # Σ c·F − k there, or a bound of it


class Bracket(NamedTuple):
    """Hold two points between which the root is."""

    low: End
    high: End


class State(NamedTuple):
    """Hold the search of each row; tensors are (rows, 1)."""

    point: Point
    residual: Residual
    low: End
    high: End
    last_step: Tensor  # the length of the last Newton step; inf if the last step divided the bracket
    last_ratio: Tensor
    halve: Tensor  # whether the next division of the bracket is in the middle
    is_open: Tensor  # whether the bracket has room for other points


# ── what is summed at a point ────────────────────────────────────────────────────────────────────────────────────────
def margin_at(x: Tensor, point: Point, temperature: Tensor, out: Tensor) -> Tensor:
    anchor, shift, scale = (part.to(x.dtype) for part in (*point, temperature))
    return torch.sub(x, anchor, out=out).div_(scale).sub_(shift)


def tolerance_of(cdf: Cdf, dtype: torch.dtype) -> float:
    """Return the largest ρ from which one Newton step, whose error is ρ² if F has no kink, ends within rounding."""
    eps = torch.finfo(dtype).eps
    return float(0.5 * eps**0.5 if cdf.smooth else 4 * eps)


def evaluate(
    cdf: Cdf, rows: Rows, point: Point, out: Tensor, early_stop: bool, across: Across | None = None
) -> Residual:
    """Compare the two sums at a point; `out` is overwritten. The sums go over the parts of rows that are `across`."""
    info, k = torch.finfo(rows.x.dtype), rows.k
    sums: tuple[Tensor, ...]
    if across is None:
        sums = cdfs.tail_sums(cdfs.tails_at(cdf, margin_at(rows.x, point, rows.temperature, out)), k, rows.costs)
    else:
        sums = across.sums_at(cdf, rows, point)
    excess, lower, upper, lower_slope, upper_slope = sums
    over, under = excess.clamp(min=0), (-excess).clamp(min=0)
    left, right = lower + over, upper + under
    log_left, log_right = left.log(), right.log()
    slope_left, slope_right = lower_slope / left, upper_slope / right
    if cdf.log_tail is not None and rows.costs is None:
        # Where a sum underflows, F is an exponential to all digits, and its logarithms are summed instead.
        deep_left, deep_right = (side < info.tiny / info.eps for side in (left, right))
        if across is not None and across.votes is not None:
            deep_left, deep_right = deep_left & ~across.votes, deep_right & ~across.votes
        if not early_stop or bool((deep_left | deep_right).any()):
            z = margin_at(rows.x, point, rows.temperature, out)
            above = z > cdf.center
            log_tail = cdf.log_tail(-z.abs()).to(over.dtype)
            sides = log_tail.masked_fill(above, -torch.inf), log_tail.masked_fill(~above, -torch.inf)
            if across is None:
                log_lower, log_upper = (side.logsumexp(-1, keepdim=True) for side in sides)
            else:
                log_lower, log_upper = across.logsumexp(*sides)
            log_left = torch.where(deep_left, torch.logaddexp(log_lower, over.log()), log_left)
            log_right = torch.where(deep_right, torch.logaddexp(log_upper, under.log()), log_right)
            slope_left, slope_right = torch.where(deep_left, 1.0, slope_left), torch.where(deep_right, 1.0, slope_right)
    is_level = (left == right) & log_left.isinf()  # every point of this plateau is a root
    ratio = torch.where(is_level, 0.0, log_left - log_right)
    # F(z) carries about |z| roundings of z, and −log of a small sum is about the |z| that counts.
    noise = 4 * info.eps * (-log_left).nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    off = (left - right).abs()
    # Twice the tolerance of the search is still certain.
    is_solved = (ratio.abs() <= 2 * tolerance_of(cdf, rows.x.dtype) + noise) | (off <= 4 * info.eps * k.clamp(min=1))
    is_near = off <= 1e-3 * k + info.eps  # where F is steep, two neighbouring points may differ by so much
    return Residual(ratio, left - right, ratio / (slope_left + slope_right), noise, is_solved, is_near)


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────────
def search(
    cdf: Cdf, rows: Rows, survey: Survey, start: Point, bracket: Bracket, live: Tensor, steps: int, early_stop: bool
) -> tuple[Point, Tensor]:
    """Run Newton's method on ρ inside a bracket that only shrinks.

    A Newton step is taken when it stays in the bracket and is at most half as long as the step before. Otherwise the
    bracket is divided, in turn in the middle and where a straight line through Σ c·F − k would vanish. A row is done
    when ρ **as summed at its own point** is so small that a Newton step, which errs by its square, would end within
    rounding (that last step is taken), or when its bracket has no room left; never because a step was short. With
    `early_stop`, rows that are done are dropped once they are many.

    Returns:
        The points, and (rows, 1) bool, whether they are the thresholds; a row that is not `live` stays at its start.
    """
    eps, tolerance = torch.finfo(rows.x.dtype).eps, tolerance_of(cdf, rows.x.dtype)
    finest = 1.0 if cdf.smooth else torch.finfo(rows.x.dtype).tiny  # points closer than eps times this are the same
    buffer = torch.empty_like(rows.x)
    point = inside(start, bracket, rows, survey)
    state = begun(point, evaluate(cdf, rows, point, buffer, early_stop), bracket)
    found = torch.empty(3, *live.shape, dtype=start.shift.dtype, device=live.device)  # anchor, shift, is solved
    places = None  # of the rows that are left, once some have been dropped
    for turn in range(steps + 1):
        state, done = look(state, rows, eps, tolerance, finest)
        done = done | ~live
        if turn == steps:
            break
        if early_stop:
            left = int((~done).sum())
            if left == 0:
                break
            if len(done) >= FEW and 2 * left <= len(done):
                _keep(found, places, state)
                which = (~done).squeeze(-1).nonzero().squeeze(-1)
                places = which if places is None else places[which]
                rows, survey, state, live, done = (take(t, which) for t in (rows, survey, state, live, done))
                buffer = buffer[: len(which)]
        state = step(state, rows, survey, done, eps)
        state = state._replace(residual=evaluate(cdf, rows, state.point, buffer, early_stop))
    _keep(found, places, state)
    return Point(found[0], found[1]), found[2] > 0


def inside(start: Point, bracket: Bracket, rows: Rows, survey: Survey) -> Point:
    """Return the start, or the end of the bracket that is nearest to it."""
    to_low, to_high = (_distance(start, end.point, rows.temperature) for end in bracket)
    return nearest(Point(start.anchor, start.shift + torch.zeros_like(to_low).clamp(to_low, to_high)), rows, survey)


def begun(point: Point, residual: Residual, bracket: Bracket) -> State:
    never, always = torch.full_like(point.shift, torch.inf), torch.ones_like(residual.is_solved)
    return State(point, residual, *bracket, never, torch.full_like(never, torch.nan), always, always)


def look(state: State, rows: Rows, eps: float, tolerance: float, finest: float) -> tuple[State, Tensor]:
    """Shrink the bracket to the side of the point where the root lies, and tell which rows are done."""
    point, ratio = state.point, state.residual.ratio
    here, is_above = End(point, state.residual.excess), ratio > 0
    low, high = where(is_above, here, state.low), where(is_above, state.high, here)
    width = _distance(low.point, high.point, rows.temperature)
    is_same = (ratio == state.last_ratio) & (ratio.abs() <= NEAR)  # two such points are equally good
    is_open = ~((width <= eps * point.shift.abs().clamp(min=finest)) | is_same)
    done = (ratio.abs() <= tolerance + state.residual.noise) | ~is_open
    return state._replace(low=low, high=high, is_open=is_open, last_ratio=ratio), done


def step(state: State, rows: Rows, survey: Survey, done: Tensor, eps: float) -> State:
    """Move the rows that are not done."""
    point, low, high, newton = state.point, state.low, state.high, state.residual.step
    to_low, to_high = (_distance(point, end.point, rows.temperature) for end in (low, high))
    rounding = 8 * eps * newton.abs()  # a step that long may overshoot an end of the bracket by this much
    is_safe = (newton > to_low - rounding) & (newton < to_high + rounding) & (newton.abs() <= state.last_step / 2)
    newton = newton.clamp(to_low, to_high)
    line = (low.excess / (low.excess - high.excess)).nan_to_num(0.5).clamp(1e-3, 1 - 1e-3)
    divided = _between(low.point, high.point, torch.where(state.halve, 0.5, line), rows)
    moved = where(is_safe, Point(point.anchor, point.shift + newton), divided)
    return state._replace(
        point=where(done, point, nearest(moved, rows, survey)),
        last_step=torch.where(is_safe, newton.abs(), torch.inf),
        halve=state.halve ^ ~is_safe,
    )


def _keep(found: Tensor, places: Tensor | None, state: State) -> None:
    """Write the points of the rows to `found`, with the last Newton step taken."""
    point, is_solved = last(state)
    result = torch.stack((*point, is_solved.to(point.shift.dtype)))
    found[:, slice(None) if places is None else places] = result


def last(state: State) -> tuple[Point, Tensor]:
    """Return the points with the last Newton step taken, and whether they are the thresholds."""
    residual = state.residual
    shift = state.point.shift + residual.step.nan_to_num(0.0, 0.0, 0.0)
    return Point(state.point.anchor, shift), residual.is_solved | (~state.is_open & residual.is_near)


# ── rows of nested tuples, and points between points ─────────────────────────────────────────────────────────────────
def take(tree: Any, which: Tensor) -> Any:
    """Return some of the rows of nested NamedTuples of tensors and None."""
    if isinstance(tree, tuple):
        parts = (take(part, which) for part in tree)
        return tuple(parts) if type(tree) is tuple else type(tree)(*parts)
    return None if tree is None else tree[which]


def where(condition: Tensor, a: Any, b: Any) -> Any:
    """Choose row by row between two tensors, or two nested NamedTuples of tensors."""
    if isinstance(a, Tensor):
        return torch.where(condition, a, b)
    return type(a)(*(where(condition, *parts) for parts in zip(a, b, strict=True)))


def put(tree: Any, which: Tensor, rows: Any) -> Any:
    """Return nested NamedTuples of tensors with some of the rows replaced."""
    if isinstance(tree, Tensor):
        return tree.index_copy(0, which, rows)
    parts = (put(part, which, new) for part, new in zip(tree, rows, strict=True))
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)


def nearest(point: Point, rows: Rows, survey: Survey) -> Point:
    """Return the same threshold with the anchor nearest to it."""
    threshold = point.anchor + rows.temperature * point.shift
    anchor = threshold.to(rows.x.dtype).to(torch.float64).clamp(survey.low, survey.high)
    return Point(anchor, point.shift - (anchor - point.anchor) / rows.temperature)


def _between(low: Point, high: Point, share: Tensor, rows: Rows) -> Point:
    """Return the point at `share` of the way from low to high, exact even when anchors are neighbours or far apart."""
    anchor = ((1 - share) * low.anchor + share * high.anchor).to(rows.x.dtype).to(torch.float64)
    here = Point(anchor, torch.zeros_like(anchor))
    to_low, to_high = (_distance(here, end, rows.temperature) for end in (low, high))
    shift = (1 - share) * to_low + share * to_high
    # Far-apart anchors over a tiny T overflow; then the anchor alone is a point well inside.
    return Point(anchor, torch.where(shift.isfinite(), shift, 0.0))


def _distance(start: Point, end: Point, temperature: Tensor) -> Tensor:
    return (end.anchor - start.anchor) / temperature + (end.shift - start.shift)


# ── derivatives ──────────────────────────────────────────────────────────────────────────────────────────────────────
# With v = F'(z), S = Σ c·v and w = c·v/S, everything follows from one line:
#
#     dz = u − ⟨w, u⟩ + (dk − ⟨y, dc⟩)/S,   u = (dx − z·dT)/T,   and   dy = v·dz.
#
# All functions are differentiable torch operations, so that a backward has a derivative too.
class Linear(NamedTuple):
    """Hold the quantities of the formula at one point."""

    z: Tensor  # (…, n) margins, finite: where one is infinite its v is 0
    slope: Tensor  # (…, n) v
    weight: Tensor  # (…, n) w, which sums to 1; 0 in a saturated row
    total: Tensor  # (…, 1) S
    scale: Tensor  # (…, 1) T, or one number


def at_value(y: Tensor, temperature: Tensor | float, cdf: Cdf) -> Linear:
    """Return the quantities from y = F(z) (…, n) and T (…) alone; F has a `quantile` and a `slope_at`.

    An entry that has rounded to 0 or 1 has no slope.
    """
    assert cdf.slope_at is not None
    assert cdf.quantile is not None
    is_open = (y > 0) & (y < 1)
    inner = torch.where(is_open, y, 0.5)  # a number that harms no derivative
    v = torch.where(is_open, cdf.slope_at(inner), 0.0 * y)  # NaN stays NaN
    total = _sum(v)
    return Linear(cdf.quantile(inner), v, _ratio(v, total), total, _scale(temperature, y))


def at_margin(z: Tensor, temperature: Tensor | float, costs: Tensor | None, cdf: Cdf) -> Linear:
    """Return the quantities for any F from z (…, n): exact where y rounds to 0 or 1, unless F′ underflows."""
    infinite = z.isinf()
    finite = torch.where(infinite, cdf.center, z)
    if cdf.log_density is None:
        v = torch.where(infinite, 0.0, cdf.density(finite))
        weighted = v if costs is None else costs * v
        total = _sum(weighted)
        return Linear(finite, v, _ratio(weighted, total), total, _scale(temperature, z))
    log_v = cdf.log_density(finite)
    v = torch.where(infinite, 0.0, log_v.exp())
    if costs is not None:
        log_v = costs.log() + log_v
    is_saturated = infinite.all(-1, keepdim=True)
    log_v = torch.where(is_saturated, 0.0, torch.where(infinite, -torch.inf, log_v))
    weight = torch.where(is_saturated, 0.0, log_v.softmax(-1))  # sums to 1 however small v is
    total = torch.where(is_saturated, 0.0, log_v.logsumexp(-1, keepdim=True).exp())
    return Linear(finite, v, weight, total, _scale(temperature, z))


def push(dx: Tensor, dk: Tensor, dt: Tensor, at: Linear) -> Tensor:
    """Return dz for tangents dx (…, n), dk and dT (…, 1)."""
    return _centered(dx, dt, at) + _ratio(dk, at.total)


def push_value(dx: Tensor, dk: Tensor, dt: Tensor, at: Linear) -> Tensor:
    """Return dy = v·dz for the same tangents, with w·dk for v·dk/S: finite in rows however sharp."""
    return at.slope * _centered(dx, dt, at) + at.weight * dk


def pull(dz: Tensor, at: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of x (…, n), k and T (…) for that of z: the transpose of `push`."""
    mass = _sum(dz)
    dx = (dz - at.weight * mass) / at.scale
    return dx, _ratio(mass, at.total).squeeze(-1), -_sum(dx * at.z).squeeze(-1)


def pull_value(g: Tensor, at: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of x (…, n), k and T (…) for that of y: the transpose of `push_value`.

    An entry without slope and weight counts as deleted: its g, NaN or infinite, must not reach the others.
    """
    is_deleted = (at.slope == 0) & (at.weight == 0)
    mean = _sum(at.weight * torch.where(is_deleted, 0.0, g))
    dx = at.slope * torch.where(is_deleted, 0.0, g - mean) / at.scale
    return dx, mean.squeeze(-1), -_sum(dx * at.z).squeeze(-1)


def _centered(dx: Tensor, dt: Tensor, at: Linear) -> Tensor:
    u = (dx - at.z * dt) / at.scale
    return u - _sum(at.weight * u)


def _scale(temperature: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(like.dtype).unsqueeze(-1)
    return torch.full((), temperature, dtype=like.dtype, device=like.device)


def _sum(t: Tensor) -> Tensor:
    return row_sum(t).to(t.dtype)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a/b, and 0 for a saturated row, where b is 0 or so small that 1/b overflows."""
    is_saturated = b < torch.finfo(b.dtype).tiny
    return torch.where(is_saturated, 0.0, a / torch.where(is_saturated, 1.0, b))
