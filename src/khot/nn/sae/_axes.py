"""One selection on three axes: for each token, in the whole batch, or for each latent.

An axis finds the entries of the pre-activations x·W + b that the selection is among, piece by piece: the matrix
(tokens, latents) never exists as a whole. Numbers are read on the host only where shapes depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import selectors

Budgets = Callable[[float | Tensor, int], Tensor]
"""How many tokens each latent chooses, (latents,), from k and the number of tokens."""
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
        """Yield the first token and the pre-activations of some tokens at a time."""
        step = max(1, PIECE // len(self.bias))
        for first in range(0, max(1, len(self.x)), step):
            yield first, torch.addmm(self.bias, self.x[first : first + step], self.weight).to(self.x.dtype)


class Axis:
    """All that differs between the kinds of sparse autoencoders. This base is common to those with a threshold."""

    has_threshold = True
    """Whether evaluation selects what exceeds a running threshold, so that a token's code does not depend on others."""
    is_by_token = False
    """Whether candidates in training come by rising token."""

    def check(self, k: float, zipf: float) -> None:
        """Raise unless a config is possible on this axis."""
        if zipf:
            raise ValueError(
                f'`zipf` is for the kind "feature", whose latents have budgets; it must be 0 for others; got {zipf:g}.'
            )

    def check_tokens(self, count: int, k: float, latents: int) -> None:
        """Raise if a training batch has too few tokens."""

    def least_k(self, count: int, latents: int) -> float:
        """Return the smallest useful k for a batch of `count` tokens: one entry in all."""
        return 1 / count

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, budgets: Budgets) -> list[Block]:
        """Return the entries to select among in training, `ratio` times as many as are selected."""
        return by_batch(encoder, k * len(encoder.x), ratio)

    def first(self, encoder: Encoder, k: int) -> list[Block]:
        """Return the entries selected before training."""
        return by_batch(encoder, k * len(encoder.x), 1.0)

    def active(self, encoder: Encoder, k: float | Tensor, threshold: Tensor) -> list[Block]:
        """Return the entries selected in evaluation, by rising token."""
        return above(encoder, threshold)

    def threshold_shape(self, latents: int) -> tuple[int, ...]:
        """Return the shape of the threshold."""
        return ()

    def lower(self, least: Tensor, block: Block, kept: Tensor) -> None:
        """Write the smallest kept value into `least`, of the shape of the threshold."""
        least.copy_(_least_kept(block, kept).squeeze(0))

    def saved_k(self, k: float) -> float:
        """Return a learned k as it is saved."""
        return k

    def description(self, k: float) -> dict[str, Any]:
        """Return what SAELens calls the evaluated model, and its k if it has one."""
        return {"architecture": "jumprelu"}


class Batch(Axis):
    """k·tokens entries in a batch (BatchTopK, Mutual Choice)."""


class Token(Axis):
    """k latents for each token (TopK), in evaluation too."""

    has_threshold = False
    is_by_token = True

    def check(self, k: float, zipf: float) -> None:
        super().check(k, zipf)
        if k != int(k):
            raise ValueError(f'`k` must be an integer for the kind "topk"; got {k:g}. "batch" takes fractions.')

    def least_k(self, count: int, latents: int) -> float:
        return 1.0

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, budgets: Budgets) -> list[Block]:
        return by_token(encoder, k, ratio)

    def first(self, encoder: Encoder, k: int) -> list[Block]:
        return by_token(encoder, k, 1.0)

    def active(self, encoder: Encoder, k: float | Tensor, threshold: Tensor) -> list[Block]:
        return by_token(encoder, max(1, round(number(k))), 1.0)

    def lower(self, least: Tensor, block: Block, kept: Tensor) -> None:
        pass

    def saved_k(self, k: float) -> float:
        return max(1, round(k))

    def description(self, k: float) -> dict[str, Any]:
        return {"architecture": "topk", "k": int(k)}


