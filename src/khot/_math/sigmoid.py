"""σ_k on rows: the threshold τ with Σ σ((x − τ)/T) = k, found without sorting, in O(n) per evaluation.

With N the number of scores above τ, Σ σ(z) = k says that two sums of small numbers agree:

    Σ_{z≤0} σ(z) + (N − k)⁺  =  Σ_{z>0} σ(−z) + (N − k)⁻

Neither side subtracts, so saturated rows keep all their digits; and ρ = log(left) − log(right) is nearly linear in τ
even where Σ σ(z) − k is flat, so that Newton's method crosses a plateau, where every p is 0 or 1 to machine precision,
in one step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .roots import Point, Residual, find_root
from .sums import row_sum

SAMPLE = 8192  # a row four times as long is first solved on about this many of its scores
MAX_STEPS = 1000  # the most seen is 167; a loop has a bound all the same
UNSOLVED_IS_NAN = True  # off only to study what an inexact root costs: benchmarks/solver_error.py
FIXED_STEPS = 64  # without early stopping; the robustness grid needs about half. A row that needs more becomes NaN


def topk(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, *, early_stop: bool) -> Tensor:
    """σ_k(x/T) along the last dim.

    Args:
        x: (…, n) float32 or float64.
        k, temperature: (…) float64.
        mask: (…, n) bool or None.
        early_stop: stop when every row is solved, which reads from the device; else take a fixed number of steps.
    """
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    root = solve(x, k, temperature, mask, early_stop=early_stop)
    p = root.tails.probabilities()
    if not early_stop or not bool(root.regular.all()):
        p = torch.where(root.regular, p, _margins(root, temperature).sigmoid_())
    return p


def margin(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, *, early_stop: bool) -> Tensor:
    """z = (x − τ)/T along the last dim, so that σ_k = σ(z); ±inf where σ_k is exactly 1 or 0. Arguments as `topk`."""
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    return _margins(solve(x, k, temperature, mask, early_stop=early_stop), temperature)


class Root(NamedTuple):
    """The solved rows."""

    x: Tensor
    """(…, n) the scores solved for: −inf where masked; if more than k were +inf, those are 0 and the rest −inf."""
    point: Point
    """The threshold; its shift is +inf where none is left to choose, −inf where all are chosen, NaN where none fits."""
    regular: Tensor
    """(…, 1) bool, the rows with a finite threshold."""
    tails: _Tails
    """The evaluation at the threshold."""


def solve(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, *, early_stop: bool) -> Root:
    """The threshold of every row; arguments as `topk`."""
    k, temperature = k.unsqueeze(-1), temperature.unsqueeze(-1)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    x, low, high, free, forced = _survey(x, k, early_stop)
    rest = k - forced  # what the finite scores share
    regular = (rest > 0) & (rest < free) & (temperature > 0)
    low, high = torch.where(regular, low, 0.0), torch.where(regular, high, 0.0)

    logit = rest.log() - (free - rest).log()
    start = _start(x, low, high, free, rest, logit, temperature, early_stop)
    tails = _Tails(x, k, temperature, early_stop)
    point = find_root(
        tails,
        start=start,
        bracket=(Point(low, -logit), Point(high, -logit)),
        excess=(free - rest, -rest),
        bounds=(low, high),
        temperature=temperature,
        dtype=x.dtype,
        active=regular,
        steps=MAX_STEPS if early_stop else FIXED_STEPS,
        early_stop=early_stop,
    )
    if UNSOLVED_IS_NAN:
        regular = regular & tails.is_solved
    limit = torch.where(rest == 0, torch.inf, torch.where(rest == free, -torch.inf, torch.nan))
    limit = torch.where((temperature > 0) & ~free.isnan(), limit, torch.nan)
    return Root(x, Point(point.anchor, torch.where(regular, point.shift + tails.last_step, limit)), regular, tails)


def _margins(root: Root, temperature: Tensor) -> Tensor:
    """z at the root, with the infinite scores where they belong even if the threshold is infinite too."""
    z = _margin_at(root.x, root.point, temperature.unsqueeze(-1), torch.empty_like(root.x))
    shift = root.point.shift.to(z.dtype)
    z = torch.where(shift.isinf(), -shift, z)  # (x − anchor)/T may have overflowed to the other side
    return torch.where(root.x.isinf() & ~shift.isnan(), root.x, z)


def _margin_at(x: Tensor, point: Point, temperature: Tensor, out: Tensor) -> Tensor:
    anchor, shift, scale = (part.to(x.dtype) for part in (*point, temperature))
    return torch.sub(x, anchor, out=out).div_(scale).sub_(shift)


class _Tails:
    """Evaluates ρ at a point; holds the row-sized buffers of one solve."""

    def __init__(self, x: Tensor, k: Tensor, temperature: Tensor, early_stop: bool) -> None:
        self.x, self.k, self.temperature, self.early_stop = x, k, temperature, early_stop
        self.z, self.tail, self.above, self.spare = (torch.empty_like(x) for _ in range(4))

    def __call__(self, point: Point) -> Residual:
        z = _margin_at(self.x, point, self.temperature, self.z)
        torch.gt(z, 0, out=self.above)  # 0. or 1.: arithmetic on floats is several times as fast as boolean masks
        torch.abs(z, out=self.tail).neg_().sigmoid_()  # min(p, 1 − p)

        excess = row_sum(self.above) - self.k
        torch.mul(self.tail, self.above, out=self.spare)
        upper = row_sum(self.spare)
        lower = row_sum(self.tail) - upper
        # Σ tail(1 − tail) on either side, which lies between half the tail's sum and the whole.
        upper_squares = row_sum(self.spare.mul_(self.tail))
        squares = torch.linalg.vector_norm(self.tail, dim=-1, keepdim=True).to(torch.float64).square()
        upper_slope = (upper - upper_squares).clamp(upper / 2, upper)
        lower_slope = (lower - (squares - upper_squares)).clamp(lower / 2, lower)

        over, under = excess.clamp(min=0), (-excess).clamp(min=0)
        left, right = lower + over, upper + under
        log_left, log_right = left.log(), right.log()
        slope_left, slope_right = lower_slope / left, upper_slope / right
        # Where a sum underflows, σ(z) = e^z to all digits.
        info = torch.finfo(z.dtype)
        deep_left, deep_right = left < info.tiny / info.eps, right < info.tiny / info.eps
        if not self.early_stop or bool((deep_left | deep_right).any()):
            above = self.above > 0
            log_lower = z.masked_fill(above, -torch.inf).to(over.dtype).logsumexp(-1, keepdim=True)
            log_upper = (-z).masked_fill(~above, -torch.inf).to(over.dtype).logsumexp(-1, keepdim=True)
            log_left = torch.where(deep_left, torch.logaddexp(log_lower, over.log()), log_left)
            log_right = torch.where(deep_right, torch.logaddexp(log_upper, under.log()), log_right)
            slope_left = torch.where(deep_left, 1.0, slope_left)
            slope_right = torch.where(deep_right, 1.0, slope_right)
        ratio, slope = log_left - log_right, slope_left + slope_right
        self.last_step = (ratio / slope).nan_to_num(0.0).clamp(-1e-3, 1e-3)
        # σ(z) carries about |z| roundings of z, and −log of a small sum is about the |z| that counts.
        noise = 4 * info.eps * (-log_left).clamp(min=0)
        # A Newton step from here errs by its square; ten times the solver's own tolerance is still beyond doubt.
        near = ratio.abs() <= info.eps**0.5 + noise
        self.is_solved = near | ((left - right).abs() <= 4 * info.eps * self.k.clamp(min=1))
        return Residual(ratio, slope, left - right, noise)

    def probabilities(self) -> Tensor:
        """σ(z) one Newton step on from the last evaluation, which also takes out what all z round alike."""
        p = (self.above - self.tail).abs_()
        v = torch.addcmul(self.tail, self.tail, self.tail, value=-1, out=self.spare)
        return p.sub_(v.mul_(self.last_step.to(p.dtype)))


def _survey(x: Tensor, k: Tensor, early_stop: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scores, their least and greatest finite one, the number of finite ones and that of +inf.

    All but the scores are (…, 1) float64. The number of finite ones is NaN in a row that holds NaN.
    """
    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if early_stop and bool((low.isfinite() & high.isfinite()).all()):
        return x, low, high, torch.full_like(k, x.shape[-1]), torch.zeros_like(k)
    infinite = x == torch.inf
    forced = infinite.sum(-1, keepdim=True).to(k.dtype)
    tied = forced > k  # too many +inf: they share k, as equal scores do
    x = torch.where(tied & ~x.isnan(), torch.where(infinite, 0.0, -torch.inf).to(x.dtype), x)
    forced = torch.where(tied, 0.0, forced)
    finite = x.isfinite()
    low = torch.where(finite, x, torch.inf).amin(-1, keepdim=True).to(k.dtype)
    high = torch.where(finite, x, -torch.inf).amax(-1, keepdim=True).to(k.dtype)
    free = torch.where(x.isnan().any(-1, keepdim=True), torch.nan, finite.sum(-1, keepdim=True).to(k.dtype))
    return x, low, high, free, forced


