"""Rows of which each process holds a part: sums over process groups, the solver on them, and selection by radix.

Every number that decides what happens next comes from an all-reduce, so all processes take the same steps. Whether a
row is done is put to the vote in the message of the next evaluation, because the logarithms of two machines may differ
by a bit; that message also brings the sums at the final point, which `threshold.corrected` needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from . import cdfs, implicit, kth, subsets, threshold
from .cdfs import Cdf, row_sum
from .implicit import Point, Rows, Survey

MOST_STEPS = 200  # evaluations of one call; rows near the k-th score need about 10
WIDE = 100.0  # as `threshold.WIDE`, but less, because a round is dear: so σ_k takes at most 16
DIGIT, ROUNDS = 8, 4  # radix select: bits a round, and rounds for a start
SHORT = 512  # parts up to this length are gathered for a hard selection: fewer bytes than counts of digits


class Message(NamedTuple):
    """One collective that was sent."""

    kind: str
    bytes: int  # that this process contributes


_logs: list[list[Message]] = []


@contextmanager
def messages() -> Iterator[list[Message]]:
    """Collect the messages that khot's functions send in this block.

    Examples:
        >>> with messages() as sent:
        ...     pass
        >>> len(sent)
        0
    """
    log: list[Message] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


class Passes(NamedTuple):
    """Hold what goes over a whole part of each row, and may have a kernel."""

    sums_at: Callable[[Cdf, Rows, Point], Tensor] = threshold.sums_at
    value_at: Callable[[Cdf, Rows, Point, Tensor], Tensor] = threshold.value_at


EAGER = Passes()


class Over:
    """Connect the processes that hold the parts of a row: process groups, of which the last varies fastest."""

    def __init__(self, names: Sequence[str], passes: Passes = EAGER) -> None:
        self.passes = passes
        self.groups = [_torch.process_group(name) for name in names]
        self.vote: Tensor | None = None  # (rows, 1) bool, sent with the next sums: this process is done with the row
        self.votes: Tensor | None = None  # (rows, 1) bool: all processes were
        self.sums: tuple[Tensor, ...] = ()  # the last result of `sums_at`

    @property
    def rank(self) -> int:
        """Return the place of this process's part in the row."""
        rank = 0
        for group in self.groups:
            rank = rank * dist.get_world_size(group) + dist.get_rank(group)
        return rank

    @property
    def size(self) -> int:
        """Return how many parts a row has."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    def reduce(self, *asked: tuple[Tensor, Any]) -> list[Tensor]:
        """Return all-reduced copies of tensors, each with its `ReduceOp`; all are in flight together."""
        results = [t.clone(memory_format=torch.contiguous_format) for t, _ in asked]
        for group in self.groups:
            works = []
            for t, (_, op) in zip(results, asked, strict=True):
                works.append(dist.all_reduce(t, op, group=group, async_op=True))
                for log in _logs:
                    log.append(Message("all_reduce", t.numel() * t.element_size()))
            for work in works:
                work.wait()
        return results

    def sum(self, t: Tensor) -> Tensor:
        """Return Σ over the processes."""
        return self.reduce((t, dist.ReduceOp.SUM))[0]

    def max(self, t: Tensor) -> Tensor:
        """Return the maximum over the processes."""
        return self.reduce((t, dist.ReduceOp.MAX))[0]

    def gather(self, t: Tensor) -> Tensor:
        """Return the tensors of all processes, in the order of their parts; (parts, *t.shape)."""
        gathered = t.contiguous()[None]
        for group in reversed(self.groups):
            parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
            for log in _logs:
                log.append(Message("all_gather", gathered.numel() * gathered.element_size()))
            dist.all_gather(parts, gathered, group=group)
            gathered = torch.cat(parts)
        return gathered

    # ── what the solver asks (`implicit.Across`) ──────────────────────────────────────────────────────────────────
    def sums_at(self, cdf: Cdf, rows: Rows, point: Point) -> tuple[Tensor, ...]:
        """Return what `cdfs.tail_sums` does for whole rows at a point, and send the vote along."""
        is_open = torch.ones_like(rows.k) if self.vote is None else (~self.vote).to(rows.k.dtype)
        own = torch.cat((self.passes.sums_at(cdf, rows, point), is_open), -1)
        count, *sums, left = self.sum(own).split(1, -1)
        self.votes, self.sums = left == 0, (count - rows.k, *sums)
        return self.sums

    def logsumexp(self, *sides: Tensor) -> list[Tensor]:
        """Return log Σ e^t of whole rows, (rows, 1) for each tensor."""
        own = torch.cat([side.logsumexp(-1, keepdim=True) for side in sides], -1)
        return list(self.gather(own).logsumexp(0).split(1, -1))


class Joined(subsets.Whole):
    """Join the results of parts on several processes."""

    is_one = False

    def __init__(self, over: Over) -> None:
        self.over = over

    def add(self, t: Tensor) -> Tensor:
        if t.is_complex():
            return torch.view_as_complex(self.over.sum(torch.view_as_real(t)))
        return self.over.sum(t)

    def multiply(self, t: Tensor) -> Tensor:
        return torch.view_as_complex(self.over.gather(torch.view_as_real(t))).prod(0)

    def largest(self, t: Tensor) -> Tensor:
        return self.over.max(t)


# ── the solver on parts ──────────────────────────────────────────────────────────────────────────────────────────────
def topk(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, cdf: Cdf, over: Over) -> Tensor:
    """Return this process's part of y, as `threshold.topk`; x (…, m), where m ≥ 0 differs between processes."""
    scores, point, rows = _solve(x, k, temperature, mask, None, cdf, over)
    step = torch.where(point.shift.isfinite(), threshold.correction(over.sums), 0.0)  # the last message had them
    return over.passes.value_at(cdf, rows._replace(x=scores), point, step)[:, : x.shape[-1]].view(x.shape)


