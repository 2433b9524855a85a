"""The law p(x) ∝ exp(θ·x) of k-subsets: its normaliser, marginals and covariance, and θ for given marginals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .. import ops
from . import cdfs, subsets

STEPS, INNER_STEPS = 100, 60
TOLERANCE = 1e-13
NEARLY_CERTAIN = 1e-12


def tilt(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """z = θ + λ with Σσ(z) = k, and λ (…); z has the gradient of θ, as nothing depends on λ.

    z is ±inf where an item is drawn for sure or never; λ is 0 where that holds for all.
    """
    one = torch.ones_like(k)
    with torch.no_grad():
        z = ops.margin(theta.detach(), k, one, None, None, cdfs.SIGMOID)
        rank = torch.where(z.isfinite(), z.abs(), torch.inf)
        place = rank.argmin(-1, keepdim=True)
        is_finite = rank.gather(-1, place).isfinite()
        shift = torch.where(is_finite, z.gather(-1, place) - theta.gather(-1, place), 0.0)
    return torch.where(z.isfinite(), theta + shift, z), shift[..., 0]


def log_normaliser(theta: Tensor, k: Tensor) -> Tensor:
    """log Σ over k-subsets of exp(θ·x); (…). An item with θ = +inf counts in every subset, with weight 1."""
    z, shift = tilt(theta, k)
    is_forced = theta == torch.inf
    is_open = z.isfinite()
    # what is drawn without choice, as k is all that is left: its θ alone
    taken = torch.where((z == torch.inf) & ~is_forced, theta, 0.0)
    free = -logsigmoid(-torch.where(is_open, z, 0.0)) * is_open
    size = k - is_forced.sum(-1)
    return subsets.log_size(subsets.counts(z, k)) + (free + taken).sum(-1) - size * shift


def marginals(theta: Tensor, k: Tensor) -> Tensor:
    """P(x_i = 1); (…, n)."""
    return subsets.marginals(subsets.counts(tilt(theta, k)[0], k))


def covariance_product(theta: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cov(x) v; (…, n)."""
    return subsets.covariance_product(subsets.counts(tilt(theta, k)[0], k), v)


def solve(p: Tensor, k: Tensor) -> Tensor:
    """θ such that the marginals are p, with Σσ(θ) = k; ±inf where p is 0 or 1.

    The odds of item i are e^θ times P(others: k − 1)/P(others: k). To add what the logits of the marginals lack
    contracts by about 1/Σp(1 − p); where it does not by 4, the step is Newton's, for those same logits, which are
    nearly linear in θ however close to 0 or 1 the marginals are.
    """
    goal = torch.logit(p)
    is_open = goal.isfinite()
    theta, last, is_newton = goal, torch.full((), torch.inf, device=p.device), False
    for _ in range(STEPS):
        z, _ = tilt(theta, k)
        counts = subsets.counts(z, k)
        less, same = subsets.without(counts)
        lack = torch.where(is_open, goal - z - (less / same).log(), 0.0)
        spread = subsets.spread(counts, less, same)
        lack = lack - (spread * lack).sum(-1, keepdim=True) / spread.sum(-1, keepdim=True).clamp(min=1e-300)
        error = lack.abs().max() if lack.numel() else last
        if not error > TOLERANCE or (is_newton and error > last / 2 and error < 1e-9):  # solved, or to rounding
            break
        is_newton = bool(error > last / 4)
        step = covariance_solve(counts, spread * lack) if is_newton else lack
        last = error
        theta = torch.where(is_open, z + step, goal)
    return torch.where(is_open, tilt(theta, k)[0], goal)


def covariance_solve(counts: subsets.Counts, r: Tensor) -> Tensor:
    """The v with Cov(x) v = r and Σv = 0, by conjugate gradients; items that are certain have v = 0.

    Cov is singular along 1: residuals are kept to sum to 0, and a row rests once it is solved to rounding. Items that
    are certain but for 1e-12 move by themselves: what joins them to others is below the rounding of Cov v.
    """
    less, same = subsets.without(counts)
    spread = subsets.spread(counts, less, same)
    is_open = spread > NEARLY_CERTAIN
    scale = torch.where(spread > 0, 1 / torch.where(spread > 0, spread, 1.0), 0.0)
    alone = torch.where(is_open, 0.0, scale * r)
    share = torch.where(is_open, spread, 0.0)
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-300)

    def balanced(t: Tensor) -> Tensor:
        t = torch.where(is_open, t, 0.0)
        return t - share * t.sum(-1, keepdim=True)

    r = balanced(r)
    v = torch.zeros_like(r)
    direction = scale * r  # r is 0 where it is not open
    power = start = (r * direction).sum(-1, keepdim=True)
    is_live = power > 0
    for _ in range(INNER_STEPS):
        if not is_live.any():
            break
        image = subsets.covariance_product(counts, direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        is_live = is_live & (curvature > 0)
        size = torch.where(is_live, power / torch.where(is_live, curvature, 1.0), 0.0)
        v = v + size * direction
        r = balanced(r - size * image)
        y = scale * r
        next_power = (r * y).sum(-1, keepdim=True)
        is_live = is_live & (next_power > 1e-29 * start)
        ratio = torch.where(is_live, next_power / torch.where(is_live, power, 1.0), 0.0)
        direction, power = y + ratio * direction, next_power
    return torch.where(is_open, v - v.sum(-1, keepdim=True) / is_open.sum(-1, keepdim=True).clamp(min=1), alone)