class Latent(Axis):
    """Tokens for each latent, k·tokens in all (Feature Choice)."""

    def check(self, k: float, zipf: float) -> None:
        pass

    def check_tokens(self, count: int, k: float, latents: int) -> None:
        if count * k < latents:
            raise ValueError(
                f"Feature Choice needs at least latents/k = {latents / k:g} tokens in a training batch, one for each "
                f"latent; got {count}."
            )

    def least_k(self, count: int, latents: int) -> float:
        return latents / count

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, budgets: Budgets) -> list[Block]:
        count, n = len(encoder.x), len(encoder.bias)
        self.check_tokens(count, n if isinstance(k, Tensor) else k, n)
        return by_latent(encoder, budgets(k, count), ratio)

    def threshold_shape(self, latents: int) -> tuple[int, ...]:
        return (latents,)

    def lower(self, least: Tensor, block: Block, kept: Tensor) -> None:
        least[block.latents[:, 0]] = _least_kept(block, kept).to(least.dtype)


AXES: dict[str, Axis] = {"topk": Token(), "batch": Batch(), "feature": Latent()}
"""The axis of each `kind` of a config."""


def by_token(encoder: Encoder, k: float | Tensor, ratio: float) -> list[Block]:
    """Choose k for each token, among the ratio·k largest."""
    width = min(len(encoder.bias), math.ceil(ratio * number(k)))
    found = [a.topk(width, sorted=False) for _, a in encoder.pieces()]
    values, latents = (torch.cat(parts) for parts in zip(*found, strict=True))
    tokens = torch.arange(len(values), device=values.device)[:, None].expand_as(latents)
    return [Block(values, tokens, latents, k)]


def by_batch(encoder: Encoder, total: float | Tensor, ratio: float) -> list[Block]:
    """Choose `total` entries in the whole batch, which is one row, among the ratio·total largest."""
    n = len(encoder.bias)
    width = min(len(encoder.x) * n, math.ceil(ratio * number(total)))
    values, places = encoder.x.new_empty(0), torch.empty(0, dtype=torch.int64, device=encoder.x.device)
    for first, a in encoder.pieces():
        new, where = _largest(a.flatten(), width)
        values, places = torch.cat([values, new]), torch.cat([places, where + first * n])
        if len(values) > width:
            values, best = values.topk(width, sorted=False)
            places = places[best]
    return [Block(values[None], (places // n)[None], (places % n)[None], total)]


def _largest(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest, or all, and where they are; found above a bound that one entry in 64 suggests."""
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
    """Choose what exceeds 0 and the threshold, which is a number or (latents,); one row, by rising token."""
    parts = []
    for first, a in encoder.pieces():
        tokens, latents = (a > threshold.clamp(min=0)).nonzero(as_tuple=True)
        parts.append((a[tokens, latents], tokens + first, latents))
    values, tokens, latents = (torch.cat(part)[None] for part in zip(*parts, strict=True))
    return [Block(values, tokens, latents, values.shape[1])]


def kept(block: Block) -> Tensor:
    """Return which entries are positive and among the k largest of their row; (rows, m)."""
    return (selectors.hard(block.values, block.k) > 0) & (block.values > 0)


def _least_kept(block: Block, kept: Tensor) -> Tensor:
    """Return the smallest value kept in each row, +inf where there is none; (rows,)."""
    return torch.where(kept, block.values, torch.inf).amin(-1)


def largest(blocks: list[Block], times: float) -> Tensor:
    """Return ones at the times·k largest of each row, as far as there are candidates; (entries,)."""
    parts = []
    for block in blocks:
        m = block.values.shape[-1]
        k = (block.k * times).clamp(max=m) if isinstance(block.k, Tensor) else min(block.k * times, m)
        parts.append(selectors.hard(block.values, k).flatten())
    return torch.cat(parts)


def entries(blocks: list[Block]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, tokens and latents of all blocks, (entries,) each."""
    fields = zip(*((block.values, block.tokens, block.latents) for block in blocks), strict=True)
    values, tokens, latents = (torch.cat([t.flatten() for t in field]) for field in fields)
    return values, tokens, latents


def number(k: float | Tensor) -> float:
    """Return k without its gradient."""
    return float(k.detach()) if isinstance(k, Tensor) else k
