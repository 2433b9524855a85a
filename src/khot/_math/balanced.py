"""Balanced and spread samples: the cube method along a tree, and the local pivotal method.

Both move a point φ, at first π, inside the unit cube. Each move keeps its mean and brings at least one entry to 0 or 1.

The cube method moves along directions u with Σ_i z_i u_i/π_i = 0, so that Σ_{drawn} z_i/π_i keeps its value Σ z_i. Of
p + 1 open entries there is always such a direction; with one variable, z = π, the move is the duel of pivotal sampling.
The entries are in blocks of 2p. When p of a block are left open it meets its neighbour: a tree, all of whose blocks on
a level move at the same time. A tree hands the most unusual entries up to its root, where they would decide the error.
So some entries wait, and meet them there one after the other, as all do in the method of Chauvet and Tillé. In the end
up to p entries are open, and the last variable is given up; then the next.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import noise

LAST = 60  # items for each variable that wait for the end of the tree
SNAP = 1e-13  # an entry so close to 0 or 1 after a move was brought there
RANK = 1e-11  # a pivot below this share of its variable is rounding


def cube(p: Tensor, z: Tensor, is_integer: Tensor, seed: Tensor, is_random: bool, draws: int) -> Tensor:
    """Draw balanced samples of p (rows, n), in all draws; z (rows, q, n) is balanced after the size; (draws · rows, n).

    Row r throws the coins of its own key. The blocks are of items as they come, or in a random order of the row's own.
    """
    rows, n = p.shape
    keys = noise.row_keys(seed, draws, rows, False)
    p = p.to(torch.float64).clamp(0, 1).repeat(draws, 1)
    variables = torch.cat((p[:, None], z.to(torch.float64).repeat(draws, 1, 1)), 1)  # (draws · rows, 1 + q, n)
    order = noise.order(noise.stream_key(keys, 1), n) if is_random else None
    if order is not None:
        p, variables = p.gather(-1, order), variables.gather(-1, order[:, None].expand(variables.shape))
    scale = variables.abs().amax(-1, keepdim=True)
    variables = variables / torch.where(scale > 0, scale, 1.0)
    phi = _flight(p, variables, keys)
    for count in range(variables.shape[1] - 1, 0, -1):  # the landing gives up one variable after the other
        phi = _root(phi, p, variables[:, :count], keys, stream=10 + count)
    root = torch.where(is_integer.repeat(draws), 0.5, 1 - noise.unit(noise.bits(noise.stream_key(keys, 2), 1))[:, 0])
    result = (phi >= root[:, None]).to(torch.float64)
    return result if order is None else torch.empty_like(result).scatter_(-1, order, result)


def _flight(p: Tensor, variables: Tensor, keys: Tensor) -> Tensor:
    """Return φ (rows, n) with at most as many open entries as there are variables (rows, v, n)."""
    rows, v, n = variables.shape
    phi, level, last = p.clone(), 0, min(LAST * v, n)
    where, fresh = torch.arange(n, device=p.device).expand(rows, n).split((n - last, last), -1)  # n: there is none
    while where.shape[-1] > v:
        if rest := -where.shape[-1] % (2 * v):
            where = pad(where, (0, rest), value=n)
        blocks = where.view(rows, -1, 2 * v)
        uniforms = noise.unit(noise.bits(noise.stream_key(keys, 100 + level), blocks.shape[1] * 2 * v))
        phi, left = _moved(phi, p, variables, blocks, uniforms.view(rows, -1, 2 * v))
        where, level = left.flatten(1), level + 1  # (rows, blocks · v)
    blocks = torch.cat((where, fresh), -1)[:, None]
    uniforms = noise.unit(noise.bits(noise.stream_key(keys, 3), blocks.shape[-1]))
    return _moved(phi, p, variables, blocks, uniforms[:, None])[0]


def _root(phi: Tensor, p: Tensor, variables: Tensor, keys: Tensor, stream: int) -> Tensor:
    """Go on moving the few entries that are still open, balanced on the given variables alone."""
    n, width = phi.shape[-1], variables.shape[1] + 2
    where = _open_first(phi, torch.arange(n, device=phi.device).expand(phi.shape), min(width, n))
    uniforms = noise.unit(noise.bits(noise.stream_key(keys, stream), width))
    return _moved(phi, p, variables, where[:, None], uniforms[:, None])[0]


def _open_first(phi: Tensor, where: Tensor, count: int) -> Tensor:
    """Return the first `count` of the entries (…, m) that are open, in their order; n, the number of φ, fills up."""
    n = phi.shape[-1]
    value = pad(phi, (0, 1)).gather(-1, where.flatten(1)).view(where.shape)
    is_open = (value > 0) & (value < 1)
    first = (~is_open).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]
    return torch.where(is_open.gather(-1, first), where.gather(-1, first), n)


def _moved(phi: Tensor, p: Tensor, variables: Tensor, blocks: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Move every block (rows, b, m) while it can; return φ, and the entries left open, at most v (rows, b, v)."""
    rows, v, n = variables.shape
    padded, chance = (pad(t, (0, 1)) for t in (phi, p))
    table = pad(variables, (0, 1)).mT  # (rows, n + 1, v)
    row = torch.arange(rows, device=phi.device)[:, None, None]
    for step in range(blocks.shape[-1]):
        first = _open_first(padded[:, :-1], blocks, v + 1)
        w, can_move = _direction(table[row, first].mT, first < n)
        if not bool(can_move.any()):
            break
        u = w * chance[row, first]  # (rows, b, v + 1)
        at = padded[row, first]
        far = [torch.where(side > 0, 1 - at, at) / side.abs() for side in (u, -u)]  # until an entry is 0 or 1
        up, down = (torch.where(u != 0, t, torch.inf) for t in far)
        forth, back = up.amin(-1), down.amin(-1)
        is_up = (uniforms[..., step] * (forth + back) < back)[..., None]
        moved = at + torch.where(is_up, forth[..., None], -back[..., None]) * u
        is_there = torch.where(is_up, up <= forth[..., None], down <= back[..., None])  # for sure, however it rounds
        moved = torch.where(is_there | (moved < SNAP) | (moved > 1 - SNAP), moved.round().clamp(0, 1), moved)
        padded.scatter_(1, first.flatten(1), torch.where(can_move[..., None], moved, at).flatten(1))
        padded[:, -1] = 0
    return padded[:, :-1], _open_first(padded[:, :-1], blocks, v)


