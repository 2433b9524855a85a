"""Tables from files: numbers in columns with names, and what had to be done to get them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ._readers import READERS, Columns, TableError

MOST_LEVELS = 20
"""Different strings that a column may hold and still be encoded."""
LEAST_ROWS = 10
LISTED = 5
"""Names in a message, at most."""


class Table(NamedTuple):
    """Features and, if there is one, the target."""

    source: str
    names: list[str]
    x: np.ndarray
    """(rows, n) float64, all finite"""
    y: np.ndarray | None
    """(rows), numbers or strings"""
    target: str | None
    notes: list[str]
    """What was done to the file, in sentences."""
    image: tuple[int, int] | None
    """Height and width, if the features are pixels."""


def digits() -> Table:
    """The digits of scikit-learn: 1797 images of 8 × 8 pixels, ten classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return Table("scikit-learn's digits", list(found.feature_names), found.data, found.target, "digit", [], (8, 8))


def read(path: Path, target: str | None, drop: Sequence[str] = ()) -> Table:
    """A CSV, Parquet or npz file as a table; `TableError` says in a line what is wrong with it."""
    if not path.is_file():
        raise TableError(f"{path} is {'not a file' if path.exists() else 'missing'}")
    kind = path.suffix.lower()
    if kind not in READERS:
        raise TableError(f"{path} must end in {', '.join(READERS)}; got {path.suffix or 'no ending'}")
    try:
        columns, image = READERS[kind](path)
    except (TableError, ModuleNotFoundError):
        raise
    except Exception as problem:  # whatever a parser says of a broken file
        said = " ".join(str(problem).split()) or type(problem).__name__
        raise TableError(f"{path} cannot be read as {kind}: {said}") from problem
    if target is None and kind == ".npz" and "y" in columns:
        target = "y"
    for name in (*drop, *([target] if target is not None else [])):
        _known(name, columns)
    columns = {name: column for name, column in columns.items() if name not in drop}
    return _table(path.name, columns, target, image)


def _table(source: str, columns: Columns, target: str | None, image: tuple[int, int] | None) -> Table:
    notes: list[str] = []
    y = columns.pop(target) if target is not None else None
    if y is not None:
        known = _is_known(y)
        if not known.any():
            raise TableError(f"the target {target!r} has no values")
        if not known.all():
            notes.append(f"{(~known).sum()} rows without a target were left out.")
            y, columns = y[known], {name: column[known] for name, column in columns.items()}
    if not columns:
        raise TableError(f"{source} has no columns" + (f" beside the target {target!r}" if target else ""))
    rows = len(next(iter(columns.values())))
    if rows < LEAST_ROWS:
        raise TableError(f"{source} must have at least {LEAST_ROWS} rows; got {rows}")
    if y is not None and y.dtype != object and np.isinf(y).any():
        raise TableError(f"the target {target!r} has infinite values")
    names, x = _features(columns, notes)
    return Table(source, names, x, y, target, notes, image if len(names) == _size(image) else None)


def _features(columns: Columns, notes: list[str]) -> tuple[list[str], np.ndarray]:
    """Numbers with the median for what is missing; a column of 0 and 1 for each string of the others."""
    empty = [name for name, column in columns.items() if not _is_known(column).any()]
    if empty:
        raise TableError(f"{_names(empty)} no values; leave out with --drop")
    infinite = [name for name, column in columns.items() if column.dtype != object and np.isinf(column).any()]
    if infinite:
        raise TableError(f"{_names(infinite)} infinite values; leave out with --drop, or replace them")
    wide = {name: len(set(column)) for name, column in columns.items() if column.dtype == object}
    wide = {name: levels for name, levels in wide.items() if levels > MOST_LEVELS}
    if wide:
        name, levels = next(iter(wide.items()))
        raise TableError(
            f"{_names(list(wide))} too many different strings ({name!r}: {levels}; {MOST_LEVELS} can be encoded); "
            "leave out with --drop, or turn into numbers"
        )
    result: dict[str, np.ndarray] = {}
    filled, encoded = [], []
    for name, column in columns.items():
        if column.dtype == object:
            encoded.append(name)
            for level in sorted({str(value) for value in column if value is not None}):
                result[f"{name}={level}"] = np.array([value == level for value in column], dtype=np.float64)
            continue
        missing = np.isnan(column)
        if missing.any():
            filled.append(name)
            column = np.where(missing, np.median(column[~missing]), column)
        result[name] = column
    if filled:
        notes.append(f"{_names(filled)} missing values, replaced by the median.")
    if encoded:
        notes.append(f"{_names(encoded)} strings: each value became a feature of its own, 0 or 1.")
    return list(result), np.stack(list(result.values()), 1)


def _known(name: str, columns: Columns) -> None:
    if name not in columns:
        near = get_close_matches(name, columns, n=3) or get_close_matches(name.lower(), columns, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}" if near else f"there are {_some(list(columns))}"
        raise TableError(f"no such column: {name!r}; {hint}")


def _is_known(column: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.array([v is not None for v in column]) if column.dtype == object else ~np.isnan(column)
    return result


def _names(names: Sequence[str]) -> str:
    """A subject with its verb: "column 'a' has", "columns 'a', 'b' have"."""
    return f"column {names[0]!r} has" if len(names) == 1 else f"columns {_some(names)} have"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(repr, names[:LISTED])) + more


def _size(image: tuple[int, int] | None) -> int:
    return image[0] * image[1] if image else -1
