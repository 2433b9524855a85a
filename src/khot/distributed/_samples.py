"""Samples of rows in parts: the same bits as on one process, at any number and length of parts.

A pivotal sample in the given order is a binary tree of duels whose odds are known before a coin is thrown. A part
reduces itself to the nodes that it holds whole and whose parents it does not: at most two a level. All parts' nodes are
gathered, every process walks the tree above them alike, since coins are thrown by counter, and each expands its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._math import across, natural, noise, pivotal, systematic
from .._math.across import Over
from .._math.cdfs import SIGMOID
from ..ops import uniform


class Layout(NamedTuple):
    """Hold where the parts of a row of n items lie."""

    n: int
    starts: list[int]  # of each part, and n at the end
    rank: int

    @property
    def own(self) -> tuple[int, int]:
        """Return the first item of this process's part, and the one after its last."""
        return self.starts[self.rank], self.starts[self.rank + 1]


def layout(length: int, over: Over, device: torch.device) -> Layout:
    """Gather the lengths of all parts."""
    lengths = over.gather(torch.tensor([length], device=device)).flatten()
    starts = [0, *lengths.cumsum(0).tolist()]
    return Layout(starts[-1], starts, over.rank)


def _held(low: int, high: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Return, for each level, the range of nodes whose leaves are all within [low, high)."""
    ranges = []
    for level, size in enumerate(sizes):
        first = -(-low >> level) if low else 0
        end = size if high == sizes[0] else high >> level
        ranges.append((first, max(first, end)) if high > low else (0, 0))
    return ranges


def _edges(ranges: list[tuple[int, int]], level: int) -> list[int]:
    """Return the nodes of a level that are held and whose parents are not: at most two."""
    first, end = ranges[level]
    if first == end:
        return []
    above = ranges[level + 1] if level + 1 < len(ranges) else (0, 0)
    return sorted({node for node in (first, end - 1) if not above[0] <= node // 2 < above[1]})


def draw_pivotal(
    p: Tensor, is_integer: Tensor, seed: Tensor, draws: int, is_paired: bool, parts: Layout, over: Over
) -> Tensor:
    """Draw this process's part (draws · rows, m) of what `_math.pivotal.draw` draws in the given order; p (rows, m)."""
    rows, sizes = len(p), pivotal.sizes(parts.n)
    top = len(sizes) - 1
    ranges = _held(*parts.own, sizes)
    # Upwards: the residuals of the nodes that this part holds, and the duels between them.
    residuals, duels = [p.to(torch.float64).clamp(0, 1)], []
    for level in range(top):
        (first, _), (low, high) = ranges[level], ranges[level + 1]
        below = residuals[-1][:, 2 * low - first : 2 * high - first]  # the last node may have one child
        duel, left = pivotal.duels(below)
        duels.append(duel)
        residuals.append(left if high > low else left[:, :0])
    sent = torch.zeros(rows, 2 * len(sizes), dtype=torch.float64, device=p.device)
    for level, each in enumerate(residuals):
        for place, node in enumerate(_edges(ranges, level)):
            sent[:, 2 * level + place] = each[:, node - ranges[level][0]]
    gathered = over.gather(sent)  # (parts, rows, 2 · levels)
    # The crown: every node that no part holds whole, and the edges below it, alike on all processes.
    known: list[dict[int, Tensor]] = [{} for _ in sizes]
    for part in range(len(parts.starts) - 1):
        theirs = _held(parts.starts[part], parts.starts[part + 1], sizes)
        for level in range(len(sizes)):
            for place, node in enumerate(_edges(theirs, level)):
                known[level][node] = gathered[part, :, 2 * level + place]
    crown: list[dict[int, pivotal.Level]] = [{} for _ in sizes]
    for level in range(top):
        for node in sorted({child // 2 for child in known[level]}):
            children = [child for child in (2 * node, 2 * node + 1) if child in known[level]]
            below = torch.stack([known[level][child] for child in children], -1)
            crown[level + 1][node], left = pivotal.duels(below)
            known[level + 1][node] = left[:, 0]
    # Downwards: who goes on, first in the crown and then within the part.
    coins = pivotal.Coins(seed, draws, rows, parts.n, is_paired)
    root = torch.where(is_integer.repeat(draws), 0.5, 1 - coins.last())
    values: list[dict[int, Tensor]] = [{} for _ in sizes]
    values[top][0] = known[top][0].repeat(draws) >= root
    for level in range(top, 0, -1):
        for node, duel in crown[level].items():
            coin = coins.of(level, torch.tensor([node], device=p.device))
            pair = _settle(values[level][node][:, None], duel, coin, draws)
            for child in (2 * node, 2 * node + 1):
                values[level - 1][child] = pair[:, child - 2 * node]
    held = torch.empty(draws * rows, 0, dtype=torch.bool, device=p.device)
    for level in range(top, -1, -1):
        first, end = ranges[level]
        below = torch.empty(draws * rows, end - first, dtype=torch.bool, device=p.device)
        if level < top and ranges[level + 1][1] > ranges[level + 1][0]:
            low, high = ranges[level + 1]
            coin = coins.of(level + 1, torch.arange(low, high, device=p.device))
            spread = _settle(held, duels[level], coin, draws)[:, : min(2 * high, end) - 2 * low]
            below[:, 2 * low - first : 2 * low - first + spread.shape[1]] = spread
        for node in _edges(ranges, level):
            below[:, node - first] = values[level][node]
        held = below
    return held.to(p.dtype)


def _settle(value: Tensor, duel: pivotal.Level, coin: Tensor, draws: int) -> Tensor:
    """Return the values of the children (draws · rows, 2m) of nodes with values (draws · rows, m)."""
    return pivotal.settle(value, coin, *(t.repeat(draws, 1) for t in (duel.odds, duel.total, duel.is_won)))


def draw_systematic(
    p: Tensor, k: Tensor, seed: Tensor, draws: int, is_paired: bool, parts: Layout, over: Over
) -> Tensor:
    """Draw this process's part (draws · rows, m) of what `_math.systematic.draw` draws; p (rows, m), k (rows)."""
    rows, m = p.shape
    shift = systematic.places(parts.n)
    w = _quantised(p, k, 1 << shift, parts.own[0] == 0, over)
    u = noise.row_keys(seed, draws, rows, is_paired)
    if is_paired:
        u = u + noise.is_second(draws, rows, p.device).to(torch.int64) * (1 << (shift - 1))
    u = u.view(draws, rows, 1) & ((1 << shift) - 1)
    before = over.gather(w.sum(-1, keepdim=True))[: over.rank].sum(0)  # the sums of the parts to the left
    running = torch.cat((torch.zeros_like(before), w.cumsum(-1)), -1) + before
    passed = (running + u) >> shift
    # At the left end of the row nothing has been passed, whatever u is.
    start = torch.where(
        torch.tensor(parts.own[0] == 0, device=p.device), torch.zeros_like(passed[..., :1]), passed[..., :1]
    )
    return torch.cat((start, passed[..., 1:]), -1).diff().to(p.dtype).view(draws * rows, m)


def _quantised(p: Tensor, k: Tensor, one: int, is_first: bool, over: Over) -> Tensor:
    """Return this process's part of `_math.systematic.quantised`; no items are to the left of the first one."""
    w, spread = systematic.units(p, one)
    lack = ((k * one).round().to(torch.int64) - over.sum(w.sum(-1)))[..., None]
    own = torch.stack((spread, systematic.room(w, lack, one)))  # (2, rows, m)
    sums = over.gather(own.sum(-1, keepdim=True))  # (parts, 2, rows, 1)
    before, total = sums[: over.rank].sum(0), sums.sum(0)
    measures = torch.cat((torch.zeros_like(before), own.cumsum(-1)), -1) + before
    is_shift = lack.abs() <= total[0]
    measure, whole = torch.where(is_shift, measures[0], measures[1]), torch.where(is_shift, total[0], total[1])
    given = systematic.share(measure, whole, lack)
    if is_first:
        given[..., :1] = 0
    return w + given.diff()


def draw_conditional_poisson(p: Tensor, k: Tensor, seed: Tensor, draws: int, parts: Layout, over: Over) -> Tensor:
    """Draw this process's part (draws · rows, m) by the law of `ConditionalPoisson`; p (rows, m), k (rows).

    Given how many each part takes, the parts are independent, and each has the same law with its own number. Every
    part builds its tree of counts; the roots are gathered as the leaves of a tree that divides k among the parts.
    """
    rows, m = p.shape
    own = torch.nn.functional.pad(p.to(torch.float64), (0, int(m == 0)))  # an item that is never drawn, for none
    ones = torch.ones_like(k)
    own = across.topk(torch.logit(own.clamp(0, 1)), k, ones, None, SIGMOID, over)  # sums to k to the last digit

    def tilted(theta: Tensor, k: Tensor) -> Tensor:
        return across.margin(theta, k, torch.ones_like(k), None, None, SIGMOID, over)

    z = tilted(natural.solve_parts(own, k, tilted, parts.n, across.Joined(over)), k)
    most = int(k.max())
    levels = natural.build_tree(z.sigmoid(), most)
    root = levels[-1]
    mass = torch.nn.functional.pad(root.mass[:, 0], (0, most + 1 - root.mass.shape[-1]))
    sent = torch.cat((mass, root.least.to(mass.dtype), root.most.to(mass.dtype)), -1)
    leaves = over.gather(sent).transpose(0, 1)  # (rows, parts, most + 3)
    extra = (1 << max(over.size - 1, 0).bit_length()) - over.size
    leaves = torch.cat((leaves, leaves.new_zeros(rows, extra, most + 3)), 1)
    leaves[:, over.size :, 0] = 1.0  # parts that do not exist take none
    crown = natural.grow([natural.Node(leaves[..., :-2], leaves[..., -2].long(), leaves[..., -1].long())], most)
    shares, _ = natural.sample_tree(crown, k.expand(draws, rows), seed, 0, uniform)
    mine = over.gather(shares)[0][..., over.rank]  # the first process decides, should two machines round otherwise
    drawn, _ = natural.sample_tree(levels, mine, noise.stream_key(seed, 1 + over.rank), 0, uniform)
    return drawn[..., :m].reshape(draws * rows, m).to(p.dtype)
