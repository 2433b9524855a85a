"""The threshold of every row: τ such that Σ c·F((x − τ)/T) = k, for any cdf F and costs c (1 where there are none).

Σ c·F(z) = k says that two sums of small numbers agree, with N the costs of the scores above the median of F:

    Σ_{below} c·F(z) + (N − k)⁺  =  Σ_{above} c·(1 − F(z)) + (N − k)⁻

No number near 1 is summed, so saturated rows keep all their digits; and ρ = log(left) − log(right) is nearly linear in
τ even where Σ c·F(z) − k is flat, so that Newton's method crosses a plateau, where every y is 0 or 1 to machine
precision, in one step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import cdfs
from .cdfs import SIGMOID, Cdf, bisect, find
from .roots import Point, Residual, find_root, nearest
from .sums import row_sum

SAMPLE = 8192  # a row four times as long is first solved on about this many of its scores
MAX_STEPS = 1000  # the grid needs some thirty; a loop has a bound all the same
UNSOLVED_IS_NAN = True  # off only to study what an inexact root costs: benchmarks/solver_error.py
QUICK_STEPS = 4  # more are not quick
FIXED_STEPS = 64  # without early stopping; the robustness grid needs about half. A row that needs more becomes NaN


def topk(
    x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, cdf: int, p: float, *, early_stop: bool
) -> Tensor:
    """y = F((x − τ)/T) along the last dim.

    Args:
        x: (…, n) float32 or float64.
        k, temperature: (…) float64.
        mask: (…, n) bool or None.
        cdf, p: the name of F, as `cdfs.find` takes it.
        early_stop: stop when every row is solved, which reads from the device; else take a fixed number of steps.
    """
    x, made = x.contiguous(), find(cdf, p)
    if x.numel() == 0:
        return torch.empty_like(x)
    if early_stop and mask is None and made is SIGMOID:
        y = _quickly(x, k.unsqueeze(-1), temperature.unsqueeze(-1))
        if y is not None:
            return y
    z = _margins(solve(made, x, k, temperature, mask, None, early_stop=early_stop), temperature)
    return value(made, z, k, None)


def margin(
    x: Tensor,
    k: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    costs: Tensor | None,
    cdf: int,
    p: float,
    *,
    early_stop: bool,
) -> Tensor:
    """z = (x − τ)/T along the last dim, so that y = F(z); ±inf where y is exactly 1 or 0.

    Arguments as `topk`, and the costs (…, n) or None.
    """
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    costs = None if costs is None else costs.contiguous()
    return _margins(solve(find(cdf, p), x, k, temperature, mask, costs, early_stop=early_stop), temperature)


def value(cdf: Cdf, z: Tensor, k: Tensor, costs: Tensor | None) -> Tensor:
    """y = F(z), (…, n), with what rounding took from Σ c·y = k given back in proportion to F′.

    In float32 a rounding of z is many of y where F is steep on a logarithmic scale.
    """
    tails = tails_at(cdf, z)
    excess, lower, upper, lower_slope, upper_slope = tail_sums(tails, k.unsqueeze(-1), costs)
    missing, total = upper - lower - excess, lower_slope + upper_slope
    step = torch.where(total > 0, missing / total, 0.0).to(z.dtype)
    return (tails.above - tails.tail).abs().add_(tails.density.mul(step)).clamp(0, 1)


def smooth_value(cdf: Cdf, z: Tensor, k: Tensor, costs: Tensor | None) -> Tensor:
    """The same, differentiable in z: what is given back is a constant."""
    y = cdfs.value(cdf, z)
    exact = value(cdf, z.detach(), k.detach(), None if costs is None else costs.detach())
    return y + (exact - y.detach())


def _quickly(x: Tensor, k: Tensor, temperature: Tensor) -> Tensor | None:
    """σ_k by Newton's method on logit(Σp/n), which takes a third of the passes and one buffer.

    For rows of finite scores in which Σp and Σp(1 − p) can be summed as they are: k ≤ n/2, far from hard. None if one
    row is not such, or is not solved in a few steps.
    """
    n = x.shape[-1]
    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if not bool((low.isfinite() & high.isfinite() & (k > 0) & (2 * k <= n) & (temperature > 0)).all()):
        return None
    share = k / n
    tied = torch.logit(share)
    point = _start(SIGMOID, x, low, high, torch.full_like(k, n), share, tied, temperature, None, True)
    p = torch.empty_like(x)
    for _ in range(QUICK_STEPS):
        point = nearest(point, temperature, x.dtype, (low, high))
        _margin_at(x, point, temperature, p).sigmoid_()
        total = row_sum(p)
        v = total - torch.linalg.vector_norm(p, dim=-1, keepdim=True).to(k.dtype).square()
        ratio = (total / k).log() - ((n - total) / (n - k)).log()
        step = ratio * total * (n - total) / (n * v)
        if not bool((v > 0.01 * total).all()):
            return None
        if bool((ratio.abs() <= _tolerance(SIGMOID, x.dtype)).all()):
            return p.sub_(torch.addcmul(p, p, p, value=-1).mul_(step.to(p.dtype)))
        point = Point(point.anchor, point.shift + step)
    return None


class Root(NamedTuple):
    """The solved rows."""

    x: Tensor
    """(…, n) the scores solved for: −inf where masked; if more than k were +inf, those are 0 and the rest −inf."""
    point: Point
    """The threshold; its shift is +inf where none is left to choose, −inf where all are chosen, NaN where none fits."""


def solve(
    cdf: Cdf,
    x: Tensor,
    k: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    costs: Tensor | None,
    *,
    early_stop: bool,
) -> Root:
    """The threshold of every row; arguments as `margin`."""
    k, temperature = k.unsqueeze(-1), temperature.unsqueeze(-1)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    if costs is not None:
        x = torch.where(costs > 0, x, torch.nan)
    x, low, high, free, forced = _survey(x, k, costs, early_stop)
    rest = k - forced  # what the finite scores share
    regular = (rest > 0) & (rest < free) & (temperature > 0)
    low, high = torch.where(regular, low, 0.0), torch.where(regular, high, 0.0)

    share = torch.where(regular, rest / free, 0.5)
    tied = _quantile(cdf, share)  # z if all scores were equal
    balance = Balance(cdf, x, k, temperature, costs, early_stop)
    point, is_closed = find_root(
        balance,
        start=_start(cdf, x, low, high, free, share, tied, temperature, costs, early_stop),
        bracket=(Point(low, -tied), Point(high, -tied)),
        excess=(free - rest, -rest),
        bounds=(low, high),
        temperature=temperature,
        dtype=x.dtype,
        active=regular,
        steps=MAX_STEPS if early_stop else FIXED_STEPS,
        early_stop=early_stop,
        tolerance=balance.tolerance,
        finest=1.0 if cdf.smooth else torch.finfo(x.dtype).tiny,
    )
    if UNSOLVED_IS_NAN:
        regular = regular & (balance.is_solved | (is_closed & balance.is_near))
    limit = torch.where(rest == 0, torch.inf, torch.where(rest == free, -torch.inf, torch.nan))
    limit = torch.where((temperature > 0) & ~free.isnan(), limit, torch.nan)
    return Root(x, Point(point.anchor, torch.where(regular, point.shift + balance.last_step, limit)))


def _margins(root: Root, temperature: Tensor) -> Tensor:
    """z at the root, with the infinite scores where they belong even if the threshold is infinite too."""
    z = _margin_at(root.x, root.point, temperature.unsqueeze(-1), torch.empty_like(root.x))
    shift = root.point.shift.to(z.dtype)
    z = torch.where(shift.isinf(), -shift, z)  # (x − anchor)/T may have overflowed to the other side
    return torch.where(root.x.isinf() & ~shift.isnan(), root.x, z)


def _margin_at(x: Tensor, point: Point, temperature: Tensor, out: Tensor) -> Tensor:
    anchor, shift, scale = (part.to(x.dtype) for part in (*point, temperature))
    return torch.sub(x, anchor, out=out).div_(scale).sub_(shift)


def _tolerance(cdf: Cdf, dtype: torch.dtype) -> float:
    """The ρ at which one more Newton step ends within rounding: it errs by its square, but for a kink on the way."""
    eps = torch.finfo(dtype).eps
    return float(0.5 * eps**0.5 if cdf.smooth else 4 * eps)


class TailSums(NamedTuple):
    """Weighted with the costs; all (…, 1) float64."""

    excess: Tensor
    """N − k, N the scores above the median of F."""
    lower: Tensor
    """Σ F below."""
    upper: Tensor
    """Σ 1 − F above."""
    lower_slope: Tensor
    """Σ F′ below."""
    upper_slope: Tensor
    """Σ F′ above."""


def tails_at(cdf: Cdf, z: Tensor) -> cdfs.Tails:
    """For z that may be infinite."""
    if cdf.tails is not None:
        return cdf.tails(z)
    infinite, is_above = z.isinf(), z > cdf.center
    finite = torch.where(infinite, cdf.center, z)
    tail = torch.where(is_above, cdf.survival(finite), cdf.cdf(finite)).masked_fill(infinite, 0.0)
    return cdfs.Tails(is_above.to(z.dtype), tail, (cdf.steer or cdf.density)(finite).masked_fill(infinite, 0.0))


def tail_sums(at: cdfs.Tails, k: Tensor, costs: Tensor | None) -> TailSums:
    """What they sum to, for k (…, 1)."""
    count, tail, density = at if costs is None else (costs * part for part in at)
    upper, upper_slope = row_sum(tail * at.above), row_sum(density * at.above)
    lower, lower_slope = (row_sum(tail) - upper).clamp(min=0), (row_sum(density) - upper_slope).clamp(min=0)
    return TailSums(row_sum(count) - k, lower, upper, lower_slope, upper_slope)


class Balance:
    """Evaluates ρ at a point, and remembers how good the last one was."""

    def __init__(
        self, cdf: Cdf, x: Tensor, k: Tensor, temperature: Tensor, costs: Tensor | None, early_stop: bool
    ) -> None:
        self.cdf, self.x, self.k, self.temperature, self.early_stop = cdf, x, k, temperature, early_stop
        self.costs = None if costs is None else costs.to(x.dtype)
        self.z = torch.empty_like(x)
        self.info = torch.finfo(x.dtype)
        self.tolerance = _tolerance(cdf, x.dtype)

    def __call__(self, point: Point) -> Residual:
        z = _margin_at(self.x, point, self.temperature, self.z)
        excess, lower, upper, lower_slope, upper_slope = tail_sums(tails_at(self.cdf, z), self.k, self.costs)
        over, under = excess.clamp(min=0), (-excess).clamp(min=0)
        left, right = lower + over, upper + under
        log_left, log_right = left.log(), right.log()
        slope_left, slope_right = lower_slope / left, upper_slope / right
        if self.cdf.log_tail is not None and self.costs is None:
            # Where a sum underflows, it is the sum of exponentials to all digits.
            deep_left, deep_right = (side < self.info.tiny / self.info.eps for side in (left, right))
            if not self.early_stop or bool((deep_left | deep_right).any()):
                above = z > self.cdf.center
                log_tail = self.cdf.log_tail(-z.abs()).to(over.dtype)
                log_lower = log_tail.masked_fill(above, -torch.inf).logsumexp(-1, keepdim=True)
                log_upper = log_tail.masked_fill(~above, -torch.inf).logsumexp(-1, keepdim=True)
                log_left = torch.where(deep_left, torch.logaddexp(log_lower, over.log()), log_left)
                log_right = torch.where(deep_right, torch.logaddexp(log_upper, under.log()), log_right)
                slope_left = torch.where(deep_left, 1.0, slope_left)
                slope_right = torch.where(deep_right, 1.0, slope_right)
        is_level = (left == right) & log_left.isinf()  # a plateau, all of which is the root
        ratio, slope = torch.where(is_level, 0.0, log_left - log_right), slope_left + slope_right
        self.last_step = (ratio / slope).nan_to_num(0.0, 0.0, 0.0)
        # F(z) carries about |z| roundings of z, and −log of a small sum is about the |z| that counts.
        noise = 4 * self.info.eps * (-log_left).nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        # Twice the solver's own tolerance is still beyond doubt.
        near = ratio.abs() <= 2 * self.tolerance + noise
        # Where F is steep, the last two points may differ by more than that; what is missing is then given back.
        self.is_near = (left - right).abs() <= 1e-3 * self.k + self.info.eps
        self.is_solved = near | ((left - right).abs() <= 4 * self.info.eps * self.k.clamp(min=1))
        return Residual(ratio, slope, left - right, noise)


def _survey(
    x: Tensor, k: Tensor, costs: Tensor | None, early_stop: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scores, their least and greatest finite one, the number (or costs) of finite ones and that of +inf.

    All but the scores are (…, 1) float64. The number of finite ones is NaN in a row that holds NaN.
    """

    def weigh(chosen: Tensor) -> Tensor:
        if costs is None:
            return chosen.sum(-1, keepdim=True).to(k.dtype)
        return torch.where(chosen, costs, 0.0).sum(-1, keepdim=True, dtype=k.dtype)

    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if early_stop and costs is None and bool((low.isfinite() & high.isfinite()).all()):
        return x, low, high, torch.full_like(k, x.shape[-1]), torch.zeros_like(k)
    infinite = x == torch.inf
    forced = weigh(infinite)
    tied = forced > k  # too many +inf: they share k, as equal scores do
    x = torch.where(tied & ~x.isnan(), torch.where(infinite, 0.0, -torch.inf).to(x.dtype), x)
    forced = torch.where(tied, 0.0, forced)
    finite = x.isfinite()
    low = torch.where(finite, x, torch.inf).amin(-1, keepdim=True).to(k.dtype)
    high = torch.where(finite, x, -torch.inf).amax(-1, keepdim=True).to(k.dtype)
    free = torch.where(x.isnan().any(-1, keepdim=True), torch.nan, weigh(finite))
    return x, low, high, free, forced


