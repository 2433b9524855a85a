"""One selection on four axes: for each token, in the batch, for each latent, by thresholds.

An axis finds the entries of the pre-activations x·W + b that the selection is among, piece by piece: the matrix
(tokens, latents) never exists as a whole. Numbers are read on the host only where shapes depend on them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ... import _check
from .. import selectors
from ._ranks import HERE, Ranks

Entries = tuple[Tensor, Tensor, Tensor]  # tokens, latents and values, (entries,) each
Budgets = Callable[[float | Tensor, int], Tensor]  # k and the number of tokens to the tokens of each latent, (latents,)
GROUP = 4  # entries in a group, from which looking at groups first is faster
PIECE = 2**22  # entries of the matrix at a time
CANDIDATES = 4.0  # times k, for a selector that does not say how many


class Block(NamedTuple):
    """Hold rows to select in, or this process's part of them, m candidates of each; (rows, m). −inf is no candidate."""

    values: Tensor
    tokens: Tensor
    latents: Tensor
    k: float | Tensor  # how many in each row: a number, or (rows,)
    width: int  # the number of candidates in a whole row
    group: list[str] | None = None  # the process groups over which rows are divided
    bound: Tensor | None = None  # what entries must exceed, (rows, m); else the k largest of a row are selected

    def kept(self) -> Tensor:
        """Return which entries a hard selection makes active."""
        is_chosen = self.hard(self.k) > 0 if self.bound is None else self.values > self.bound
        return is_chosen & (self.values > 0)

    def hard(self, k: float | Tensor) -> Tensor:
        """Return ones at the k largest of each row."""
        return selectors.hard(self.values, k, group=self.group)


class Running(NamedTuple):
    """Hold what an axis needs to know of training so far."""

    budgets: Budgets
    threshold: Tensor  # learned, (latents,)
    bandwidth: float = 0.0  # of the estimate of its gradient


class Encoder(NamedTuple):
    """Hold tokens and weights of the pre-activations x·W + b, detached."""

    x: Tensor  # (tokens, d)
    weight: Tensor  # (d, latents)
    bias: Tensor  # (latents,)
    tokens: int  # how many there are on all processes
    latents: int
    ranks: Ranks = HERE

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token and the pre-activations of some tokens at a time, in the dtype of autocast."""
        x, weight, bias = (t.to(self.product_dtype) for t in (self.x, self.weight, self.bias))  # not at each piece
        step = max(1, PIECE // max(1, len(bias)))
        for first in range(0, max(1, len(x)), step):
            yield first, torch.addmm(bias, x[first : first + step], weight)

    @property
    def product_dtype(self) -> torch.dtype:
        """Return what autocast would compute products in: double precision is left alone."""
        device = self.x.device.type
        if torch.is_autocast_enabled(device) and self.x.dtype == torch.float32:
            return torch.get_autocast_dtype(device)
        return self.x.dtype


class Axis:
    """Hold all that differs between the kinds of sparse autoencoders; here k·tokens entries in a batch (BatchTopK)."""

    has_threshold = True  # evaluation selects what exceeds a running threshold: a token's code depends on no other's
    is_by_token = False  # whether candidates in training come by rising token
    is_by_latent = False  # whether each latent has a threshold of its own
    has_budgets = False  # whether each latent has a number of tokens, and a row of candidates
    learns_threshold = False  # whether thresholds are parameters
    architecture = "jumprelu"  # what SAELens calls the evaluated model

    def groups(self, ranks: Ranks) -> list[str]:
        """Return the process groups over which a row of candidates is divided."""
        return ranks.everyone

    def check(self, k: float, zipf: float) -> None:
        """Raise unless a config is possible on this axis."""
        if zipf and not self.has_budgets:
            only = 'for the kind "feature", whose latents have budgets'
            raise ValueError(f"`zipf` is {only}; it must be 0 for others; got {zipf:g}.")

    def check_tokens(self, count: int, k: float, latents: int) -> None:
        """Raise if a training batch has too few tokens."""

    def least_k(self, count: int, latents: int) -> float:
        """Return the smallest useful k for a batch of `count` tokens: one entry in all."""
        return 1 / count

    def check_selector(self, selector: Any) -> None:
        """Raise if a selector cannot select on this axis."""
        _check.function("selector", selector)

    def select(self, selector: Any, scores: Tensor, block: Block, threshold: Tensor, bandwidth: float) -> Tensor:
        """Return the weights of a block's entries in training, like `scores`."""
        weights: Tensor = selector(scores, block.k, **({"group": block.group} if block.group else {}))
        return weights

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, running: Running | None) -> list[Block]:
        """Return the largest entries, to select among in training, `ratio` times as many as are selected."""
        n, total = len(encoder.bias), k * encoder.tokens
        width = min(encoder.tokens * encoder.latents, math.ceil(ratio * number(total)))
        values, places = encoder.x.new_empty(0), torch.empty(0, dtype=torch.int64, device=encoder.x.device)
        for first, a in encoder.pieces():
            new, where = _largest(a.flatten(), width)
            new = new.to(values.dtype)
            values, places = torch.cat([values, new]), torch.cat([places, where + first * n])
            if len(values) > width:
                values, best = values.topk(width, sorted=False)
                places = places[best]
        values, places = _best(values[None], places[None], width, Axis.groups(self, encoder.ranks))
        return [Block(values, places // n, places % n, total, width, Axis.groups(self, encoder.ranks) or None)]

    def active(self, encoder: Encoder, k: float | Tensor, threshold: Tensor) -> list[Block]:
        """Return the entries selected in evaluation, by rising token: what exceeds 0 and the threshold."""
        if self.is_by_latent:
            threshold = threshold[encoder.ranks.part(encoder.latents)]
        return [_above(encoder, threshold)]

    def saved_k(self, k: float) -> float:
        """Return a learned k as it is evaluated and saved."""
        return k


class Token(Axis):
    """Select k latents for each token (TopK), in evaluation too."""

    has_threshold, is_by_token, architecture = False, True, "topk"

    def groups(self, ranks: Ranks) -> list[str]:
        return ranks.latents

    def check(self, k: float, zipf: float) -> None:
        super().check(k, zipf)
        if k != int(k):
            raise ValueError(f'`k` must be an integer for the kind "topk"; got {k:g}. "batch" takes fractions.')

    def least_k(self, count: int, latents: int) -> float:
        return 1.0

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, running: Running | None) -> list[Block]:
        width, groups = min(encoder.latents, math.ceil(ratio * number(k))), self.groups(encoder.ranks)
        found = [_top(a, min(width, a.shape[1])) for _, a in encoder.pieces()]
        values, latents = (torch.cat(parts) for parts in zip(*found, strict=True))
        values, latents = _best(values.to(encoder.x.dtype), latents, width, groups)
        tokens = torch.arange(len(values), device=values.device)[:, None].expand_as(latents)
        return [Block(values, tokens, latents, k, width, groups or None)]

    def active(self, encoder: Encoder, k: float | Tensor, threshold: Tensor) -> list[Block]:
        return self.candidates(encoder, self.saved_k(number(k)), 1.0, None)

    def saved_k(self, k: float) -> float:
        return max(1, round(k))


class Latent(Axis):
    """Select tokens for each latent, k·tokens in all (Feature Choice)."""

    is_by_latent = has_budgets = True

    def groups(self, ranks: Ranks) -> list[str]:
        return ranks.tokens

    def check_tokens(self, count: int, k: float, latents: int) -> None:
        if count * k < latents:
            least = f"latents/k = {latents / k:g} tokens in a training batch, one for each latent"
            raise ValueError(f"Feature Choice needs at least {least}; got {count}.")

    def least_k(self, count: int, latents: int) -> float:
        return latents / count

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, running: Running | None) -> list[Block]:
        if running is None:  # before training
            return super().candidates(encoder, k, ratio, None)
        count, n = encoder.tokens, encoder.latents
        self.check_tokens(count, n if isinstance(k, Tensor) else k, n)
        shares, here = running.budgets(k, count), encoder.ranks.part(n)
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
        values, tokens = _top(a, min(width, a.shape[1]))
        groups = self.groups(encoder.ranks)
        values, tokens = _best(values.to(encoder.x.dtype), tokens, width, groups)
        return Block(values, tokens, latents[:, None].expand_as(tokens), shares, width, groups or None)


