"""Brewer's draw-by-draw procedure, on the last dim: odds that make the inclusion probabilities right."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from . import select


def odds(p: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Of the next item, given those drawn x: π(R − π)/(R − mπ), R = k − Σ_drawn π, m yet to be drawn; (…, n), sum 1."""
    left = (k - x.sum(-1))[..., None]
    rest = (k - (p * x).sum(-1))[..., None]
    is_open = (x == 0) & (p > 0) & (left > 0)
    weight = torch.where(is_open, p * (rest - p) / torch.where(is_open, rest - left * p, 1.0), 0.0)
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total > 0, total, 1.0)


def draw(p: Tensor, k: Tensor, seed: Tensor, draws: int) -> Tensor:
    """`draws` samples of each row of p (rows, n); (draws, rows, n) float64."""
    rows, n = p.shape
    x = (p == 1).to(p.dtype).expand(draws, rows, n)
    for step in range(int((k - (p == 1).sum(-1)).max())):
        running = odds(p, x, k).cumsum(-1)
        total = running[..., -1:]
        u = ops.uniform(seed, step, draws * rows).view(draws, rows, 1)
        chosen = torch.searchsorted(running, u * total, right=True).clamp(max=n - 1)
        x = torch.where(total > 0, x.scatter(-1, chosen, 1.0), x)
    return x


def log_prob(p: Tensor, k: Tensor, value: Tensor) -> Tensor:
    """log P(value) (…), summed over the orders in which it can be drawn: 2^k sets on the way."""
    certain = (p == 1).to(p.dtype)
    free = (value * (1 - certain)).detach()
    index = select.indices(free)  # (…, m), −1 where there is none
    m = index.shape[-1]
    member = torch.arange(1 << m, device=p.device)[:, None] >> torch.arange(m, device=p.device) & 1  # (2^m, m)
    hot = torch.nn.functional.one_hot(index.clamp(min=0), p.shape[-1]) * (index >= 0)[..., None]  # (…, m, n)
    drawn = certain[..., None, :] + (member.to(p.dtype) @ hot.to(p.dtype))  # (…, 2^m, n)
    step = odds(p[..., None, :], drawn, k[..., None]) @ hot.to(p.dtype).mT  # (…, 2^m, m)
    chance = [torch.ones_like(value[..., 0])]  # of each set on the way
    for place in range(1, 1 << m):
        ways = [chance[place ^ 1 << b] * step[..., place ^ 1 << b, b] for b in range(m) if place >> b & 1]
        chance.append(torch.stack(ways).sum(0))
    size = (index >= 0).sum(-1)
    reached = torch.stack(chance, -1).gather(-1, ((1 << size) - 1)[..., None])[..., 0]
    is_nil = reached <= 0
    return torch.where(is_nil, -torch.inf, torch.where(is_nil, 1.0, reached).log())