def _quantile(cdf: Cdf, share: Tensor) -> Tensor:
    """F⁻¹; shares that round to 0 or 1 are moved inside."""
    info = torch.finfo(share.dtype)
    share = share.clamp(info.tiny, 1 - info.eps)
    return bisect(cdf.cdf, share) if cdf.quantile is None else cdf.quantile(share)


def _start(
    cdf: Cdf,
    x: Tensor,
    low: Tensor,
    high: Tensor,
    free: Tensor,
    share: Tensor,
    tied: Tensor,
    temperature: Tensor,
    costs: Tensor | None,
    early_stop: bool,
) -> Point:
    """A first guess: the threshold of a sample, or about that of a normal distribution with the same moments."""
    if x.shape[-1] >= 4 * SAMPLE:
        step = x.shape[-1] // SAMPLE
        sample = x[..., ::step].contiguous()
        part = None if costs is None else costs[..., ::step]
        weight = torch.ones_like(sample) if part is None else part
        finite = torch.where(sample.isfinite(), weight, 0.0).sum(-1, dtype=share.dtype)
        forced = torch.where(sample == torch.inf, weight, 0.0).sum(-1, dtype=share.dtype)
        k = share.squeeze(-1) * finite + forced
        guess = solve(cdf, sample, k, temperature.squeeze(-1), None, part, early_stop=early_stop).point
        is_good = guess.shift.isfinite()
        return Point(torch.where(is_good, guess.anchor, low), torch.where(is_good, guess.shift, -tied))
    center, radius = low / 2 + high / 2, (high / 2 - low / 2).clamp(min=torch.finfo(x.dtype).tiny)
    y = (x - center.to(x.dtype)) / radius.to(x.dtype)  # in [−1, 1]: no square can overflow
    y = y.masked_fill_(x.isinf(), 0.0)
    number = free if costs is None else x.isfinite().sum(-1, keepdim=True)
    mean = row_sum(y) / number
    deviation = (row_sum(y.square()) / number - mean.square()).clamp(min=0).sqrt() * radius
    # Between the threshold of equal scores and the one of T → 0.
    spread = torch.special.ndtri(share)
    shift = spread.sign() * torch.hypot(tied - cdf.center, deviation / temperature * spread) + cdf.center
    threshold = (radius * mean) / temperature - shift
    return Point(center, torch.where(threshold.isfinite(), threshold, -tied))
