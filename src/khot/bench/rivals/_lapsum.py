"""LapSum, re-implemented for comparison."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ._implicit import implicit, laplace_density


def lapsum(x: Tensor, k: float) -> Tensor:
    """The threshold family with the Laplace cdf, solved in closed form between two scores.

    Our re-implementation of LapSum (Struski et al., 2025): sort; cumulative sums of e^{±x}, which give Σy for a
    threshold at each score; search for the two scores that enclose the threshold; between them Σy = k is a quadratic in
    e^τ. O(n log n). Differentiates implicitly.

    The exponentials are taken from the middle of each row: scores may span 170 in float32 and 1400 in float64.

    Args:
        x: (…, n) scores.
        k: 0 < k < n, whole or fractional.
    """
    return implicit(x, partial(_solve, k=k), laplace_density)


def _solve(x: Tensor, k: float) -> Tensor:
    n = x.shape[-1]
    s = x.sort(-1).values
    middle = (s[..., :1] + s[..., -1:]) / 2
    up = (s - middle).exp_()
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
    return _laplace_cdf((x - s.gather(-1, anchor)).sub_(u.log()))


def _laplace_cdf(z: Tensor) -> Tensor:
    tail = z.abs().neg_().exp_().div_(2)
    return torch.where(z > 0, 1 - tail, tail)
