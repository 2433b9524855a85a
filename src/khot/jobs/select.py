"""The job of `khot select`: choose features, compare the choice with others, and record the result."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from .._interrupts import interruptible
from ..sklearn import KHotSelector, find_task
from ._compare import AFFORDABLE, compare
from ._compare import Score as Score
from ._compare import methods as methods
from ._compare import plain_model as plain_model
from ._table import Table as Table
from ._table import TableError as TableError
from ._table import digits as digits
from ._table import read_table as read_table

Progress = Callable[[str, int, int], None]
"""Called with a label, the work done so far, and all of it."""


class Feature(NamedTuple):
    """A feature with its rank, of which 1 is the best."""

    name: str
    rank: int
    inclusion_probability: float


@dataclass
class Selection:
    """The result, or as much of it as there is after an interruption."""

    table: Table
    task: str
    k: int
    seed: int
    model: str
    features: list[Feature] = field(default_factory=list)
    """All of them, the best first; the first k are chosen."""
    history: list[dict[str, float]] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def chosen(self) -> list[Feature]:
        """The k best."""
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
    if task == "classification":
        classes, counts = np.unique(table.y.astype(str), return_counts=True)
        if len(classes) < 2:
            raise TableError(f"the target {table.target!r} must have at least 2 classes; got 1, {str(classes[0])!r}")
        if counts.min() < 2:
            rare = str(classes[counts.argmin()])
            raise TableError(f"each class of {table.target!r} must have 2 rows or more; got 1 of {rare!r}")
    return task


def select(
    table: Table,
    task: str,
    k: int,
    *,
    seed: int = 0,
    model: str = "linear",
    steps: int = 1000,
    on_progress: Progress = lambda label, done, total: None,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Selection:
    """Choose k features, then compare the choice with others. Ctrl-C calls `on_interrupt` and keeps the best so far.

    One thread: the matrices are small, and threads would wait for one another.
    """
    if table.x.size > AFFORDABLE and task != "reconstruction":
        table.notes.append("RFE was left out of the comparison: the table is too large for it.")
    result = Selection(table, task, k, seed, model)
    y = None if task == "reconstruction" else table.y
    if task == "classification" and y is not None:
        y = np.unique(y.astype(str), return_inverse=True)[1]
    with interruptible(on_interrupt) as is_interrupted, _one_thread():

        def watch(entry: dict[str, float]) -> bool:
            gap = entry["budget"] - k
            more = f", {gap:.0f} features too many" if gap else ""
            on_progress(f"choosing   loss {entry['validation_loss']:.4f}{more}", int(entry["step"]), steps)
            return is_interrupted()

        def fold(name: str, done: int, total: int) -> bool:
            on_progress(f"comparing  {name}", done, total)
            return is_interrupted()

        selector = KHotSelector(k, task=task, max_steps=steps, random_state=seed, callback=watch).fit(table.x, y)
        probabilities = selector.inclusion_probabilities_
        order = np.argsort(-selector.scores_, kind="stable")
        result.features = [Feature(table.names[i], r + 1, float(probabilities[i])) for r, i in enumerate(order)]
        result.history = selector.history_
        if not is_interrupted():
            result.scores.update(compare(table.x, y, task, k, seed=seed, model=model, steps=steps, on_fold=fold))
        result.is_complete = not is_interrupted()
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def to_json(selection: Selection, report: Path | None) -> str:
    """Return what `--json` prints; a score that is not finite becomes null, because JSON has no NaN."""
    scores = {
        name: {key: value if math.isfinite(value) else None for key, value in (("mean", s.mean), ("std", s.std))}
        for name, s in selection.scores.items()
    }
    record = {
        "selected": [feature._asdict() for feature in selection.chosen],
        "scores": scores,
        "task": selection.task,
        "k": selection.k,
        "seed": selection.seed,
        "report": None if report is None else str(report),
        "complete": selection.is_complete,
        "notes": selection.table.notes,
    }
    return json.dumps(record, indent=1, allow_nan=False)


def to_csv(selection: Selection) -> str:
    """Return all features as CSV, the best first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "name", "inclusion_probability", "selected"])
    writer.writerows(
        [f.rank, f.name, f"{f.inclusion_probability:.6f}", int(f.rank <= selection.k)] for f in selection.features
    )
    return text.getvalue()
