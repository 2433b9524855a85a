"""Least squares on sets of units, judged by cross-validation: all from one Gram matrix for each fold.

A unit is what is chosen: a column, or a group of columns. An item is some columns of a design that are used if all its
units are chosen: the columns of a unit itself, steps of them, or a product of columns of several units. With the Gram
matrices of the folds, the held-out loss of any set of units is a small linear system, and no row is read again.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

RIDGE = 1.0  # penalty, in rows of mean weight: columns have variance 1
TRIED = 16  # exchanges of which the best is made, those that lower the training error most
BESIDE = 3  # units that are tried in the place of one
ROUNDS = 8  # exchanges in one search
CLEAR = 0.5  # standard errors by which an exchange must lower the held-out loss
CELLS = 20_000_000  # numbers in a batch of linear systems

Units = tuple[int, ...]


class Item(NamedTuple):
    """Columns of a design, and the units that must be chosen for them to be used."""

    units: Units
    columns: np.ndarray  # (rows, columns), centred


class Purse(NamedTuple):
    """Hold what units cost, and how much may be spent."""

    costs: np.ndarray  # (units,), > 0
    budget: float

    @property
    def is_count(self) -> bool:
        """Return whether every unit costs the same, so that all full sets are of one size."""
        return bool((self.costs == self.costs[0]).all())

    @property
    def affordable(self) -> np.ndarray:
        """Which units cost no more than the budget alone, (units,)."""
        return np.asarray(self.costs <= self.budget * (1 + 1e-12))

    def room(self, units: Iterable[int]) -> float:
        """Return what is left of the budget."""
        return self.budget * (1 + 1e-12) - float(self.costs[list(units)].sum())


class Blocks:
    """Squared errors of least squares on any set of units, in training and held out.

    Args:
        items: the design; the first ones are those of one unit each, for all units in order.
        y: (rows, targets), centred.
        weight: (rows,).
        fold: (rows,), the fold of each row; if there is one fold, losses are those of training.
        purse: costs and budget.
        is_stopped: asked between exchanges.
    """

    def __init__(
        self,
        items: Sequence[Item],
        y: np.ndarray,
        weight: np.ndarray,
        fold: np.ndarray,
        purse: Purse,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.units = [item.units for item in items]
        ends = np.cumsum([0, *(item.columns.shape[1] for item in items)])
        self.at = [np.arange(a, b) for a, b in pairwise(ends)]
        self.q, self.purse, self.is_stopped = int(ends[-1]), purse, is_stopped
        root = np.sqrt(weight / weight.mean())[:, None]
        blank = np.zeros((len(y), 1))  # a column of zeros, to which short lists of columns are filled up
        both = np.concatenate([*(item.columns for item in items), blank, y], 1) * root
        folds = [both[fold == f] for f in range(int(fold.max()) + 1)]
        self.held = np.stack([part.T @ part for part in folds])  # (folds, q + 1 + targets, …)
        self.total = self.held.sum(0)
        self.train = self.total - self.held if len(folds) > 1 else self.held
        self.null = np.einsum("fii->f", self.held[:, self.q + 1 :, self.q + 1 :])  # loss without columns
        self.visited: dict[Units, np.ndarray] = {}  # sets and their losses, (folds,)

    def columns(self, units: Iterable[int]) -> np.ndarray:
        """Return the columns that a set of units uses."""
        chosen, n = set(units), len(self.purse.costs)
        shared = [at for at, needs in zip(self.at[n:], self.units[n:], strict=True) if chosen.issuperset(needs)]
        return np.concatenate([np.zeros(0, dtype=int), *(self.at[u] for u in chosen), *shared])

    def losses(self, sets: Sequence[Iterable[int]]) -> np.ndarray:
        """Return the held-out squared error of each set in each fold, (sets, folds), as a share of the total without.

        The sum over folds is 1 − R² of cross-validation.
        """
        keys = [tuple(sorted(units)) for units in sets]
        new = [key for key in dict.fromkeys(keys) if key not in self.visited]
        lists = [self.columns(key) for key in new]
        width = max((len(each) for each in lists), default=0)
        step = max(1, CELLS // (max(width, 1) ** 2 * len(self.held)))
        for start in range(0, len(new), step):
            part = lists[start : start + step]
            index = np.array([np.pad(each, (0, width - len(each)), constant_values=self.q) for each in part])
            for key, loss in zip(new[start:], self._losses(index.reshape(len(part), width)), strict=False):
                self.visited[key] = loss
        return np.array([self.visited[key] for key in keys]).reshape(len(keys), len(self.held))

    def _losses(self, index: np.ndarray) -> np.ndarray:
        rows, columns, y = index[:, :, None], index[:, None, :], slice(self.q + 1, None)
        result = []
        for train, held, null in zip(self.train, self.held, self.null, strict=True):
            coefs = np.linalg.solve(train[rows, columns] + RIDGE * np.eye(index.shape[1]), train[:, y][index])
            back = held[rows, columns] @ coefs - 2 * held[:, y][index]
            result.append(null + (coefs * back).sum((1, 2)))
        return np.stack(result, 1) / max(float(self.null.sum()), 1e-300)

    def loss(self, units: Iterable[int]) -> float:
        """Return the held-out loss of one set, a share of that of none."""
        return float(self.losses([units]).sum())

    def gains(self, units: Iterable[int]) -> np.ndarray:
        """Return by how much each item lowers the training error beside a set, (items,), as a share of the total."""
        own, total, y = self.columns(units), self.total, slice(self.q + 1, None)
        known = total[own]
        back = np.linalg.solve(known[:, own] + RIDGE * np.eye(len(own)), known)  # (s, q + 1 + targets)
        right = total[: self.q, y] - total[: self.q, own] @ back[:, y]
        gain = np.zeros(len(self.at))
        sizes = np.array([len(at) for at in self.at])
        for size in np.unique(sizes[sizes > 0]):
            which = np.flatnonzero(sizes == size)
            index = np.array([self.at[i] for i in which])
            seen = known[:, index]  # (s, m, size)
            inner = total[index[:, :, None], index[:, None, :]] - np.einsum("sma,smb->mab", seen, back[:, index])
            r = right[index]
            gain[which] = np.einsum("mat,mat->m", r, np.linalg.solve(inner + RIDGE * np.eye(size), r))
        return gain / max(float(self.null.sum()), 1e-300)

    def starts(self) -> list[Units]:
        """Return what forward selection leads to; with costs, also if it does not look at them."""
        return [self.forward()] if self.purse.is_count else [self.forward(), self.forward(thrift=0.0)]

    def forward(self, start: Iterable[int] = (), *, thrift: float = 1.0) -> Units:
        """Add the units that lower the training error most per cost ** thrift, one, or the partners of a product.

        Ends when nothing more fits; with a count, the set is full.
        """
        chosen, n = list(start), len(self.purse.costs)
        while True:
            room, gain = self.purse.room(chosen), self.gains(chosen)
            moves: dict[Units, float] = {}
            for needs, value in zip(self.units, gain, strict=True):
                new = tuple(u for u in needs if u not in chosen)
                cost = float(self.purse.costs[list(new)].sum())
                if new and cost <= room:
                    alone = sum(gain[u] for u in new) if len(needs) > 1 else 0.0
                    moves[new] = max(moves.get(new, -1.0), (value + alone) / max(len(new), cost**thrift))
            if not moves:
                return tuple(sorted(chosen))
            best = max(moves.items(), key=lambda move: (move[1], [-u for u in move[0]]))
            chosen += best[0]
            if len(chosen) == n:
                return tuple(range(n))

    def exchange(self, units: Iterable[int], rounds: int = ROUNDS) -> Units:
        """Exchange units, one for one, while that lowers the held-out loss clearly; return the set."""
        chosen = tuple(sorted(units))
        for _ in range(rounds):
            sets = self.neighbours(chosen)[:TRIED]
            if not sets or self.is_stopped():
                break
            fewer = self.losses([chosen]) - self.losses(sets)  # (sets, folds)
            error = fewer.std(1, ddof=min(1, len(self.held) - 1)) * len(self.held) ** 0.5
            clear = fewer.sum(1) - CLEAR * error
            if not clear.max() > 1e-9:
                break
            chosen = sets[int(clear.argmax())]
        return chosen

    def neighbours(self, chosen: Units) -> list[Units]:
        """Return sets that differ in a unit, a few for each that goes; first those of the lowest training error."""
        found: list[tuple[float, Units]] = []
        losses: dict[int, float] = {}
        for gone in (*chosen, *(() if self.purse.is_count else (None,))):
            kept = [u for u in chosen if u != gone]
            gain, room = self._unit_gains(kept), self.purse.room(kept)
            lost = gain[gone] if gone is not None else 0.0
            if gone is not None:
                losses[gone] = lost
            gain[list(chosen)] = -1.0
            gain[self.purse.costs > room] = -1.0
            best = np.argsort(-gain, kind="stable")[:BESIDE]
            found += [(gain[u] - lost, tuple(sorted((*kept, int(u))))) for u in best if gain[u] >= 0]
            if not self.purse.is_count and kept and gone is not None:
                found.append((-lost, tuple(sorted(kept))))
        if not self.purse.is_count:  # a dear one, for as many of those that are least missed as pay for it
            gain = self._unit_gains(chosen)
            order = sorted(losses, key=lambda u: losses[u] / self.purse.costs[u])
            for new in np.flatnonzero(self.purse.costs <= self.purse.budget):
                kept = list(chosen)
                for u in order:
                    if self.purse.room([*kept, int(new)]) >= 0:
                        break
                    kept.remove(u)
                if new not in chosen and self.purse.room([*kept, int(new)]) >= 0:
                    lost = sum(losses[u] for u in chosen if u not in kept)
                    found.append((gain[new] - lost, tuple(sorted({*kept, int(new)}))))
        return [units for _, units in sorted(found, key=lambda each: (-each[0], each[1]))]

    def _unit_gains(self, kept: Sequence[int]) -> np.ndarray:
        """Return the gain of each unit with all items that it completes, about: their sum."""
        gain, chosen = self.gains(kept), set(kept)
        result = np.zeros(len(self.purse.costs))
        for needs, value in zip(self.units, gain, strict=True):
            new = [u for u in needs if u not in chosen]
            if len(new) == 1:
                result[new[0]] += value
        return result

    def missed(self, chosen: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return what the held-out loss rises by without each chosen unit, and the standard error, (units,).

        The loss is a share of that of no units. For another unit, the first is minus the loss of the best set tried
        with it, and the second is that one's; NaN for a unit that was not tried.
        """
        best, result = self.losses([chosen])[0], np.full((2, len(self.purse.costs)), np.nan)
        known = dict(self.visited)
        without = self.losses([[v for v in chosen if v != u] for u in chosen]) - best
        self.visited = known  # these sets are smaller than those that are compared elsewhere
        factor = len(best) ** 0.5
        spread = 1 if len(best) > 1 else 0
        for u, difference in zip(chosen, without, strict=True):
            result[:, u] = max(difference.sum(), 0.0), difference.std(ddof=spread) * factor
        for units, loss in known.items():
            for u in set(units).difference(chosen):
                value = -max((loss - best).sum(), 0.0)
                if not result[0, u] >= value:
                    result[:, u] = value, (loss - best).std(ddof=spread) * factor
        return result[0], result[1]

    def margins(self, chosen: Units) -> np.ndarray:
        """Return for each unit what it costs to do otherwise, in standard errors of the difference of held-out losses.

        For a chosen one it is the loss of the best set tried without it, ≥ 0; for another, minus the loss of the best
        set tried with it. A unit that was not tried is below all others, by what it gains.
        """
        best, gain = self.losses([chosen])[0], self._unit_gains(chosen)
        sets, table = list(self.visited), np.array(list(self.visited.values()))
        difference = table - best
        spread = difference.std(1, ddof=1 if len(best) > 1 else 0) * np.sqrt(len(best)) + 1e-6
        cost = np.maximum(difference.sum(1), 0.0) / spread
        result, members = np.full(len(gain), -np.inf), [frozenset(units) for units in sets]
        for u in range(len(gain)):
            others = [c for c, units in zip(cost, members, strict=True) if (u in units) != (u in chosen)]
            if others:
                result[u] = min(others) if u in chosen else -min(others)
        alone = np.isinf(result)
        high, low = (float(result[~alone].max()), float(result[~alone].min())) if (~alone).any() else (0.0, 0.0)
        place = np.argsort(np.argsort(gain, kind="stable"), kind="stable") / max(len(gain), 1)
        inside = np.isin(np.arange(len(gain)), chosen)
        result[alone & inside] = max(high, 0.0) + 1.0
        result[alone & ~inside] = min(low, 0.0) - 2.0 + place[alone & ~inside]
        result[inside] += 1e-9 * (1 + place[inside])
        return result
