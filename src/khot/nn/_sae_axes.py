"""One selection on three axes: for each token, for each latent, or for the whole batch.

Each finds the entries of the pre-activations x·W + b that the selection is among, piece by piece: the matrix (tokens,
latents) never exists whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import selectors

PIECE = 2**22
"""Entries of the matrix at a time."""


class Block(NamedTuple):
    """Rows to select in, of m candidates each; (rows, m)."""

    values: Tensor
    tokens: Tensor
    latents: Tensor
    k: float | Tensor
    """How many in each row: a number, or (rows,)."""


class Encoder(NamedTuple):
    """Tokens and weights of the pre-activations x·W + b, detached."""

    x: Tensor
    """(tokens, d)."""
    weight: Tensor
    """(d, latents)."""
    bias: Tensor
    """(latents,)."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The first token and the pre-activations of some tokens at a time."""
        step = max(1, PIECE // len(self.bias))
        for first in range(0, max(1, len(self.x)), step):
            yield first, torch.addmm(self.bias, self.x[first : first + step], self.weight).to(self.x.dtype)


def by_token(encoder: Encoder, k: float | Tensor, ratio: float) -> list[Block]:
    """Choose k for each token, among the ratio·k greatest."""
    width = min(len(encoder.bias), math.ceil(ratio * number(k)))
    found = [a.topk(width, sorted=False) for _, a in encoder.pieces()]
    values, latents = (torch.cat(parts) for parts in zip(*found, strict=True))
    tokens = torch.arange(len(values), device=values.device)[:, None].expand_as(latents)
    return [Block(values, tokens, latents, k)]


def by_batch(encoder: Encoder, total: float | Tensor, ratio: float) -> list[Block]:
    """Choose `total` entries in the whole batch, which is one row, among the ratio·total greatest."""
    n = len(encoder.bias)
    width = min(len(encoder.x) * n, math.ceil(ratio * number(total)))
    values, places = encoder.x.new_empty(0), torch.empty(0, dtype=torch.int64, device=encoder.x.device)
    for first, a in encoder.pieces():
        new, where = _greatest(a.flatten(), width)
        values, places = torch.cat([values, new]), torch.cat([places, where + first * n])
        if len(values) > width:
            values, best = values.topk(width, sorted=False)
            places = places[best]
    return [Block(values[None], (places // n)[None], (places % n)[None], total)]


def _greatest(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest, or all, and where they are; among what exceeds a bound that one entry in 64 suggests."""
    count = min(count, len(a))
    sample = a[::64]
    rank = count // 50 + 8  # of the sample, where some 5/4 of the count are expected above
    if rank < len(sample):
        where = (a > sample.kthvalue(len(sample) - rank).values).nonzero().squeeze(1)
        if len(where) >= count:
            values, best = a[where].topk(count, sorted=False)
            return values, where[best]
    values, where = a.topk(count, sorted=False)
    return values, where


def by_latent(encoder: Encoder, budgets: Tensor, ratio: float) -> list[Block]:
    """Choose budgets[j] tokens for the latent j, among ratio times as many; in a block, none has half of another's."""
    count = len(encoder.x)
    order = budgets.detach().argsort(descending=True, stable=True)
    octaves = budgets.detach()[order].log2().floor().unique_consecutive(return_counts=True)[1].tolist()
    blocks = []
    for latents in (part for octave in order.split(octaves) for part in octave.split(max(1, PIECE // count))):
        a = torch.addmm(encoder.bias[latents, None], encoder.weight.t()[latents], encoder.x.t())  # (latents, tokens)
        k = budgets[latents]
        values, tokens = a.topk(min(count, math.ceil(ratio * number(k.max()))), sorted=False)
        blocks.append(Block(values.to(encoder.x.dtype), tokens, latents[:, None].expand_as(tokens), k))
    return blocks


def above(encoder: Encoder, threshold: Tensor) -> list[Block]:
    """What exceeds 0 and the threshold, which is a number or (latents,); one row, by rising token."""
    parts = []
    for first, a in encoder.pieces():
        tokens, latents = (a > threshold.clamp(min=0)).nonzero(as_tuple=True)
        parts.append((a[tokens, latents], tokens + first, latents))
    values, tokens, latents = (torch.cat(part)[None] for part in zip(*parts, strict=True))
    return [Block(values, tokens, latents, values.shape[1])]


def energies(encoder: Encoder) -> Tensor:
    """The mean of ReLU(x·W + b)², (latents,): how much a latent could explain, chosen or not."""
    sums = [a.relu().square().sum(0) for _, a in encoder.pieces()]
    return torch.stack(sums).sum(0) / max(1, len(encoder.x))


def kept(block: Block) -> Tensor:
    """Which are positive and among the k greatest of their row; (rows, m)."""
    return (selectors.hard(block.values, block.k) > 0) & (block.values > 0)


def greatest(blocks: list[Block], times: float) -> Tensor:
    """Ones at the times·k greatest of each row, as far as there are candidates; (entries,)."""
    parts = []
    for block in blocks:
        m = block.values.shape[-1]
        k = (block.k * times).clamp(max=m) if isinstance(block.k, Tensor) else min(block.k * times, m)
        parts.append(selectors.hard(block.values, k).flatten())
    return torch.cat(parts)


def entries(blocks: list[Block]) -> tuple[Tensor, Tensor, Tensor]:
    """The values, tokens and latents of all blocks, (entries,) each."""
    fields = zip(*((block.values, block.tokens, block.latents) for block in blocks), strict=True)
    values, tokens, latents = (torch.cat([t.flatten() for t in field]) for field in fields)
    return values, tokens, latents


def number(k: float | Tensor) -> float:
    """Without its gradient."""
    return float(k.detach()) if isinstance(k, Tensor) else k