def _start(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    free: Tensor,
    rest: Tensor,
    logit: Tensor,
    temperature: Tensor,
    early_stop: bool,
) -> Point:
    """A first guess: the threshold of a sample, or that of a normal distribution with the same moments."""
    if x.shape[-1] >= 4 * SAMPLE:
        sample = x[..., :: x.shape[-1] // SAMPLE].contiguous()
        finite, forced = sample.isfinite().sum(-1), (sample == torch.inf).sum(-1)
        k = (rest / free).squeeze(-1) * finite + forced
        guess = solve(sample, k, temperature.squeeze(-1), None, early_stop=early_stop).point
        is_good = guess.shift.isfinite()
        return Point(torch.where(is_good, guess.anchor, low), torch.where(is_good, guess.shift, -logit))
    center, radius = low / 2 + high / 2, (high / 2 - low / 2).clamp(min=torch.finfo(x.dtype).tiny)
    y = (x - center.to(x.dtype)) / radius.to(x.dtype)  # in [−1, 1]: no square can overflow
    y = y.masked_fill_(x.isinf(), 0.0)
    mean = row_sum(y) / free
    variance = (row_sum(y.square()) / free - mean.square()).clamp(min=0) * radius.square()
    # σ convolved with a normal of variance s² is nearly σ(·/√(1 + πs²/8)).
    threshold = center + radius * mean - logit * (temperature.square() + math.pi / 8 * variance).sqrt()
    threshold = torch.where(threshold.isfinite(), threshold, center)
    return Point(center, (threshold - center) / temperature)
