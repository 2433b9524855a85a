"""Files to named columns: CSV, Parquet and npz."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}

Columns = dict[str, np.ndarray]
"""Floats with NaN for what is missing, or strings (object) with None."""
Image = tuple[int, int] | None
"""Height and width, if the columns are pixels."""


class TableError(ValueError):
    """A table that cannot be used, in one line."""


def _csv(path: Path) -> tuple[Columns, Image]:
    """The first line has the names; the separator is the commonest of , ; tab | there."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        separator = max(",;\t|", key=first.count)
        file.seek(0)
        lines = list(csv.reader(file, delimiter=separator))
    lines = [line for line in lines if line]
    if not lines:
        raise TableError(f"{path} is empty")
    names, rows = [name.strip() for name in lines[0]], lines[1:]
    if all(_is_number(name) for name in names):
        raise TableError(f"{path} must have the names of the columns in its first line; got numbers")
    for i, row in enumerate(rows):
        if len(row) != len(names):
            raise TableError(f"{path}: row {i + 1} must have {len(names)} values, like the first line; got {len(row)}")
    if not rows:
        raise TableError(f"{path} has names of columns but no rows")
    return _columns(path, names, list(zip(*rows, strict=True))), None


def _columns(path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> Columns:
    for i, name in enumerate(names):
        if not name:
            raise TableError(f"{path}: column {i + 1} must have a name; got an empty one")
        if name in names[:i]:
            raise TableError(f"{path} must have different names of columns; got {name!r} twice")
    return {name: _column(values) for name, values in zip(names, columns, strict=True)}


def _column(values: Sequence[Any]) -> np.ndarray:
    """Floats if all are numbers or missing; otherwise strings."""
    try:
        return np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        pass
    texts = [None if value is None else str(value).strip() for value in values]
    texts = [None if text is None or text.lower() in MISSING else text for text in texts]
    try:
        return np.array([np.nan if text is None else float(text) for text in texts])
    except ValueError:
        return np.array(texts, dtype=object)


def _parquet(path: Path) -> tuple[Columns, Image]:
    """With polars or pandas, whichever there is."""
    try:
        import polars

        frame = polars.read_parquet(path)
        return _columns(path, frame.columns, [frame[name].to_list() for name in frame.columns]), None
    except ModuleNotFoundError:
        pass
    try:
        import pandas

        table = pandas.read_parquet(path)
    except ImportError as missing:
        raise ModuleNotFoundError("Parquet files need polars: pip install 'khot[parquet]'", name="polars") from missing
    table = table.astype(object).where(table.notna(), None)
    return _columns(path, [str(name) for name in table.columns], [table[name].tolist() for name in table.columns]), None


def _npz(path: Path) -> tuple[Columns, Image]:
    """`X` (rows, n) or images (rows, height, width), or the only such array; every vector beside it is a column."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    named = [name for name in ("X", "x") if name in arrays]
    many = named or [name for name, array in arrays.items() if array.ndim in (2, 3)]
    if len(many) != 1 or arrays[many[0]].ndim not in (2, 3):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise TableError(f"{path} must hold features X, (rows, n) or (rows, height, width); got {shapes}")
    x = arrays.pop(many[0])
    image = x.shape[1:] if x.ndim == 3 else None
    if x.dtype.kind not in "fiub":
        raise TableError(f"{path}: {many[0]} must hold numbers; got {x.dtype}")
    given = [str(name) for key in ("names", "feature_names") if key in arrays for name in arrays.pop(key)]
    names = given or (
        [f"pixel_{i}_{j}" for i in range(image[0]) for j in range(image[1])]
        if image
        else [f"x{i}" for i in range(x.shape[1])]
    )
    x = x.reshape(len(x), -1).astype(np.float64)
    if len(names) != x.shape[1]:
        raise TableError(f"{path} must hold {x.shape[1]} names; got {len(names)}")
    columns = _columns(path, names, list(x.T))
    for name, array in arrays.items():
        if array.shape == (len(x),):
            columns[name] = _column(array.tolist())
    return columns, (int(image[0]), int(image[1])) if image else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


READERS: dict[str, Callable[[Path], tuple[Columns, Image]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".pq": _parquet,
    ".npz": _npz,
}
