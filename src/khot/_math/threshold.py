"""Thresholds, margins and values of whole rows: y = F(z), z = (x − τ)/T, where τ solves Σ c·F((x − τ)/T) = k.

Where the search for τ begins decides how many steps it takes: at the threshold of equal or normal scores, at that of a
sample if the row is long, or at the k-th score if the row is hard. `implicit` has the search itself.
"""

import torch
from torch import Tensor

from . import cdfs, kth
from .cdfs import SIGMOID, Cdf, row_sum
from .implicit import Bracket, End, Survey, margin_at, nearest, put, search, take, tolerance_of
from .implicit import Point as Point
from .implicit import Rows as Rows

SAMPLE = 8192  # a row four times as long is first solved on about this many of its scores
MAX_STEPS = 1000  # with early stopping; the robustness grid needs about 30
FIXED_STEPS = 12  # without early stopping, for the tails of σ_k, Laplace and the normal: twice what the grid needs
FIXED_STEPS_OF_OTHERS = 40  # for heavy tails and kinks. A row that needs more becomes NaN
WIDE = 1000.0  # if a row spans more than this many T, its search begins at its k-th score
LONG_STEPS = 8  # from the threshold of a sample; a row that needs more begins again at its k-th score
QUICK_STEPS = 4  # of `_quickly`


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


def margins_at(scores: Tensor, point: Point, temperature: Tensor) -> Tensor:
    """Return z (rows, n) at the threshold, which may be infinite."""
    z = margin_at(scores, point, temperature, torch.empty_like(scores))
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


def sums_at(cdf: Cdf, rows: Rows, point: Point) -> Tensor:
    """Return the sums of `cdfs.tail_sums` at a point, with N instead of N − k; (rows, 5)."""
    z = margin_at(rows.x, point, rows.temperature, torch.empty_like(rows.x))
    return torch.cat(cdfs.tail_sums(cdfs.tails_at(cdf, z), torch.zeros_like(rows.k), rows.costs), -1)


def value_at(cdf: Cdf, rows: Rows, point: Point, step: Tensor) -> Tensor:
    """Return y = F(z) + step·F′(z) within [0, 1] at a threshold, which may be infinite; (rows, n)."""
    return _moved(cdfs.tails_at(cdf, margins_at(rows.x, point, rows.temperature)), step)


def smooth_value(cdf: Cdf, z: Tensor, k: Tensor, costs: Tensor | None) -> Tensor:
    """Return the same, differentiable in z; the correction counts as a constant."""
    y = cdfs.value(cdf, z)
    exact = value(cdf, z.detach(), k.detach(), None if costs is None else costs.detach())
    return y + (exact - y.detach())


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
            start, bracket = put((start, bracket), which, near_kth(cdf, *take((rows, rest, survey.free), which)))
        most = LONG_STEPS if is_long else MAX_STEPS
    else:  # there is no early stop to gain from a start that suits most rows
        start, bracket = near_kth(cdf, rows, torch.where(regular, rest, share), torch.where(regular, survey.free, 1.0))
        most = FIXED_STEPS if cdf.log_density is not None else FIXED_STEPS_OF_OTHERS
    most = most if steps is None else steps
    point, is_solved = search(cdf, rows, survey, start, bracket, regular, most, early_stop)
    if early_stop and steps is None and most == LONG_STEPS and bool((regular & ~is_solved).any()):
        which = (regular & ~is_solved).squeeze(-1).nonzero().squeeze(-1)
        some, few, k, free, live = take((rows, survey, rest, survey.free, regular), which)
        again = search(cdf, some, few, *near_kth(cdf, some, k, free), live, MAX_STEPS, early_stop)
        point, is_solved = put(point, which, again[0]), put(is_solved, which, again[1])
    return rows.x, concluded(rows, survey, point, regular & (is_solved | (steps is not None)))


def pose(cdf: Cdf, rows: Rows, survey: Survey) -> tuple[Survey, Tensor, Tensor, Tensor, Tensor, Bracket]:
    """Return the survey, k less the forced, which rows have a finite root, k/n, its quantile, and the first bracket."""
    rest = rows.k - survey.forced  # what the finite scores share
    regular = (rest > 0) & (rest < survey.free) & (rows.temperature > 0)
    low, high = torch.where(regular, survey.low, 0.0), torch.where(regular, survey.high, 0.0)
    survey = survey._replace(low=low, high=high)
    share = torch.where(regular, rest / survey.free, 0.5)
    tied = cdfs.quantile(cdf, share)  # z if all scores were equal
    bracket = Bracket(End(Point(low, -tied), survey.free - rest), End(Point(high, -tied), -rest))
    return survey, rest, regular, share, tied, bracket


