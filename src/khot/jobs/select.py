"""The job of `khot select`: choose features, compare the choice with others, and record the result.

Choices are compared by cross-validated scores of one plain model on what each chooses.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from sklearn.base import clone
from threadpoolctl import threadpool_limits

from .._process import interruptible, threads_for
from ..sklearn import Discoveries, find_task, knockoffs
from ._compare import AFFORDABLE, preparation, prepared
from ._compare import Score as Score
from ._compare import compare as compare
from ._compare import methods as methods
from ._compare import plain_model as plain_model
from ._table import Table as Table
from ._table import digits as digits
from ._table import read_table as read_table
from ._text import Reading as Reading
from ._text import TableError as TableError
from ._text import some
from ._trust import PAIRS as PAIRS
from ._trust import in_halves, stand_ins, warn_of, winner
from ._wish import Wish as Wish
from ._wish import read_costs as read_costs
from ._wish import read_groups as read_groups

XOR = 1000, 20, (3, 7)  # rows, columns, and the two whose product decides the label
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
    loss: float | None = None  # what the held-out loss rises by without it; without any feature, the loss is 1
    error: float | None = None  # standard error of that


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
    cost: tuple[float, float] | None = None  # of the choice, and the budget, if there is one
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
    if task == "regression" and (np.ptp(table.y, axis=0) == 0).any():
        raise TableError(f"the target {table.target!r} must vary; got {table.y.flat[0]:g} in all rows")
    if task == "classification" and table.y.ndim == 2:
        raise TableError("--task classification needs one --target; got several")
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
    wish = wish.with_priced_columns(names)
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
        by_row: dict[str, Any] = {"sample_weight": table.weight, "groups": table.groups}
        selector.set_params(callback=watch).fit(x, y, **by_row)
        first = np.array([places[0] for _, places in units])
        is_chosen, scores = selector.get_support()[first], selector.scores_[first]
        order = np.lexsort((-scores, ~is_chosen))
        result.k, result.candidates, result.curve = int(is_chosen.sum()), selector.history_, selector.curve_
        shares = selector.inclusion_probabilities_[first]
        errors = selector.errors_[first]
        result.features = [Feature(units[i][0], r + 1, float(shares[i])) for r, i in enumerate(order)]
        for r, i in enumerate(order[: result.k]):
            if math.isfinite(errors[i]):
                result.features[r] = result.features[r]._replace(loss=float(scores[i]), error=float(errors[i]))
        singles = [(r, units[i][1][0]) for r, i in enumerate(order[: result.k]) if len(units[i][1]) == 1]
        for (r, _), found in zip(singles, stand_ins(x, np.array([i for _, i in singles], dtype=int)), strict=True):
            similar = tuple((names[j], round(value, 3)) for j, value in found)
            result.features[r] = result.features[r]._replace(stand_ins=similar)
        if wish.budget is not None:
            result.cost = float(np.asarray(selector.costs)[selector.get_support()].sum()), wish.budget
            if dear := wish.too_dear(names):
                told = f"Left out, since they cost more than the budget of {wish.budget:g} alone"
                table.notes.append(f"{told}: {some(dear)}.")
        if table.weight is not None:
            table.notes.append("SelectKBest, L1 and RFE choose without weights; the models that score use them.")
        if wish.groups or wish.costs:
            table.notes.append("The other methods know no groups and no costs: they chose as many columns as khot.")
        if wish.false_discoveries is not None and y is not None and not is_interrupted():
            on_progress("knockoffs", 0, 1)
            result.discoveries = knockoffs(x, y, wish.false_discoveries, task=task, seed=seed)
        if not is_interrupted():
            fixed = result.k if k == "auto" else k
            khot = wish._replace(max_k=None).selector(fixed, names, task, seed).set_params(callback=watch)
            how: dict[str, Any] = {"seed": seed, "model": model, "on_fold": fold, "khot": khot}
            how |= {"weight": table.weight, "groups": table.groups}
            result.scores.update(compare(table.x, y, task, int(selector.get_support().sum()), prepare=prepare, **how))
        if "khot" in result.scores and (share := result.scores["khot"].chosen):
            pairs = zip(result.features, order, strict=True)
            result.features = [feature._replace(stability=share[first[i]]) for feature, i in pairs]
            ready = None if prepare is None else partial(prepared, clone(prepare))
            again = clone(khot).set_params(strategy=winner(selector), callback=watch)
            halves = in_halves(table.x, y, task, again, ready, fold, table.weight, table.groups)
            if halves is not None and not is_interrupted():
                pairs = zip(result.features, order, strict=True)
                result.features = [feature._replace(subsamples=float(halves[first[i]])) for feature, i in pairs]
        result.is_complete = not is_interrupted()
    result.seconds = monotonic() - began
    return result


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
        "cost": None if selection.cost is None else selection.cost[0],
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
