"""One selection on three axes: for each token, in the whole batch, or for each latent; and running counts of it.

An axis finds the entries of the pre-activations x·W + b that the selection is among, piece by piece: the matrix
(tokens, latents) never exists as a whole. Numbers are read on the host only where shapes depend on them.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import selectors
from .._precision import KeepsPrecision, wide_dtype
from ._ranks import HERE, Ranks

Entries = tuple[Tensor, Tensor, Tensor]  # tokens, latents and values, (entries,) each
Budgets = Callable[[float | Tensor, int], Tensor]  # k and the number of tokens to the tokens of each latent, (latents,)
GROUP = 4  # entries in a group, from which looking at groups first is faster
PIECE = 2**22  # entries of the matrix at a time
RATE = 0.01  # of the running means after some time; at first they are plain means of all batches so far
SPAN = 10  # at first, the threshold is the mean of the last tenth or so of the batches, because it moves fast then


class Block(NamedTuple):
    """Rows to select in, or this process's part of them, m candidates of each; (rows, m). −inf is no candidate."""

    values: Tensor
    tokens: Tensor
    latents: Tensor
    k: float | Tensor  # how many in each row: a number, or (rows,)
    width: int  # the number of candidates in a whole row
    group: list[str] | None = None  # the process groups over which rows are divided

    def hard(self, k: float | Tensor) -> Tensor:
        """Return ones at the k largest of each row."""
        return selectors.hard(self.values, k, group=self.group)


