"""What may be wrong with a choice of features: constants, copies of the target, stand-ins, and choices by luck."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import polars as pl
from sklearn.base import clone
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from sklearn.tree import DecisionTreeClassifier

from ._text import leave_out, some

COPY = 0.999  # smallest correlation, or balanced accuracy, of a column that may be a copy of the target
STAND_IN = 0.95  # smallest correlation of a column that could stand in for another
SAMPLE = 2000  # most rows, evenly spaced, on which classes are told apart
LARGE = 20_000  # most rows, evenly spaced, of correlations
PAIRS = 5  # of halves of the rows


def warn_of(names: Sequence[str], x: np.ndarray, y: np.ndarray | None, task: str, *, is_image: bool) -> list[str]:
    """Return a sentence on constant columns, and one on columns that alone give the target; images have constants."""
    said = []
    constant = [name for name, spread in zip(names, np.ptp(x, axis=0), strict=True) if spread == 0]
    if constant and not is_image:
        said.append(f"The same value in all rows, which cannot help: {some(constant)}.")
    if y is not None and (copies := [names[i] for i in copies_of(x, y, task)]):
        hint = f"If that is a copy of the target, or known only after it, add {leave_out(copies)}."
        said.append(f"Predicts the target alone, without error or nearly so: {some(copies)}. {hint}")
    return said


def copies_of(x: np.ndarray, y: np.ndarray, task: str) -> list[int]:
    """Return the columns of which each alone gives the target.

    These have a correlation of .999 with the target, with its ranks, or with a class against the others; or thresholds,
    as many as separate the classes, tell all classes apart.
    """
    most = LARGE if task == "regression" else SAMPLE
    x, y = _spaced(x, most), _spaced(y, most)
    if task == "regression":
        y = y.reshape(len(y), -1)
        linear, monotone = correlations(y, x), correlations(_ranks(y), _ranks(x))
        return np.flatnonzero(np.maximum(np.abs(linear), np.abs(monotone)).max(0) >= COPY).tolist()
    classes = np.unique(y)
    found = np.abs(correlations((y[:, None] == classes).astype(float), x)).max(0) >= COPY
    tree = DecisionTreeClassifier(max_leaf_nodes=max(2, len(classes)), class_weight="balanced", random_state=0)
    for i in np.flatnonzero(~found):
        guess = tree.fit(x[:, [i]], y).predict(x[:, [i]])
        found[i] = balanced_accuracy_score(y, guess) >= COPY
    return np.flatnonzero(found).tolist()


def stand_ins(x: np.ndarray, columns: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return for each of some columns those that could stand in for it, with correlations, the strongest first."""
    x = _spaced(x, LARGE)
    r = correlations(x[:, columns], x)
    r[np.arange(len(columns)), columns] = 0.0
    return [[(int(i), float(row[i])) for i in np.argsort(-abs(row)) if abs(row[i]) >= STAND_IN] for row in r]


def winner(selector: Any) -> Any:
    """Return the strategy whose choice it was, so that it can choose again alone."""
    strategy = selector.strategy
    names = [row["candidate"] for row in selector.history_ if "candidate" in row]
    found = [s for s in getattr(strategy, "strategies", ()) if names and getattr(s, "__name__", "") == names[0]]
    return found[0] if found else strategy


def splits(
    x: np.ndarray, y: np.ndarray | None, task: str, count: int, groups: np.ndarray | None, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the training and the other rows of each fold, with the same share of classes, and whole groups."""
    how: dict[str, Any] = {"shuffle": True, "random_state": seed}
    is_class = task == "classification"
    if is_class and y is not None:
        count = max(2, min(count, int(np.unique(y, return_counts=True)[1].max())))  # rows of the most frequent class
    if groups is not None:
        count = max(2, min(count, len(np.unique(groups))))
        return list((StratifiedGroupKFold if is_class else GroupKFold)(count, **how).split(x, y, groups))
    return list((StratifiedKFold if is_class else KFold)(count, **how).split(x, y))


def in_halves(
    x: np.ndarray,
    y: np.ndarray | None,
    task: str,
    khot: Any,
    prepare: Callable[[np.ndarray, np.ndarray | None], np.ndarray] | None,
    on_half: Callable[[str, int, int], bool | None],
    weight: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return for each column the share of random halves of the rows, in pairs that make up all, that choose it.

    Reference: Shah and Samworth, "Variable selection with error control" (2013). None if no half can be chosen from, or
    if `on_half` returns True.
    """
    choices: list[np.ndarray] = []
    for pair in range(PAIRS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The least populated class|The number of unique classes")
            parts = splits(x, y, task, 2, groups, pair)
        for i, (rows, _) in enumerate(parts):
            if on_half("khot, halves", 2 * pair + i, 2 * PAIRS):
                return None
            known, target = x[rows], None if y is None else y[rows]
            with warnings.catch_warnings(), suppress(ValueError):  # such as one class
                warnings.filterwarnings("ignore", message="The number of unique classes")
                known = known if prepare is None else prepare(known, target)
                own = (None if given is None else given[rows] for given in (weight, groups))
                choices.append(clone(khot).fit(known, target, *own).get_support())
    return np.mean(choices, axis=0) if choices else None


def _ranks(x: np.ndarray) -> np.ndarray:
    """Return the ranks in each column; equal values share the mean of theirs."""
    return np.asarray(pl.from_numpy(x).select(pl.all().rank()).to_numpy())


def _spaced(x: np.ndarray, most: int) -> np.ndarray:
    """Return evenly spaced rows, all if there are not more than `most`."""
    return x if len(x) <= most else x[np.linspace(0, len(x) - 1, most).astype(int)]


def correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the correlations of columns of a and b, (n of a, n of b); those of a constant column are 0."""
    unit = []
    for x in (a, b):
        x = x - x.mean(0)
        x = x / np.where(peak := np.abs(x).max(0), peak, 1)  # the squares of large numbers stay finite
        length = np.linalg.norm(x, axis=0)
        unit.append(x / np.where(length > 0, length, 1))
    return np.asarray(unit[0].T @ unit[1])
