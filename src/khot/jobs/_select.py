"""`khot select`: choose features, compare the choice with others, and write down what came out."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from ..sklearn import KHotSelector, find_task
from ._compare import AFFORDABLE, Score, compare
from ._readers import TableError
from ._table import Table


class Feature(NamedTuple):
    """One that was chosen, or not."""

    name: str
    rank: int
    """1 is the best."""
    inclusion_probability: float


@dataclass
class Selection:
    """What came out, so far."""

    table: Table
    task: str
    k: int
    seed: int
    model: str
    features: list[Feature] = field(default_factory=list)
    """All of them, the best first; k are chosen."""
    history: list[dict[str, float]] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    is_whole: bool = False
    """Nothing was cut short."""

    @property
    def chosen(self) -> list[Feature]:
        """The k best."""
        return self.features[: self.k]


Report = Callable[[str, int, int], bool | None]
"""What is being done, how much of it is done, and of how much; True ends it."""


def task_of(table: Table, asked: str) -> str:
    """The task, found from the target if "auto" is asked for; `TableError` if there is none for it."""
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
            few = str(classes[counts.argmin()])
            raise TableError(f"each class of {table.target!r} must have 2 rows or more; got 1 of {few!r}")
    return task


def select(table: Table, task: str, k: int, seed: int, model: str, on_progress: Report) -> Iterator[Selection]:
    """Choose, then compare: yields the selection as it grows, the last one whole unless `on_progress` returned True.

    One thread: matrices are small, and threads would wait for one another.
    """
    if table.x.size > AFFORDABLE and task != "reconstruction":
        table.notes.append("RFE was left out of the comparison: the table is too large for it.")
    result = Selection(table, task, k, seed, model)
    y = None if task == "reconstruction" else table.y
    if task == "classification" and y is not None:
        y = np.unique(y.astype(str), return_inverse=True)[1]
    stopped = False

    def watch(entry: dict[str, float]) -> bool:
        nonlocal stopped
        loss, gap = entry["validation_loss"], entry["budget"] - k
        label = f"choosing   loss {loss:.4f}, {gap:.0f} features too many" if gap else f"choosing   loss {loss:.4f}"
        stopped = bool(on_progress(label, int(entry["step"]), selector.max_steps))
        return stopped

    def fold(name: str, done: int, total: int) -> bool:
        nonlocal stopped
        stopped = bool(on_progress(f"comparing  {name}", done, total))
        return stopped

    with _one_thread():
        selector = KHotSelector(k, task=task, random_state=seed, callback=watch)
        selector.fit(table.x, y)
        order = np.argsort(-selector.scores_, kind="stable")
        probabilities = selector.inclusion_probabilities_
        result.features = [Feature(table.names[i], r + 1, float(probabilities[i])) for r, i in enumerate(order)]
        result.history = selector.history_
        yield result
        if not stopped:
            for name, score in compare(table.x, y, task, k, seed, model, fold):
                result.scores[name] = score
                yield result
    result.is_whole = not stopped
    yield result


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def record(selection: Selection, report: Path | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "selected": [feature._asdict() for feature in selection.chosen],
        "scores": {
            name: {"mean": _finite(score.mean), "std": _finite(score.std)} for name, score in selection.scores.items()
        },
        "task": selection.task,
        "k": selection.k,
        "seed": selection.seed,
        "report": None if report is None else str(report),
        "complete": selection.is_whole,
        "notes": selection.table.notes,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def to_json(selection: Selection, report: Path | None) -> str:
    """The record as text."""
    return json.dumps(record(selection, report), indent=1, allow_nan=False)


def files(selection: Selection, report: Path) -> dict[str, str]:
    """What `--out` writes beside the report: the record, and all features."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "name", "inclusion_probability", "selected"])
    writer.writerows(
        [f.rank, f.name, f"{f.inclusion_probability:.6f}", int(f.rank <= selection.k)] for f in selection.features
    )
    return {
        "selection.json": to_json(selection, report) + "\n",
        "features.csv": text.getvalue(),
    }
