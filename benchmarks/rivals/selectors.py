"""Ways to choose k columns to compare with: scikit-learn's, abess, and our own implementations of Boruta and mRMR.

Each is a function of x (rows, n), y, k, whether y holds classes, and a seed, that returns columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_selection import (
    RFE,
    f_classif,
    f_regression,
    mutual_info_classif,
    mutual_info_regression,
)
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression, Ridge, lasso_path
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.svm import l1_min_c

try:
    import abess
except ImportError:
    abess = None

TREES = 60
BORUTA_ROUNDS = 12
LASSO_STEPS = 40
RFE_FITS = 12
Method = Callable[[np.ndarray, np.ndarray, int, bool, int], np.ndarray]


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """The k columns with the highest scores."""
    return np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:k]


def forest(is_class: bool, seed: int) -> Any:
    """A random forest."""
    kind = RandomForestClassifier if is_class else RandomForestRegressor
    return kind(TREES, min_samples_leaf=2, max_features="sqrt" if is_class else 1 / 3, random_state=seed, n_jobs=1)


def linear(is_class: bool) -> Any:
    """Logistic or ridge regression."""
    return LogisticRegression(max_iter=300) if is_class else Ridge()


def f_test(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """The F test of each column."""
    return best((f_classif if is_class else f_regression)(x, y)[0], k)


def mutual_information(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """The estimated mutual information of each column."""
    return best((mutual_info_classif if is_class else mutual_info_regression)(x, y, random_state=seed), k)


def lasso(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """The first k columns of the lasso path; of an L1 logistic path for classes."""
    first = np.full(x.shape[1], LASSO_STEPS + 1.0)
    size = np.zeros(x.shape[1])
    if is_class:
        lowest = l1_min_c(x, y, loss="log")
        for step, c in enumerate(lowest * np.logspace(0, 2.5, 12)):
            model = LogisticRegression(
                l1_ratio=1, solver="liblinear" if len(np.unique(y)) == 2 else "saga", C=c, tol=1e-3
            )
            size = np.abs(model.fit(x, y).coef_).max(0)
            first = np.where((size > 0) & (first > step), step, first)
            if (first <= step).sum() >= k:
                break
    else:
        coefs = lasso_path(x, (y - y.mean()) / (y.std() or 1), alphas=LASSO_STEPS)[1]
        for step, at in enumerate(coefs.T):
            size = np.abs(at)
            first = np.where((size > 0) & (first > step), step, first)
            if (first <= step).sum() >= k:
                break
    return best(-first + size / (1 + size.max()), k)


def recursive(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int, *, is_forest: bool) -> np.ndarray:
    """Recursive feature elimination in about 12 fits."""
    model = forest(is_class, seed) if is_forest else linear(is_class)
    step = max(1, (x.shape[1] - k) // RFE_FITS)
    return RFE(model, n_features_to_select=k, step=step).fit(x, y).get_support(indices=True)


def importance(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """The impurity importance of a random forest."""
    return best(forest(is_class, seed).fit(x, y).feature_importances_, k)


def permutation(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """The permutation importance of boosted trees, on a quarter of the rows."""
    parts = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y if is_class else None)
    kind = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    model = kind(random_state=seed).fit(parts[0], parts[2])
    return best(permutation_importance(model, parts[1], parts[3], n_repeats=3, random_state=seed).importances_mean, k)


def boruta(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """Our own implementation of Boruta, as a ranking: how often a column beats the best of all permuted columns.

    Ties, which are many among columns that always or never do, are broken by the mean importance. Reference: Kursa and
    Rudnicki, "Feature selection with the Boruta package" (2010), which accepts or rejects and does not take k.
    """
    random, hits, total = np.random.default_rng(seed), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for i in range(BORUTA_ROUNDS):
        shadow = random.permuted(x, axis=0)
        found = forest(is_class, seed + i).fit(np.hstack([x, shadow]), y).feature_importances_
        own, other = np.split(found, 2)
        hits += own > other.max()
        total += own
    return best(hits + total / (1 + total.max()), k)


def mrmr(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """Our own implementation of mRMR with the F test over the mean |correlation| (the FCQ form).

    Reference: Ding and Peng, "Minimum redundancy feature selection from microarray gene expression data" (2005).
    """
    relevance = np.nan_to_num((f_classif if is_class else f_regression)(x, y)[0])
    z = StandardScaler().fit_transform(x) / len(x) ** 0.5
    chosen, redundancy = [int(relevance.argmax())], np.zeros(x.shape[1])
    while len(chosen) < k:
        redundancy += np.abs(z.T @ z[:, chosen[-1]])
        score = relevance / np.maximum(redundancy / len(chosen), 1e-3)
        score[chosen] = -1
        chosen.append(int(score.argmax()))
    return np.array(chosen)


def abess_splicing(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """abess with exactly k columns: linear, logistic or multinomial."""
    varied, count = np.flatnonzero(x.std(0) > 0), len(np.unique(y))  # it refuses constant columns
    if is_class:
        model = (abess.LogisticRegression if count == 2 else abess.MultinomialRegression)(support_size=k)
        target = np.unique(y, return_inverse=True)[1]
        coefs = model.fit(x[:, varied], target if count == 2 else np.eye(count)[target]).coef_
    else:
        coefs = abess.LinearRegression(support_size=k).fit(x[:, varied], y).coef_
    coefs = np.abs(coefs)
    return varied[best(coefs if coefs.ndim == 1 else coefs.max(1 if len(coefs) == len(varied) else 0), k)]


def quietly(method: Method, *given: Any) -> np.ndarray:
    """The choice, without warnings of models that need more steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(method(*given))


METHODS: dict[str, Method] = {
    "F test": f_test,
    "mutual information": mutual_information,
    "mRMR": mrmr,
    "lasso path": lasso,
    "RFE, linear": partial(recursive, is_forest=False),
    "RFE, forest": partial(recursive, is_forest=True),
    "forest importance": importance,
    "permutation, boosting": permutation,
    "Boruta": boruta,
    **({"abess": abess_splicing} if abess is not None else {}),
}
