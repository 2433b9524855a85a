"""Tables from CSV, Parquet and npz files: named columns of numbers, and what had to be done to get them."""

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
ROW_NUMBERS = "row numbers"  # the name given to a first column without one, as pandas writes its index
MOST_LEVELS = 20  # largest number of different strings that a column may hold and still be encoded
LEAST_ROWS = 10
HUGE = 1e100  # squares of smaller numbers can still be summed
LISTED = 5  # largest number of names in a message

Columns = dict[str, np.ndarray]  # floats with NaN for what is missing, or strings (object) with None
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
    from sklearn.datasets import load_digits

    found = load_digits()
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
    except (TableError, ModuleNotFoundError):
        raise
    except Exception as problem:  # whatever a parser says of a broken file
        said = " ".join(str(problem).split()) or type(problem).__name__
        raise TableError(f"{path} cannot be read as {kind}: {said}") from problem
    if target is None and kind == ".npz" and "y" in columns:
        target = "y"
    for name in (*drop, *([target] if target is not None else [])):
        if name not in columns:
            near = get_close_matches(name, columns, n=3) or get_close_matches(name.lower(), columns, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}" if near else f"there are {_some(list(columns))}"
            raise TableError(f"no such column: {name!r}; {hint}")
    columns = {name: column for name, column in columns.items() if name not in drop}
    return _table(path.name.encode(errors="surrogateescape").decode(errors="replace"), columns, target, image)


def _csv(path: Path) -> tuple[Columns, Image]:
    """Read names from the first line; the separator is the most frequent of , ; tab | there."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        separator = max(",;\t|", key=file.readline().count)
        file.seek(0)
        lines = [line for line in csv.reader(file, delimiter=separator) if line]
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
    names[0] = names[0] or ROW_NUMBERS
    return _columns(path, names, list(zip(*rows, strict=True))), None


def _parquet(path: Path) -> tuple[Columns, Image]:
    """Read with polars or pandas, whichever is installed."""
    with suppress(ModuleNotFoundError):
        import polars

        frame = polars.read_parquet(path)
        return _columns(path, frame.columns, [frame[name].to_list() for name in frame.columns]), None
    try:
        import pandas

        table = pandas.read_parquet(path)
    except ImportError as missing:
        raise ModuleNotFoundError("Parquet files need polars: pip install 'khot[parquet]'", name="polars") from missing
    table = table.astype(object).where(table.notna(), None)
    return _columns(path, [str(name) for name in table.columns], [table[name].tolist() for name in table.columns]), None


def _npz(path: Path) -> tuple[Columns, Image]:
    """Read `X` (rows, n) or images (rows, height, width), or the only such array; vectors beside it are columns."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
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
    columns = _columns(path, names, list(x.T))
    return columns | {name: _column(a.tolist()) for name, a in arrays.items() if a.shape == (len(x),)}, image


def _columns(path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> Columns:
    for i, name in enumerate(names):
        if not name:
            raise TableError(f"{path}: column {i + 1} must have a name; got an empty one")
        if name in names[:i]:
            raise TableError(f"{path} must have different names of columns; got {name!r} twice")
    return {name: _column(values) for name, values in zip(names, columns, strict=True)}


def _column(values: Sequence[Any]) -> np.ndarray:
    """Return floats if all values are numbers or missing; otherwise strings."""
    with suppress(ValueError, TypeError):
        return np.array(values, dtype=np.float64)
    stripped = ["" if value is None else str(value).strip() for value in values]
    texts = [None if text.lower() in MISSING else text for text in stripped]
    if {text.lower() for text in texts if text is not None} <= {"true", "false"}:
        return np.array([np.nan if text is None else float(text.lower() == "true") for text in texts])
    try:
        return np.array([np.nan if text is None else float(text) for text in texts])
    except ValueError:
        return np.array(texts, dtype=object)


def _table(source: str, columns: Columns, target: str | None, image: Image) -> Table:
    notes: list[str] = []
    if columns.pop(ROW_NUMBERS, None) is not None:
        notes.append("The first column has no name: it was taken for row numbers and left out.")
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
    if y is not None and y.dtype != object and not (np.abs(y) < HUGE).all():
        raise TableError(f"the target {target!r} must be less than {HUGE:g}; got {np.abs(y).max():g}")
    _check_columns(columns)
    names, x = _features(columns, notes)
    return Table(source, names, x, y, target, notes, image if image and len(names) == image[0] * image[1] else None)


def _check_columns(columns: Columns) -> None:
    """Raise `TableError` for columns that cannot become features."""
    strings = {name: column for name, column in columns.items() if column.dtype == object}
    if empty := [name for name, column in columns.items() if not _is_known(column).any()]:
        raise TableError(f"{_names(empty)} no values; leave out with --drop")
    if huge := [n for n, column in columns.items() if n not in strings and (np.abs(column) >= HUGE).any()]:
        raise TableError(f"{_names(huge)} values of {HUGE:g} or more; leave out with --drop, or rescale")
    decimal = re.compile(r"[+-]?\d+,\d+")
    if commas := [name for name, column in strings.items() if all(decimal.fullmatch(v) for v in column if v)]:
        raise TableError(f"{_names(commas)} numbers with decimal commas; write them with points")
    levels = {name: len(set(column) - {None}) for name, column in strings.items()}
    if wide := [name for name, count in levels.items() if count > MOST_LEVELS]:
        got = f"too many different strings ({wide[0]!r}: {levels[wide[0]]}; {MOST_LEVELS} can be encoded)"
        raise TableError(f"{_names(wide)} {got}; leave out with --drop, or turn into numbers")


def _features(columns: Columns, notes: list[str]) -> tuple[list[str], np.ndarray]:
    """Replace missing numbers by the median, and columns of strings by a column of 0 and 1 for each string."""
    result: dict[str, np.ndarray] = {}
    filled, encoded = [], []
    for name, column in columns.items():
        if column.dtype == object:
            encoded.append(name)
            for level in sorted({str(value) for value in column if value is not None}):
                if f"{name}={level}" in columns:
                    raise TableError(f"{level!r} in column {name!r} would be a feature {name}={level}, which is there")
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


def _is_known(column: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.array([v is not None for v in column]) if column.dtype == object else ~np.isnan(column)
    return result


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names(names: Sequence[str]) -> str:
    """Return a subject with its verb: "column 'a' has", "columns 'a', 'b' have"."""
    return f"column {names[0]!r} has" if len(names) == 1 else f"columns {_some(names)} have"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(repr, names[:LISTED])) + more
