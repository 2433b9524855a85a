"""Beam search: one loop for hard beams and one for sampled ones; that for soft beams is in `_soft`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from .. import _check
from .._torch import require_values
from ._select import Select, hard
from ._soft import soft_search
from ._steps import EMPTY, Beams, Reorder, Step, check_scores, continued, gather, reordered

Ints = Sequence[int]


def beam_search(
    step: Step,
    state: Any,
    k: int | Sequence[int],
    *,
    start: Tensor,
    length: int,
    select: Select = hard,
    generator: Generator | None = None,
    end: int | Sequence[int] | None = None,
    lengths: Tensor | None = None,
    length_penalty: float = 0.0,
    reorder: Reorder | None = None,
) -> Beams:
    """Search for sequences, k at a time: at each step, choose k among all continuations of the k of before.

    Args:
        step: `(tokens, state) → (log-probabilities, state)`: tokens (rows), log-probabilities (rows, V) of the next
            one, with rows = batch · beams. The first call has one beam for each row of the batch. For soft beams,
            tokens after the first are distributions (rows, V): see `embed`.
        state: what the model remembers: tensors (batch, …) and lists, tuples and dicts of them. It follows the beams.
        k: how many beams, or a list with one number for each step.
        start: (batch) tokens to begin with; never an end.
        length: how many tokens at most.
        select: `khot.search.hard`, `khot.search.sampled` or `khot.search.soft`, or a `functools.partial` of one.
        generator: of what is random; torch's own if None.
        end: the token, or tokens, that end a sequence. Hard and soft beams that end are set aside, so that k go on, and
            the best k are returned. Sampled beams that end keep their slot, and go on being drawn.
        lengths: (batch) integers 0 ≤ l ≤ length, if rows may have fewer tokens.
        length_penalty: hard and soft beams are ranked by log-probability/length^penalty at their end.
        reorder: `(state, index) → state` in place of `index_select(0, index)` on each tensor; index (batch · k).

    Returns:
        k sequences for each row. If fewer than k continuations are possible, slots stay empty: score −inf, tokens −1. A
        row of length 0 has one beam without tokens, of score 0. NaN and +inf from `step` raise ValueError.

    Examples:
        >>> table = torch.tensor([[0.6, 0.4], [0.1, 0.9]]).log()  # p(next | last)
        >>> step = lambda tokens, state: (table[tokens], state)
        >>> beams = beam_search(step, None, 2, start=torch.tensor([0]), length=3)
        >>> beams.tokens, beams.scores.exp()
        (tensor([[[1, 1, 1],
                 [0, 0, 0]]]), tensor([[0.3240, 0.2160]]))
    """
    _check.at_least("length", length, 1)
    counts = list(k) if isinstance(k, Sequence) else [k] * length
    if len(counts) != length:
        raise ValueError(f"`k` must be one number or one for each of the {length} steps; got {len(counts)} of them.")
    for count in counts:
        _check.at_least("k", count, 1)
    _check_tokens("start", start)
    require_values("A beam search", start)
    if lengths is not None:
        _check_tokens("lengths", lengths, tuple(start.shape))
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= length:
            got = f"values from {int(lengths.min())} to {int(lengths.max())}"
            raise ValueError(f"`lengths` must satisfy 0 ≤ lengths ≤ {length} (`length`); got {got}.")
    for name, fn in (("step", step), ("select", select), ("reorder", reordered if reorder is None else reorder)):
        _check.function(name, fn)
    _check.number("length_penalty", length_penalty, "a number")
    kind = select.func if isinstance(select, partial) else select
    is_random, is_soft = getattr(kind, "is_random", False), getattr(kind, "is_soft", False)
    if length_penalty and is_random:
        raise ValueError("`length_penalty` must be 0 for sampled beams: they are not ranked at their end.")
    choose: Select = partial(select, generator=generator)
    ends = list(dict.fromkeys(end)) if isinstance(end, Sequence) else [] if end is None else [end]
    for token in ends:
        _check.at_least("end", token, 0)
    most = torch.full_like(start, length) if lengths is None else lengths
    if is_soft:
        return soft_search(step, state, counts, start, choose, ends, most, length_penalty)
    if is_random:
        return _sampled_search(step, state, counts, start, choose, ends, most, reorder or reordered)
    return search(step, state, counts, start, choose, ends, most, length_penalty, reorder or reordered)


class _Paths(NamedTuple):
    """Hold beams on their way: tokens and back-pointers so far, and what a selection needs."""

    tokens: Tensor  # (batch, m, t)
    back: Tensor  # (batch, m, t)
    log_probs: Tensor  # (batch, m)
    lengths: Tensor  # (batch, m)

    def at(self, slot: Tensor) -> "_Paths":
        """Return the paths in slots (batch, k)."""
        return _Paths(*(gather(t, slot) for t in self))

    def extended(self, parent: Tensor, token: Tensor, log_probs: Tensor) -> "_Paths":
        """Return the paths that continue the slots `parent`, (batch, k), by one token each; −1 if it has ended."""
        tokens, back, _, lengths = self.at(parent)
        slot = torch.where(token < 0, EMPTY, parent)
        tokens, back = torch.cat((tokens, token[..., None]), -1), torch.cat((back, slot[..., None]), -1)
        return _Paths(tokens, back, log_probs, lengths + (token >= 0))

    def padded(self, length: int) -> "_Paths":
        """Return the paths with room for `length` tokens."""
        room = partial(torch.nn.functional.pad, pad=(0, length - self.tokens.shape[-1]), value=EMPTY)
        return self._replace(tokens=room(self.tokens), back=room(self.back))


def _first(start: Tensor) -> _Paths:
    none = start.new_zeros(len(start), 1, 0, dtype=torch.int64)
    return _Paths(none, none, torch.zeros(len(start), 1, device=start.device), none.new_zeros(len(start), 1))


def search(
    step: Step,
    state: Any,
    counts: Sequence[int],
    start: Tensor,
    select: Select,
    ends: Sequence[int],
    most: Tensor,
    penalty: float,
    reorder: Reorder,
    *,
    is_ended: Callable[[Tensor], Tensor] | None = None,
    early_stopping: bool | None = None,
) -> Beams:
    """Search for hard beams; those that end are set aside.

    `most` is (batch), the largest number of tokens. `is_ended` tells of tokens (batch, k, t) which sequences end there.
    A row is done if no beam can become better than those set aside. With early_stopping False, as in transformers, a
    beam is not expected to gain by a penalty on later tokens; with True, k beams set aside are enough.
    """
    length, kept = len(counts), counts[-1]
    paths, last = _first(start), start
    aside = _Paths(*(t.expand(-1, kept, *t.shape[2:]) for t in paths)).padded(length)
    is_empty = (most == 0)[:, None] & (torch.arange(kept, device=start.device) == 0)
    aside = aside._replace(log_probs=torch.where(is_empty, 0.0, -torch.inf))
    scores, is_open = aside.log_probs, most > 0
    stop = torch.tensor(ends, device=start.device)
    for t, k in enumerate(counts):
        if not is_open.any():
            break
        total, state, width = continued(step, last, state, paths.log_probs, t)
        index = select(total, total, k * max(2, 1 + len(ends)) if ends or is_ended else k).slots
        assert index is not None
        top = torch.where(index < 0, -torch.inf, total.gather(-1, index.clamp(min=0)))
        check_scores(top, t)
        parent, token = index.clamp(min=0) // width, index.clamp(min=0) % width
        grown = paths.extended(parent, token, top)
        ending = (torch.isin(token, stop) | (t + 1 >= most)[:, None]) & (top > -torch.inf)
        if is_ended is not None:
            ending |= is_ended(grown.tokens)
        if ending[:, :k].any():
            new = _Paths(*(u[:, :k] for u in grown)).padded(length)
            gained = torch.where(ending[:, :k] & is_open[:, None], top[:, :k] / (t + 1) ** penalty, -torch.inf)
            scores, slot = torch.cat((scores, gained), 1).topk(kept)
            aside = _Paths(*(torch.cat(pair, 1) for pair in zip(aside, new, strict=True))).at(slot)
        if t + 1 == length:
            break
        running, slot = top.masked_fill(ending, -torch.inf).topk(min(k, top.shape[-1]))
        paths = grown.at(slot)._replace(log_probs=running)
        last, parent = paths.tokens[..., -1].flatten(), parent.gather(-1, slot)
        state = reorder(state, _rows(parent, total.shape[-1] // width))
        # the longest that a beam can become, if that is to its advantage
        span = most if penalty > 0 and early_stopping is None else torch.full_like(most, t + 1)
        worst = scores.detach().min(-1).values
        is_open = is_open & (running[:, 0].detach() / span.clamp(min=1) ** penalty > worst)
        if early_stopping:
            is_open = is_open & (worst == -torch.inf)
    return _beams(aside, scores)


def _sampled_search(
    step: Step, state: Any, counts: Ints, start: Tensor, select: Select, ends: Ints, most: Tensor, reorder: Reorder
) -> Beams:
    """Search for random beams. One that has ended has one continuation, with probability 1."""
    batch, paths, last = len(start), _first(start), start
    log_q = torch.zeros(batch, 1, dtype=torch.float64, device=start.device)
    log_pairs: Tensor | None = log_q[..., None]
    is_ended, stop = (most == 0)[:, None], torch.tensor(ends, device=start.device)
    for t, k in enumerate(counts):
        total, state, width = continued(step, last, state, paths.log_probs, t, is_ended)
        check_scores(total, t)
        before = paths.log_probs.shape[-1]
        log_weights = (total.detach().view(batch, before, width) - log_q[..., None]).flatten(1)
        index, log_probs, pairs, _ = select(total, log_weights, k)
        if index is None or log_probs is None:
            raise ValueError("`select` must return `slots` and `log_inclusion_probs` if it is random.")
        is_empty, index = index < 0, index.clamp(min=0)
        parent, token = index // width, index % width
        token = torch.where(is_empty | is_ended.gather(-1, parent), EMPTY, token)
        paths = paths.extended(parent, token, total.gather(-1, index).masked_fill(is_empty, -torch.inf))
        is_ended = (token < 0) | torch.isin(token, stop) | (t + 1 >= most)[:, None]
        log_q = (log_q.gather(-1, parent) + log_probs).masked_fill(is_empty, 0.0)
        if pairs is None or log_pairs is None:
            log_pairs = None
        else:
            both = gather(gather(log_pairs, parent).mT, parent)
            nothing = is_empty[..., None] | is_empty[:, None]
            log_pairs = (both + pairs.to(torch.float64).clamp(min=0).log()).masked_fill(nothing, 0.0)
        last = token.flatten()
        state = reorder(state, _rows(parent, before))
    order = paths.log_probs.detach().argsort(-1, descending=True)
    if log_pairs is not None:
        log_pairs = gather(gather(log_pairs, order).mT, order)
    paths = paths.at(order)
    return Beams(*_beams(paths, paths.log_probs)[:5], log_q.gather(-1, order), log_pairs)


def _beams(paths: _Paths, scores: Tensor) -> Beams:
    """Return paths as beams; slots with the score −inf are empty."""
    is_empty = scores == -torch.inf
    tokens, back = (u.masked_fill(is_empty[..., None], EMPTY) for u in (paths.tokens, paths.back))
    log_probs, lengths = paths.log_probs.masked_fill(is_empty, -torch.inf), paths.lengths.masked_fill(is_empty, 0)
    return Beams(tokens, scores, log_probs, lengths, back)


def _rows(parent: Tensor, before: int) -> Tensor:
    """Return the rows of the state that slots (batch, k) continue; (batch · k)."""
    return (parent + before * torch.arange(len(parent), device=parent.device)[:, None]).flatten()


def _check_tokens(name: str, value: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raise unless `value` is an integer tensor (batch)."""
    _check.instance(name, value, Tensor)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must be an integer tensor; got {value.dtype}.")
    if value.ndim != 1 or (shape is not None and tuple(value.shape) != shape):
        raise ValueError(f"`{name}` must have the shape {shape or '(batch)'}; got {tuple(value.shape)}.")
