"""The judges of `KHotSelector`: a linear model and boosted trees on chosen columns, scored on held-out rows."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge

from ._problem import DIRECTIONS, Problem, cuts

Predict = Callable[[np.ndarray], np.ndarray]


def boosted(problem: Problem, x: np.ndarray) -> tuple[Predict, np.ndarray]:
    """Fit boosted trees; return a predictor of y, or of few directions of it, and those, (targets, directions)."""
    edges = [cuts(values, 64) for values in x.T]  # whole numbers are binned at once

    def coarse(new: np.ndarray) -> np.ndarray:
        return np.stack([np.searchsorted(e, v) for e, v in zip(edges, new.T, strict=True)], 1).astype(float)

    how: dict[str, Any] = {"max_leaf_nodes": 12, "learning_rate": 0.15, "early_stopping": False}
    how |= {"min_samples_leaf": int(np.clip(len(x) // 30, 2, 20)), "random_state": problem.seed}
    turn, weight = np.eye(problem.y.shape[1]), problem.weight
    if problem.classes is not None:
        count = len(np.unique(problem.classes))
        if count < 2:
            return (lambda new: np.zeros((len(new), len(turn)))), turn
        model = HistGradientBoostingClassifier(max_iter=int(np.clip(80 / count, 15, 40)), **how)
        fitted(model, coarse(x), problem.classes, weight)
        codes = _codes(problem, model.classes_)
        return (lambda new: model.predict_proba(coarse(new)) @ codes), turn
    if len(turn) >= DIRECTIONS:
        turn = np.linalg.eigh(problem.y.T @ problem.y)[1][:, 1 - DIRECTIONS :]
    each = [
        fitted(HistGradientBoostingRegressor(max_iter=40, **how), coarse(x), target, weight)
        for target in (problem.y @ turn).T
    ]
    return (lambda new: np.stack([model.predict(coarse(new)) for model in each], 1)), turn


def line(problem: Problem, x: np.ndarray) -> tuple[Predict, np.ndarray]:
    """Fit logistic or ridge regression; return a predictor of y, and the unit matrix."""
    turn = np.eye(problem.y.shape[1])
    if problem.classes is not None and len(np.unique(problem.classes)) < 2:
        return (lambda new: np.zeros((len(new), len(turn)))), turn
    if problem.classes is not None:
        model = fitted(LogisticRegression(max_iter=100), x, problem.classes, problem.weight)
        codes = _codes(problem, model.classes_)
        return (lambda new: model.predict_proba(new) @ codes), turn
    ridge = Ridge().fit(x, problem.y, sample_weight=problem.weight)
    return (lambda new: ridge.predict(new).reshape(len(new), -1)), turn


def fitted(model: Any, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Any:
    """Fit a judge, without warnings about its own limits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="The number of unique classes")
        return model.fit(x, y, sample_weight=weight)


def _codes(problem: Problem, classes: np.ndarray) -> np.ndarray:
    """Return the row of y that stands for each class, (classes, targets)."""
    return np.stack([problem.y[problem.classes == c][0] for c in classes])


def squared_errors(predict: Any, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the weighted squared error of each row."""
    return np.asarray(((predict(x) - y) ** 2).sum(1) * weight)


def judged(problem: Problem, fold: int, units: Sequence[int]) -> dict[str, float]:
    """Return R² in a fold of a linear model and of boosted trees on some units, fitted to the other folds."""
    held = problem.fold == fold
    train, new = problem.rows(~held).sample(), problem.rows(held).sample()
    columns = problem.columns(units)
    result = {}
    for name, fit in (("linear", line), ("boosted", boosted)):
        if name == "boosted" and problem.task == "reconstruction":
            continue
        predict, turn = fit(train, train.x[:, columns])
        y = new.y @ turn
        error = float(squared_errors(predict, new.x[:, columns], y, new.weight).sum())
        result[name] = 1 - error / max(float(((y**2).sum(1) * new.weight).sum()), 1e-300)
    return result
