"""Sampford's and Brewer's laws on the last dim: exact inclusion probabilities, with an entropy near the largest.

Sampford's law is p(s) ∝ Π_s w · Σ_s (1 − π), w = π/(1 − π), drawn by accepting samples of Pareto's law. Brewer's draws
one item after another, with odds that make the inclusion probabilities right.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import natural, noise, order_sampling, select
from .natural import Margins
from .noise import Uniform
from .order_sampling import LOGISTIC, HardTopK, made_anew
from .subsets import safe_log

FALL = 46.0  # the integrand is followed until it has fallen by e^−46 = 1e-20
TRIES = 16
AT_ONCE = 1 << 17  # numbers at a time: few enough for a cache


def pareto_constants(logits: Tensor, k: Tensor, step: float = 0.5) -> Tensor:
    """Return c, up to a factor per row, in Pareto's law p(s) ∝ Π_s w · Σ_s c; (…, n), 0 for items that are certain.

    c_i = ∫ e^{g(y)} σ(−θ_i − y) dy, g(y) = ky − Σ log(1 + e^{θ + y}), by the trapezoid rule: g is concave, g'(0) = 0.
    They are good to 1e-12 at the greatest step, and to rounding at 0.27.
    """
    n = logits.shape[-1]
    rows = logits.reshape(-1, n)
    is_open = rows.isfinite()
    theta = torch.where(is_open, rows, 0.0)
    size = k.expand(logits.shape[:-1]).reshape(-1) - (rows == torch.inf).sum(-1)

    def exponent(theta: Tensor, is_open: Tensor, size: Tensor, y: Tensor) -> Tensor:
        at = logsigmoid(-(theta[:, None, :] + y[..., None])) - logsigmoid(-theta[:, None, :])
        return size[:, None] * y + (at * is_open[:, None, :]).sum(-1)  # (rows, nodes)

    with torch.no_grad():
        spread = (theta.sigmoid() * torch.sigmoid(-theta) * is_open).sum(-1)
        reach = (2 * FALL / spread.clamp(min=1e-3)).sqrt()
        ends = []
        for sign in (-1.0, 1.0):
            end = reach
            while bool((is_short := _is_short(exponent(theta, is_open, size, sign * end[:, None]), is_open)).any()):
                end = torch.where(is_short, 1.5 * end, end)
            ends.append(sign * end)
        apart = (spread.clamp(min=1e-300).rsqrt() / 1.6).clamp(max=step)
        nodes = int(((ends[1] - ends[0]) / apart).max().ceil()) + 1 if spread.numel() else 1
        share = torch.linspace(0, 1, nodes, dtype=theta.dtype, device=theta.device)

    def integral(theta: Tensor, is_open: Tensor, size: Tensor, low: Tensor, high: Tensor) -> Tensor:
        total = torch.zeros_like(theta)
        for part in share.split(max(AT_ONCE // max(theta.numel(), 1), 1)):
            y = low[:, None] + (high - low)[:, None] * part  # (rows, nodes)
            away = torch.sigmoid(-(theta[:, None, :] + y[..., None]))
            total = total + (exponent(theta, is_open, size, y).exp()[..., None] * away).sum(-2)
        return torch.where(is_open, total, 0.0)

    width = max(AT_ONCE // (nodes * n), 1)
    parts = list(zip(*(t.split(width) for t in (theta, is_open, size, *ends)), strict=True))
    return torch.cat([made_anew(integral, len(parts), *part) for part in parts]).view(logits.shape)


def _is_short(exponent: Tensor, is_open: Tensor) -> Tensor:
    return (exponent[:, 0] > -FALL) & is_open.any(-1)


def draw_sampford(
    p: Tensor,
    k: Tensor,
    seed: Tensor,
    draws: int,
    uniform: Uniform,
    hard_topk: HardTopK,
    margins: Margins,
    constants_of: Callable[[Tensor, Tensor], Tensor],
    rejective: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Tensor:
    """Draw `draws` samples of each row of p (rows, n); (draws, rows, n) float64.

    Pareto's law is close to Sampford's, so nearly all of its samples are accepted, unless nearly all items are certain.
    Samples that `TRIES` rounds have not accepted are drawn as a mixture. `constants_of` is `pareto_constants`, and
    `rejective` is `natural.draw` from tilted logits, or twins of them.
    """
    rows, n = p.shape
    logits = torch.logit(p)
    constants = constants_of(logits, k)
    away = torch.where(logits.isfinite(), 1 - p, 0.0)
    bound = (away / torch.where(constants > 0, constants, torch.inf)).amax(-1)
    result = p.new_empty(draws * rows, n)
    left = torch.arange(draws * rows, device=p.device)
    for attempt in range(TRIES):
        row = left % rows
        theta, rest, weight = (t if len(left) == rows and not attempt else t[row] for t in (logits, away, constants))
        trial = order_sampling.draw(LOGISTIC, theta, k[row], seed, 1, uniform, hard_topk, 2 * attempt)[0]
        u = uniform(seed, 2 * attempt + 1, len(left))
        is_accepted = (trial * rest).sum(-1) >= u * bound[row] * (trial * weight).sum(-1)
        if not attempt and bool(is_accepted.all()):
            return trial.view(draws, rows, n)
        result[left[is_accepted]] = trial[is_accepted]
        left = left[~is_accepted]
        if len(left) == 0:
            break
    else:
        row, key = left % rows, noise.stream_key(seed, 2 * TRIES)
        result[left] = _mixture(logits[row], away[row], k[row], key, uniform, margins, rejective)
    return result.view(draws, rows, n)


def _mixture(
    logits: Tensor,
    away: Tensor,
    k: Tensor,
    seed: Tensor,
    uniform: Uniform,
    margins: Margins,
    rejective: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Tensor:
    """Draw one item ∝ (1 − π) times its chance in the law ∝ Π w, and the others from that law."""
    running = (away * natural.marginals(logits, k, margins)).cumsum(-1)
    u = uniform(seed, 0, len(logits))[:, None]
    first = torch.searchsorted(running, u * running[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    z, _ = natural.tilt(logits.scatter(-1, first, torch.inf), k, margins)
    return rejective(z, k, noise.stream_key(seed, 1), 1)[0]


def brewer_odds(p: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Return the odds of the next item given those drawn: π(R − π)/(R − mπ), R = k − Σ_drawn π, m yet to be drawn."""
    left, rest = (k - x.sum(-1))[..., None], (k - (p * x).sum(-1))[..., None]
    is_open = (x == 0) & (p > 0) & (left > 0)
    weight = torch.where(is_open, p * (rest - p) / torch.where(is_open, rest - left * p, 1.0), 0.0)
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total > 0, total, 1.0)


