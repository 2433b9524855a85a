"""Tables from CSV, Parquet and npz files: named columns of numbers, and what had to be done to get them."""

import csv
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._extras import require

pl = require("polars", extra="select")

MISSING = ["", "na", "n/a", "nan", "null", "none", "?"]
ROW_NUMBERS = "row numbers"  # the name given to a first column without one, as pandas writes its index
NUMBERED = re.compile(r"(id|index|key|number|nr)$", re.IGNORECASE)  # names of columns that number the rows
MOST_LEVELS = 20  # largest number of different strings that a column may hold and still be encoded
LEAST_ROWS = 10
HUGE = 1e100  # squares of smaller numbers can still be summed
LISTED = 5  # largest number of names in a message

Image = tuple[int, int] | None  # height and width, if the columns are pixels


class TableError(ValueError):
    """A table cannot be used; the message is one line."""


class Table(NamedTuple):
    """Features and, if there is one, the target."""

    source: str
    names: list[str]
    x: np.ndarray  # (rows, n) float64, all finite
    y: np.ndarray | None  # (rows), numbers or strings
    target: str | None
    notes: list[str]  # what was done to the file, in sentences
    image: Image


def digits() -> Table:
    """Load scikit-learn's digits: 1797 images of 8 × 8 pixels, ten classes."""
    found = require("sklearn.datasets", extra="select").load_digits()
    return Table("scikit-learn's digits", list(found.feature_names), found.data, found.target, "digit", [], (8, 8))


def read_table(path: Path, target: str | None, drop: Sequence[str] = ()) -> Table:
    """Read a CSV, Parquet or npz file; `TableError` says in one line what is wrong with it."""
    if not path.is_file():
        raise TableError(f"{path} is {'not a file' if path.exists() else 'missing'}")
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".pq": _parquet, ".npz": _npz}
    kind = path.suffix.lower()
    if kind not in readers:
        raise TableError(f"{path} must end in {', '.join(readers)}; got {path.suffix or 'no ending'}")
    try:
        columns, image = readers[kind](path)
        frame = pl.DataFrame([_column(name, values) for name, values in columns])
    except TableError:
        raise
    except Exception as problem:  # whatever a parser says of a broken file
        said = " ".join(str(problem).split()) or type(problem).__name__
        raise TableError(f"{path} cannot be read as {kind}: {said}") from problem
    if target is None and kind == ".npz" and "y" in frame.columns:
        target = "y"
    for name in (*drop, *([target] if target is not None else [])):
        if name not in frame.columns:
            near = get_close_matches(name, frame.columns, n=3) or get_close_matches(name.lower(), frame.columns, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}" if near else f"there are {_some(frame.columns)}"
            raise TableError(f"no such column: {name!r}; {hint}")
    return _table(path.name.encode(errors="surrogateescape").decode(errors="replace"), frame.drop(drop), target, image)


Columns = list[tuple[str, Any]]


def _csv(path: Path) -> tuple[Columns, Image]:
    """Read names from the first line; the separator is the most frequent of , ; tab | there."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        separator = max(",;\t|", key=file.readline().count)
        file.seek(0)
        lines = [line for line in csv.reader(file, delimiter=separator) if line]
    if not lines:
        raise TableError(f"{path} is empty")
    names, rows = [name.strip() for name in lines[0]], lines[1:]
    if pl.Series(names).cast(pl.Float64, strict=False).null_count() == 0:
        raise TableError(f"{path} must have the names of the columns in its first line; got numbers")
    for i, row in enumerate(rows):
        if len(row) != len(names):
            raise TableError(f"{path}: row {i + 1} must have {len(names)} values, like the first line; got {len(row)}")
    if not rows:
        raise TableError(f"{path} has names of columns but no rows")
    names[0] = names[0] or ROW_NUMBERS
    return _named(path, names, list(zip(*rows, strict=True))), None


def _parquet(path: Path) -> tuple[Columns, Image]:
    frame = pl.read_parquet(path)
    return _named(path, frame.columns, frame.get_columns()), None


def _npz(path: Path) -> tuple[Columns, Image]:
    """Read `X` (rows, n) or images (rows, height, width), or the only such array; vectors beside it are columns."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    named = [name for name in ("X", "x") if name in arrays]
    many = named or [name for name, array in arrays.items() if array.ndim in (2, 3)]
    if len(many) != 1 or arrays[many[0]].ndim not in (2, 3):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise TableError(f"{path} must hold features X, (rows, n) or (rows, height, width); got {shapes}")
    x = arrays.pop(many[0])
    if x.dtype.kind not in "fiub":
        raise TableError(f"{path}: {many[0]} must hold numbers; got {x.dtype}")
    image = (int(x.shape[1]), int(x.shape[2])) if x.ndim == 3 else None
    names = [str(name) for key in ("names", "feature_names") if key in arrays for name in arrays.pop(key)]
    if not names and image:
        names = [f"pixel_{i}_{j}" for i in range(image[0]) for j in range(image[1])]
    x = x.reshape(len(x), -1).astype(np.float64)
    names = names or [f"x{i}" for i in range(x.shape[1])]
    if len(names) != x.shape[1]:
        raise TableError(f"{path} must hold {x.shape[1]} names; got {len(names)}")
    others = [(name, array) for name, array in arrays.items() if array.shape == (len(x),)]
    return _named(path, names, list(x.T)) + others, image


