"""The comparison of `khot select`: what each method's choice is worth to one plain model, cross-validated."""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, f_classif, f_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder

from ..sklearn import KHotSelector
from ._table import Table
from ._trust import splits

FOLDS = 5
RANDOM_CHOICES = 5
RFE_FITS = 25  # about how many times RFE fits a model
AFFORDABLE = 2e6  # largest number of cells of a table for which RFE is run
KHOT_WORK = 5  # about how many times longer khot takes than another method


class Score(NamedTuple):
    """The mean and standard deviation over folds, and each fold; the folds are the same for all methods."""

    mean: float
    std: float
    folds: tuple[float, ...]  # means over several choices, if a method makes several
    chosen: tuple[float, ...] = ()  # for each feature, the share of choices that hold it, if the method chooses


def preparation(table: Table, task: str, seed: int) -> Any:
    """Return what fills missing values and encodes categories, to be fitted to training rows; None if all are there."""
    plain = len(table.names) - table.categories
    fill = SimpleImputer(strategy="median", keep_empty_features=True)
    if not table.categories:
        return fill if np.isnan(table.x).any() else None
    kind, folds = "continuous", FOLDS
    if task == "classification" and table.y is not None:
        counts = np.unique(table.y.astype(str), return_counts=True)[1]
        kind = "binary" if len(counts) == 2 else "multiclass"
        folds = max(2, min(FOLDS, int(counts.max()) // 2))  # a part of the rows has a class in each fold too
    encode = TargetEncoder(target_type=kind, cv=folds, random_state=seed)
    columns = list(range(len(table.names)))
    return ColumnTransformer([("fill", fill, columns[:plain]), ("encode", encode, columns[plain:])])


def prepared(prepare: Any, x: np.ndarray, y: np.ndarray | None) -> np.ndarray:
    """Fit to training rows and return them; a category is encoded by the targets of other rows than its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TargetEncoder.*deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The least populated class")
        return np.asarray(prepare.fit_transform(x, y))


def _random_scores(x: np.ndarray, y: Any = None, *, seed: int) -> np.ndarray:
    """Score features by their places in a random order, the first the highest."""
    return -np.argsort(np.random.default_rng(seed).permutation(x.shape[1]))


def plain_model(task: str, kind: str, seed: int) -> Any:
    """Return the model that scores all choices: logistic or ridge regression, or a random forest."""
    is_class = task == "classification"
    if kind == "forest":
        forest = RandomForestClassifier if is_class else RandomForestRegressor
        return forest(n_estimators=100, min_samples_leaf=2, random_state=seed, n_jobs=1)
    return LogisticRegression(max_iter=1000) if is_class else Ridge()


def methods(task: str, k: int, shape: tuple[int, int], seed: int) -> dict[str, list[Any]]:
    """Return the affordable ways to choose k features for a task, by name; several of one name are averaged."""
    result: dict[str, list[Any]] = {
        "khot": [KHotSelector(k, task=task, random_state=seed)],
        "all features": ["passthrough"],
        "random": [SelectKBest(partial(_random_scores, seed=seed + i), k=k) for i in range(RANDOM_CHOICES)],
    }
    if task == "reconstruction":
        return result | {"PCA, not a choice": [PCA(min(k, *shape), random_state=seed)]}
    if task == "classification":
        f_score = f_classif
        sparse = LogisticRegression(l1_ratio=1, solver="saga", C=0.1, max_iter=100, random_state=seed)
    else:
        f_score, sparse = f_regression, Lasso(alpha=0.01)
    result["SelectKBest"] = [SelectKBest(f_score, k=k)]
    result["L1"] = [SelectFromModel(sparse, max_features=k, threshold=-np.inf)]
    if shape[0] * shape[1] <= AFFORDABLE and k < shape[1]:
        step = max(1, (shape[1] - k) // RFE_FITS)
        result["RFE"] = [RFE(plain_model(task, "linear", seed), n_features_to_select=k, step=step)]
    return result


def compare(
    x: np.ndarray,
    y: np.ndarray | None,
    task: str,
    k: int,
    *,
    seed: int = 0,
    model: str = "linear",
    prepare: Any = None,
    khot: KHotSelector | None = None,
    weight: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    on_fold: Callable[[str, int, int], bool | None] = lambda name, done, total: None,
) -> Iterator[tuple[str, Score]]:
    """Yield each method with its score: accuracy, or R² of the target or of all features.

    Methods choose anew in every fold, on the rows that are not scored, to which `prepare` is fitted first. `khot` is
    what khot chooses with, if not a `KHotSelector` of k columns. A method that fails has no score. Stops if `on_fold`,
    which is called with the method and the folds done and in all, returns True. Models and khot see the `weight` of
    each row; rows with the same label in `groups` are in one fold.
    """
    if task == "regression" and y is not None:
        y = (y - y.mean(0)) / np.where(y.std(0) > 0, y.std(0), 1)  # R² does not see it, penalties do
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # F scores of constant columns
        warnings.filterwarnings("ignore", message="(?s)Features .* are constant|The least populated class")
        parts = splits(x, y, task, FOLDS, groups)
        candidates = methods(task, k, x.shape, seed)
        if y is not None and y.ndim == 2:  # the F test is of one target
            candidates.pop("SelectKBest")
        if khot is not None and "khot" in candidates:
            candidates["khot"] = [khot]
        cost = {name: KHOT_WORK if name == "khot" else 1 for name in candidates}  # of a fold
        total = len(parts) * sum(cost[name] * len(made) for name, made in candidates.items())
        done, stopped = 0, False

        def watch() -> bool:
            nonlocal stopped
            stopped = stopped or bool(on_fold(name, done, total))
            return stopped

        for name, selectors in candidates.items():
            scores, choices = [], []
            for selector in selectors:
                scored = ("model", plain_model(task, model, seed))
                pipe = Pipeline([("scale", StandardScaler()), ("select", selector), scored])
                for train, test in parts:
                    if not watch():
                        fitted = clone(pipe)
                        scores.append(_score(fitted, prepare, x, y, train, test, weight, groups))
                        if math.isfinite(scores[-1]) and hasattr(fitted["select"], "get_support"):
                            choices.append(fitted["select"].get_support())
                    if stopped:
                        return
                    done += cost[name]
            each = np.array(scores).reshape(-1, len(parts))
            chosen = tuple(np.mean(choices, axis=0).tolist()) if choices else ()
            yield name, Score(float(each.mean()), float(each.std()), tuple(each.mean(0).tolist()), chosen)


def _score(
    pipe: Pipeline,
    prepare: Any,
    x: np.ndarray,
    y: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    weight: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> float:
    known, new, y_known = x[train], x[test], None if y is None else y[train]
    how, is_khot = dict[str, Any](), isinstance(pipe["select"], KHotSelector)
    if weight is not None:
        how |= {"model__sample_weight": weight[train]} | ({"select__sample_weight": weight[train]} if is_khot else {})
    if groups is not None and is_khot:
        how["select__groups"] = groups[train]
    try:
        if prepare is not None:
            prepare = clone(prepare)
            known, new = prepared(prepare, known, y_known), prepare.transform(new)
        if y is not None:
            judging = {} if weight is None else {"sample_weight": weight[test]}
            return float(pipe.fit(known, y_known, **how).score(new, y[test], **judging))
    except ValueError:  # such as a constant column in this part, or one class
        return float("nan")
    scaler = StandardScaler().fit(known)
    wanted = scaler.transform(new)
    error = pipe.fit(known, scaler.transform(known), **how).predict(new) - wanted
    each = np.ones((len(new), 1)) if weight is None else weight[test][:, None]
    return float(1 - (error**2 * each).sum() / (wanted**2 * each).sum())  # of all: some are constant in a part