class Encoder(NamedTuple):
    """Tokens and weights of the pre-activations x·W + b, detached."""

    x: Tensor  # (tokens, d)
    weight: Tensor  # (d, latents)
    bias: Tensor  # (latents,)
    tokens: int  # how many there are on all processes
    latents: int
    ranks: Ranks = HERE

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token and the pre-activations of some tokens at a time."""
        step = max(1, PIECE // max(1, len(self.bias)))
        for first in range(0, max(1, len(self.x)), step):
            yield first, torch.addmm(self.bias, self.x[first : first + step], self.weight).to(self.x.dtype)


class Axis:
    """All that differs between the kinds of sparse autoencoders; here k·tokens entries in a batch (BatchTopK)."""

    has_threshold = True  # evaluation selects what exceeds a running threshold: a token's code depends on no other's
    is_by_token = False  # whether candidates in training come by rising token
    is_by_latent = False  # whether each latent has a budget, a row of candidates and a threshold of its own
    architecture = "jumprelu"  # what SAELens calls the evaluated model

    def groups(self, ranks: Ranks) -> list[str]:
        """Return the process groups over which a row of candidates is divided."""
        return ranks.everyone

    def check(self, k: float, zipf: float) -> None:
        """Raise unless a config is possible on this axis."""
        if zipf and not self.is_by_latent:
            only = 'for the kind "feature", whose latents have budgets'
            raise ValueError(f"`zipf` is {only}; it must be 0 for others; got {zipf:g}.")

    def check_tokens(self, count: int, k: float, latents: int) -> None:
        """Raise if a training batch has too few tokens."""

    def least_k(self, count: int, latents: int) -> float:
        """Return the smallest useful k for a batch of `count` tokens: one entry in all."""
        return 1 / count

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, budgets: Budgets | None) -> list[Block]:
        """Return the largest entries, to select among in training, `ratio` times as many as are selected."""
        n, total = len(encoder.bias), k * encoder.tokens
        width = min(encoder.tokens * encoder.latents, math.ceil(ratio * number(total)))
        values, places = encoder.x.new_empty(0), torch.empty(0, dtype=torch.int64, device=encoder.x.device)
        for first, a in encoder.pieces():
            new, where = _largest(a.flatten(), width)
            values, places = torch.cat([values, new]), torch.cat([places, where + first * n])
            if len(values) > width:
                values, best = values.topk(width, sorted=False)
                places = places[best]
        values, places = _best(values[None], places[None], width, Axis.groups(self, encoder.ranks))
        return [Block(values, places // n, places % n, total, width, Axis.groups(self, encoder.ranks) or None)]

    def active(self, encoder: Encoder, k: float | Tensor, threshold: Tensor) -> list[Block]:
        """Return the entries selected in evaluation, by rising token: what exceeds 0 and the threshold."""
        parts = []
        if self.is_by_latent:
            threshold = threshold[encoder.ranks.part(encoder.latents)]
        for first, a in encoder.pieces():
            tokens, latents = (a > threshold.clamp(min=0)).nonzero(as_tuple=True)
            parts.append((a[tokens, latents], tokens + first, latents))
        values, tokens, latents = (torch.cat(part)[None] for part in zip(*parts, strict=True))
        return [Block(values, tokens, latents, values.shape[1], values.shape[1])]

    def saved_k(self, k: float) -> float:
        """Return a learned k as it is evaluated and saved."""
        return k


class Token(Axis):
    """k latents for each token (TopK), in evaluation too."""

    has_threshold, is_by_token, architecture = False, True, "topk"

    def groups(self, ranks: Ranks) -> list[str]:
        return ranks.latents

    def check(self, k: float, zipf: float) -> None:
        super().check(k, zipf)
        if k != int(k):
            raise ValueError(f'`k` must be an integer for the kind "topk"; got {k:g}. "batch" takes fractions.')

    def least_k(self, count: int, latents: int) -> float:
        return 1.0

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, budgets: Budgets | None) -> list[Block]:
        width, groups = min(encoder.latents, math.ceil(ratio * number(k))), self.groups(encoder.ranks)
        found = [_top(a, min(width, a.shape[1])) for _, a in encoder.pieces()]
        values, latents = (torch.cat(parts) for parts in zip(*found, strict=True))
        values, latents = _best(values, latents, width, groups)
        tokens = torch.arange(len(values), device=values.device)[:, None].expand_as(latents)
        return [Block(values, tokens, latents, k, width, groups or None)]

    def active(self, encoder: Encoder, k: float | Tensor, threshold: Tensor) -> list[Block]:
        return self.candidates(encoder, self.saved_k(number(k)), 1.0, None)

    def saved_k(self, k: float) -> float:
        return max(1, round(k))


class Latent(Axis):
    """Tokens for each latent, k·tokens in all (Feature Choice)."""

    is_by_latent = True

    def groups(self, ranks: Ranks) -> list[str]:
        return ranks.tokens

    def check_tokens(self, count: int, k: float, latents: int) -> None:
        if count * k < latents:
            least = f"latents/k = {latents / k:g} tokens in a training batch, one for each latent"
            raise ValueError(f"Feature Choice needs at least {least}; got {count}.")

    def least_k(self, count: int, latents: int) -> float:
        return latents / count

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, budgets: Budgets | None) -> list[Block]:
        if budgets is None:  # before training
            return super().candidates(encoder, k, ratio, None)
        count, n = encoder.tokens, encoder.latents
        self.check_tokens(count, n if isinstance(k, Tensor) else k, n)
        shares, here = budgets(k, count), encoder.ranks.part(n)
        order = shares.detach().argsort(descending=True, stable=True)
        octaves = shares.detach()[order].log2().floor().unique_consecutive(return_counts=True)[1].tolist()
        blocks = []  # in each, no latent has half the budget of another
        for octave in order.split(octaves):
            width = min(count, math.ceil(ratio * number(shares[octave].max())))
            if encoder.ranks.latents:
                octave = octave[(octave >= here.start) & (octave < here.stop)] - here.start
            parts = octave.split(max(1, PIECE // count)) if len(octave) else ()
            blocks += [self._block(encoder, part, shares[here][part], width) for part in parts]
        return blocks

    def _block(self, encoder: Encoder, latents: Tensor, shares: Tensor, width: int) -> Block:
        """Return the candidates of some latents, `width` for each."""
        a = torch.addmm(encoder.bias[latents, None], encoder.weight.t()[latents], encoder.x.t())  # by latent
        values, tokens = _top(a.to(encoder.x.dtype), min(width, a.shape[1]))
        groups = self.groups(encoder.ranks)
        values, tokens = _best(values, tokens, width, groups)
        return Block(values, tokens, latents[:, None].expand_as(tokens), shares, width, groups or None)


AXES: dict[str, Axis] = {"topk": Token(), "batch": Axis(), "feature": Latent()}


def _top(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row, in no order, and where they are; a (rows, n).

    They are in the `count` groups whose maxima are largest. With groups of √(n/count) entries, both steps look at
    √(n·count) entries, where one step would look at n.
    """
    rows, n = a.shape
    size = next((i for i in range(math.isqrt(n // max(1, count)), GROUP - 1, -1) if n % i == 0), 0)
    if not size:
        values, where = a.topk(count, sorted=False)
        return values, where
    groups = n // size
    parts = a.view(rows, size, groups)  # a group has every `groups`-th entry
    best = parts.amax(1).topk(count, sorted=False).indices
    values, place = parts.gather(2, best[:, None].expand(rows, size, count)).flatten(1).topk(count, sorted=False)
    return values, best.gather(1, place % count) + place // count * groups


def _largest(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest, or all, and where they are; found above a bound that one entry in 64 suggests."""
    count, sample = min(count, len(a)), a[::64]
    rank = count // 50 + 8  # of the sample, where some 5/4 of the count are expected above
    if rank < len(sample):
        where = (a > sample.kthvalue(len(sample) - rank).values).nonzero().squeeze(1)
        if len(where) >= count:
            values, best = a[where].topk(count, sorted=False)
            return values, where[best]
    values, where = a.topk(count, sorted=False)
    return values, where


def _best(values: Tensor, places: Tensor, width: int, groups: list[str]) -> tuple[Tensor, Tensor]:
    """Return this process's part of the `width` largest of whole rows; places in a row that are too many are −inf."""
    if not groups:
        return values, places
    is_best = selectors.hard(values, width, group=groups) != 0  # NaN stays, and will show
    most = int(is_best.sum(-1).max()) if is_best.numel() else 0
    values, order = torch.where(is_best, values, -torch.inf).topk(most, sorted=False)
    return values, places.gather(-1, order)


def largest(blocks: list[Block], times: float) -> Tensor:
    """Return ones at the times·k largest of each row, as far as there are candidates; (entries,)."""
    parts = []
    for block in blocks:
        k, m = block.k * times, block.width
        parts.append(block.hard(k.clamp(max=m) if isinstance(k, Tensor) else min(k, m)).flatten())
    return torch.cat(parts)


def entries(blocks: list[Block]) -> Entries:
    """Return the tokens, latents and values of all blocks."""
    fields = zip(*((block.tokens, block.latents, block.values) for block in blocks), strict=True)
    tokens, latents, values = (torch.cat([t.flatten() for t in field]) for field in fields)
    return tokens, latents, values


def number(k: float | Tensor) -> float:
    """Return k without its gradient."""
    return float(k.detach()) if isinstance(k, Tensor) else k


class Activity(KeepsPrecision):
    """Running counts and means of a hard selection, whatever the selector; budgets by Zipf's law, or equal at 0."""

    threshold: Tensor  # the mean of the smallest value kept, in model units; (latents,) for "feature", else ()
    since: Tensor  # tokens since a latent was last active, (latents,)
    density: Tensor  # the running fraction of tokens for which a latent is active, (latents,)
    # The running mean of ReLU(a)², (latents,), which ranks latents for their budgets. Their density cannot: under a
    # budget it is the budget, and the first ranks would stay for ever.
    energy: Tensor
    batches: Tensor

    def __init__(self, latents: int, axis: Axis, exponent: float) -> None:
        super().__init__()
        self.axis, self.exponent = axis, exponent
        self.register_buffer("threshold", torch.zeros(latents if axis.is_by_latent else (), dtype=wide_dtype()))
        self.register_buffer("since", torch.zeros(latents, dtype=torch.int64))
        self.register_buffer("density", torch.zeros(latents, dtype=wide_dtype()))
        self.register_buffer("energy", torch.zeros(latents if exponent else 0, dtype=wide_dtype()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def budgets(self, k: float | Tensor, count: int) -> Tensor:
        """Return how many of `count` tokens each latent chooses, k·count in all; (latents,)."""
        shares = zipf(self.energy if self.exponent else self.density, self.exponent)  # equal if there is no exponent
        if isinstance(k, Tensor):
            return (shares * k * count).clamp(1, count).to(k.dtype)
        return apportion(shares, round(k * count), count)

    @torch.no_grad()
    def update(self, blocks: list[Block], encoder: Encoder) -> None:
        """Count the entries of a batch that the selection was among; an empty batch changes nothing."""
        if not (count := encoder.tokens):
            return
        ranks, own = encoder.ranks, encoder.ranks.part(encoder.latents)
        before = self.batches.to(self.density.dtype)
        rate, faster = ((span / (span + before)).clamp(min=RATE) for span in (1, SPAN))
        active = torch.zeros_like(self.since)
        least = torch.full_like(self.threshold, torch.inf)
        for block in blocks:
            kept = (block.hard(block.k) > 0) & (block.values > 0)
            active[own].scatter_add_(0, block.latents.flatten(), kept.flatten().long())
            if self.axis.has_threshold and kept.numel():  # the smallest value kept of each row
                lowest = torch.where(kept, block.values, torch.inf).amin(-1).to(least.dtype)
                least[block.latents[:, 0] + own.start if self.axis.is_by_latent else ...] = lowest
        active, least = ranks.sum(active), ranks.least(least)
        self.batches += 1
        self.since += count
        self.since.masked_fill_(active > 0, 0)
        self.density.lerp_((active / count).to(self.density.dtype), rate)
        is_new = (self.threshold == 0) & least.isfinite()
        moved = self.threshold.lerp(least, faster)
        self.threshold.copy_(torch.where(is_new, least, torch.where(least.isfinite(), moved, self.threshold)))
        if self.exponent:
            sums = [a.relu().square().sum(0) for _, a in encoder.pieces()]  # what each could explain, chosen or not
            energy = torch.zeros_like(self.energy)
            energy[own] = (torch.stack(sums).sum(0) / count).to(energy.dtype)
            self.energy.lerp_(ranks.sum(energy), rate)


def zipf(importance: Tensor, exponent: float) -> Tensor:
    """Return shares r^−exponent that sum to 1, r = 1, 2, … in the order of falling importance; (n,), float64."""
    ranks = torch.arange(1, len(importance) + 1, dtype=torch.float64, device=importance.device)
    shares = torch.empty_like(ranks)
    shares[importance.argsort(descending=True, stable=True)] = ranks**-exponent
    return shares / shares.sum()


def apportion(shares: Tensor, total: int, most: int) -> Tensor:
    """Return integers from 1 to `most` that sum to `total`, near total·shares, by largest remainders; (n,) int64."""
    n = len(shares)
    total = min(max(total, n), n * most)
    ideal = shares * total
    low, high = torch.zeros_like(ideal[0]), most / ideal.min().clamp(min=1e-300)
    for _ in range(60):  # bisection, on the device, for the multiple that sums to the total within the bounds
        middle = (low + high) / 2
        is_low = (middle * ideal).clamp(1, most).sum() <= total
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    ideal = (low * ideal).clamp(1, most)
    floor = ideal.floor()
    rest = torch.where(floor < most, ideal - floor, -1.0)
    gets_more = torch.arange(n, device=shares.device) < total - floor.sum()
    floor[rest.argsort(descending=True, stable=True)] += gets_more.to(floor.dtype)
    return floor.long()
