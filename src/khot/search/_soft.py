"""Soft beams: tokens, scores, states and sequences are mixed by the weights of k slots."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._select import Select
from ._steps import EMPTY, Beams, Step, check_scores, continued, gather, mapped


class _Paths(NamedTuple):
    """Soft sequences (batch, n), with the tokens of each place so far."""

    tokens: list[Tensor]  # each (batch, n, V)
    log_probs: Tensor  # (batch, n)
    back: Tensor  # (batch, n, t), the parents with the largest weight

    def mixed(self, weights: Tensor, total: Tensor) -> "_Paths":
        """Return the slots that weights (batch, k, n, V) make of all continuations, of log-probabilities `total`."""
        back = weights.sum(-1)  # (batch, k, n)
        tokens = [*(back @ each for each in self.tokens), weights.sum(2)]
        parent = back.detach().argmax(-1)
        steps = torch.cat((gather(self.back, parent), parent[..., None]), -1)
        return _Paths(tokens, _weighed(weights.flatten(2), total), steps)

    def ended(self, ends: Tensor, total: Tensor) -> "_Paths":
        """Return each path with each of the end tokens, (batch, n · ends), of log-probabilities `total`."""
        batch, n = self.log_probs.shape
        width, times = total.shape[-1] // n, len(ends)
        last = torch.nn.functional.one_hot(ends, width).to(total.dtype).repeat(n, 1).expand(batch, -1, -1)
        parent = torch.arange(n, device=total.device).repeat_interleave(times).expand(batch, -1)
        tokens = [*(each.repeat_interleave(times, 1) for each in self.tokens), last]
        back = torch.cat((gather(self.back, parent), parent[..., None]), -1)
        return _Paths(tokens, total.view(batch, n, width)[..., ends].flatten(1), back)


class _Pool(NamedTuple):
    """Paths that have ended, all at the same place, and how much each is there: log-weights (batch, n), −inf if not."""

    paths: _Paths
    log_weights: Tensor


def soft_search(
    step: Step,
    state: Any,
    counts: Sequence[int],
    start: Tensor,
    select: Select,
    ends: Sequence[int],
    most: Tensor,
    penalty: float,
) -> Beams:
    """Search with soft slots; `most` is (batch), the largest number of tokens.

    A path that ends is set aside with the weight π that all k slots give it, and the k slots of the others go on. The
    result are k slots of all that was set aside, by score + log π: as T → 0, log π is 0 or −inf.
    """
    batch, last = len(start), start
    paths = _Paths([], torch.zeros(batch, 1, device=start.device), start.new_zeros(batch, 1, 0, dtype=torch.int64))
    pools, mixing = list[_Pool](), list[Tensor]()
    stop = torch.tensor(ends, dtype=torch.int64, device=start.device)
    for t, k in enumerate(counts):
        total, state, width = continued(step, last, state, paths.log_probs, t)
        check_scores(total, t)
        if max(ends, default=0) >= width:
            raise ValueError(f"`end` must satisfy 0 ≤ end < {width} (size of the last dim of `step`); got {max(ends)}.")
        total = torch.where((most > t)[:, None], total, 0.0)  # rows that are complete do not matter
        shape, is_last, is_open = (batch, k, total.shape[-1] // width, width), most == t + 1, most > t + 1
        parts = _weights(select, total, k).view(shape)
        slots = paths.mixed(parts, total)
        if is_last.any() or t + 1 == len(counts):
            pools.append(_Pool(slots, _minus(is_last[:, None]).expand(-1, k)))
        if ends and t + 1 < len(counts):
            share = parts.sum(1)[..., stop].flatten(1).clamp(max=1)  # (batch, m · ends)
            is_there = is_open[:, None] & (share > torch.finfo(share.dtype).tiny)
            pools.append(_Pool(paths.ended(stop, total), torch.where(is_there, share, 1.0).log() + _minus(is_there)))
            others = total.view(batch, -1, width).index_fill(-1, stop, -torch.inf).flatten(1)
            total = torch.where(is_open[:, None], others, 0.0)
            parts = _weights(select, total, k).view(shape)
            slots = paths.mixed(parts, total)
        mixing.append(parts.sum(-1))
        paths, last = slots, slots.tokens[-1].flatten(0, 1)
        state = mapped(state, partial(_mixed, back=mixing[-1]))
    found = _best(pools, select if ends else None, counts[-1], most, penalty)
    return found._replace(soft_back_pointers=tuple(mixing))


def _best(pools: Sequence[_Pool], select: Select | None, k: int, most: Tensor, penalty: float) -> Beams:
    """Return k slots of all that was set aside; without a selection, those of the last step of each row."""
    log_probs = torch.cat([pool.paths.log_probs for pool in pools], 1)
    log_weights = torch.cat([pool.log_weights for pool in pools], 1)
    scores = torch.cat([p.paths.log_probs / len(p.paths.tokens) ** penalty for p in pools], 1)
    if select is None:  # one pool for each row, already in order
        eyes = [torch.eye(k, w.shape[1], device=w.device) for w in (pool.log_weights for pool in pools)]
        weights = torch.cat(eyes, 1).to(scores.dtype) * (log_weights == 0)[:, None]
    else:
        ranked = torch.where(log_weights > -torch.inf, scores + log_weights, -torch.inf)
        weights = _weights(select, torch.where((most > 0)[:, None], ranked, 0.0), k) * (most > 0)[:, None, None]
    length = max(len(pool.paths.tokens) for pool in pools)
    parts = weights.split([pool.log_weights.shape[1] for pool in pools], -1)
    both = [(part, pool.paths.tokens) for part, pool in zip(parts, pools, strict=True)]
    soft = [sum(part @ tokens[t] for part, tokens in both if t < len(tokens)) for t in range(length)]
    stacked = torch.stack(soft, 2)  # (batch, k, length, V)
    lengths = (stacked.detach().sum(-1) > 0.5).sum(-1)
    is_past = torch.arange(length, device=most.device) >= lengths[..., None]
    backs = [torch.nn.functional.pad(p.paths.back, (0, length - len(p.paths.tokens)), value=EMPTY) for p in pools]
    back = gather(torch.cat(backs, 1), weights.detach().argmax(-1))
    tokens, back = (u.masked_fill(is_past, EMPTY) for u in (stacked.detach().argmax(-1), back))
    is_none = weights.detach().sum(-1) == 0
    is_none[:, 0] &= most > 0  # a row without tokens has one beam without tokens
    scores, log_probs = (_weighed(weights, x).masked_fill(is_none, -torch.inf) for x in (scores, log_probs))
    return Beams(tokens, scores, log_probs, lengths, back, soft_tokens=stacked)


def _weights(select: Select, scores: Tensor, k: int) -> Tensor:
    """Return the slots (batch, k, n) of scores (batch, n)."""
    weights = select(scores, scores, k).weights
    if weights is None:
        raise ValueError("`select` must return `weights` if it is soft.")
    return weights


def _weighed(weights: Tensor, x: Tensor) -> Tensor:
    """Return the means (batch, k) of numbers (batch, n); −inf has no weight."""
    mean: Tensor = (weights * x.masked_fill(x == -torch.inf, 0.0)[:, None]).sum(-1)
    return mean


def _minus(is_there: Tensor) -> Tensor:
    """Return 0 where True and −inf where not."""
    return torch.where(is_there, 0.0, -torch.inf)


def _mixed(x: Tensor, back: Tensor) -> Tensor:
    """Return rows (batch · m, …) mixed by weights (batch, k, m); (batch · k, …)."""
    if not x.is_floating_point():
        raise TypeError(f"`state` must hold floating tensors for soft beams, which mix them; got {x.dtype}.")
    batch, k, m = back.shape
    return (back.to(x.dtype) @ x.reshape(batch, m, -1)).view(batch * k, *x.shape[1:])