def margin(
    x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, costs: Tensor | None, cdf: Cdf, over: Over
) -> Tensor:
    """Return this process's part of z, as `threshold.margin`."""
    scores, point, rows = _solve(x, k, temperature, mask, costs, cdf, over)
    return threshold.margins_at(scores, point, rows.temperature)[:, : x.shape[-1]].view(x.shape)


def value(cdf: Cdf, z: Tensor, k: Tensor, costs: Tensor | None, over: Over) -> Tensor:
    """Return this process's part of y = F(z), as `threshold.value`."""
    at = cdfs.tails_at(cdf, z)
    own = torch.cat(cdfs.tail_sums(at, torch.zeros_like(k).unsqueeze(-1), costs), -1)
    count, *sums = over.sum(own).split(1, -1)
    return threshold.corrected(at, (count - k.unsqueeze(-1), *sums))


def _padded(t: Tensor, rows: int, fill: float) -> Tensor:
    """Return (rows, n) with n ≥ 1: an empty part becomes one entry that counts for nothing."""
    return t.reshape(rows, t.shape[-1]).contiguous() if t.shape[-1] else t.new_full((rows, 1), fill)


def _solve(
    x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, costs: Tensor | None, cdf: Cdf, over: Over
) -> tuple[Tensor, Point, Rows]:
    count = k.numel()
    scores = _padded(x if mask is None else x.masked_fill(~mask, -torch.inf), count, -torch.inf)
    weights = None if costs is None else _padded(costs.to(x.dtype), count, 1.0)
    rows = Rows(scores, k.reshape(-1, 1), temperature.reshape(-1, 1), weights)
    if rows.costs is not None:
        rows = rows._replace(x=torch.where(rows.costs > 0, rows.x, torch.nan))
    rows, survey, mean, deviation = _survey(rows, over)
    survey, rest, regular, share, tied, bracket = threshold.pose(cdf, rows, survey)
    spread = torch.special.ndtri(share)
    shift = spread.sign() * torch.hypot(tied - cdf.center, deviation / rows.temperature * spread) + cdf.center
    first = torch.where((mean / rows.temperature - shift).isfinite(), -shift, -tied)
    start = Point(torch.where(first == -shift, mean, survey.low), first)
    is_wide = regular & (survey.high - survey.low > WIDE * rows.temperature)
    which = is_wide.squeeze(-1).nonzero().squeeze(-1)
    if len(which):
        some, few, size, free = implicit.take((rows, survey, rest, survey.free), which)
        edges = radix_edges(some.x, some.costs, size, few, over)
        near = threshold.near_kth(cdf, some, size, free, edges)
        start, bracket = implicit.put((start, bracket), which, near)
    point, is_solved = _search(cdf, rows, survey, start, bracket, regular, over)
    return rows.x, threshold.concluded(rows, survey, point, regular & is_solved), rows