def _direction(a: Tensor, is_open: Tensor) -> tuple[Tensor, Tensor]:
    """Return w with a w = 0, for matrices (…, v, m) in columns that are open (…, m), and whether there is one ≠ 0.

    By elimination with full pivots. There is one if more columns are open than the rank of a: v + 1 columns, or fewer
    that depend on each other.
    """
    v, m = a.shape[-2:]
    a = a / a.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    is_free = is_open
    is_left = torch.ones(*a.shape[:-2], v, dtype=torch.bool, device=a.device)  # rows that have no pivot yet
    column_of = torch.full((*a.shape[:-2], v), m, device=a.device)
    for _ in range(v):
        size = torch.where(is_left[..., :, None] & is_free[..., None, :], a.abs(), -1.0)
        best, place = size.flatten(-2).max(-1)
        i, j = place // m, place % m
        is_pivot = (best > RANK)[..., None]
        row = a.gather(-2, i[..., None, None].expand(*i.shape, 1, m))  # (…, 1, m)
        row = row / torch.where(is_pivot[..., None], row.gather(-1, j[..., None, None]), 1.0)
        column = a.gather(-1, j[..., None, None].expand(*j.shape, v, 1))  # (…, v, 1)
        is_row = torch.arange(v, device=a.device) == i[..., None]
        reduced = torch.where(is_row[..., None], row, a - column * row)
        a = torch.where(is_pivot[..., None], reduced, a)
        is_left = is_left & ~(is_row & is_pivot)
        is_free = is_free & ~((torch.arange(m, device=a.device) == j[..., None]) & is_pivot)
        column_of = torch.where(is_row & is_pivot, j[..., None], column_of)
    free = is_free.to(torch.int8).argmax(-1, keepdim=True)
    w = torch.zeros(*a.shape[:-2], m + 1, dtype=a.dtype, device=a.device).scatter_(-1, free, 1.0)
    w = w.scatter(-1, column_of, -a.gather(-1, free[..., None].expand(*a.shape[:-1], 1))[..., 0])[..., :-1]
    return w / w.abs().amax(-1, keepdim=True).clamp(min=1e-300), is_free.any(-1)