class _Step(torch.autograd.Function):
    """Return 1 where a score exceeds its threshold; the threshold's gradient is estimated by a rectangular kernel."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward((scores - threshold).abs() < bandwidth / 2)
        ctx.bandwidth = bandwidth
        return (scores > threshold).to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:
        (is_near,) = ctx.saved_tensors
        return None, -g * is_near / ctx.bandwidth, None


class Jump(Axis):
    """Select what exceeds a threshold of each latent, which is learned (JumpReLU)."""

    is_by_latent = learns_threshold = is_by_token = True

    def check_selector(self, selector: Any) -> None:
        if selector is not selectors.straight_through:
            name = getattr(selector, "__name__", selector)
            raise ValueError(f'The kind "jumprelu" selects by thresholds, straight-through; got the selector {name}.')

    def select(self, selector: Any, scores: Tensor, block: Block, threshold: Tensor, bandwidth: float) -> Tensor:
        step: Tensor = _Step.apply(scores, threshold[block.latents], bandwidth)
        return step

    def candidates(self, encoder: Encoder, k: float | Tensor, ratio: float, running: Running | None) -> list[Block]:
        if running is None:
            return super().candidates(encoder, k, ratio, None)
        block = _above(encoder, running.threshold - running.bandwidth / 2)
        return [block._replace(bound=running.threshold[block.latents])]


AXES: dict[str, Axis] = {"topk": Token(), "batch": Axis(), "feature": Latent(), "jumprelu": Jump()}


def _above(encoder: Encoder, threshold: Tensor) -> Block:
    """Return the entries that exceed 0 and a threshold, by rising token, as one row."""
    parts = []
    for first, a in encoder.pieces():
        tokens, latents = (a > threshold.clamp(min=0)).nonzero(as_tuple=True)
        parts.append((a[tokens, latents].to(encoder.x.dtype), tokens + first, latents))
    values, tokens, latents = (torch.cat(part)[None] for part in zip(*parts, strict=True))
    return Block(values, tokens, latents, values.shape[1], values.shape[1])


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
    member = place.to(torch.int32) // count  # whole numbers of 32 bits divide faster
    return values, best.gather(1, place - member * count) + member * groups


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


def ratio(selector: Any, wanted: float | None) -> float:
    """Return among how many times k entries a selector chooses in training, if it is not one that is hard."""
    if getattr(selector, "is_hard", False):
        return 1.0
    return float(getattr(selector, "candidates", CANDIDATES) if wanted is None else wanted)


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