def _survey(rows: Rows, over: Over) -> tuple[Rows, Survey, Tensor, Tensor]:
    """Return rows and survey as `threshold._survey` does, the mean and the deviation, in one round.

    A row whose k or T is not the same on all processes gets T = NaN, and with it no solution on any of them.
    """
    x, k, costs = rows.x, rows.k, rows.costs
    size, heat = k.nan_to_num(-1.0), rows.temperature.nan_to_num(-1.0)
    weigh = threshold.weigh
    low, high = x.amin(-1, keepdim=True).to(k.dtype), x.amax(-1, keepdim=True).to(k.dtype)
    if costs is None and bool((low.isfinite() & high.isfinite()).all()):
        none, each = torch.zeros_like(k), torch.full_like(k, x.shape[-1])
        middle = (low / 2 + high / 2).to(x.dtype)
        apart, middle = x - middle, middle.to(k.dtype)  # an offset would leave no digits of the deviation
        first, square = row_sum(apart), torch.linalg.vector_norm(apart, dim=-1, keepdim=True).to(k.dtype).square()
        moments = first + each * middle, square + middle * (2 * first + each * middle)
        sums = torch.cat((none, each, none, each, *moments), -1)
    else:
        finite = x.isfinite()
        inner = torch.where(finite, x, 0.0).to(k.dtype)
        sums = torch.cat((weigh(x == torch.inf, costs), weigh(finite, costs), weigh(x.isnan(), None),
                          weigh(finite, None), row_sum(inner), row_sum(inner.square())), -1)  # fmt: skip
        low, high = (torch.where(finite, x, s * torch.inf).to(k.dtype) for s in (1.0, -1.0))
        low, high = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    ends = torch.cat((-low, high, size, -size, heat, -heat), -1)
    sums, ends = over.reduce((sums, dist.ReduceOp.SUM), (ends, dist.ReduceOp.MAX))
    forced, free, lost, number, first, second = sums.split(1, -1)
    low, high, most_k, least_k, most_heat, least_heat = ends.split(1, -1)
    agrees = (most_k == -least_k) & (most_heat == -least_heat)
    tied = forced > k  # too many +inf: they share k, as equal scores do
    if bool(tied.any()):
        x = torch.where(tied & ~x.isnan(), torch.where(x == torch.inf, 0.0, -torch.inf).to(x.dtype), x)
    free = torch.where(lost > 0, torch.nan, torch.where(tied, forced, free))
    survey = Survey(torch.where(tied, 0.0, -low), torch.where(tied, 0.0, high), free, torch.where(tied, 0.0, forced))
    mean = torch.where(tied, 0.0, first / number)
    deviation = torch.where(tied, 0.0, (second / number - mean.square()).clamp(min=0).sqrt())
    heat = torch.where(agrees, rows.temperature, torch.nan)
    return rows._replace(x=x, temperature=heat), survey, mean, deviation