def concluded(rows: Rows, survey: Survey, point: Point, is_found: Tensor) -> Point:
    """Return the threshold of each row: the point if it was found, else ±inf, or NaN if there is none."""
    rest = rows.k - survey.forced
    limit = torch.where(rest == 0, torch.inf, torch.where(rest == survey.free, -torch.inf, torch.nan))
    limit = torch.where((rows.temperature > 0) & ~survey.free.isnan(), limit, torch.nan)
    return Point(point.anchor, torch.where(is_found, point.shift, limit))


# ── where to begin ───────────────────────────────────────────────────────────────────────────────────────────────────
def _survey(rows: Rows, early_stop: bool) -> tuple[Rows, Survey]:
    """Return the rows, with 0 and −inf where more than k scores are +inf, and what is known of them."""
    x, k, costs = rows.x, rows.k, rows.costs
    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if early_stop and costs is None and bool((low.isfinite() & high.isfinite()).all()):
        return rows, Survey(low, high, torch.full_like(k, x.shape[-1]), torch.zeros_like(k))
    infinite = x == torch.inf
    forced = weigh(infinite, costs)
    tied = forced > k  # too many +inf: they share k, as equal scores do
    x = torch.where(tied & ~x.isnan(), torch.where(infinite, 0.0, -torch.inf).to(x.dtype), x)
    forced = torch.where(tied, 0.0, forced)
    finite = x.isfinite()
    low = torch.where(finite, x, torch.inf).amin(-1, keepdim=True).to(k.dtype)
    high = torch.where(finite, x, -torch.inf).amax(-1, keepdim=True).to(k.dtype)
    free = torch.where(x.isnan().any(-1, keepdim=True), torch.nan, weigh(finite, costs))
    return rows._replace(x=x), Survey(low, high, free, forced)


def weigh(chosen: Tensor, costs: Tensor | None) -> Tensor:
    """Return the number (or costs) of the chosen entries; (rows, 1) float64."""
    if costs is None:
        return chosen.sum(-1, keepdim=True).to(torch.float64)
    return torch.where(chosen, costs, 0.0).sum(-1, keepdim=True, dtype=torch.float64)


def near_kth(cdf: Cdf, rows: Rows, rest: Tensor, free: Tensor, edges: kth.Edges | None = None) -> tuple[Point, Bracket]:
    """Return the k-th score as a start, and the bracket around it; `rest` of k is for the finite scores."""
    edges = kth.sorted_edges(rows.x, rows.costs, rest) if edges is None else edges
    near = kth.bracket(cdf, edges, rest, free, rows.temperature)
    low, high = Point(near.low, near.low_shift), Point(near.high, near.high_shift)
    return Point(near.start, torch.zeros_like(near.start)), Bracket(End(low, free - rest), End(high, -rest))


def _start(cdf: Cdf, rows: Rows, survey: Survey, share: Tensor, tied: Tensor) -> Point:
    """Return a first guess: the threshold of a sample, or that of a normal distribution with the same moments."""
    x, costs, low, high = rows.x, rows.costs, survey.low, survey.high
    if x.shape[-1] >= 4 * SAMPLE:
        step = x.shape[-1] // SAMPLE
        sample = x[..., ::step].contiguous()
        part = None if costs is None else costs[..., ::step]
        total = share * weigh(sample.isfinite(), part) + weigh(sample == torch.inf, part)
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
        point = nearest(point, rows, survey)
        margin_at(x, point, temperature, p).sigmoid_()
        total = row_sum(p)
        v = total - torch.linalg.vector_norm(p, dim=-1, keepdim=True).to(k.dtype).square()
        ratio = (total / k).log() - ((n - total) / (n - k)).log()
        step = ratio * total * (n - total) / (n * v)
        if not bool((v > 0.01 * total).all()):
            return None
        # The last step is p − p(1 − p)·step: its square must be a rounding of every entry, not just of the sum.
        if bool(((ratio.abs() <= tolerance_of(SIGMOID, x.dtype)) & (step.square() <= eps / 4)).all()):
            return p.sub_(torch.addcmul(p, p, p, value=-1).mul_(step.to(p.dtype))).view(shape)
        point = Point(point.anchor, point.shift + step)
    return None
