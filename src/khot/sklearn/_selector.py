"""Feature selection in scikit-learn's terms: the best k columns, or groups of columns, for a prediction."""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from .. import _check
from ..relaxations import sigmoid_topk
from ._blocks import Purse
from ._portfolio import Portfolio, curve, within_error
from ._problem import Choice, Problem, Strategy, folds_of

PORTFOLIO = Portfolio()
AUTO, MOST = "auto", 30  # and the largest k, if `max_features` does not say
TASKS = ("auto", "classification", "regression", "reconstruction")
DENSE = 2000  # columns of a sparse matrix that are looked at closely
CELLS = 20_000_000  # numbers of them: 160 MB in double precision
FEWEST = 400  # columns that are looked at closely, however many rows there are: of more, some are left out
SMALL = 50_000_000  # numbers of a table that are kept in double precision


@dataclass(eq=False, repr=False)  # scikit-learn has its own
class KHotSelector(SelectorMixin, BaseEstimator):
    """Choose the k features that a prediction needs.

    Several strategies choose, and held-out rows decide between them (`khot.sklearn.Portfolio`): best subsets of a
    linear model, of steps and products of columns, boosted trees, and a gate that is trained with a network. So it
    finds linear effects among many columns, others that are not linear, and features that matter only together.

    Args:
        n_features_to_select: k, an int, or a fraction of the features, a float in (0, 1]; None for half of them; "auto"
            for the smallest k whose held-out score is within a standard error of the best.
        max_features: with "auto", the largest k; None for all features, but at most 30.
        strategy: how to choose, a function of a `khot.sklearn.Problem` that returns a `khot.sklearn.Choice`.
        task: "classification", "regression" or "reconstruction" (of all features from k of them; y is ignored);
            "auto" finds it from y: reconstruction if it is None; classification if it holds strings, booleans, or
            integers with few different values (20, or the root of the number of rows); otherwise regression.
        groups: lists of columns, names or numbers, that are chosen together and count as one.
        costs: what each column costs, (n_features); that of a group is their sum. Needs `budget`.
        budget: the most that the chosen ones may cost, instead of `n_features_to_select`.
        random_state: an int, for the same result each time.
        callback: called with dicts of progress; the search stops soon after it returns True, with the best so far.
        verbose: 1 shows a line of progress on stderr, as scikit-learn's estimators do; 0 shows nothing.
        n_jobs: processes of a `Portfolio` that choose at the same time; None for what `strategy` says.

    Attributes:
        scores_: (n_features), larger is better. By the default strategy, they are what the held-out loss rises by
            without a chosen feature, or (negative) what it rises by with another; the loss without features is 1.
        errors_: (n_features), their standard errors; NaN where unknown.
        inclusion_probabilities_: (n_features), in [0, 1] with sum k (over groups, if there are any): how sure the
            choice is, σ_k of what another choice costs in standard errors; 0 for what costs more than the budget.
        history_: what the strategy measured on the way, dicts: the candidates of a portfolio with their scores, the
            winner first; or the steps of a gate's training.
        curve_: with "auto", a dict for each k that was tried: k, score, error. The score is that of `Portfolio`, of
            choices from other rows.
        task_: the task that was found.
        classes_: of a classification.
        n_features_in_, feature_names_in_: as usual.

    Examples:
        >>> X = np.random.default_rng(0).standard_normal((2000, 20))
        >>> y = X[:, 3] * X[:, 7] > 0  # neither column alone says anything
        >>> selector = KHotSelector(2, random_state=0).fit(X, y)
        >>> selector.get_feature_names_out()
        array(['x3', 'x7'], dtype=object)
        >>> selector.transform(X).shape
        (2000, 2)
    """

    n_features_to_select: float | str | None = None
    _: KW_ONLY
    max_features: int | None = None
    strategy: Strategy = PORTFOLIO
    task: str = "auto"
    groups: Sequence[Sequence[int | str]] | None = None
    costs: Sequence[float] | None = None
    budget: float | None = None
    random_state: int | np.random.RandomState | None = None
    callback: Callable[[dict[str, Any]], bool | None] | None = None
    verbose: int = 0
    n_jobs: int | None = None

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None) -> Self:
        """Choose by X (rows, features), which may be sparse, and y (rows) or (rows, outputs).

        Args:
            X, y: the rows.
            sample_weight: (rows,), if they differ.
            groups: (rows,), labels of rows that must not be separated by cross-validation, such as patients.
        """
        _check.one_of("task", self.task, TASKS)
        strategy = self._strategy()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        x, target = self._validated(X, y)
        if sparse.issparse(x) and x.shape[1] <= DENSE and x.shape[0] * x.shape[1] <= CELLS:
            x = x.toarray()
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        if groups is not None:
            groups = np.unique(column_or_1d(np.asarray(groups)), return_inverse=True)[1]
            if len(groups) != x.shape[0]:
                raise ValueError(f"`groups` must have a label for each of the {x.shape[0]} rows; got {len(groups)}.")
        units, purse = self._units(x.shape[1])
        problem, kept = self._problem(x, target, weight, groups, units, purse, seed)
        self.curve_: list[dict[str, float]] = []
        if self.n_features_to_select == AUTO:
            self.curve_ = curve(problem, strategy)
            problem = problem.spending(within_error(self.curve_))
        choice = _checked(strategy(problem), problem)
        if self.verbose:
            sys.stderr.write("\n")
        scores = np.full(len(units), float(np.min(choice.scores)) - 1.0)
        scores[kept] = choice.scores
        losses = scores.copy() if choice.losses is None else np.full(len(units), float(np.min(choice.losses)) - 1.0)
        losses[kept] = choice.scores if choice.losses is None else choice.losses
        errors = np.full(len(units), np.nan)
        errors[kept] = np.nan if choice.errors is None else choice.errors
        budget = len(choice.units)
        probabilities = sigmoid_topk(torch.from_numpy(scores), budget, mask=torch.from_numpy(purse.affordable)).numpy()
        self.history_ = [dict(entry) for entry in choice.history]
        self._support = np.zeros(x.shape[1], dtype=bool)
        self.scores_, self.errors_, self.inclusion_probabilities_ = np.empty((3, x.shape[1]))
        for u, columns in enumerate(units):
            self.scores_[columns], self.errors_[columns] = losses[u], errors[u]
            self.inclusion_probabilities_[columns] = probabilities[u]
        for u in choice.units:
            self._support[units[kept[u]]] = True
        return self

    def _strategy(self) -> Strategy:
        """Return what chooses, with the processes that were asked for."""
        if not callable(self.strategy):
            raise TypeError(
                "`strategy` must be a function of a Problem that returns a Choice, such as khot.sklearn.splicing; "
                f"got {self.strategy!r}."
            )
        if self.n_jobs is None:
            return self.strategy
        if not isinstance(self.strategy, Portfolio):
            raise ValueError(f"`n_jobs` needs a Portfolio as `strategy`; got {self.n_jobs} and {self.strategy!r}.")
        return replace(self.strategy, n_jobs=self.n_jobs)

    def _units(self, n: int) -> tuple[list[np.ndarray], Purse]:
        """Return the columns of each unit in the order of their first columns, what units cost, and the budget."""
        names = {str(name): i for i, name in enumerate(getattr(self, "feature_names_in_", ()))}
        owner = np.arange(n)
        for group in self.groups or ():
            if isinstance(group, str) or not np.iterable(group):
                raise TypeError(f"`groups` must hold lists of columns, such as [[0, 1], [4, 5]]; got {group!r} in it.")
            columns = []
            for given in group:
                at = names.get(given) if isinstance(given, str) else given if isinstance(given, Integral) else None
                if at is None or not 0 <= at < n:
                    raise ValueError(
                        f"`groups` must name columns of X, or their numbers from 0 to {n - 1}; got {given!r}."
                    )
                columns.append(int(at))
            if not columns or len(np.unique(owner[columns])) < len(columns) or (owner[columns] != columns).any():
                raise ValueError(f"a column must be in one of `groups`, once; got {list(group)!r}.")
            owner[columns] = min(columns)
        units = [np.flatnonzero(owner == first) for first in np.unique(owner)]
        if (self.costs is None) != (self.budget is None):
            raise ValueError("`costs` and `budget` must be given together.")
        if self.costs is None or self.budget is None:
            return units, Purse(np.ones(len(units)), self._count(len(units)))
        if self.n_features_to_select is not None:
            raise ValueError("`n_features_to_select` must be None if there is a `budget`.")
        costs = np.asarray(self.costs, dtype=np.float64)
        if costs.shape != (n,) or not (costs > 0).all() or not np.isfinite(costs).all():
            raise ValueError(f"`costs` must hold {n} finite numbers > 0, one for each column.")
        each = np.array([costs[columns].sum() for columns in units])
        if not each.min() <= self.budget * (1 + 1e-12):
            raise ValueError(f"`budget` must be ≥ {each.min():g}, the lowest cost of a feature; got {self.budget}.")
        return units, Purse(each, float(self.budget))

    def _count(self, n: int) -> int:
        """Return k, or the largest k of "auto"."""
        if not isinstance(self.n_features_to_select, str):
            if self.max_features is not None:
                raise ValueError('`max_features` needs `n_features_to_select="auto"`.')
            return number_of_features(self.n_features_to_select, n)
        _check.one_of("n_features_to_select", self.n_features_to_select, (AUTO,))
        if self.max_features is None:
            return min(n, MOST)
        _check.at_least("max_features", self.max_features, 1)
        return min(n, int(self.max_features))

    def _validated(self, X: Any, y: Any) -> tuple[Any, np.ndarray]:
        """Return features and what to predict, numbers or indices of classes, (rows, …); set `task_` and `classes_`."""
        how: dict[str, Any] = {"dtype": np.float64, "ensure_min_samples": 2, "accept_sparse": "csr"}
        if y is None or self.task == "reconstruction":
            if self.task not in ("auto", "reconstruction"):
                said = f"`y` must be given for {self.task}; got None. Without it, the task is reconstruction."
                raise ValueError(said)
            self.task_ = "reconstruction"
            x = validate_data(self, X, **how)
            return x, np.zeros((x.shape[0], 0))
        x, y = validate_data(self, X, y, multi_output=True, **how)
        self.task_ = find_task(y) if self.task == "auto" else self.task
        if self.task_ == "regression":
            return x, y.astype(np.float64).reshape(len(y), -1)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` must have at least 2 classes; got one class, {self.classes_.tolist()[0]!r}.")
        return x, index.astype(np.float64)[:, None]

    def _problem(
        self,
        x: Any,
        target: np.ndarray,
        weight: np.ndarray,
        groups: Any,
        units: list[np.ndarray],
        purse: Purse,
        seed: int,
    ) -> tuple[Problem, np.ndarray]:
        """Return the problem for the strategy, and which units it has: of a sparse matrix, the most promising."""
        first, weight = _merged(x, target, weight, groups)
        if sparse.issparse(x):
            if self.task_ == "reconstruction" and x.shape[1] > DENSE:
                raise ValueError(f"a sparse X must have at most {DENSE} columns without y; got {x.shape[1]}.")
            first = first[: CELLS // min(x.shape[1], DENSE if self.task_ == "reconstruction" else FEWEST)]
            weight = weight[: len(first)]
        x, target = x[first], target[first]
        classes = target[:, 0].astype(np.int64) if self.task_ == "classification" else None
        y = target if classes is None else (classes[:, None] == np.arange(len(self.classes_))).astype(np.float64)
        y = y[:, 1:] if y.shape[1] == 2 and classes is not None else y
        y = y - np.average(y, axis=0, weights=weight) if classes is not None else standardised(_drawn_in(y), weight)
        if self.task_ == "reconstruction":
            x = y = standardised(x.toarray() if sparse.issparse(x) else x, weight)
        kept = np.flatnonzero(purse.affordable)
        if sparse.issparse(x):
            kept = _promising(x, y, weight, units, kept)
            if self.costs is None and purse.budget > len(kept) and self.n_features_to_select != AUTO:
                raise ValueError(
                    f"`n_features_to_select` must be ≤ {len(kept)} for a sparse X with {x.shape[0]} rows: so many "
                    f"columns are looked at closely; got {purse.budget:g}."
                )
        if len(kept) < len(units) or sparse.issparse(x):
            x = x[:, np.concatenate([units[u] for u in kept])]
            ends = np.cumsum([0, *(len(units[u]) for u in kept)])
            units = [np.arange(a, b) for a, b in pairwise(ends)]
            purse = Purse(purse.costs[kept], purse.budget)
        if self.task_ != "reconstruction":
            x = standardised(x.toarray() if sparse.issparse(x) else x, weight)
        fold = folds_of(classes, len(x), None if groups is None else groups[first])
        how: dict[str, Any] = {"task": self.task_, "seed": seed, "callback": self._tell}
        return Problem(x, y, classes, weight, fold, tuple(units), purse, **how), kept

    def _tell(self, entry: dict[str, Any]) -> bool | None:
        """Show a line of progress, if it is wanted, and pass it on."""
        if self.verbose:
            now = f"{entry.get('candidate')}, {entry.get('done')} of {entry.get('total')} done"
            if "step" in entry:
                now = f"step {entry['step']} of {entry['steps']}, validation loss {entry['validation_loss']:.4f}"
                now += f", features {entry['budget']}"
            sys.stderr.write(f"\rKHotSelector: {now:<70}")
        return self.callback(entry) if self.callback is not None else None

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self._support

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        tags.input_tags.sparse = True
        return tags


def _checked(choice: Choice, problem: Problem) -> Choice:
    """Return what a strategy chose; raise if it does not fit the problem."""
    if not isinstance(choice, Choice):
        raise TypeError(f"`strategy` must return a khot.sklearn.Choice; got {type(choice).__name__}.")
    units, count = [int(u) for u in choice.units], len(problem.units)
    if len({*units}) < len(units) or not all(0 <= u < count for u in units):
        raise ValueError(f"`strategy` must choose different units from 0 to {count - 1}; got {choice.units}.")
    if np.shape(choice.scores) != (count,):
        raise ValueError(f"`strategy` must give a score to each of {count} units; got shape {np.shape(choice.scores)}.")
    if problem.purse.is_count and len(units) != problem.k:
        raise ValueError(f"`strategy` must choose {problem.k} units (k); got {len(units)}.")
    if problem.purse.room(units) < 0:
        cost = float(problem.purse.costs[units].sum())
        raise ValueError(f"`strategy` must spend at most {problem.purse.budget:g} (the budget); got {cost:g}.")
    return choice


def number_of_features(given: float | None, n: int) -> int:
    """Return k of n: from an int, a fraction, or None for half."""
    if given is None:
        return max(1, n // 2)
    _check.number("n_features_to_select", given, 'an int, a float, "auto" or None')
    if isinstance(given, Integral):
        if not 1 <= int(given) <= n:
            raise ValueError(f"`n_features_to_select` must satisfy 1 ≤ k ≤ {n} (number of features); got {given}.")
        return int(given)
    if not 0 < given <= 1:
        raise ValueError(f"`n_features_to_select`, a fraction, must satisfy 0 < fraction ≤ 1; got {given}.")
    return max(1, int(given * n))


def find_task(y: np.ndarray) -> str:
    """Return classification for strings, booleans and integers with few different values; otherwise regression."""
    if y.ndim == 2 and y.shape[1] > 1:
        return "regression"
    if y.dtype.kind not in "fiu":
        return "classification"
    values = np.unique(y)
    few = len(values) <= max(20, len(y) ** 0.5)
    return "classification" if few and (values == np.round(values)).all() else "regression"


def standardised(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return columns with mean 0 and variance 1, whatever their size; constant ones are 0."""
    x = x / np.where(peak := np.abs(x).max(0), peak, 1)
    x -= np.average(x, axis=0, weights=weight)
    x /= np.where((peak := np.abs(x).max(0)) > 1e-14, peak, np.inf)
    scale = np.sqrt(np.einsum("ij,ij,i->j", x, x, weight) / weight.sum())
    x /= np.where(scale, scale, 1)
    return x if x.size <= SMALL else x.astype(np.float32)


def _drawn_in(y: np.ndarray) -> np.ndarray:
    """Return numbers with outliers drawn in: beyond the middle 90 % by more than its width, 4.9 σ if normal."""
    if not y.size:
        return y
    low, high = np.quantile(y, [0.05, 0.95], axis=0)
    wide = np.where(high > low, high - low, np.inf)
    return np.asarray(np.clip(y, low - wide, high + wide))


def _merged(x: Any, y: np.ndarray, weight: np.ndarray, groups: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return one of each set of equal rows, ordered by a hash of what they hold, and the sums of their weights.

    So a weight of 2 is the row twice, a weight of 0 is its absence, the order of the rows does not matter, and no row
    is both trained on and held out. Rows of different `groups` are different.
    """
    order = np.flatnonzero(weight > 0)
    more = y if groups is None else np.column_stack([y, groups])
    more = np.ascontiguousarray(more + 0.0)  # −0 is 0
    digests = np.empty(len(order), dtype="S16")
    if sparse.issparse(x):
        x = x.copy()
        x.sum_duplicates()
        x.eliminate_zeros()
    for place, i in enumerate(order):
        if sparse.issparse(x):
            at = slice(x.indptr[i], x.indptr[i + 1])
            digest = hashlib.blake2b(x.indices[at].astype(np.int64).tobytes(), digest_size=16)
            digest.update(x.data[at].tobytes())
        else:
            digest = hashlib.blake2b(x[i] + 0.0, digest_size=16)
        digest.update(more[i].tobytes())
        digests[place] = digest.digest()
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return order[first], np.bincount(group, weights=weight[order])


def _promising(x: Any, y: np.ndarray, weight: np.ndarray, units: list[np.ndarray], among: np.ndarray) -> np.ndarray:
    """Return those units of a sparse matrix whose columns have the highest correlations with y, and fit in memory."""
    most = min(DENSE, CELLS // x.shape[0])
    if sum(len(units[u]) for u in among) <= most:
        return among
    scaled = x.multiply(weight[:, None] / weight.sum()).tocsr()
    mean = np.asarray(scaled.sum(0)).ravel()
    variance = np.asarray(scaled.multiply(x).sum(0)).ravel() - mean**2
    share = ((scaled.T @ y) ** 2).sum(1) / np.maximum(variance, 1e-12)  # y is centred
    each = np.array([share[units[u]].max() for u in among])
    order = among[np.argsort(-each, kind="stable")]
    taken = np.cumsum([len(units[u]) for u in order]) <= most
    taken[0] = True
    return np.sort(order[taken])