def local_pivotal(p: Tensor, places: Tensor, is_integer: Tensor, seed: Tensor, draws: int) -> Tensor:
    """Draw spread samples of p (rows, n): a random open item duels with its nearest, until none is open.

    The items are at `places` (rows, n, d). Ties are broken at random. Returns (draws · rows, n).
    """
    rows, n = p.shape
    phi = p.to(torch.float64).clamp(0, 1).repeat(draws, 1)
    keys, row = noise.row_keys(seed, draws, rows, False), torch.arange(draws * rows, device=p.device)
    coins = noise.unit(noise.bits(keys, 2 * n))
    own, at = row % rows, places.to(torch.float64)
    for step in range(n - 1):
        is_open = (phi > 0) & (phi < 1)
        count = is_open.sum(-1)
        if not bool((count > 1).any()):
            break
        wanted = (coins[:, 2 * step] * count).floor() + 1
        i = (is_open.cumsum(-1) >= wanted[:, None]).to(torch.int8).argmax(-1)
        apart = (at - at[own, i][:, None] if rows == 1 else at[own] - at[own, i][:, None]).square().sum(-1)
        apart = apart.masked_fill(~is_open, torch.inf)
        apart[row, i] = torch.inf
        is_nearest = apart <= apart.amin(-1, keepdim=True)
        tied = noise.bits(noise.stream_key(keys, 3 + step), n).masked_fill(~is_nearest, -(2**63))
        j = tied.argmax(-1)
        a, b = phi[row, i], phi[row, j]
        s = a + b
        is_won = s >= 1
        total, odds = torch.where(is_won, 2 - s, s), torch.where(is_won, 1 - b, a)  # as in `pivotal`
        goes_on = (coins[:, 2 * step + 1] * total < odds) ^ is_won
        stops, rest = is_won.to(s.dtype), s - is_won.to(s.dtype)
        rest = torch.where((rest < SNAP) | (rest > 1 - SNAP), rest.round(), rest)
        is_duel = count > 1
        phi[row, i] = torch.where(is_duel, torch.where(goes_on, rest, stops), a)
        phi[row, j] = torch.where(is_duel, torch.where(goes_on, stops, rest), phi[row, j])
    last = 1 - noise.unit(noise.bits(noise.stream_key(keys, 2), 1))
    root = torch.where(is_integer.repeat(draws)[:, None], 0.5, last)
    return (phi >= root).to(torch.float64)


def tree_order(places: Tensor) -> Tensor:
    """Return an order (…, n) of points (…, n, d) in which neighbours of a binary tree are close: halved at medians.

    On each level every cell is split along its widest side.
    """
    *batch, n, d = places.shape
    places = places.to(torch.float64)
    order = torch.arange(n, device=places.device).expand(*batch, n)
    size = 1 << max(n - 1, 0).bit_length()
    while size > 1:  # cells are `size` places of the order, the last one fewer
        count = math.ceil(n / size)
        at = places.gather(-2, order[..., None].expand(*order.shape, d))
        full = pad(at, (0, 0, 0, count * size - n), value=torch.nan)
        cells = full.unflatten(-2, (count, size))
        low, high = cells.nan_to_num(nan=torch.inf).amin(-2), cells.nan_to_num(nan=-torch.inf).amax(-2)
        side = (high - low).argmax(-1)[..., None, None].expand(*batch, count, size, 1)
        key = cells.gather(-1, side)[..., 0].nan_to_num(nan=torch.inf)
        inside = key.argsort(dim=-1, stable=True)
        held = pad(order, (0, count * size - n), value=n).unflatten(-1, (count, size))
        order, size = held.gather(-1, inside).flatten(-2)[..., :n], size // 2
    return order