def _named(path: Path, names: Sequence[str], columns: Sequence[Any]) -> Columns:
    for i, name in enumerate(names):
        if not name:
            raise TableError(f"{path}: column {i + 1} must have a name; got an empty one")
        if name in names[:i]:
            raise TableError(f"{path} must have different names of columns; got {name!r} twice")
    return list(zip(names, columns, strict=True))


def _column(name: str, values: Any) -> Any:
    """Return a series of floats if all values are numbers, true or false, or missing; otherwise of strings."""
    column = pl.Series(name, values)
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return column.cast(pl.Float64).fill_nan(None)
    text = column.cast(pl.String).str.strip_chars()
    text = text.set(text.str.to_lowercase().is_in(MISSING), None)
    truth = text.str.to_lowercase().replace_strict({"true": 1.0, "false": 0.0}, default=None, return_dtype=pl.Float64)
    made = (truth, text.cast(pl.Float64, strict=False))
    return next((numbers for numbers in made if numbers.null_count() == text.null_count()), text)


def _table(source: str, frame: Any, target: str | None, image: Image) -> Table:
    notes: list[str] = []
    if ROW_NUMBERS in frame.columns:
        frame = frame.drop(ROW_NUMBERS)
        notes.append("The first column has no name: it was taken for row numbers and left out.")
    y = None
    if target is not None:
        unknown = frame[target].null_count()
        if unknown == len(frame):
            raise TableError(f"the target {target!r} has no values")
        if unknown:
            notes.append(f"{unknown} rows without a target were left out.")
            frame = frame.drop_nulls(target)
        y = frame[target].to_numpy()
        frame = frame.drop(target)
    if not frame.width:
        raise TableError(f"{source} has no columns" + (f" beside the target {target!r}" if target else ""))
    if len(frame) < LEAST_ROWS:
        raise TableError(f"{source} must have at least {LEAST_ROWS} rows; got {len(frame)}")
    if y is not None and y.dtype != object and not (np.abs(y) < HUGE).all():
        raise TableError(f"the target {target!r} must be less than {HUGE:g}; got {np.abs(y).max():g}")
    features = _features(frame, notes)
    image = image if image and features.width == image[0] * image[1] else None
    return Table(source, features.columns, features.to_numpy(), y, target, notes, image)


def _features(frame: Any, notes: list[str]) -> Any:
    """Replace missing numbers by the median, and columns of strings by a column of 0 and 1 for each string."""
    numbers = [column for column in frame if column.dtype == pl.Float64]
    strings = {column.name: column.drop_nulls() for column in frame if column.dtype == pl.String}
    levels = {name: sorted(column.unique()) for name, column in strings.items()}
    if empty := [column.name for column in frame if column.null_count() == len(column)]:
        raise TableError(f"{_have(empty)} no values; leave out with --drop")
    if huge := [column.name for column in numbers if (column.abs() >= HUGE).any()]:
        raise TableError(f"{_have(huge)} values of {HUGE:g} or more; leave out with --drop, or rescale")
    if commas := [name for name, column in strings.items() if column.str.contains(r"^[+-]?\d+,\d+$").all()]:
        raise TableError(f"{_have(commas)} numbers with decimal commas; write them with points")
    if wide := [name for name in strings if len(levels[name]) > MOST_LEVELS]:
        got = f"too many different strings ({wide[0]!r}: {len(levels[wide[0]])}; {MOST_LEVELS} can be encoded)"
        raise TableError(f"{_have(wide)} {got}; leave out with --drop, or turn into numbers")
    if filled := [column.name for column in numbers if column.null_count()]:
        notes.append(f"{_have(filled)} missing values, replaced by the median.")
    if strings:
        notes.append(f"{_have(list(strings))} strings: each value became a feature of its own, 0 or 1.")
    if identifiers := [column.name for column in numbers if _numbers_rows(column)]:
        fix = " ".join(f"--drop {name}" for name in identifiers[:LISTED])
        notes.append(f"{_have(identifiers)} a different whole number in each row: if they number the rows, add {fix}.")
    columns = []
    for name in frame.columns:
        if name not in levels:
            columns.append(pl.col(name).fill_null(pl.col(name).median()))
        for level in levels.get(name, ()):
            if f"{name}={level}" in frame.columns:
                raise TableError(f"{level!r} in column {name!r} would be a feature {name}={level}, which is there")
            columns.append((pl.col(name) == level).fill_null(False).cast(pl.Float64).alias(f"{name}={level}"))
    return frame.select(columns)


def _numbers_rows(column: Any) -> bool:
    """Return whether a column holds each row's number: different integers without gaps, or named like an identifier."""
    if column.null_count() or column.n_unique() < len(column) or (column != column.round()).any():
        return False
    return bool(column.max() - column.min() == len(column) - 1 or NUMBERED.search(column.name))


def _have(names: Sequence[str]) -> str:
    """Return a subject with its verb: "column 'a' has", "columns 'a', 'b' have"."""
    return f"column {names[0]!r} has" if len(names) == 1 else f"columns {_some(names)} have"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(repr, names[:LISTED])) + more
