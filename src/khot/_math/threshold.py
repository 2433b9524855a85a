"""The threshold τ of every row: the root of Σ c·F((x − τ)/T) = k, for any cdf F and costs c (1 where there are none).

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

from . import cdfs, kth
from .cdfs import SIGMOID, Cdf, row_sum

SAMPLE = 8192  # a row four times as long is first solved on about this many of its scores
MAX_STEPS = 1000  # with early stopping; the robustness grid needs about 30
FIXED_STEPS = 12  # without early stopping, for the tails of σ_k, Laplace and the normal: twice what the grid needs
FIXED_STEPS_OF_OTHERS = 40  # for heavy tails and kinks. A row that needs more becomes NaN
WIDE = 1000.0  # if a row spans more than this many T, its search begins at its k-th score
LONG_STEPS = 8  # from the threshold of a sample; a row that needs more begins again at its k-th score
QUICK_STEPS = 4  # of `_quickly`
FEW = 64  # with fewer rows than this, rows that are done are not dropped
NEAR = 1e-3  # a ρ that rounding may leave where F is steep


def topk(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, cdf: Cdf, *, early_stop: bool) -> Tensor:
    """Return y = F((x − τ)/T) along the last dim.

    Args:
        x: (…, n) float32 or float64.
        k, temperature: (…) float64; T within the normal range of x's dtype, or NaN.
        mask: (…, n) bool or None.
        cdf: F.
        early_stop: stop when every row is solved, which reads from the device; else take a fixed number of steps.
    """
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    if early_stop and mask is None and cdf is SIGMOID:
        y = _quickly(x, k.unsqueeze(-1), temperature.unsqueeze(-1))
        if y is not None:
            return y
    return value(cdf, margin(x, k, temperature, mask, None, cdf, early_stop=early_stop), k, None)


def margin(
    x: Tensor,
    k: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    costs: Tensor | None,
    cdf: Cdf,
    *,
    early_stop: bool,
    steps: int | None = None,
) -> Tensor:
    """Return z = (x − τ)/T along the last dim, so that y = F(z); ±inf where y is exactly 1 or 0.

    Args:
        x, k, temperature, mask, cdf, early_stop: as for `topk`.
        costs: (…, n) or None.
        steps: if given, take at most so many steps and return where they end, solved or not.
    """
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    n = x.shape[-1]
    scores = x.view(-1, n) if mask is None else x.view(-1, n).masked_fill(~mask.reshape(-1, n), -torch.inf)
    costs = None if costs is None else costs.contiguous().view(-1, n).to(x.dtype)
    rows = Rows(scores, k.reshape(-1, 1), temperature.reshape(-1, 1), costs)
    scores, point = solve(cdf, rows, early_stop=early_stop, steps=steps)
    return margins_at(scores, point, rows.temperature).view(x.shape)


def margins_at(scores: Tensor, point: "Point", temperature: Tensor) -> Tensor:
    """Return z (rows, n) at the threshold, which may be infinite."""
    z = _margin_at(scores, point, temperature, torch.empty_like(scores))
    shift = point.shift.to(z.dtype)
    z = torch.where(shift.isinf(), -shift, z)  # (x − anchor)/T may have overflowed to the other side
    # Infinite scores go where they belong even if the threshold is infinite too.
    return torch.where(scores.isinf() & ~shift.isnan(), scores, z)


def value(cdf: Cdf, z: Tensor, k: Tensor, costs: Tensor | None) -> Tensor:
    """Return y = F(z) (…, n), corrected in proportion to F′ such that Σ c·y = k.

    In float32, where F is steep on a logarithmic scale, one rounding of z changes y by many roundings.
    """
    tails = cdfs.tails_at(cdf, z)
    return corrected(tails, cdfs.tail_sums(tails, k.unsqueeze(-1), costs))


def corrected(tails: cdfs.Tails, sums: tuple[Tensor, ...]) -> Tensor:
    """Return y (…, n) from both sides of F and their sums over the whole row."""
    return _moved(tails, correction(sums))


def _moved(tails: cdfs.Tails, step: Tensor) -> Tensor:
    """Return F(z) + step·F′(z), within [0, 1]."""
    shift = tails.density.mul(step.to(tails.tail.dtype))
    return (tails.above - tails.tail).abs().add_(shift).clamp(0, 1)


def correction(sums: tuple[Tensor, ...]) -> Tensor:
    """Return the step in z, (…, 1), that makes up for what rounding took from Σ c·y = k."""
    excess, lower, upper, lower_slope, upper_slope = sums
    total = lower_slope + upper_slope
    return torch.where(total > 0, (upper - lower - excess) / total, 0.0)


def sums_at(cdf: Cdf, rows: "Rows", point: "Point") -> Tensor:
    """Return the sums of `cdfs.tail_sums` at a point, with N instead of N − k; (rows, 5)."""
    z = _margin_at(rows.x, point, rows.temperature, torch.empty_like(rows.x))
    return torch.cat(cdfs.tail_sums(cdfs.tails_at(cdf, z), torch.zeros_like(rows.k), rows.costs), -1)


def value_at(cdf: Cdf, rows: "Rows", point: "Point", step: Tensor) -> Tensor:
    """Return y = F(z) + step·F′(z) within [0, 1] at a threshold, which may be infinite; (rows, n)."""
    return _moved(cdfs.tails_at(cdf, margins_at(rows.x, point, rows.temperature)), step)


def smooth_value(cdf: Cdf, z: Tensor, k: Tensor, costs: Tensor | None) -> Tensor:
    """Return the same, differentiable in z; the correction counts as a constant."""
    y = cdfs.value(cdf, z)
    exact = value(cdf, z.detach(), k.detach(), None if costs is None else costs.detach())
    return y + (exact - y.detach())


# ── rows, points and what is summed at a point ───────────────────────────────────────────────────────────────────────
class Point(NamedTuple):
    """The threshold `anchor + T·shift`; both (rows, 1) float64."""

    anchor: Tensor
    shift: Tensor  # +inf where nothing is left to choose, −inf where all are chosen, NaN where no threshold exists


class Rows(NamedTuple):
    """The equations to solve, one for each row."""

    x: Tensor  # (rows, n) scores, −inf where masked
    k: Tensor  # (rows, 1) float64
    temperature: Tensor  # (rows, 1) float64, NaN where it was not positive
    costs: Tensor | None  # (rows, n), or None if each entry costs 1


class Survey(NamedTuple):
    """What is known of the rows at first; all (rows, 1) float64."""

    low: Tensor  # the smallest finite score
    high: Tensor  # the largest finite score
    free: Tensor  # the number (or costs) of finite scores; NaN in a row that holds NaN
    forced: Tensor  # the number (or costs) of scores +inf


class Across(Protocol):
    """How sums go over a row of which each process holds a part."""

    votes: Tensor | None  # (rows, 1) bool, since the last sums: rows that are done, of which nothing else is asked

    def sums_at(self, cdf: Cdf, rows: Rows, point: Point) -> tuple[Tensor, ...]:
        """Return what `cdfs.tail_sums` does at a point, for the whole row."""

    def logsumexp(self, *sides: Tensor) -> list[Tensor]:
        """Return log Σ e^t of the whole row for each tensor (rows, n); (rows, 1)."""


class Residual(NamedTuple):
    """What an evaluation at a point says; all (rows, 1), float64 or bool."""

    ratio: Tensor  # ρ, a logarithm: > 0 where the sum is above k, < 0 below, 0 at the root
    excess: Tensor  # Σ c·F − k
    step: Tensor  # Newton's step in units of T
    noise: Tensor  # how much rounding may change ρ
    is_solved: Tensor  # whether the row is certainly solved at this point
    is_near: Tensor  # whether the row counts as solved if no other point lies nearer; `value` corrects the rest


def _margin_at(x: Tensor, point: Point, temperature: Tensor, out: Tensor) -> Tensor:
    anchor, shift, scale = (part.to(x.dtype) for part in (*point, temperature))
    return torch.sub(x, anchor, out=out).div_(scale).sub_(shift)


def _tolerance(cdf: Cdf, dtype: torch.dtype) -> float:
    """Return the largest ρ from which one Newton step, whose error is ρ² if F has no kink, ends within rounding."""
    eps = torch.finfo(dtype).eps
    return float(0.5 * eps**0.5 if cdf.smooth else 4 * eps)


def _evaluate(
    cdf: Cdf, rows: Rows, point: Point, out: Tensor, early_stop: bool, across: "Across | None" = None
) -> Residual:
    """Compare the two sums at a point; `out` is overwritten. The sums go over the parts of rows that are `across`."""
    info, k = torch.finfo(rows.x.dtype), rows.k
    sums: tuple[Tensor, ...]
    if across is None:
        sums = cdfs.tail_sums(cdfs.tails_at(cdf, _margin_at(rows.x, point, rows.temperature, out)), k, rows.costs)
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
            z = _margin_at(rows.x, point, rows.temperature, out)
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
    is_solved = (ratio.abs() <= 2 * _tolerance(cdf, rows.x.dtype) + noise) | (off <= 4 * info.eps * k.clamp(min=1))
    is_near = off <= 1e-3 * k + info.eps  # where F is steep, two neighbouring points may differ by so much
    return Residual(ratio, left - right, ratio / (slope_left + slope_right), noise, is_solved, is_near)


# ── the solver ───────────────────────────────────────────────────────────────────────────────────────────────────────
def solve(cdf: Cdf, rows: Rows, *, early_stop: bool, steps: int | None = None) -> tuple[Tensor, Point]:
    """Find the threshold of every row.

    Returns:
        The scores (rows, n) it was found for, in which a row with more than k scores of +inf has 0 for those and −inf
        for the rest; and the threshold.
    """
    if rows.costs is not None:
        rows = rows._replace(x=torch.where(rows.costs > 0, rows.x, torch.nan))
    rows, survey = _survey(rows, early_stop)
    survey, rest, regular, share, tied, bracket = pose(cdf, rows, survey)
    if early_stop:
        start, is_long = _start(cdf, rows, survey, share, tied), rows.x.shape[-1] >= 4 * SAMPLE
        is_wide = regular & (survey.high - survey.low > WIDE * rows.temperature)
        if not is_long and bool(is_wide.any()):
            which = is_wide.squeeze(-1).nonzero().squeeze(-1)
            start, bracket = _put((start, bracket), which, _near_kth(cdf, *_take((rows, rest, survey.free), which)))
        most = LONG_STEPS if is_long else MAX_STEPS
    else:  # there is no early stop to gain from a start that suits most rows
        start, bracket = _near_kth(cdf, rows, torch.where(regular, rest, share), torch.where(regular, survey.free, 1.0))
        most = FIXED_STEPS if cdf.log_density is not None else FIXED_STEPS_OF_OTHERS
    most = most if steps is None else steps
    point, is_solved = _search(cdf, rows, survey, start, bracket, regular, most, early_stop)
    if early_stop and steps is None and most == LONG_STEPS and bool((regular & ~is_solved).any()):
        which = (regular & ~is_solved).squeeze(-1).nonzero().squeeze(-1)
        some, few, k, free, live = _take((rows, survey, rest, survey.free, regular), which)
        again = _search(cdf, some, few, *_near_kth(cdf, some, k, free), live, MAX_STEPS, early_stop)
        point, is_solved = _put(point, which, again[0]), _put(is_solved, which, again[1])
    return rows.x, concluded(rows, survey, point, regular & (is_solved | (steps is not None)))


def pose(cdf: Cdf, rows: Rows, survey: Survey) -> "tuple[Survey, Tensor, Tensor, Tensor, Tensor, Bracket]":
    """Return the survey, k less the forced, which rows have a finite root, k/n, its quantile, and the first bracket."""
    rest = rows.k - survey.forced  # what the finite scores share
    regular = (rest > 0) & (rest < survey.free) & (rows.temperature > 0)
    low, high = torch.where(regular, survey.low, 0.0), torch.where(regular, survey.high, 0.0)
    survey = survey._replace(low=low, high=high)
    share = torch.where(regular, rest / survey.free, 0.5)
    tied = cdfs.quantile(cdf, share)  # z if all scores were equal
    bracket = Bracket(End(Point(low, -tied), survey.free - rest), End(Point(high, -tied), -rest))
    return survey, rest, regular, share, tied, bracket


def concluded(rows: Rows, survey: Survey, point: "Point", is_found: Tensor) -> "Point":
    """Return the threshold of each row: the point if it was found, else ±inf, or NaN if there is none."""
    rest = rows.k - survey.forced
    limit = torch.where(rest == 0, torch.inf, torch.where(rest == survey.free, -torch.inf, torch.nan))
    limit = torch.where((rows.temperature > 0) & ~survey.free.isnan(), limit, torch.nan)
    return Point(point.anchor, torch.where(is_found, point.shift, limit))


class End(NamedTuple):
    """One end of the bracket that holds the root."""

    point: Point
    excess: Tensor  # Σ c·F − k there, or a bound of it


class Bracket(NamedTuple):
    """What holds the root."""

    low: End
    high: End


class State(NamedTuple):
    """The search of each row; tensors are (rows, 1)."""

    point: Point
    residual: Residual
    low: End
    high: End
    last_step: Tensor  # the length of the last Newton step; inf if the last step divided the bracket
    last_ratio: Tensor
    halve: Tensor  # whether the next division of the bracket is in the middle
    is_open: Tensor  # whether the bracket has room for other points


def _search(
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
    eps, tolerance = torch.finfo(rows.x.dtype).eps, _tolerance(cdf, rows.x.dtype)
    finest = 1.0 if cdf.smooth else torch.finfo(rows.x.dtype).tiny  # points closer than eps times this are the same
    buffer = torch.empty_like(rows.x)
    point = _inside(start, bracket, rows, survey)
    state = _begun(point, _evaluate(cdf, rows, point, buffer, early_stop), bracket)
    found = torch.empty(3, *live.shape, dtype=start.shift.dtype, device=live.device)  # anchor, shift, is solved
    places = None  # of the rows that are left, once some have been dropped
    for turn in range(steps + 1):
        state, done = _look(state, rows, eps, tolerance, finest)
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
                rows, survey, state, live, done = (_take(t, which) for t in (rows, survey, state, live, done))
                buffer = buffer[: len(which)]
        state = _step(state, rows, survey, done, eps)
        state = state._replace(residual=_evaluate(cdf, rows, state.point, buffer, early_stop))
    _keep(found, places, state)
    return Point(found[0], found[1]), found[2] > 0


def _inside(start: Point, bracket: Bracket, rows: Rows, survey: Survey) -> Point:
    """Return the start, or the end of the bracket that is nearest to it."""
    to_low, to_high = (_distance(start, end.point, rows.temperature) for end in bracket)
    return _nearest(Point(start.anchor, start.shift + torch.zeros_like(to_low).clamp(to_low, to_high)), rows, survey)


def _begun(point: Point, residual: Residual, bracket: Bracket) -> State:
    never, always = torch.full_like(point.shift, torch.inf), torch.ones_like(residual.is_solved)
    return State(point, residual, *bracket, never, torch.full_like(never, torch.nan), always, always)


def _look(state: State, rows: Rows, eps: float, tolerance: float, finest: float) -> tuple[State, Tensor]:
    """Shrink the bracket to the side of the point where the root lies, and tell which rows are done."""
    point, ratio = state.point, state.residual.ratio
    here, is_above = End(point, state.residual.excess), ratio > 0
    low, high = _where(is_above, here, state.low), _where(is_above, state.high, here)
    width = _distance(low.point, high.point, rows.temperature)
    is_same = (ratio == state.last_ratio) & (ratio.abs() <= NEAR)  # two such points are equally good
    is_open = ~((width <= eps * point.shift.abs().clamp(min=finest)) | is_same)
    done = (ratio.abs() <= tolerance + state.residual.noise) | ~is_open
    return state._replace(low=low, high=high, is_open=is_open, last_ratio=ratio), done


def _step(state: State, rows: Rows, survey: Survey, done: Tensor, eps: float) -> State:
    """Move the rows that are not done."""
    point, low, high, newton = state.point, state.low, state.high, state.residual.step
    to_low, to_high = (_distance(point, end.point, rows.temperature) for end in (low, high))
    rounding = 8 * eps * newton.abs()  # a step that long may overshoot an end of the bracket by this much
    is_safe = (newton > to_low - rounding) & (newton < to_high + rounding) & (newton.abs() <= state.last_step / 2)
    newton = newton.clamp(to_low, to_high)
    line = (low.excess / (low.excess - high.excess)).nan_to_num(0.5).clamp(1e-3, 1 - 1e-3)
    divided = _between(low.point, high.point, torch.where(state.halve, 0.5, line), rows)
    moved = _where(is_safe, Point(point.anchor, point.shift + newton), divided)
    return state._replace(
        point=_where(done, point, _nearest(moved, rows, survey)),
        last_step=torch.where(is_safe, newton.abs(), torch.inf),
        halve=state.halve ^ ~is_safe,
    )


def _keep(found: Tensor, places: Tensor | None, state: State) -> None:
    """Write the points of the rows to `found`, with the last Newton step taken."""
    point, is_solved = _last(state)
    result = torch.stack((*point, is_solved.to(point.shift.dtype)))
    found[:, slice(None) if places is None else places] = result


def _last(state: State) -> tuple[Point, Tensor]:
    """Return the points with the last Newton step taken, and whether they are the thresholds."""
    residual = state.residual
    shift = state.point.shift + residual.step.nan_to_num(0.0, 0.0, 0.0)
    return Point(state.point.anchor, shift), residual.is_solved | (~state.is_open & residual.is_near)


def _take(tree: Any, which: Tensor) -> Any:
    """Return some of the rows of nested NamedTuples of tensors and None."""
    if isinstance(tree, tuple):
        parts = (_take(part, which) for part in tree)
        return tuple(parts) if type(tree) is tuple else type(tree)(*parts)
    return None if tree is None else tree[which]


def _where(condition: Tensor, a: Any, b: Any) -> Any:
    """Choose row by row between two tensors, or two nested NamedTuples of tensors."""
    if isinstance(a, Tensor):
        return torch.where(condition, a, b)
    return type(a)(*(_where(condition, *parts) for parts in zip(a, b, strict=True)))


def _nearest(point: Point, rows: Rows, survey: Survey) -> Point:
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


# ── where to begin ───────────────────────────────────────────────────────────────────────────────────────────────────
def _survey(rows: Rows, early_stop: bool) -> tuple[Rows, Survey]:
    """Return the rows, with 0 and −inf where more than k scores are +inf, and what is known of them."""
    x, k, costs = rows.x, rows.k, rows.costs
    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if early_stop and costs is None and bool((low.isfinite() & high.isfinite()).all()):
        return rows, Survey(low, high, torch.full_like(k, x.shape[-1]), torch.zeros_like(k))
    infinite = x == torch.inf
    forced = _weigh(infinite, costs)
    tied = forced > k  # too many +inf: they share k, as equal scores do
    x = torch.where(tied & ~x.isnan(), torch.where(infinite, 0.0, -torch.inf).to(x.dtype), x)
    forced = torch.where(tied, 0.0, forced)
    finite = x.isfinite()
    low = torch.where(finite, x, torch.inf).amin(-1, keepdim=True).to(k.dtype)
    high = torch.where(finite, x, -torch.inf).amax(-1, keepdim=True).to(k.dtype)
    free = torch.where(x.isnan().any(-1, keepdim=True), torch.nan, _weigh(finite, costs))
    return rows._replace(x=x), Survey(low, high, free, forced)


def _weigh(chosen: Tensor, costs: Tensor | None) -> Tensor:
    """Return the number (or costs) of the chosen entries; (rows, 1) float64."""
    if costs is None:
        return chosen.sum(-1, keepdim=True).to(torch.float64)
    return torch.where(chosen, costs, 0.0).sum(-1, keepdim=True, dtype=torch.float64)


def _near_kth(
    cdf: Cdf, rows: Rows, rest: Tensor, free: Tensor, edges: kth.Edges | None = None
) -> tuple[Point, Bracket]:
    """Return the k-th score as a start, and the bracket around it; `rest` of k is for the finite scores."""
    edges = kth.sorted_edges(rows.x, rows.costs, rest) if edges is None else edges
    near = kth.bracket(cdf, edges, rest, free, rows.temperature)
    low, high = Point(near.low, near.low_shift), Point(near.high, near.high_shift)
    return Point(near.start, torch.zeros_like(near.start)), Bracket(End(low, free - rest), End(high, -rest))


def _put(tree: Any, which: Tensor, rows: Any) -> Any:
    """Return nested NamedTuples of tensors with some of the rows replaced."""
    if isinstance(tree, Tensor):
        return tree.index_copy(0, which, rows)
    parts = (_put(part, which, new) for part, new in zip(tree, rows, strict=True))
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)


def _start(cdf: Cdf, rows: Rows, survey: Survey, share: Tensor, tied: Tensor) -> Point:
    """Return a first guess: the threshold of a sample, or that of a normal distribution with the same moments."""
    x, costs, low, high = rows.x, rows.costs, survey.low, survey.high
    if x.shape[-1] >= 4 * SAMPLE:
        step = x.shape[-1] // SAMPLE
        sample = x[..., ::step].contiguous()
        part = None if costs is None else costs[..., ::step]
        total = share * _weigh(sample.isfinite(), part) + _weigh(sample == torch.inf, part)
        few = Rows(sample, total, rows.temperature, part)
        _, guess = solve(cdf, few, early_stop=True)
        is_good = guess.shift.isfinite()
        return Point(torch.where(is_good, guess.anchor, low), torch.where(is_good, guess.shift, -tied))
    center, radius = low / 2 + high / 2, (high / 2 - low / 2).clamp(min=torch.finfo(x.dtype).tiny)
    y = ((x - center.to(x.dtype)) / radius.to(x.dtype)).masked_fill_(x.isinf(), 0.0)  # no square can overflow
    number = survey.free if costs is None else x.isfinite().sum(-1, keepdim=True)
    mean = row_sum(y) / number
    deviation = (row_sum(y.square()) / number - mean.square()).clamp(min=0).sqrt() * radius
    # Between the threshold of equal scores and the one of T → 0.
    spread = torch.special.ndtri(share)
    shift = spread.sign() * torch.hypot(tied - cdf.center, deviation / rows.temperature * spread) + cdf.center
    threshold = (radius * mean) / rows.temperature - shift
    return Point(center, torch.where(threshold.isfinite(), threshold, -tied))


def _quickly(x: Tensor, k: Tensor, temperature: Tensor) -> Tensor | None:
    """Return σ_k by Newton's method on logit(Σp/n), which takes a third of the passes and one buffer.

    This serves rows of finite scores in which Σp and Σp(1 − p) can be summed as they are: k ≤ n/2, far from hard.
    The result is None if one row is not like that, or is not solved in a few steps.
    """
    n, eps = x.shape[-1], torch.finfo(x.dtype).eps
    shape, rows = x.shape, Rows(x.view(-1, n), k.reshape(-1, 1), temperature.reshape(-1, 1), None)
    x, k, temperature, _ = rows
    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if not bool((low.isfinite() & high.isfinite() & (k > 0) & (2 * k <= n) & (temperature > 0)).all()):
        return None
    share, survey = k / n, Survey(low, high, torch.full_like(k, n), torch.zeros_like(k))
    point = _start(SIGMOID, rows, survey, share, torch.logit(share))
    p = torch.empty_like(x)
    for _ in range(QUICK_STEPS):
        point = _nearest(point, rows, survey)
        _margin_at(x, point, temperature, p).sigmoid_()
        total = row_sum(p)
        v = total - torch.linalg.vector_norm(p, dim=-1, keepdim=True).to(k.dtype).square()
        ratio = (total / k).log() - ((n - total) / (n - k)).log()
        step = ratio * total * (n - total) / (n * v)
        if not bool((v > 0.01 * total).all()):
            return None
        # The last step is p − p(1 − p)·step: its square must be a rounding of every entry, not just of the sum.
        if bool(((ratio.abs() <= _tolerance(SIGMOID, x.dtype)) & (step.square() <= eps)).all()):
            return p.sub_(torch.addcmul(p, p, p, value=-1).mul_(step.to(p.dtype))).view(shape)
        point = Point(point.anchor, point.shift + step)
    return None
