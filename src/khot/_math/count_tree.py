"""Drawing k-subsets from the law of independent draws given their number: a tree of counts, on the last dim.

Each node has the distribution of its number of ones. From the root down, a node with c ones gives j of them to its left
child with probability ∝ P_left(j) P_right(c − j). O(n log n) for each sample, in ⌈log2 n⌉ rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops

DIRECT = 16  # up to this length, distributions are convolved term by term; beyond, by FFT


class Node(NamedTuple):
    """The nodes of one level."""

    mass: Tensor
    """(…, nodes, size + 1) P(number of ones), within [least, most]."""
    least: Tensor
    """(…, nodes) how many are ones for sure."""
    most: Tensor
    """(…, nodes) how many can be."""


def build(p: Tensor, most: int) -> list[Node]:
    """The levels from the leaves (…, n) to the root, for counts up to `most`.

    n is filled up to a power of two with items that are never drawn.
    """
    n = p.shape[-1]
    p = pad(p, (0, (1 << max(n - 1, 0).bit_length()) - n))
    levels = [Node(torch.stack((1 - p, p), -1), (p == 1).long(), (p > 0).long())]
    while levels[-1].mass.shape[-2] > 1:
        below = levels[-1]
        left, right = below.mass.unflatten(-2, (-1, 2)).unbind(-2)
        least, greatest = (bound.unflatten(-1, (-1, 2)).sum(-1) for bound in (below.least, below.most))
        mass = _convolved(left, right)[..., : most + 1]
        levels.append(Node(_within(mass, least, greatest), least, greatest))
    return levels


def sample(levels: list[Node], k: Tensor, seed: Tensor, stream: int) -> tuple[Tensor, int]:
    """Counts of the leaves (draws, …, n filled up) for `k` (draws, …) whole, and the next unused stream."""
    count = k.long()[..., None]
    for below in reversed(levels[:-1]):
        left, right = below.mass.unflatten(-2, (-1, 2)).unbind(-2)  # (…, nodes, size + 1)
        (least, least_right), (most, most_right) = (
            bound.unflatten(-1, (-1, 2)).unbind(-1) for bound in (below.least, below.most)
        )
        size = left.shape[-1]
        rest = count[..., None] - torch.arange(size, device=k.device)  # (draws, …, nodes, size + 1)
        is_possible = (rest >= 0) & (rest < size)
        other = right.expand(rest.shape).gather(-1, rest.clamp(0, size - 1))
        running = (left * torch.where(is_possible, other, 0.0)).cumsum(-1)
        coin = ops.uniform(seed, stream, count.numel()).view(count.shape) * running[..., -1]
        stream += 1
        first = (running <= coin[..., None]).sum(-1)
        first = torch.maximum(torch.minimum(first, torch.minimum(most, count - least_right)), least)
        first = torch.maximum(first, count - most_right)
        count = torch.stack((first, count - first), -1).flatten(-2)
    return count, stream


def _within(mass: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """0 where the count cannot be, which an FFT does not know."""
    place = torch.arange(mass.shape[-1], device=mass.device)
    return torch.where((place >= least[..., None]) & (place <= most[..., None]), mass.clamp(min=0), 0.0)


def _convolved(a: Tensor, b: Tensor) -> Tensor:
    size = a.shape[-1]
    if size > DIRECT + 1:
        length = 2 * size - 1
        product: Tensor = torch.fft.irfft(torch.fft.rfft(a, n=length) * torch.fft.rfft(b, n=length), n=length)
        return product
    result = a.new_zeros(*a.shape[:-1], 2 * size - 1)
    for j in range(size):
        result[..., j : j + size] += a[..., j : j + 1] * b
    return result
