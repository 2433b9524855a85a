"""Compare the choice of features with others, by cross-validated scores of one plain model on what each chooses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import BaseEstimator, clone
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, SelectorMixin, f_classif, f_regression
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

from ..sklearn import KHotSelector

FOLDS = 5
RANDOM_CHOICES = 5
RFE_FITS = 25
"""About how many times RFE fits a model."""
AFFORDABLE = 2e6
"""Largest number of cells of a table for which RFE is run."""


class Score(NamedTuple):
    """The mean and standard deviation over folds, and each fold; the folds are the same for all methods."""

    mean: float
    std: float
    folds: tuple[float, ...]
    """Means over several choices, if a method makes several."""


class Random(SelectorMixin, BaseEstimator):
    """Choose k features at random."""

    def __init__(self, k: int, seed: int) -> None:
        self.k = k
        self.seed = seed

    def fit(self, X: Any, y: Any = None) -> Random:
        """Choose; of X only the number of columns matters."""
        x = validate_data(self, X)
        chosen = np.random.default_rng(self.seed).permutation(x.shape[1])[: self.k]
        self.mask_ = np.isin(np.arange(x.shape[1]), chosen)
        return self

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self.mask_


def plain_model(task: str, kind: str, seed: int) -> Any:
    """Return the model that scores all choices: logistic or ridge regression, or a random forest."""
    is_class = task == "classification"
    if kind == "forest":
        forest = RandomForestClassifier if is_class else RandomForestRegressor
        return forest(n_estimators=100, min_samples_leaf=2, random_state=seed, n_jobs=1)
    return LogisticRegression(max_iter=1000) if is_class else Ridge()


def methods(task: str, k: int, shape: tuple[int, int], seed: int, steps: int = 1000) -> dict[str, list[Any]]:
    """Return the affordable ways to choose k features for a task, by name; several of one name are averaged."""
    result: dict[str, list[Any]] = {
        "khot": [KHotSelector(k, task=task, max_steps=steps, random_state=seed)],
        "all features": ["passthrough"],
        "random": [Random(k, seed + i) for i in range(RANDOM_CHOICES)],
    }
    if task == "reconstruction":
        return result | {"PCA, not a choice": [PCA(min(k, *shape), random_state=seed)]}
    is_class = task == "classification"
    result["SelectKBest"] = [SelectKBest(f_classif if is_class else f_regression, k=k)]
    sparse = (
        LogisticRegression(l1_ratio=1, solver="saga", C=0.1, max_iter=100, random_state=seed)
        if is_class
        else Lasso(alpha=0.01)
    )
    result["L1"] = [SelectFromModel(sparse, max_features=k, threshold=-np.inf)]
    if shape[0] * shape[1] <= AFFORDABLE and k < shape[1]:
        ranked = LogisticRegression(max_iter=1000) if is_class else Ridge()
        step = max(1, (shape[1] - k) // RFE_FITS)
        result["RFE"] = [RFE(ranked, n_features_to_select=k, step=step)]
    return result


def compare(
    x: np.ndarray,
    y: np.ndarray | None,
    task: str,
    k: int,
    *,
    seed: int = 0,
    model: str = "linear",
    steps: int = 1000,
    on_fold: Callable[[str, int, int], bool | None] = lambda name, done, total: None,
) -> Iterator[tuple[str, Score]]:
    """Yield each method with its score: accuracy, or R² of the target or of all features.

    Ends when `on_fold`, which is called with the method and the folds done and in all, returns True.

    Methods choose anew in every fold, on the rows that are not scored. One that fails has no score.
    """
    if task == "regression" and y is not None:
        y = (y - y.mean()) / (y.std() or 1)  # R² does not see it, penalties do
    target = x if y is None else y
    folds = (StratifiedKFold if task == "classification" else KFold)(_folds(task, target), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # F scores of constant columns
        warnings.filterwarnings("ignore", message="(?s)Features .* are constant|The least populated class")
        parts = list(folds.split(x, target))
        candidates = methods(task, k, x.shape, seed, steps)
        total, done, stopped = len(parts) * sum(map(len, candidates.values())), 0, False

        def watch(entry: dict[str, float] | None = None) -> bool:
            nonlocal stopped
            stopped = stopped or bool(on_fold(name, done, total))
            return stopped

        for selector in candidates.get("khot", ()):
            selector.callback = watch  # it takes the longest
        for name, selectors in candidates.items():
            scores = []
            for selector in selectors:
                pipe = Pipeline(
                    [("scale", StandardScaler()), ("select", selector), ("model", plain_model(task, model, seed))]
                )
                for train, test in parts:
                    if not watch():
                        scores.append(_score(clone(pipe), x, y, train, test))
                    if stopped:
                        return
                    done += 1
            folds = np.array(scores).reshape(-1, len(parts))
            yield name, Score(float(folds.mean()), float(folds.std()), tuple(folds.mean(0).tolist()))


def _folds(task: str, target: np.ndarray) -> int:
    """Return the number of folds, at most the rows of the most frequent class."""
    return (
        FOLDS if task != "classification" else max(2, min(FOLDS, int(np.unique(target, return_counts=True)[1].max())))
    )


def _score(pipe: Pipeline, x: np.ndarray, y: np.ndarray | None, train: np.ndarray, test: np.ndarray) -> float:
    if y is not None:
        try:
            return float(pipe.fit(x[train], y[train]).score(x[test], y[test]))
        except ValueError:  # such as a constant column in this part, or one class
            return float("nan")
    scaler = StandardScaler().fit(x[train])
    wanted = scaler.transform(x[test])
    error = pipe.fit(x[train], scaler.transform(x[train])).predict(x[test]) - wanted
    return float(1 - (error**2).sum() / (wanted**2).sum())  # of all columns together: some are constant in a part