def _search(
    cdf: Cdf, rows: Rows, survey: Survey, start: Point, bracket: implicit.Bracket, live: Tensor, over: Over
) -> tuple[Point, Tensor]:
    """Search as `implicit.search` does; a row rests when all processes have voted that it is done."""
    eps, tolerance = torch.finfo(rows.x.dtype).eps, implicit.tolerance_of(cdf, rows.x.dtype)
    finest = 1.0 if cdf.smooth else torch.finfo(rows.x.dtype).tiny
    buffer = torch.empty_like(rows.x)
    point = implicit.inside(start, bracket, rows, survey)
    over.vote = None
    state = implicit.begun(point, implicit.evaluate(cdf, rows, point, buffer, True, over), bracket)
    rests, is_solved = torch.zeros_like(live), torch.zeros_like(live)
    for _ in range(MOST_STEPS):
        state, done = implicit.look(state, rows, eps, tolerance, finest)
        done = done | ~live
        last, solves = implicit.last(state)
        is_solved = torch.where(done & ~rests, solves, is_solved)
        moved = implicit.step(state, rows, survey, rests, eps)
        point = implicit.where(rests, state.point, implicit.where(done & live, last, moved.point))
        over.vote = done | rests
        state = moved._replace(point=point, residual=implicit.evaluate(cdf, rows, point, buffer, True, over))
        assert over.votes is not None
        rests = over.votes
        if bool(rests.all()):  # a sum of votes, so the same on all processes
            break
    return state.point, is_solved & rests


# ── selection by radix ───────────────────────────────────────────────────────────────────────────────────────────────
def _keys(x: Tensor) -> tuple[Tensor, int]:
    """Return integers in the order of the scores, (rows, n) int64, and how many bits they have."""
    bits = 64 if x.dtype == torch.float64 else 32
    word = (x + 0.0).view(torch.int64 if bits == 64 else torch.int32).long()  # −0 becomes 0
    return word ^ ((word >> (bits - 1)) & ((1 << (bits - 1)) - 1)), bits


def _scores(keys: Tensor, bits: int) -> Tensor:
    """Undo `_keys`; float64."""
    word = keys ^ ((keys >> (bits - 1)) & ((1 << (bits - 1)) - 1))
    if bits == 64:
        return word.view(torch.float64)
    return word.to(torch.int32).view(torch.float32).to(torch.float64)


class Found(NamedTuple):
    """Hold where the k-th largest key is; tensors are (rows, 1), and (rows, 256) for each round."""

    key: Tensor  # the least key of its bucket
    above: Tensor  # the weight of all keys above the bucket
    inside: Tensor  # the weight in it
    edges: list[Tensor]  # keys of the edges of all buckets that were counted
    counts: list[Tensor]  # the weight at or above each edge, float64


def radix(keys: Tensor, bits: int, weights: Tensor, k: Tensor, rounds: int, over: Over) -> Found:
    """Find the bucket of the key at which the weight from above reaches k; k (rows, 1) float64, > 0."""
    prefix, above = torch.zeros_like(k, dtype=torch.int64), torch.zeros_like(k)
    digits = torch.arange(256, device=keys.device)
    edges, counts = [], []
    for turn in range(rounds):
        shift = bits - DIGIT * (turn + 1)
        digit = (keys >> shift) + 128 if turn == 0 else (keys >> shift) & 255
        counted = weights if turn == 0 else torch.where(keys >> (shift + DIGIT) == prefix, weights, 0.0)
        hist = over.sum(torch.zeros_like(k).repeat(1, 256).scatter_add_(-1, digit, counted))
        at_least = above + hist.flip(-1).cumsum(-1).flip(-1)
        base = digits - 128 if turn == 0 else (prefix << DIGIT) + digits
        edges.append(base << shift)
        counts.append(at_least)
        place = ((at_least >= k).sum(-1, keepdim=True) - 1).clamp(min=0)
        prefix, inside = base.expand(len(k), -1).gather(-1, place), hist.gather(-1, place)
        above = at_least.gather(-1, place) - inside
        if len(k) == 1:  # what is outside the bucket counts no more
            is_in = (keys >> shift == prefix)[0]
            keys, weights = keys[:, is_in], weights[:, is_in]
    return Found(prefix << (bits - DIGIT * rounds), above, inside, edges, counts)


