"""Sampford's law on the last dim: p(s) ∝ Π_s w · Σ_s (1 − π), w = π/(1 − π), by accepting samples of Pareto's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .. import ops
from . import natural, noise, order_sampling, rejective

FALL = 46.0  # e^−46 is 1e-20
TRIES = 16


def pareto_constants(logits: Tensor, k: Tensor) -> Tensor:
    """c, up to a factor per row, in Pareto's law p(s) ∝ Π_s w · Σ_s c; (…, n), 0 for items that are certain.

    c_i = ∫ e^{g(y)} σ(−θ_i − y) dy, g(y) = ky − Σ log(1 + e^{θ + y}), by the trapezoid rule: g is concave, g'(0) = 0.
    """
    is_open = logits.isfinite()
    theta = torch.where(is_open, logits, 0.0)
    size = k - (logits == torch.inf).sum(-1)

    def exponent(y: Tensor) -> Tensor:
        at = logsigmoid(-(theta[..., None, :] + y[..., None])) - logsigmoid(-theta[..., None, :])
        return size[..., None] * y + (at * is_open[..., None, :]).sum(-1)  # (…, nodes)

    spread = (theta.sigmoid() * torch.sigmoid(-theta) * is_open).sum(-1)
    reach = (2 * FALL / spread.clamp(min=1e-3)).sqrt()
    ends = []
    for sign in (-1.0, 1.0):
        end = reach
        while bool((is_short := (exponent(sign * end[..., None])[..., 0] > -FALL) & is_open.any(-1)).any()):
            end = torch.where(is_short, 1.5 * end, end)
        ends.append(sign * end)
    step = torch.minimum(spread.clamp(min=1e-300).rsqrt() / 1.6, torch.full_like(spread, 0.5))
    nodes = int(((ends[1] - ends[0]) / step).max().ceil()) + 1
    share = torch.linspace(0, 1, nodes, dtype=theta.dtype, device=theta.device)
    total = torch.zeros_like(theta)
    for part in share.split(max((1 << 20) // theta.shape[-1], 1)):
        y = ends[0][..., None] + (ends[1] - ends[0])[..., None] * part  # (…, nodes)
        away = torch.sigmoid(-(theta[..., None, :] + y[..., None]))
        total = total + (exponent(y).exp()[..., None] * away).sum(-2)
    return torch.where(is_open, total, 0.0)


def draw(p: Tensor, k: Tensor, seed: Tensor, draws: int) -> Tensor:
    """`draws` samples of each row of p (rows, n); (draws, rows, n) float64.

    Pareto's law is close to Sampford's, so nearly all of its samples are accepted; unless nearly all items are certain:
    what `TRIES` have not settled is drawn as a mixture.
    """
    rows, n = p.shape
    logits = torch.logit(p)
    constants = pareto_constants(logits, k)
    away = torch.where(logits.isfinite(), 1 - p, 0.0)
    bound = (away / torch.where(constants > 0, constants, torch.inf)).amax(-1)
    result = p.new_empty(draws * rows, n)
    left = torch.arange(draws * rows, device=p.device)
    for attempt in range(TRIES):
        row = left % rows
        trial = order_sampling.draw(order_sampling.LOGISTIC, logits[row], k[row], seed, 1, 2 * attempt)[0]
        accept = (trial * away[row]).sum(-1) >= (
            ops.uniform(seed, 2 * attempt + 1, len(left)) * bound[row] * (trial * constants[row]).sum(-1)
        )
        result[left[accept]] = trial[accept]
        left = left[~accept]
        if len(left) == 0:
            break
    else:
        row = left % rows
        result[left] = _mixture(logits[row], away[row], k[row], noise.stream_key(seed, 2 * TRIES))
    return result.view(draws, rows, n)


def _mixture(logits: Tensor, away: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    """Σ_s (1 − π) as a choice: one item ∝ (1 − π) times its chance in the law ∝ Π w, and of that law the others."""
    running = (away * natural.marginals(logits, k)).cumsum(-1)
    u = ops.uniform(seed, 0, len(logits))[:, None]
    first = torch.searchsorted(running, u * running[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    z, _ = natural.tilt(logits.scatter(-1, first, torch.inf), k)
    return rejective.draw(z, k, noise.stream_key(seed, 1), 1)[0]
