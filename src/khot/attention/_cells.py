"""Cells of keys: a bound on every score in a cell from a few numbers, and a search that opens the best cells first."""

from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _check, _shape
from .._math import tails
from .._math.cells import cluster
from .._torch import require_values, without_autocast
from ..kernels import cpu

MOST_LOG = 600.0  # of a mass: sums of e^600 are finite


class CellBound(Protocol):
    """What a cell stores beside its mean, as tensors (…, cells, …), and the bounds that follow: a NamedTuple class."""

    @classmethod
    def fit(cls, keys: Tensor, valid: Tensor, centre: Tensor) -> Self:
        """Return the numbers of cells from keys (…, cells, size, d), which are keys (…, cells, size), and means."""

    def spread(self, q: Tensor, centre_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds on x = q·(key − mean) in each cell: on its maximum, and on log mean(e^x); (…, rows, cells)."""


class Ball(NamedTuple):
    """Bound a cell by a ball: all keys are within a radius of the mean, and their variance in any direction is bounded.

    `x = q·(key − mean)` has mean 0, |x| ≤ b = ‖q‖ r and a variance of at most ρ b². Of all such x the mean of e^x is
    largest for one with two values (Bennett 1962): `(e^{−ρb} + ρ e^b)/(1 + ρ)`.
    """

    radius: Tensor
    """(…, cells): r, the largest distance from the mean."""
    share: Tensor
    """(…, cells): ρ ≤ 1, a bound on the variance in any direction, divided by r²."""

    @classmethod
    @without_autocast
    def fit(cls, keys: Tensor, valid: Tensor, centre: Tensor) -> Self:
        """Return radius and share; the variance is bounded by ‖(AᵀA)²‖_F^½, at least the largest of AᵀA."""
        size, d = keys.shape[-2:]
        eps = torch.finfo(keys.dtype).eps * (size + d)
        apart = (keys - centre.unsqueeze(-2)) * valid.unsqueeze(-1)
        radius = apart.norm(dim=-1).amax(-1)
        apart = apart / radius.clamp(min=torch.finfo(keys.dtype).tiny)[..., None, None]
        gram = apart @ apart.mT if size < d else apart.mT @ apart
        most = (gram @ gram).flatten(-2).norm(dim=-1).sqrt() / valid.sum(-1).clamp(min=1)
        return cls(radius * (1 + eps), (most * (1 + 8 * eps)).clamp(max=1.0))

    @without_autocast
    def spread(self, q: Tensor, centre_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bounds of `CellBound`."""
        b, share = q.norm(dim=-1, keepdim=True) * self.radius.unsqueeze(-2), self.share.unsqueeze(-2)
        return b, torch.logaddexp(-share * b, share.log() + b) - share.log1p()


class Box(NamedTuple):
    """Bound a cell by a box, the range of each coordinate: `x ≤ Σ_d max(q_d lo_d, q_d hi_d) − q·mean`."""

    lowest: Tensor
    """(…, cells, d)."""
    highest: Tensor
    """(…, cells, d)."""

    @classmethod
    @without_autocast
    def fit(cls, keys: Tensor, valid: Tensor, centre: Tensor) -> Self:
        """Return the corners."""
        has = valid.unsqueeze(-1)
        low = torch.where(has, keys, torch.inf).amin(-2)
        high = torch.where(has, keys, -torch.inf).amax(-2)
        return cls(low.where(valid.any(-1, keepdim=True), 0.0), high.where(valid.any(-1, keepdim=True), 0.0))

    @without_autocast
    def spread(self, q: Tensor, centre_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bounds of `CellBound`."""
        b = q.clamp(min=0) @ self.highest.mT + q.clamp(max=0) @ self.lowest.mT - centre_scores
        return b, b


class Group(NamedTuple):
    """Hold the rows of a search that are certified."""

    rows: Tensor
    """(a): which rows, as numbers b · queries + row."""
    scores: Tensor
    """(a, c): of the keys that were read; −inf for none."""
    positions: Tensor
    """(a, c): where these keys are in the cache."""
    unread: Tensor
    """(a): a bound on the log of the mass of all other keys."""


class KeyCells:
    """Keep the keys of a cache in cells of near ones, for `certified_attention`; it grows with the cache.

    Keys that are near each other share a cell: they are halved again and again, and then clustered by k-means. Keys
    that are appended go to new cells in the order in which they come; make a new object from time to time if they are
    many. The cells hold a copy of the keys, in their order, without a gradient. How many cells a query opens depends a
    little on the other queries of the call.

    Args:
        keys: (…, n, d), such as (batch, heads, n, d).
        size: the most keys of a cell.
        rounds: of k-means; each costs n/size products for each key.
        bound: `Ball` or `Box`, or a class of yours with the methods of `CellBound`.
        limit: the share of the cells that a query may open before it is refused, and attends to all keys.

    Examples:
        >>> keys = torch.randn(1, 2, 1000, 16, generator=torch.Generator().manual_seed(0))
        >>> cells = KeyCells(keys)
        >>> cells.append(keys[:, :, :1])
        >>> cells
        KeyCells(batch=(1, 2), keys=1001, d=16, cells=23, size=64, bound=Ball, limit=0.5)
    """

    @without_autocast
    def __init__(
        self, keys: Tensor, *, size: int = 64, rounds: int = 2, bound: type[CellBound] = Ball, limit: float = 0.5
    ) -> None:
        require_values("The number of cells", keys)
        _check.vectors("keys", keys)
        _check.function("bound", bound)
        _check.at_least("size", size, 1)
        _check.at_least("rounds", rounds, 0)
        _check.fraction("limit", limit)
        self.bound, self.limit, self.dtype = bound, float(limit), keys.dtype
        self.batch, self.length = keys.shape[:-2], keys.shape[-2]
        x = keys.detach().to(_shape.compute_dtype(keys.dtype))
        x = x.reshape(self.batch.numel(), *keys.shape[-2:])  # (B, n, d)
        index = cluster(x, int(size), int(rounds))
        self.size, self.used = index.shape[-1], index.shape[-2]
        valid = index < self.length
        padded = torch.cat((x, torch.zeros_like(x[:, :1])), 1)
        padded = padded.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        self._index = torch.where(valid, index, -1)
        self._keys = padded.view(*index.shape, x.shape[-1])
        self._fit(slice(None), valid)
        self._largest = x.norm(dim=-1).amax(-1)  # (B): ‖key‖ ≤ …
        self._open = self.length if self.used == 1 else 0  # how many keys the last cell has, if it may get more
        self._is_behind = False  # the last cell has keys that its bounds do not know

    def _fit(self, cells: slice, valid: Tensor) -> None:
        """Compute the numbers of some cells."""
        keys = self._keys[:, cells]
        counts = valid.sum(-1)
        centre = keys.sum(-2) / counts.clamp(min=1).unsqueeze(-1)
        stats: Any = self.bound.fit(keys, valid, centre)  # a NamedTuple of tensors
        blank = torch.where(valid, 0.0, -torch.inf).to(keys.dtype)
        if cells == slice(None):
            self._centre, self._counts, self._blank, self._stats = centre, counts, blank, stats
            return
        self._centre[:, cells], self._counts[:, cells], self._blank[:, cells] = centre, counts, blank
        for mine, new in zip(self._stats, stats, strict=True):
            mine[:, cells] = new

    @without_autocast
    def append(self, keys: Tensor) -> None:
        """Add keys (…, t, d) after those that are there."""
        _check.vectors("keys", keys)
        want = (*self.batch, keys.shape[-2], self._keys.shape[-1])
        if tuple(keys.shape) != want:
            raise ValueError(f"`keys` must have the shape {want}; got {tuple(keys.shape)}.")
        x = keys.detach().to(self._keys).reshape(self.batch.numel(), *keys.shape[-2:])
        self._largest = torch.maximum(self._largest, x.norm(dim=-1).amax(-1))
        start, many = 0, x.shape[1]
        while start < many:
            if self._open in (0, self.size):
                self._grow()
            take = min(self.size - self._open, many - start)
            cell, part = self.used - 1, slice(self._open, self._open + take)
            self._keys[:, cell, part] = x[:, start : start + take]
            self._index[:, cell, part] = torch.arange(self.length, self.length + take, device=x.device)
            self._counts[:, cell] += take
            self._open, self.length, start = self._open + take, self.length + take, start + take
            self._is_behind = True
            if self._open == self.size:
                self._catch_up()

    def _catch_up(self) -> None:
        """Bound the last cell: where it is full, or where a search needs it. The kernel reads it without a bound."""
        if self._is_behind:
            last = slice(self.used - 1, self.used)
            self._fit(last, self._index[:, last] >= 0)
            self._is_behind = False

    def _grow(self) -> None:
        """Begin an empty cell; the room for cells is doubled when it is used up."""
        if self.used == self._keys.shape[1]:
            self._keys, self._index = _doubled(self._keys), _doubled(self._index, -1)
            self._centre, self._counts, self._blank = (_doubled(t) for t in (self._centre, self._counts, self._blank))
            self._stats = type(self._stats)(*map(_doubled, self._stats))
        self.used, self._open = self.used + 1, 0

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        cells = f"cells={self.used}, size={self.size}, bound={self.bound.__name__}, limit={self.limit}"
        return f"KeyCells(batch={tuple(self.batch)}, keys={self.length}, d={self._keys.shape[-1]}, {cells})"

    @without_autocast
    def dense(self, q: Tensor, b: int) -> tuple[Tensor, Tensor]:
        """Return the scores (r, n) of queries (r, d) with all keys of a batch entry, and their positions (n)."""
        positions = self._index[b, : self.used].flatten()
        has = positions >= 0
        return (q @ self._keys[b, : self.used].flatten(0, 1).mT)[:, has], positions[has]

    def native(
        self,
        q: Tensor,
        values: Tensor | None,
        mask: Tensor | None,
        epsilon: Tensor,
        *,
        slack: float,
        head: Tensor | None,
    ) -> tuple[Any, ...] | None:
        """Return what `kernels.cpu.attend` finds; None if it does not serve these cells and queries."""
        if type(self._stats) is not Ball or not cpu.serves(q):
            return None
        parts = (self._keys, self._centre, *self._stats, self._index, self._counts)
        sizes = {"used": self.used, "bounded": self.used - int(self._is_behind), "limit": int(self.limit * self.used)}
        return cpu.attend(q, parts, values, mask, epsilon, self._largest, slack=slack, head=head, **sizes)

    @without_autocast
    def search(self, q: Tensor, epsilon: Tensor, allowed: Tensor | None, delta: Tensor) -> Group | None:
        """Return the rows that are certified; those that are missing are refused.

        Args:
            q: (B, R, d), scaled.
            epsilon: (B, R), float64.
            allowed: None or (B, R, n).
            delta: (B, R), what scores may be off by rounding.
        """
        room, many = self._keys.shape[1], q.shape[1]
        plan = self._plan(q, epsilon, allowed, delta)
        limit = int(self.limit * self.used)
        rows = (plan.least.flatten() <= limit).nonzero().squeeze(-1)
        order, rest = plan.order.flatten(0, 1), plan.rest.flatten(0, 1)
        shift, enough = plan.shift.flatten() + delta.flatten(), plan.enough.flatten()
        within = epsilon.flatten() * (1 - 2.0**-30)  # room for the rounding of what follows
        least, mass = plan.least.flatten(), torch.zeros_like(shift)
        cells, spots, blanks = (t.flatten(0, 1) for t in (self._keys, self._index, self._blank))
        read: list[Tensor] = []
        where: list[Tensor] = []
        groups: list[Group] = []
        opened, most = 0, min(self.used // 32, 16)  # a round costs as much as some cells
        while len(rows):
            goal = max(int(least[rows].min()), opened + max(1, opened // 2, most))
            goal = min(goal, max(opened + 1, int(enough[rows].max())), limit)
            if goal <= opened:
                break
            ids = (order[rows, opened:goal] + (rows // many * room).unsqueeze(-1)).flatten()
            keys = cells.index_select(0, ids).view(len(rows), -1, q.shape[-1])
            found = (keys @ q.flatten(0, 1)[rows].unsqueeze(-1)).squeeze(-1)
            found += blanks.index_select(0, ids).view(found.shape)
            spot = spots.index_select(0, ids).view(found.shape)
            if allowed is not None:
                found.masked_fill_(~allowed.flatten(0, 1)[rows.unsqueeze(-1), spot.clamp(min=0)], -torch.inf)
            read, where, opened = [*read, found], [*where, spot], goal
            mass[rows] += (found.double() - shift[rows].unsqueeze(-1)).exp().sum(-1)
            left = rest[rows, goal]
            done = left <= within[rows] * (left + mass[rows])
            if bool(done.any()):
                scores, positions = torch.cat(read, -1)[done], torch.cat(where, -1)[done]
                unread = left[done].log() + (shift - delta.flatten())[rows[done]]
                groups.append(Group(rows[done], scores, positions, unread))
                read, where, rows = [t[~done] for t in read], [t[~done] for t in where], rows[~done]
        if len(groups) < 2:
            return groups[0] if groups else None
        rows, unread = (torch.cat([group[i] for group in groups]) for i in (0, 3))
        scores = _padded([group.scores for group in groups], -torch.inf)
        return Group(rows, scores, _padded([group.positions for group in groups], -1), unread)

    def _plan(self, q: Tensor, epsilon: Tensor, allowed: Tensor | None, delta: Tensor) -> "_Plan":
        """Bound the mass of every cell for every row, and order the cells by it."""
        self._catch_up()
        m = self.used
        counts = self._counts[:, None, :m]  # (B, 1, m)
        scores = q @ self._centre[:, :m].mT
        stats = type(self._stats)(*(t[:, :m] for t in self._stats))
        most, mean = stats.spread(q, scores)
        upper = scores.double() + mean + counts.log()
        lower = scores.double() + counts.log()  # Jensen: mean(e^x) ≥ e^mean(x)
        if allowed is not None:
            index = self._index[:, :m].flatten(1)
            some = (
                allowed.gather(-1, index.clamp(min=0).unsqueeze(1).expand(-1, q.shape[1], -1)) & (index >= 0)[:, None]
            )
            some = some.view(*some.shape[:-1], m, self.size).sum(-1)  # (B, R, m)
            upper = torch.minimum(upper, scores.double() + most + some.log())
            upper = torch.where(some > 0, upper, -torch.inf)
            lower = torch.where(some == counts, lower, -torch.inf)
        upper, lower = upper + delta.unsqueeze(-1), lower - delta.unsqueeze(-1)
        upper, order, _ = tails.falling(upper, None)
        # Real scores may be far below `upper`: if masses were divided by its e^, all that matters could underflow.
        shift = torch.maximum(lower.amax(-1, keepdim=True), upper[..., :1] - MOST_LOG)
        up, low = (upper - shift).exp(), (lower.gather(-1, order) - shift).exp()
        rest, lost = tails.after(up), tails.after(low)
        epsilon = epsilon.unsqueeze(-1)
        least = torch.where(shift.squeeze(-1).isnan(), m + 1, (rest > epsilon * rest[..., :1]).sum(-1))
        enough = (rest > epsilon * (lost[..., :1] - lost + rest)).sum(-1)
        rest = rest * (1 + m * 2.0**-51 + tails.ROUNDING) + m * tails.TINY
        return _Plan(order, rest, shift.squeeze(-1), least, enough)


class _Plan(NamedTuple):
    """Hold the cells of each row by falling bound on their mass; masses are divided by e^shift."""

    order: Tensor  # (B, R, m)
    rest: Tensor  # (B, R, m + 1): a bound on the mass of all cells after the first 0, …, m
    shift: Tensor  # (B, R)
    least: Tensor  # (B, R): how many cells must be opened
    enough: Tensor  # (B, R): how many are sure to be enough


def _doubled(t: Tensor, blank: float = 0) -> Tensor:
    """Return twice the room along the dimension of the cells."""
    return torch.cat((t, torch.full_like(t, blank)), 1)


def _padded(parts: list[Tensor], blank: float) -> Tensor:
    """Return tensors (a, c) one below the other, as wide as the widest."""
    widest = max(t.shape[1] for t in parts)
    return torch.cat([pad(t, (0, widest - t.shape[1]), value=blank) for t in parts])