def radix_edges(x: Tensor, costs: Tensor | None, k: Tensor, survey: Survey, over: Over) -> kth.Edges:
    """Return edges around the k-th of the finite scores, as `kth.sorted_edges` does, in five rounds."""
    keys, bits = _keys(x)
    weights = x.isfinite().to(k.dtype) if costs is None else torch.where(x.isfinite(), costs, 0.0).to(k.dtype)
    found = radix(keys, bits, weights, k, ROUNDS, over)
    counts = torch.cat(found.counts, -1)
    values = _scores(torch.cat([e.expand(len(x), -1) for e in found.edges], -1).contiguous(), bits)
    beyond = torch.where(counts > 0, survey.low, survey.high)  # of digits that no number has
    values = torch.where(values.isnan(), beyond, values).clamp(survey.low, survey.high)
    # If the bucket ends just at k, the threshold is between its least score and the next one below.
    is_in = keys >= found.key
    above = torch.where(is_in & (weights > 0), x, torch.inf).amin(-1, keepdim=True).to(k.dtype)
    below = torch.where(~is_in & (weights > 0), x, -torch.inf).amax(-1, keepdim=True).to(k.dtype)
    least, most = over.max(torch.cat((-above, below), -1)).split(1, -1)
    is_between = (found.above + found.inside == k) & most.isfinite()
    middle = torch.where(is_between, most / 2 - least / 2, _scores(found.key, bits))
    return kth.Edges(values, counts, values, counts, middle.clamp(survey.low, survey.high))


def _gathered(scores: Tensor, k: Tensor, widest: int, over: Over) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k-th largest key of short rows, how many are above, and how many equal ones earlier parts have."""
    padded = torch.nn.functional.pad(scores, (0, widest - scores.shape[-1]), value=-torch.inf)
    row = over.gather(padded).transpose(0, 1).flatten(1)  # (rows, parts · widest)
    keys, _ = _keys(row)
    key = keys.sort(-1, descending=True).values.gather(-1, (k.long() - 1).clamp(max=row.shape[-1] - 1))
    is_equal = (keys == key) & (row > -torch.inf)
    return key, (keys > key).sum(-1, keepdim=True), is_equal[:, : over.rank * widest].sum(-1, keepdim=True)


def k_hot(x: Tensor, k: Tensor, mask: Tensor | None, over: Over) -> Tensor:
    """Return this process's part of `select.k_hot`: ties by the lowest part, then by the lowest index."""
    k = k.reshape(-1, 1)
    scores = _padded(x if mask is None else x.masked_fill(~mask, -torch.inf), len(k), -torch.inf)
    allowed, lost = scores > -torch.inf, scores.isnan()
    if not len(k):
        return torch.empty_like(x)
    size, width = k.nan_to_num(-1.0), torch.full_like(k, scores.shape[-1])
    sums, ends = over.reduce(
        (torch.cat((threshold.weigh(allowed, None), threshold.weigh(lost, None)), -1), dist.ReduceOp.SUM),
        (torch.cat((size, -size, width), -1), dist.ReduceOp.MAX),
    )
    agrees = ends[:, :1] == -ends[:, 1:2]
    possible = (k >= 0) & (k <= sums[:, :1]) & (k == k.floor()) & (sums[:, 1:] == 0) & agrees
    keys, bits = _keys(scores)
    if (widest := int(ends[:, 2].max())) <= SHORT:  # the same on all processes
        kth_key, above, before = _gathered(torch.where(lost, -torch.inf, scores), size.clamp(min=1), widest, over)
        ties = (keys == kth_key) & allowed
    else:
        kth_key, above, *_ = radix(keys, bits, (allowed & ~lost).to(k.dtype), size.clamp(min=1), bits // DIGIT, over)
        ties = (keys == kth_key) & allowed
        before = over.gather(threshold.weigh(ties, None))[: over.rank].sum(0)  # of (parts, rows, 1)
    take = (size - above - before).clamp(min=0)
    chosen = (keys > kth_key) & allowed | (ties & (ties.cumsum(-1) <= take))
    chosen = chosen & (size > 0)
    return torch.where(possible, chosen.to(x.dtype), torch.nan)[:, : x.shape[-1]].reshape(x.shape)
