"""Which columns matter, with a bound on the share of false ones: Gaussian model-X knockoffs."""

import warnings
from typing import Any, NamedTuple

import numpy as np
from sklearn.covariance import ledoit_wolf
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LassoCV, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.utils.validation import check_array, check_X_y

from .. import _check

ROUNDING = 0.999  # of the largest s, so that the covariance of knockoffs stays positive definite
ROWS_A_COLUMN = 5  # fewer rows: the covariance is shrunk


class Discoveries(NamedTuple):
    """Hold what knockoffs found."""

    selected: np.ndarray
    """(n), which columns are discoveries."""
    statistics: np.ndarray
    """(n), by how much a column says more of y than its knockoff; symmetric around 0 for a column of no use."""
    threshold: float
    """The smallest statistic of a discovery; infinite if there is none."""
    q: float
    """The bound on the expected share of false discoveries."""

    def names(self, names: list[str]) -> list[str]:
        """Return the names of the discoveries, the best first."""
        order = np.argsort(-self.statistics, kind="stable")
        return [names[i] for i in order if self.selected[i]]


def gaussian_knockoffs(x: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Draw knockoffs of the columns of x: jointly normal with them, and independent of y given them.

    With Σ the correlations, `(X, X̃)` has the covariance `[[Σ, Σ − s·I], [Σ − s·I, Σ]]`, `s = min(1, 2·λ_min(Σ))`, the
    equicorrelated choice. So a column and its knockoff can be exchanged without a change of the law.

    Args:
        x: (rows, n), about normal.
        seed: of the draw.

    Returns:
        (rows, n), in the units of x.

    Reference: Candès, Fan, Janson and Lv, "Panning for gold: model-X knockoffs" (2018).
    """
    x = check_array(x, dtype=np.float64)
    mean, scale = x.mean(0), x.std(0)
    z = (x - mean) / np.where(scale > 0, scale, 1)
    rows, n = z.shape
    sigma = z.T @ z / rows if rows >= ROWS_A_COLUMN * n else ledoit_wolf(z, assume_centered=True)[0]
    size = np.sqrt(np.where(np.diag(sigma) > 0, np.diag(sigma), 1))
    sigma = sigma / size / size[:, None] + np.diag(np.diag(sigma) <= 0).astype(float)  # a constant column stands alone
    s = ROUNDING * min(1.0, 2 * max(float(np.linalg.eigvalsh(sigma)[0]), 0.0))
    inverse = np.linalg.inv(sigma + 1e-10 * np.eye(n))
    covariance = 2 * s * np.eye(n) - s * s * inverse
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    root = vectors * np.sqrt(np.maximum(values, 0))
    noise = np.random.default_rng(seed).standard_normal((rows, n)) @ root.T
    return np.asarray(mean + scale * (z - s * z @ inverse + noise))


def knockoffs(x: Any, y: Any, q: float = 0.1, *, task: str = "regression", seed: int = 0) -> Discoveries:
    """Find the columns that matter, so that at most a share q of them is expected to be false (knockoff+).

    Each column competes with a knockoff of itself for a place in a lasso (for two classes or more, an L1 logistic
    model) whose penalty is found by cross-validation. What wins against its knockoff by more than a threshold is a
    discovery. The bound holds if the columns are about normal and their correlations well estimated.

    Args:
        x: (rows, n).
        y: (rows).
        q: the bound on the expected share of false discoveries, in (0, 1).
        task: "regression" or "classification".
        seed: of the knockoffs.

    Examples:
        >>> x = np.random.default_rng(0).standard_normal((500, 30))
        >>> found = knockoffs(x, 2 * x[:, :12].sum(1) + np.random.default_rng(1).standard_normal(500), 0.1)
        >>> np.flatnonzero(found.selected)
        array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
    """
    _check.fraction("q", q, is_open=True)
    _check.above("q", q, 0)
    _check.one_of("task", task, ("regression", "classification"))
    x, y = check_X_y(x, y, dtype=np.float64, y_numeric=task == "regression")
    both = np.concatenate([x, gaussian_knockoffs(x, seed=seed)], 1)
    scale = both.std(0)
    both = (both - both.mean(0)) / np.where(scale > 0, scale, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a penalty that is too weak is not chosen
        size = _sizes(both, y, task)
    own, other = np.split(size, 2)
    statistics = own - other
    threshold = _threshold(statistics, q)
    return Discoveries(statistics >= threshold, statistics, threshold, q)


def _sizes(both: np.ndarray, y: np.ndarray, task: str) -> np.ndarray:
    """Return the sizes of the coefficients of a lasso whose penalty is the best in cross-validation."""
    if task == "regression":
        return np.asarray(np.abs(LassoCV(cv=5, alphas=30).fit(both, (y - y.mean()) / (y.std() or 1)).coef_))
    model = LogisticRegression(l1_ratio=1, solver="saga", tol=1e-3, max_iter=200)
    search = GridSearchCV(model, {"C": np.logspace(-2.5, 0.5, 7)}, cv=5, scoring="neg_log_loss")
    return np.asarray(np.abs(search.fit(both, y).best_estimator_.coef_).max(0))


def _threshold(statistics: np.ndarray, q: float) -> float:
    """Return the smallest t with `(1 + #{W ≤ −t}) / #{W ≥ t} ≤ q`."""
    for t in np.sort(np.abs(statistics[statistics != 0])):
        if 1 + (statistics <= -t).sum() <= q * max(int((statistics >= t).sum()), 1):
            return float(t)
    return float("inf")
