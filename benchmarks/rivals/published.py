"""The solvers of two papers of the threshold family, re-implemented for comparison."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from .implicit import implicit, laplace_density


def halley(x: Tensor, k: float) -> Tensor:
    """Solve σ_k as the paper that introduced it: Halley's method guarded by bisection, in float64; 0 < k < n.

    Our re-implementation of the method of Wijk et al., "From one-hot to k-hot" (2025). It starts at the better of
    `logit(k/n) − mean x` and minus a quantile of x, which costs a full sort. Each iteration tries a Halley step and the
    middle of the bracket `±(max|x| + 10)` and keeps the one that leaves the smaller residual. It ends when the largest
    residual of the batch is below 1e-6, after 50 iterations at the latest.
    """
    return implicit(x, partial(_solve_halley, k=k))


def _solve_halley(x: Tensor, k: float) -> Tensor:
    scores = x.to(torch.float64)
    n = scores.shape[-1]
    high = scores.abs().amax(-1, keepdim=True) + 10
    low = -high
    by_mean = math.log(k / (n - k)) - scores.mean(-1, keepdim=True)
    by_quantile = -_quantile(scores, (n - k) / n)
    p, spare = torch.empty_like(scores), torch.empty_like(scores)
    shift, residual = _better(scores, k, by_mean, by_quantile, p, spare)
    for _ in range(50):
        if residual.abs().max() < 1e-6:
            break
        high, low = torch.where(residual > 0, shift, high), torch.where(residual > 0, low, shift)
        v = torch.addcmul(p, p, p, value=-1, out=spare)
        slope = v.sum(-1, keepdim=True)
        curvature = slope - 2 * v.mul_(p).sum(-1, keepdim=True)  # Σ v(1 − 2p)
        step = 2 * residual * slope / (2 * slope.square() - residual * curvature)
        shift, residual = _better(scores, k, shift - step, (low + high) / 2, p, spare)
    return p.to(x.dtype)


def _better(scores: Tensor, k: float, first: Tensor, second: Tensor, p: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shift of smaller |Σp − k| (the second if the first is NaN) and its Σp − k; leave its p in `p`."""
    a = torch.add(scores, first, out=p).sigmoid_().sum(-1, keepdim=True) - k
    b = torch.add(scores, second, out=spare).sigmoid_().sum(-1, keepdim=True) - k
    wins = a.abs() <= b.abs()
    torch.where(wins, p, spare, out=p)
    return torch.where(wins, first, second), torch.where(wins, a, b)


def _quantile(x: Tensor, q: float) -> Tensor:
    """Return what torch.quantile does, which refuses more than 16 million scores; (…, 1)."""
    place = q * (x.shape[-1] - 1)
    low, ordered = math.floor(place), x.sort(-1).values
    pair = ordered[..., low : low + 2]  # one element if the place is the last
    return torch.lerp(pair[..., :1], pair[..., -1:], place - low)


def lapsum(x: Tensor, k: float) -> Tensor:
    """Solve the threshold family with the Laplace cdf, in closed form between two scores; 0 < k < n.

    Our re-implementation of LapSum (Struski et al., 2025): sort; cumulative sums of e^{±x}, which give Σy for a
    threshold at each score; search for the two scores that enclose the threshold; between them Σy = k is a quadratic in
    e^τ. O(n log n). The exponentials are taken from the middle of each row: scores may span 170 in float32 and 1400 in
    float64.
    """
    return implicit(x, partial(_solve_lapsum, k=k), laplace_density)


def _solve_lapsum(x: Tensor, k: float) -> Tensor:
    n = x.shape[-1]
    s = x.sort(-1).values
    up = (s - (s[..., :1] + s[..., -1:]) / 2).exp_()
    down = up.reciprocal()
    # With the threshold at s_j: scores up to j give ½Σe^{s−s_j}, each of those after it 1 − ½e^{s_j−s}.
    below = up.cumsum(-1).mul_(down)
    after = down.flip(-1).cumsum_(-1).flip(-1)
    above = down
    torch.mul(after[..., 1:], up[..., :-1], out=above[..., :-1])
    above[..., -1] = 0
    # The sum falls along the row and searchsorted wants rising values: n minus the sum.
    missing = torch.sub(above, below, out=up).div_(2).add_(torch.arange(1, n + 1, dtype=x.dtype, device=x.device))
    j = torch.searchsorted(missing, missing.new_full((*x.shape[:-1], 1), n - k), right=True) - 1  # −1: below all scores
    anchor = j.clamp(min=0)

    # Σ = m − ½·above·u + ½·below/u with u = e^{τ − s_j} and m scores above; the positive root without cancellation.
    a, b = above.gather(-1, anchor), below.gather(-1, anchor)
    a, b = torch.where(j < 0, a + 1, a), torch.where(j < 0, 0.0, b)
    d = ((n - 1 - j).double() - k).to(x.dtype)
    root = (d.square() + a * b).sqrt()
    u = torch.where(d > 0, (d + root) / a, b / (root - d))
    z = (x - s.gather(-1, anchor)).sub_(u.log())
    tail = z.abs().neg_().exp_().div_(2)
    return torch.where(z > 0, 1 - tail, tail)
