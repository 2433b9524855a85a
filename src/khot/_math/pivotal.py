"""Pivotal sampling along a binary tree on the last dim: neighbours duel until each is 0 or 1.

A node leaves one of its leaves undecided, the survivor. Its probability is the fractional part of the sum of the node's
leaves, its residual, so the odds of every duel are known before a coin is thrown. Children with residuals a and b have
s = a + b. If s < 1, one of them becomes 0 and the left goes on with probability a/s; otherwise one becomes 1, and the
left does so with probability (1 − b)/(2 − s), and the other goes on. No coin changes the size of the sample. At s = 1
both say the same of a coin, so that a sum that rounds to either side of 1 gives the same sample.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import noise
from .subsets import safe_log


class Level(NamedTuple):
    """Hold the duels between the nodes of one level of the tree."""

    left: Tensor  # (…, m) residual of the left child
    right: Tensor  # (…, m) of the right; 0 where there is none
    is_won: Tensor  # (…, m) bool: whether the one that stops becomes 1 (else 0)
    odds: Tensor  # (…, m) the left is ahead if coin · total < odds: it becomes the 1, or if there is none it goes on
    total: Tensor  # (…, m)
    size: int  # how many nodes were below: 2m, or 2m − 1


def plan(p: Tensor) -> tuple[list[Level], Tensor]:
    """Return the duels from the leaves to the root, and the residual of the root (…); differentiable."""
    levels = []
    while p.shape[-1] > 1:
        level, p = duels(p)
        levels.append(level)
    return levels, p[..., 0]


def duels(p: Tensor) -> tuple[Level, Tensor]:
    """Return the duels between neighbours (…, n), and the residuals of their parents (…, m)."""
    size = p.shape[-1]
    a, b = pad(p, (0, size % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    s = a + b
    is_won = s >= 1
    return Level(a, b, is_won, torch.where(is_won, 1 - b, a), torch.where(is_won, 2 - s, s), size), s - is_won.to(
        s.dtype
    )


def settle(value: Tensor, coins: Tensor, odds: Tensor, total: Tensor, is_won: Tensor) -> Tensor:
    """Return the values of the children (…, 2m) of nodes whose survivors have the values (…, m)."""
    goes_on = (coins * total < odds) ^ is_won
    pair = torch.where(goes_on, value, is_won), torch.where(goes_on, is_won, value)
    return torch.stack(pair, -1).flatten(-2)


class Strata(NamedTuple):
    """Hold a tree in which each stratum is a subtree: of 2^m leaves, the largest first, so that none is cut in two."""

    rank: Tensor  # (n) place of the stratum of each item
    slots: Tensor  # (n) leaves of the items, stratum after stratum
    empty: Tensor  # leaves without an item, which are never drawn
    leaves: int  # how many there are; fewer than 2n


def strata(labels: Tensor) -> Strata:
    """Lay out the strata of n items; reads the labels."""
    _, code, counts = labels.unique(return_inverse=True, return_counts=True)
    width = torch.tensor([1 << (int(count) - 1).bit_length() for count in counts], device=labels.device)
    order = width.argsort(dim=0, descending=True, stable=True)
    start = width[order].cumsum(0) - width[order]
    inside = torch.arange(len(labels), device=labels.device)
    counts = counts[order]
    slots = inside + (start - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    leaves = int(width.sum())
    is_empty = torch.ones(leaves, dtype=torch.bool, device=labels.device)
    is_empty[slots] = False
    return Strata(order.argsort()[code], slots, is_empty.nonzero()[:, 0], leaves)


def grouped(tree: Strata, order: Tensor) -> Tensor:
    """Return the item at each leaf, (…, leaves), in the order (…, n) within a stratum; from n on for empty leaves."""
    n = order.shape[-1]
    by_stratum = order.gather(-1, tree.rank[order].argsort(dim=-1, stable=True))
    result = order.new_empty(*order.shape[:-1], tree.leaves)
    result[..., tree.slots] = by_stratum
    result[..., tree.empty] = torch.arange(n, tree.leaves, device=order.device)
    return result


def sizes(n: int) -> list[int]:
    """Return how many nodes each level of the tree has, from the leaves to the root."""
    sizes = [n]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


class Coins:
    """The coins of each row (draws · rows), by their place in the tree; as `draw` throws them."""

    def __init__(self, seed: Tensor, draws: int, rows: int, n: int, is_paired: bool) -> None:
        self.keys = noise.stream_key(noise.row_keys(seed, draws, rows, is_paired), 2)
        self.opposite = noise.is_second(draws, rows, seed.device)[:, None] if is_paired else None
        self.starts = [0]
        for size in sizes(n)[1:]:
            self.starts.append(self.starts[-1] + size)

    def at(self, index: Tensor) -> Tensor:
        """Return the uniforms at places (m,) of the sequence; (draws · rows, m)."""
        words = noise.mixed(self.keys[:, None] + (index + 1) * noise.STEP)
        u = noise.unit(words)
        return u if self.opposite is None else torch.where(self.opposite, (1 - noise.UNIT) - u, u)

    def of(self, level: int, nodes: Tensor) -> Tensor:
        """Return the coins of nodes (m,) of a level ≥ 1."""
        return self.at(self.starts[level - 1] + nodes)

    def last(self) -> Tensor:
        """Return the coin for a size that is not an integer; (draws · rows)."""
        return self.at(torch.tensor([self.starts[-1]], device=self.keys.device))[:, 0]


def sample(p: Tensor, root: Tensor, uniforms: Tensor) -> Tensor:
    """Return a boolean k-hot sample for `uniforms` (…, coins); the last survivor is 1 if its residual is ≥ `root`."""
    levels, residual = plan(p)
    value = (residual >= root)[..., None]
    end = uniforms.shape[-1]
    for level in reversed(levels):
        start = end - level.odds.shape[-1]
        value = settle(value, uniforms[..., start:end], level.odds, level.total, level.is_won)[..., : level.size]
        end = start
    return value.expand(p.shape)


def draw(
    p: Tensor, is_integer: Tensor, seed: Tensor, order: Tensor | None, is_random: bool, draws: int, is_paired: bool
) -> Tensor:
    """Draw `draws` samples of each row of `p` (rows, n) → (draws · rows, n) in the dtype of `p`.

    Row r throws the coins of its own key, the last one for a size that is not an integer. The leaves are in the given
    `order` (rows or 1, n), in a random order of the row's own, or as they come. The second draw of a pair has the order
    of the first, and the opposite coins.
    """
    rows, n = p.shape
    keys = noise.row_keys(seed, draws, rows, is_paired)
    leaves = p.to(torch.float64).clamp(0, 1).repeat(draws, 1)
    if is_random:
        order = noise.order(noise.stream_key(keys, 1), n)
    elif order is not None:
        order = order.expand(rows, n).repeat(draws, 1)
    if order is not None:
        leaves = leaves.gather(-1, order)
    uniforms = noise.unit(noise.bits(noise.stream_key(keys, 2), sum(sizes(n)[1:]) + 1))
    if is_paired:
        opposite = (1 - noise.UNIT) - uniforms
        uniforms = torch.where(noise.is_second(draws, rows, p.device)[:, None], opposite, uniforms)
    root = torch.where(is_integer.repeat(draws), 0.5, 1 - uniforms[:, -1])
    result = sample(leaves, root, uniforms[:, :-1]).to(p.dtype)
    return result if order is None else torch.empty_like(result).scatter_(-1, order, result)


def covariance(p: Tensor) -> Tensor:
    """Return Cov(x); (…, n, n). Two leaves meet at one node: −P(both survive until then) · min(ab, (1 − a)(1 − b))."""
    survives, total = torch.ones_like(p), torch.diag_embed(p * (1 - p))
    node = torch.arange(p.shape[-1], device=p.device)  # the node of each leaf, on the level below
    for level in plan(p)[0]:
        parent = node // 2
        meet = (parent[:, None] == parent) & (node[:, None] != node)
        total = total - meet * _apart(level)[..., parent, None] * survives[..., :, None] * survives[..., None, :]
        share = shares(level)[..., parent]
        survives = survives * torch.where(node % 2 == 0, share, 1 - share)
        node = parent
    return total


def _apart(level: Level) -> Tensor:
    """Return min(ab, (1 − a)(1 − b)), minus the covariance of the survivors of the two sides; (…, m)."""
    return torch.minimum(level.left * level.right, (1 - level.left) * (1 - level.right))


def variance_of_sum(p: Tensor, weights: Tensor) -> Tensor:
    """Return Var(Σ c x) in O(n): Σ over nodes of min(ab, (1 − a)(1 − b)) · E(c_I − c_J)², I and J the two survivors.

    A fractional size adds a duel of the last survivor with an item that weighs nothing and makes the sum an integer.
    """
    levels, residual = plan(p)
    first, second, total = weights, weights.square(), p.new_zeros(())
    for level in levels:
        first, second = (pad(moment, (0, level.size % 2)).unflatten(-1, (-1, 2)) for moment in (first, second))
        spread = second.sum(-1) - 2 * first.prod(-1)
        total = total + (_apart(level) * spread).sum(-1)
        share = shares(level)
        first, second = (share * moment[..., 0] + (1 - share) * moment[..., 1] for moment in (first, second))
    return total + (residual * (1 - residual)) * second[..., 0]


def shares(level: Level) -> Tensor:
    """Return the probability that the left goes on (…, m); ½ where the duel decides nothing."""
    is_empty, left = level.total <= 0, torch.where(level.is_won, 1 - level.left, level.left)
    return torch.where(is_empty, 0.5, left / torch.where(is_empty, 1.0, level.total))


def log_prob(p: Tensor, x: Tensor, is_integer: Tensor) -> Tensor:
    """Return log P(x) in O(n), differentiable in p.

    For each node, the probabilities that its decided leaves agree with x and that its survivor's x is 0, or 1.
    """
    levels, residual = plan(p)
    one, never, total = x.to(p.dtype), p.new_tensor([1.0, 0.0]), p.new_zeros(())
    agree = torch.stack((1 - one, one), -1)  # (…, m, 2)
    for level in levels:
        if level.size % 2:  # the missing child is one that is never drawn
            agree = torch.cat((agree, never.expand(*agree.shape[:-2], 1, 2)), -2)
        left, right = agree.unflatten(-2, (-1, 2)).unbind(-2)
        share, won = shares(level)[..., None], level.is_won[..., None]
        stops = [torch.where(won, side[..., 1:], side[..., :1]) for side in (left, right)]
        agree = share * left * stops[1] + (1 - share) * right * stops[0]
        mass = agree.sum(-1, keepdim=True)
        total = total + safe_log(mass).sum((-1, -2))
        agree = agree / torch.where(mass > 0, mass, 1.0)
    root = torch.where(is_integer, (residual >= 0.5).to(residual.dtype), residual)  # P(the last survivor becomes 1)
    return total + safe_log(agree[..., 0, 1] * root + agree[..., 0, 0] * (1 - root))
