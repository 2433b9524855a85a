"""Cells of near points."""

import math

import torch
from torch import Tensor

CHUNK = 2**22  # products of points and means that are held at once


def cluster(x: Tensor, size: int, rounds: int) -> Tensor:
    """Return points x (B, n, d) in cells of near ones, as indices (B, cells, size); n stands for none.

    Halving gives about n/size means, some rounds of k-means move them, and a cluster of more than `size` is cut.
    """
    many, n = x.shape[:2]
    if not many:
        return torch.empty(0, math.ceil(n / size), size, dtype=torch.int64, device=x.device)
    group = torch.zeros(many, n, dtype=torch.int64, device=x.device)
    parts = 2 ** max(0, round(math.log2(n / size)))
    if parts > 1:
        index = _halved(x, parts)
        means = _means(x, torch.empty_like(group).scatter_(1, *_without_blanks(index, n)), parts, x[:, :1])
        for step in range(rounds + 1):
            group = _nearest(x, means)
            if step < rounds:
                means = _means(x, group, parts, means)
    counts = torch.zeros(many, parts, dtype=torch.int64, device=x.device).scatter_add_(1, group, torch.ones_like(group))
    cells = (counts + size - 1) // size
    order = group.argsort(dim=1, stable=True)
    mine = group.gather(1, order)
    rank = torch.arange(n, device=x.device) - (counts.cumsum(1) - counts).gather(1, mine)
    place = ((cells.cumsum(1) - cells).gather(1, mine) + rank // size) * size + rank % size
    result = torch.full((many, int(cells.sum(1).max()) * size), n, device=x.device)
    return result.scatter_(1, place, order).view(many, -1, size)


def _halved(x: Tensor, parts: int) -> Tensor:
    """Halve again and again across the direction of the largest variance; (B, parts, n/parts), n stands for none."""
    n = x.shape[1]
    index = torch.arange(parts * math.ceil(n / parts), device=x.device).clamp(max=n).expand(len(x), 1, -1)
    x = torch.cat((x, torch.zeros_like(x[:, :1])), 1)
    while index.shape[1] < parts:
        part = x.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])).view(*index.shape, -1)
        has = (index < n).unsqueeze(-1)
        part = (part - part.sum(-2, keepdim=True) / has.sum(-2, keepdim=True).clamp(min=1)) * has
        along = part[..., :1, :] + part.abs().amax(-2, keepdim=True)
        for _ in range(3):  # of the power method; any direction will do
            along = (part @ along.mT).mT @ part
            along = along / along.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        order = (part @ along.mT).squeeze(-1).masked_fill(~has.squeeze(-1), torch.inf).argsort(-1)
        index = index.gather(-1, order).view(len(x), 2 * index.shape[1], -1)
    return index


def _without_blanks(index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the points of parts (B, parts, size) as (B, n), and which part each is in."""
    flat = index.flatten(1)
    keep = flat.argsort(dim=1, stable=True)[:, :n]  # blanks are n, and come last
    return flat.gather(1, keep), keep // index.shape[-1]


def _nearest(x: Tensor, means: Tensor) -> Tensor:
    """Return the nearest mean (B, m, d) of each point, (B, n)."""
    half = means.square().sum(-1) / 2
    step = max(1, CHUNK // means.shape[1])
    rows = [
        torch.cat([(part @ m.T - h).argmax(-1) for part in points.split(step)])
        for points, m, h in zip(x, means, half, strict=True)
    ]
    return torch.stack(rows)


def _means(x: Tensor, group: Tensor, parts: int, old: Tensor) -> Tensor:
    """Return the means (B, parts, d) of groups; that of an empty one does not move."""
    sums = x.new_zeros(len(x), parts, x.shape[-1]).scatter_add_(1, group.unsqueeze(-1).expand_as(x), x)
    counts = x.new_zeros(len(x), parts, 1).scatter_add_(1, group.unsqueeze(-1), torch.ones_like(x[..., :1]))
    return torch.where(counts > 0, sums / counts.clamp(min=1), old)
