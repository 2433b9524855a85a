"""What a strategy of `KHotSelector` is given, and what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from sklearn.model_selection import GroupKFold

from ._blocks import Blocks, Item, Purse, Units

FOLDS = 5
BINS = 8  # of a column with many values
ROWS = 4000  # of searches that read the rows more than once
PRODUCTS = 60  # that a design has, those that explain most of what its other columns leave
PAIRED, TRIPLED = 2000, 64  # columns of which all pairs, all triples are looked at
DIRECTIONS = 4  # of the residual, for many targets
CLIPPED, FAR = 2.5, 4.0  # standard deviations, of factors of products, and of columns beside steps of them
CHANCE = 4.0  # added to the largest χ² that products of noise are expected to have


@dataclass(frozen=True)
class Problem:
    """Hold a choice to be made: the best set of units whose costs are at most the budget.

    Rows are in a random order that depends on what they hold; equal ones are merged, and weighted.
    """

    x: np.ndarray
    """(rows, columns), of mean 0 and variance 1."""
    y: np.ndarray
    """(rows, targets), centred: standardised numbers, or one column of 0 and 1 for each class (one for two)."""
    classes: np.ndarray | None
    """(rows,), the number of the class, if the task is classification."""
    weight: np.ndarray
    """(rows,), > 0."""
    fold: np.ndarray
    """(rows,), which fold of cross-validation a row is in."""
    units: tuple[np.ndarray, ...]
    """The columns of each unit."""
    purse: Purse
    """What units cost, and the budget; for a count, each costs 1 and the budget is k."""
    task: str
    """Classification, regression or reconstruction."""
    seed: int = 0
    callback: Callable[[dict[str, Any]], bool | None] | None = None
    """Called with progress; work should end soon after it has returned True."""
    stopped: list[bool] = field(default_factory=list)
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def k(self) -> int:
        """Return the number of units to choose; with costs, the most that fit."""
        return int(np.searchsorted(np.cumsum(np.sort(self.purse.costs)), self.purse.budget * (1 + 1e-12), "right"))

    def tell(self, entry: dict[str, Any]) -> bool:
        """Report progress; return whether to stop."""
        if self.callback is not None and self.callback(entry):
            self.stopped.append(True)
        return bool(self.stopped)

    def columns(self, units: Sequence[int]) -> np.ndarray:
        """Return the columns of some units."""
        return np.concatenate([np.zeros(0, dtype=int), *(self.units[u] for u in units)])

    def of(self, units: Any) -> "Problem":
        """Return the problem with these units alone."""
        ends = np.cumsum([0, *(len(self.units[u]) for u in units)])
        own = tuple(np.arange(a, b) for a, b in pairwise(ends))
        purse = Purse(self.purse.costs[list(units)], self.purse.budget)
        return replace(self, x=self.x[:, self.columns(units)], units=own, purse=purse, made={})

    def spending(self, k: int) -> "Problem":
        """Return the problem with another number of units to choose."""
        return replace(self, purse=Purse(np.ones(len(self.units)), k), made={})

    def rows(self, which: Any) -> "Problem":
        """Return the problem with some of the rows, a slice or indices."""
        classes = None if self.classes is None else self.classes[which]
        parts = {"x": self.x[which], "y": self.y[which], "weight": self.weight[which]}
        fold = np.unique(self.fold[which], return_inverse=True)[1]
        return replace(self, classes=classes, fold=fold, made={}, **parts)

    def narrow(self, most: int, keep: Sequence[int] = ()) -> tuple["Problem", np.ndarray]:
        """Return the problem with the most promising units, and which they are; all if there are not more."""
        if len(self.units) <= most:
            return self, np.arange(len(self.units))
        if most not in self.made:
            self.made[most] = screened(self, most)
        kept = np.union1d(self.made[most], np.array(keep, dtype=int))
        part: Problem = self.made.setdefault(kept.tobytes(), None) or self.of(kept)
        self.made[kept.tobytes()] = part
        return part, kept

    def sample(self, most: int = ROWS) -> "Problem":
        """Return the problem with the first rows, which are in a random order; all if there are not more."""
        if len(self.x) <= most:
            return self
        if "rows" not in self.made:
            self.made["rows"] = self.rows(slice(0, most))
        part: Problem = self.made["rows"]
        return part

    @cached_property
    def linear(self) -> Blocks:
        """Return the least-squares problem of the columns themselves."""
        items = [Item((u,), self.x[:, columns]) for u, columns in enumerate(self.units)]
        return Blocks(items, self.y, self.weight, self.fold, self.purse, lambda: bool(self.stopped))

    @cached_property
    def surface(self) -> Blocks:
        """Return that of the columns, steps of them, and products of two and three that explain the rest."""
        items = [Item((u,), self._steps(columns)) for u, columns in enumerate(self.units)]
        how = (self.weight, self.fold, self.purse, lambda: bool(self.stopped))
        return Blocks([*items, *self._products(self._residual(items))], self.y, *how)

    def _steps(self, columns: np.ndarray) -> np.ndarray:
        """Return columns, and indicators of the intervals between quantiles of each, or of its values if few."""
        parts = [np.clip(self.x[:, columns], -FAR, FAR)]
        for values in self.x[:, columns].T:
            edges = cuts(values)
            if len(edges) > 1:
                codes = np.searchsorted(edges, values)
                steps = (codes[:, None] == np.arange(len(edges))).astype(np.float64)
                parts.append(steps - np.average(steps, axis=0, weights=self.weight))
        return np.concatenate(parts, 1)

    def _residual(self, items: Sequence[Item]) -> np.ndarray:
        """Return what the items that gain most leave of y, in few directions, (rows, directions)."""
        gains = np.array([_explained(item.columns, self.y, self.weight) for item in items])
        best = np.argsort(-gains, kind="stable")[: max(self.k, 10)]
        design = np.concatenate([items[i].columns for i in best], 1)
        inner = (design * self.weight[:, None]).T @ design + np.eye(design.shape[1]) * self.weight.mean()
        rest = self.y - design @ np.linalg.solve(inner, (design * self.weight[:, None]).T @ self.y)
        if rest.shape[1] > DIRECTIONS:
            rest = rest @ np.linalg.eigh(rest.T @ rest)[1][:, -DIRECTIONS:]
        return np.asarray(rest)

    def _products(self, rest: np.ndarray) -> list[Item]:
        """Return the products of columns that explain most of a residual, and more than chance does."""
        n, owner = self.x.shape[1], np.empty(self.x.shape[1], dtype=int)
        if not 2 <= n <= PAIRED or self.k < 2 <= n == len(self.units):
            return []
        for u, columns in enumerate(self.units):
            owner[columns] = u
        z = np.clip(self.x, -CLIPPED, CLIPPED)
        size = float((rest**2 * self.weight[:, None]).sum()) or 1.0
        found: list[tuple[float, tuple[int, ...]]] = []
        i, j = np.triu_indices(n, 1)
        self._scan(z, rest, self.weight, (i, j), (), size, found)
        if n <= TRIPLED and self.k >= 3:
            for first in range(n - 2):
                i, j = np.triu_indices(n - first - 1, 1)
                after = i + first + 1, j + first + 1
                self._scan(z, rest * z[:, [first]], self.weight, after, (first,), size, found, z[:, first] ** 2)
        count = n * n / 2 + (n**3 / 6 if n <= TRIPLED and self.k >= 3 else 0)
        least = (2 * np.log(count) + CHANCE + rest.shape[1]) / len(z)
        result: list[Item] = []
        for share, places in sorted(found, key=lambda each: (-each[0], each[1]))[: 3 * PRODUCTS]:
            if share < least:
                break
            units = tuple(int(u) for u in np.unique(owner[list(places)]))
            if self.purse.room(units) >= 0 and len(result) < PRODUCTS:
                product = z[:, list(places)].prod(1)
                product = product - np.average(product, weights=self.weight)
                scale = np.sqrt(np.average(product**2, weights=self.weight)) or 1.0
                result.append(Item(units, (product / scale)[:, None]))
        return result

    def _scan(
        self,
        z: np.ndarray,
        rest: np.ndarray,
        weight: np.ndarray,
        places: tuple[np.ndarray, np.ndarray],
        first: tuple[int, ...],
        size: float,
        found: list[tuple[float, tuple[int, ...]]],
        square: np.ndarray | float = 1.0,
    ) -> None:
        """Append the best products of two columns (and a first one) with their shares of the residual."""
        i, j = places
        low = int(i.min()) if len(i) else 0
        part = z[:, low:]
        norm = ((part**2 * (weight * square)[:, None]).T @ part**2)[i - low, j - low]
        share = np.zeros(len(i))
        for r in rest.T:
            share += ((part * (weight * r)[:, None]).T @ part)[i - low, j - low] ** 2
        share /= np.maximum(norm, 1e-12) * size
        best = np.argsort(-share, kind="stable")[:PRODUCTS]
        found += [(float(share[at]), (*first, int(i[at]), int(j[at]))) for at in best]


class Choice(NamedTuple):
    """Hold what a strategy chose."""

    units: Units
    """The chosen units."""
    scores: np.ndarray
    """(units,), larger is better; those of chosen units are the largest."""
    history: tuple[dict[str, Any], ...] = ()
    """What was measured on the way: candidates of a portfolio, or steps of training."""
    losses: np.ndarray | None = None
    """(units,), what the held-out loss, a share of that of no units, rises by without a chosen unit; minus what it
    rises by with another. `scores` if the strategy does not say."""
    errors: np.ndarray | None = None
    """(units,), the standard errors of `losses`; NaN where unknown."""


Strategy = Callable[[Problem], Choice]
"""A function of a problem that returns a choice."""


def cuts(values: np.ndarray, most: int = BINS) -> np.ndarray:
    """Return where a column is cut: between its values if they are few, else at quantiles."""
    ordered = np.sort(values[:ROWS])
    some = ordered[np.r_[True, ordered[1:] != ordered[:-1]]]
    if len(some) > most:
        return np.unique(ordered[np.linspace(0, len(ordered), most + 1).astype(int)[1:-1]])
    return np.asarray((some[1:] + some[:-1]) / 2)


def folds_of(classes: np.ndarray | None, rows: int, groups: np.ndarray | None) -> np.ndarray:
    """Return the fold of each row: whole groups, and about the same share of every class, in each."""
    if groups is not None:
        names = np.unique(groups)
        fold = np.zeros(rows, dtype=int)
        if len(names) > 1:
            parts = GroupKFold(min(FOLDS, len(names))).split(fold, groups=groups)
            for f, (_, held) in enumerate(parts):
                fold[held] = f
        return fold
    if rows < 4:
        return np.zeros(rows, dtype=int)
    count = min(FOLDS, rows)
    if classes is None:
        return np.arange(rows) % count
    order = np.argsort(classes, kind="stable")
    fold = np.empty(rows, dtype=int)
    fold[order] = np.arange(rows) % count
    return np.unique(fold, return_inverse=True)[1]


def _explained(columns: np.ndarray, y: np.ndarray, weight: np.ndarray) -> float:
    """Return how much of y some columns explain."""
    inner = (columns * weight[:, None]).T @ columns + np.eye(columns.shape[1]) * weight.mean()
    right = (columns * weight[:, None]).T @ y
    return float((right * np.linalg.solve(inner, right)).sum())


def screened(problem: Problem, most: int) -> np.ndarray:
    """Return the units, at most so many, that explain y best alone: by a line, by steps, or in a pair with another."""
    part = problem.sample()
    root = np.sqrt(part.weight)[:, None]
    y, x = part.y * root, part.x * root
    if y.shape[1] > DIRECTIONS:
        y = y @ np.linalg.eigh(y.T @ y)[1][:, -DIRECTIONS:]
    line = ((x.T @ y) ** 2).sum(1) / np.maximum((x**2).sum(0), 1e-12)  # (columns,)
    steps = np.array([_between(values, y * root, part.weight) for values in part.x.T])
    ranks = [line, np.maximum(line, steps)]
    if x.shape[1] <= PAIRED and problem.k > 1:
        z = np.clip(part.x, -CLIPPED, CLIPPED)
        norm = np.maximum((z**2 * part.weight[:, None]).T @ z**2, 1e-12)
        share = sum(((z * (root * y[:, [t]])).T @ z) ** 2 for t in range(y.shape[1])) / norm
        np.fill_diagonal(share, 0.0)
        ranks.append(share.max(1))
    of_unit = [np.array([value[columns].max() for columns in problem.units]) for value in ranks]
    place = np.stack([np.argsort(np.argsort(-value, kind="stable"), kind="stable") for value in of_unit])
    return np.sort(np.argsort(place.min(0), kind="stable")[:most])


def _between(values: np.ndarray, right: np.ndarray, weight: np.ndarray) -> float:
    """Return the variation of y between the intervals of a column; `right` is y times the weights."""
    edges = cuts(values)
    codes = np.searchsorted(edges, values)
    mass = np.bincount(codes, weights=weight, minlength=len(edges) + 1)
    sums = np.stack([np.bincount(codes, weights=r, minlength=len(edges) + 1) for r in right.T])
    return float((sums**2 / np.maximum(mass, 1e-12)).sum())
