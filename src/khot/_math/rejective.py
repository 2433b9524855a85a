"""Samplers of the law p(x) ∝ exp(z·x) of k-subsets, tilted: Σσ(z) = k."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from . import count_tree

TRIES = 8
STEEP = 300.0  # e^z is not summed beyond
AT_ONCE = 1 << 22  # numbers at a time along the tree


def draw(z: Tensor, k: Tensor, seed: Tensor, draws: int) -> Tensor:
    """`draws` k-hot samples of each row of z (rows, n); (draws, rows, n) float64.

    Few of many items are drawn one by one, with replacement, until they differ, `TRIES` times; the rest, and what
    failed, along the tree of counts. The law is the same.
    """
    rows, n = z.shape
    most = int(k.max())
    result = z.new_zeros(draws, rows, n)
    is_left = torch.ones(draws, rows, dtype=torch.bool, device=z.device)
    if 0 < 4 * most * most <= n:
        chosen, is_left = _one_by_one(z, k, most, seed, draws)
        result = z.new_zeros(draws, rows, n + 1).scatter_(-1, chosen, 1.0)[..., :n]  # n stands for none
    width = max(AT_ONCE // (n * n.bit_length()), 1)
    stream = TRIES
    for first in range(0, rows, width):
        part = slice(first, first + width)
        if not bool(is_left[:, part].any()):
            continue
        levels = count_tree.build(z[part].sigmoid(), most)
        needed = is_left[:, part].any(-1).nonzero()[:, 0]
        for some in needed.split(max(AT_ONCE // (n * len(z[part])), 1)):
            size = k[part].expand(len(some), -1)
            sample, stream = count_tree.sample(levels, size, seed, stream)
            result[some, part] = torch.where(is_left[some, part][..., None], sample[..., :n], result[some, part])
    return result


def _one_by_one(z: Tensor, k: Tensor, most: int, seed: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Indices (draws, rows, most), n where there is none; and whether no try succeeded (draws, rows)."""
    rows, n = z.shape
    is_steep = z.amax(-1) > STEEP
    running = z.masked_fill(is_steep[:, None], 0.0).exp().cumsum(-1)
    is_left = torch.ones(draws, rows, dtype=torch.bool, device=z.device)
    result = torch.full((draws, rows, most), n, device=z.device)
    is_used = torch.arange(most, device=z.device) < k[:, None]
    for stream in range(TRIES):
        u = ops.uniform(seed, stream, draws * rows * most).view(rows, draws * most)
        place = torch.searchsorted(running, u * running[:, -1:], right=True).clamp(max=n - 1)
        chosen = torch.where(is_used, place.view(rows, draws, most).transpose(0, 1), n)
        ranked = chosen.sort(-1).values
        differ = ((ranked.diff() != 0) | (ranked[..., 1:] == n)).all(-1)
        is_new = is_left & differ & ~is_steep
        result = torch.where(is_new[..., None], chosen, result)
        is_left = is_left & ~is_new
        if not bool(is_left.any()):
            break
    return result, is_left
