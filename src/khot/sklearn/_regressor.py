"""Best-subset linear regression in scikit-learn's terms."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from .. import _check
from ..coding import Criterion, ebic, splice, splice_path

MOST = 30  # columns up to which k="auto" looks, if `max_k` does not say


class KHotRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Linear regression on exactly k features: best-subset selection by `khot.coding.splice`.

    `min Σ w(y − c₀ − X·c)² + ridge·‖c‖²` such that at most k of c differ from 0.

    Args:
        k: the number of features, or "auto": the number with the lowest `criterion` along the path 0, 1, …, max_k.
        max_k: where the path ends; None for all features, or half the rank of X if that is lower, but at most 30.
        criterion: (loss, k, rows, features) → what to minimise: `khot.coding.ebic`, `bic`, `aicc`, `gcv`, or yours.
        ridge: penalty of the squared coefficients.
        fit_intercept: add a constant, which is not counted.
        exchange: how many features are exchanged at once in the search.
        exact: True proves the optimum by enumeration (k given, up to about 25 features).

    Attributes:
        coef_: (n_features) or (n_targets, n_features); 0 where not chosen.
        intercept_: a number or (n_targets).
        support_: which features are chosen, boolean, like `coef_`.
        path_: with k="auto", the `khot.coding.SplicePath`; otherwise None.
        n_features_in_, feature_names_in_: as usual.

    Examples:
        >>> X = np.random.default_rng(0).standard_normal((100, 10))
        >>> model = KHotRegressor().fit(X, 3 * X[:, 2] - X[:, 5] + 1)
        >>> model.coef_.round(6) + 0.0
        array([ 0.,  0.,  3.,  0.,  0., -1.,  0.,  0.,  0.,  0.])
    """

    def __init__(
        self,
        k: int | str = "auto",
        *,
        max_k: int | None = None,
        criterion: Criterion = ebic,
        ridge: float = 0.0,
        fit_intercept: bool = True,
        exchange: int = 2,
        exact: bool | None = None,
    ) -> None:
        self.k = k
        self.max_k = max_k
        self.criterion = criterion
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.exchange = exchange
        self.exact = exact

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to X (rows, features) and y (rows) or (rows, targets), with weights of rows if they differ."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64)
        y = y.astype(np.float64)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        x_mean, y_mean = np.zeros(X.shape[1]), np.zeros(y.shape[1:])
        if self.fit_intercept:
            x_mean, y_mean = np.average(X, 0, weight), np.average(y, 0, weight)
        a, b = torch.tensor(X - x_mean), torch.tensor(y - y_mean)
        how: dict[str, Any] = {"ridge": self.ridge, "weights": torch.tensor(weight), "exchange": self.exchange}
        self.path_ = None
        if isinstance(self.k, str):
            _check.one_of("k", self.k, ("auto",))
            self.path_ = splice_path(a, b, self._most(a, how["weights"]), **how)
            found = self.path_.at(self.path_.choose(self.criterion))
        else:
            found = splice(a, b, self.k, exact=self.exact, **how)
        self.coef_, self.support_ = found.coef.numpy().T, found.support.numpy().T
        self.intercept_ = y_mean - self.coef_ @ x_mean
        return self

    def _most(self, a: Tensor, weights: Tensor) -> int:
        """Return where the path ends: before the features that are left could explain anything at all."""
        if self.max_k is not None:
            return self.max_k
        rank, n = int(torch.linalg.matrix_rank(weights.sqrt().unsqueeze(-1) * a)), a.shape[1]
        return min(n if rank == n else max(rank // 2, 1), MOST)

    def predict(self, X: Any) -> np.ndarray:
        """Return X·coef + intercept, (rows) or (rows, targets)."""
        check_is_fitted(self)
        result: np.ndarray = validate_data(self, X, reset=False, dtype=np.float64) @ self.coef_.T + self.intercept_
        return result
