"""The job of `khot select`: choose features, compare the choice with others, and record the result.

Choices are compared by cross-validated scores of one plain model on what each chooses.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, f_classif, f_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder
from threadpoolctl import threadpool_limits

from .._process import interruptible, threads_for
from ..sklearn import Discoveries, KHotSelector, find_task, knockoffs
from ._table import Table as Table
from ._table import digits as digits
from ._table import read_table as read_table
from ._text import Reading as Reading
from ._text import TableError as TableError
from ._trust import PAIRS as PAIRS
from ._trust import in_halves, stand_ins, warn_of, winner
from ._wish import Wish as Wish
from ._wish import read_costs as read_costs
from ._wish import read_groups as read_groups

FOLDS = 5
RANDOM_CHOICES = 5
RFE_FITS = 25  # about how many times RFE fits a model
AFFORDABLE = 2e6  # largest number of cells of a table for which RFE is run
XOR = 1000, 20, (3, 7)  # rows, columns, and the two whose product decides the label
KHOT_WORK = 5  # about how many times longer khot takes than another method
RIVALS = ("SelectKBest", "L1", "RFE")

Progress = Callable[[str, int, int], None]
"""Called with a label, the work done so far, and all of it."""


class Feature(NamedTuple):
    """Hold a feature with its rank, of which 1 is the best."""

    name: str
    rank: int
    inclusion_probability: float
    stability: float | None = None  # share of folds in which it was chosen, if they were compared
    subsamples: float | None = None  # share of random halves of the rows in which it was chosen, if they were drawn
    stand_ins: tuple[tuple[str, float], ...] = ()  # for a chosen one: features like it, and their correlations


class Score(NamedTuple):
    """Hold the mean and standard deviation over folds, and each fold; the folds are the same for all methods."""

    mean: float
    std: float
    folds: tuple[float, ...]  # means over several choices, if a method makes several
    chosen: tuple[float, ...] = ()  # for each feature, the share of choices that hold it, if the method chooses


class Found(NamedTuple):
    """Hold what a method chose where two columns matter only together."""

    columns: list[int]
    right: int  # how many of the two
    accuracy: float  # of a random forest with these columns, on new rows


@dataclass
class Selection:
    """Hold the result, or as much of it as there is after an interruption."""

    table: Table
    task: str
    k: int
    seed: int
    model: str
    features: list[Feature] = field(default_factory=list)  # all of them, the best first; the first k are chosen
    candidates: list[dict[str, Any]] = field(default_factory=list)  # strategies and their scores, the winner first
    curve: list[dict[str, float]] = field(default_factory=list)  # scores against k, if k was to be found
    discoveries: Discoveries | None = None  # if their false share was to be controlled
    scores: dict[str, Score] = field(default_factory=dict)
    is_complete: bool = False
    seconds: float = 0.0
    xor: dict[str, Found] = field(default_factory=dict)  # what `xor` found, if it was run
    warnings: list[str] = field(default_factory=list)  # what may be wrong with the table, in sentences

    @property
    def names(self) -> list[str]:
        """Return the names of the columns that were chosen from."""
        return self.table.features(self.task)

    @property
    def chosen(self) -> list[Feature]:
        """Return the names of the chosen features, the best first."""
        return self.features[: self.k]


def find_task_of(table: Table, asked: str) -> str:
    """Return the task, found from the target if `asked` is "auto"; raise `TableError` if the target does not fit."""
    if table.y is None:
        if asked not in ("auto", "reconstruction"):
            raise TableError(f"--task {asked} needs --target")
        return "reconstruction"
    task = find_task(table.y) if asked == "auto" else asked
    if task == "regression" and table.y.dtype == object:
        raise TableError(f"the target {table.target!r} holds strings: --task must be classification; got regression")
    if task == "regression" and np.ptp(table.y) == 0:
        raise TableError(f"the target {table.target!r} must vary; got {table.y[0]:g} in all rows")
    if task == "classification":
        classes, counts = np.unique(table.y.astype(str), return_counts=True)
        if len(classes) < 2:
            raise TableError(f"the target {table.target!r} must have at least 2 classes; got 1, {str(classes[0])!r}")
        if counts.min() < 2:
            rare = str(classes[counts.argmin()])
            raise TableError(f"each class of {table.target!r} must have 2 rows or more; got 1 of {rare!r}")
    return task


PLAIN = Wish()


def select(
    table: Table,
    task: str,
    k: int | str,
    *,
    wish: Wish = PLAIN,
    seed: int = 0,
    model: str = "linear",
    with_xor: bool = False,
    on_progress: Progress = lambda label, done, total: None,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Selection:
    """Choose k features, then compare the choice with others. Ctrl-C calls `on_interrupt` and keeps the best so far.

    k may be "auto"; `wish` has groups, costs and more. `with_xor` runs `xor` first.
    """
    if table.x.size > AFFORDABLE and task != "reconstruction":
        table.notes.append("RFE was left out of the comparison: the table is too large for it.")
    result, names, began = Selection(table, task, 0, seed, model), table.features(task), monotonic()
    y = None if task == "reconstruction" else table.y
    if task == "classification" and y is not None:
        y = np.unique(y.astype(str), return_inverse=True)[1]
    with interruptible(on_interrupt) as is_interrupted, threads_for(0), threadpool_limits(1):

        def watch(entry: dict[str, Any]) -> bool:
            if "candidate" in entry:
                on_progress(f"choosing   {entry['candidate']}", entry["done"], entry["total"])
            return is_interrupted()

        def fold(name: str, done: int, total: int) -> bool:
            on_progress(f"comparing  {name}", done, total)
            return is_interrupted()

        if with_xor:
            result.xor = xor(seed, on_progress)
        on_progress("choosing", 0, 1)
        prepare = preparation(table, task, seed)
        x = table.x if prepare is None else prepared(prepare, table.x, y)
        result.warnings = [*table.warnings, *warn_of(names, x, y, task, is_image=table.image is not None)]
        units, selector = wish.units(names), wish.selector(k, names, task, seed)
        selector.set_params(callback=watch).fit(x, y)
        first = np.array([places[0] for _, places in units])
        is_chosen, scores = selector.get_support()[first], selector.scores_[first]
        order = np.lexsort((-scores, ~is_chosen))
        result.k, result.candidates, result.curve = int(is_chosen.sum()), selector.history_, selector.curve_
        shares = selector.inclusion_probabilities_[first]
        result.features = [Feature(units[i][0], r + 1, float(shares[i])) for r, i in enumerate(order)]
        singles = [(r, units[i][1][0]) for r, i in enumerate(order[: result.k]) if len(units[i][1]) == 1]
        for (r, _), found in zip(singles, stand_ins(x, np.array([i for _, i in singles], dtype=int)), strict=True):
            similar = tuple((names[j], round(value, 3)) for j, value in found)
            result.features[r] = result.features[r]._replace(stand_ins=similar)
        if wish.groups or wish.costs:
            table.notes.append("The other methods know no groups and no costs: they chose as many columns as khot.")
        if wish.false_discoveries is not None and y is not None and not is_interrupted():
            on_progress("knockoffs", 0, 1)
            result.discoveries = knockoffs(x, y, wish.false_discoveries, task=task, seed=seed)
        if not is_interrupted():
            fixed = result.k if k == "auto" else k
            khot = wish._replace(max_k=None).selector(fixed, names, task, seed).set_params(callback=watch)
            how: dict[str, Any] = {"seed": seed, "model": model, "on_fold": fold, "khot": khot}
            result.scores.update(compare(table.x, y, task, int(selector.get_support().sum()), prepare=prepare, **how))
        if "khot" in result.scores and (share := result.scores["khot"].chosen):
            pairs = zip(result.features, order, strict=True)
            result.features = [feature._replace(stability=share[first[i]]) for feature, i in pairs]
            ready = None if prepare is None else partial(prepared, clone(prepare))
            again = clone(khot).set_params(strategy=winner(selector), callback=watch)
            halves = in_halves(table.x, y, task, again, ready, fold)
            if halves is not None and not is_interrupted():
                pairs = zip(result.features, order, strict=True)
                result.features = [feature._replace(subsamples=float(halves[first[i]])) for feature, i in pairs]
        result.is_complete = not is_interrupted()
    result.seconds = monotonic() - began
    return result


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


def xor(seed: int, on_progress: Progress) -> dict[str, Found]:
    """Let each method look for two columns of which neither alone says anything about the label."""
    rows, n, true = XOR
    x = np.random.default_rng(seed).standard_normal((2 * rows, n))
    y = (x[:, true[0]] * x[:, true[1]] > 0).astype(int)
    known = methods("classification", 2, (rows, n), seed)
    result = {}
    for i, name in enumerate(("khot", *RIVALS)):
        on_progress(f"XOR        {name}", i, 1 + len(RIVALS))
        chosen = known[name][0].fit(x[:rows], y[:rows]).get_support(indices=True)
        forest = plain_model("classification", "forest", seed).fit(x[:rows, chosen], y[:rows])
        accuracy = float(forest.score(x[rows:, chosen], y[rows:]))
        result[name] = Found(chosen.tolist(), len({*true} & {*chosen.tolist()}), accuracy)
    return result


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
    on_fold: Callable[[str, int, int], bool | None] = lambda name, done, total: None,
) -> Iterator[tuple[str, Score]]:
    """Yield each method with its score: accuracy, or R² of the target or of all features.

    Methods choose anew in every fold, on the rows that are not scored, to which `prepare` is fitted first. `khot` is
    what khot chooses with, if not a `KHotSelector` of k columns. A method that fails has no score. Stops if `on_fold`,
    which is called with the method and the folds done and in all, returns True.
    """
    if task == "regression" and y is not None:
        y = (y - y.mean()) / (y.std() or 1)  # R² does not see it, penalties do
    folds = KFold(FOLDS, shuffle=True, random_state=0)
    if task == "classification" and y is not None:
        largest = int(np.unique(y, return_counts=True)[1].max())  # rows of the most frequent class
        folds = StratifiedKFold(max(2, min(FOLDS, largest)), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # F scores of constant columns
        warnings.filterwarnings("ignore", message="(?s)Features .* are constant|The least populated class")
        parts = list(folds.split(x, y))
        candidates = methods(task, k, x.shape, seed)
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
                        scores.append(_score(fitted, prepare, x, y, train, test))
                        if math.isfinite(scores[-1]) and hasattr(fitted["select"], "get_support"):
                            choices.append(fitted["select"].get_support())
                    if stopped:
                        return
                    done += cost[name]
            each = np.array(scores).reshape(-1, len(parts))
            chosen = tuple(np.mean(choices, axis=0).tolist()) if choices else ()
            yield name, Score(float(each.mean()), float(each.std()), tuple(each.mean(0).tolist()), chosen)


def _score(
    pipe: Pipeline, prepare: Any, x: np.ndarray, y: np.ndarray | None, train: np.ndarray, test: np.ndarray
) -> float:
    known, new, y_known = x[train], x[test], None if y is None else y[train]
    try:
        if prepare is not None:
            prepare = clone(prepare)
            known, new = prepared(prepare, known, y_known), prepare.transform(new)
        if y is not None:
            return float(pipe.fit(known, y_known).score(new, y[test]))
    except ValueError:  # such as a constant column in this part, or one class
        return float("nan")
    scaler = StandardScaler().fit(known)
    wanted = scaler.transform(new)
    error = pipe.fit(known, scaler.transform(known)).predict(new) - wanted
    return float(1 - (error**2).sum() / (wanted**2).sum())  # of all columns together: some are constant in a part


def to_json(selection: Selection, report: Path | None) -> str:
    """Return what `--json` prints; a score that is not finite becomes null, because JSON has no NaN."""
    scores = {name: {"mean": score.mean, "std": score.std} for name, score in selection.scores.items()}
    record = {
        "selected": [feature._asdict() for feature in selection.chosen],
        "scores": {name: {key: v if math.isfinite(v) else None for key, v in s.items()} for name, s in scores.items()},
        "task": selection.task,
        "k": selection.k,
        "seed": selection.seed,
        "report": None if report is None else str(report),
        "complete": selection.is_complete,
        "candidates": selection.candidates,
        "curve": selection.curve,
        "discoveries": None if selection.discoveries is None else selection.discoveries.names(selection.names),
        "notes": selection.table.notes,
        "warnings": selection.warnings,
    }
    return json.dumps(record, indent=1, allow_nan=False)


def to_csv(selection: Selection) -> str:
    """Return all features as CSV, the best first."""
    rows = [(*f[1::-1], f.inclusion_probability, int(f.rank <= selection.k), *f[3:5]) for f in selection.features]
    columns = ["rank", "name", "inclusion_probability", "selected", "stability", "subsamples"]
    frame = pl.DataFrame(rows, columns, orient="row")
    return str(frame.write_csv(float_precision=6))