def draw_brewer(p: Tensor, k: Tensor, seed: Tensor, draws: int, uniform: Uniform) -> Tensor:
    """Draw `draws` samples of each row of p (rows, n); (draws, rows, n) float64."""
    rows, n = p.shape
    x = (p == 1).to(p.dtype).expand(draws, rows, n)
    for step in range(int((k - (p == 1).sum(-1)).max())):
        running = brewer_odds(p, x, k).cumsum(-1)
        total = running[..., -1:]
        u = uniform(seed, step, draws * rows).view(draws, rows, 1)
        chosen = torch.searchsorted(running, u * total, right=True).clamp(max=n - 1)
        x = torch.where(total > 0, x.scatter(-1, chosen, 1.0), x)
    return x


def brewer_log_prob(p: Tensor, k: Tensor, value: Tensor) -> Tensor:
    """Return log P(value) (…), summed over the orders in which it can be drawn: 2^k sets on the way."""
    certain = (p == 1).to(p.dtype)
    index = select.indices((value * (1 - certain)).detach())  # (…, m), −1 where there is none
    m = index.shape[-1]
    member = torch.arange(1 << m, device=p.device)[:, None] >> torch.arange(m, device=p.device) & 1  # (2^m, m)
    hot = (index[..., None] == torch.arange(p.shape[-1], device=p.device)).to(p.dtype)  # (…, m, n)
    drawn = certain[..., None, :] + member.to(p.dtype) @ hot  # (…, 2^m, n)
    step = brewer_odds(p[..., None, :], drawn, k[..., None]) @ hot.mT  # (…, 2^m, m)
    chance = [torch.ones_like(value[..., 0])]  # of each set on the way
    for place in range(1, 1 << m):
        ways = [chance[place ^ 1 << b] * step[..., place ^ 1 << b, b] for b in range(m) if place >> b & 1]
        chance.append(torch.stack(ways).sum(0))
    whole = (1 << (index >= 0).sum(-1, keepdim=True)) - 1
    return safe_log(torch.stack(chance, -1).gather(-1, whole)[..., 0])
