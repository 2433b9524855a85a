"""Tables from CSV, Parquet and npz files: named columns of numbers, and what had to be done to get them."""

import gzip
import io
import math
import random
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._extras import require
from ._text import AUTOMATIC, Reading, TableError, leave_out, some, split
from ._values import DAY, parsed

pl = require("polars", extra="select")

STDIN = Path("-")
ROW_NUMBERS = "row numbers"  # the name given to a first column without one, as pandas writes its index
NUMBERED = re.compile(r"(id|index|key|number|nr)$", re.IGNORECASE)  # names of columns that number the rows
LEAST_ROWS = 10
HUGE = 1e100  # squares of smaller numbers can still be summed
MAGIC = {b"PAR1": ".parquet", b"PK\x03\x04": ".npz"}  # how files begin whose name does not say what they are

Image = tuple[int, int] | None  # height and width, if the columns are pixels


class Table(NamedTuple):
    """Hold features and, if there is one, the target."""

    source: str
    names: list[str]
    x: np.ndarray  # (rows, n) float64, finite or NaN for a missing value
    y: np.ndarray | None  # (rows), numbers or strings
    target: str | None
    notes: list[str]  # what was done to the file, in sentences
    image: Image
    warnings: tuple[str, ...] = ()  # what may be wrong with the table, in sentences
    categories: int = 0  # how many of the last columns hold numbers that only name a category
    weight: np.ndarray | None = None  # (rows), > 0
    groups: np.ndarray | None = None  # (rows), of which those with the same number are not separated

    def features(self, task: str) -> list[str]:
        """Return the names of features: for more than two classes, a category has one feature for each class."""
        classes = np.unique(self.y.astype(str)) if task == "classification" and self.y is not None else ()
        if not self.categories or len(classes) <= 2:
            return self.names
        plain = len(self.names) - self.categories
        return self.names[:plain] + [f"{name}→{label}" for name in self.names[plain:] for label in classes]

    def together(self, task: str) -> dict[str, list[str]]:
        """Return the features of each category: one, or one for each class, which count as one."""
        features, plain = self.features(task), len(self.names) - self.categories
        step = (len(features) - plain) // max(self.categories, 1)
        return {name: features[plain + i * step :][:step] for i, name in enumerate(self.names[plain:])}


def digits() -> Table:
    """Load scikit-learn's digits: 1797 images of 8 × 8 pixels, ten classes."""
    found = require("sklearn.datasets", extra="select").load_digits()
    return Table("scikit-learn's digits", list(found.feature_names), found.data, found.target, "digit", [], (8, 8))


def read_table(
    path: Path,
    target: str | Sequence[str] | None,
    drop: Sequence[str] = (),
    how: Reading = AUTOMATIC,
    *,
    weight: str | None = None,
    rows_of: str | None = None,
) -> Table:
    """Read a CSV, Parquet or npz file, or standard input for "-"; `TableError` says in one line what is wrong with it.

    A file may be compressed by gzip. `how` overrides what is found out about a text file. `target` may be several
    columns of numbers; `weight` and `rows_of` name columns with the weight of each row, and the group that it is of.
    """
    if path != STDIN and not path.is_file():
        raise TableError(f"{path} is {'not a file' if path.exists() else 'missing'}")
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".pq": _parquet, ".npz": _npz}
    kind = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    if path != STDIN and kind not in readers:
        raise TableError(
            f"{path} must end in {', '.join(readers)}, or one of these and .gz; got {path.suffix or 'no ending'}"
        )
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes() if not _is_parquet(path) else b""
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        kind = kind or next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), ".csv")
        raw = readers[kind](path, data, how)
        frame = pl.DataFrame([_column(name, values, how) for name, values in raw.columns])
    except TableError:
        raise
    except Exception as problem:  # whatever a parser says of a broken file
        said_so = " ".join(str(problem).split()) or type(problem).__name__
        raise TableError(f"{path} cannot be read as {kind}: {said_so}") from problem
    if not target and kind == ".npz" and "y" in frame.columns:
        target = "y"
    targets = [target] if isinstance(target, str) else list(target or ())
    special = [name for name in (weight, rows_of) if name is not None]
    for name in (*drop, *targets, *special):
        if name not in frame.columns:
            near = get_close_matches(name, frame.columns, n=3) or get_close_matches(name.lower(), frame.columns, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}" if near else f"there are {some(frame.columns)}"
            raise TableError(f"no such column: {name!r}; {hint}")
    if len({*targets, *special, *drop}) < len(targets) + len(special) + len({*drop}):
        raise TableError("a column can be only one of --target, --weight, --rows-of and --drop, once")
    frame = frame.drop(drop)
    groups = None if rows_of is None else frame[rows_of].cast(pl.String).fill_null("")
    frame = frame if rows_of is None else frame.drop(rows_of)
    texts, more = parsed(
        [column for column in frame if column.dtype == pl.String],
        how,
        raw.separator,
        targets[0] if len(targets) == 1 else None,
    )
    frame = frame.with_columns(texts)
    said = [*raw.said, *more]
    notes = [*raw.notes, *([f"Assumed of the file: {'; '.join(said)}."] if said else [])]
    source = "standard input" if path == STDIN else path.name.encode(errors="surrogateescape").decode(errors="replace")
    if weight is not None:
        notes.append(f"Rows count by their {weight!r}.")
    if groups is not None:
        place = "rows of" + max(frame.columns, key=len, default="")  # a name that no column has
        frame = frame.with_columns(groups.rank("dense").cast(pl.Float64).alias(place))
        nameless = int((groups == "").sum())
        besides = f", of which one has the {nameless} rows without a value" if nameless else ""
        notes.append(f"Rows of one {rows_of!r} are on one side of every split: {groups.n_unique()} groups{besides}.")
        if groups.n_unique() < 2:
            raise TableError(f"--rows-of {rows_of} must have at least 2 different values; got 1")
        return _table(source, frame, targets, raw.image, notes, how.levels, weight, place)
    return _table(source, frame, targets, raw.image, notes, how.levels, weight)


Columns = list[tuple[str, Any]]


class Raw(NamedTuple):
    """Hold what a file holds, as it is written there."""

    columns: Columns
    image: Image = None
    separator: str = ","
    said: Sequence[str] = ()  # what was assumed
    notes: Sequence[str] = ()  # what else was done, in sentences


def _csv(path: Path, data: bytes, how: Reading) -> Raw:
    """Read names from the first line; the separator is the most frequent of , ; tab | there."""
    first, rows, separator, said = split(data, how)
    if not first:
        raise TableError(f"{path} is empty")
    names = [name.strip() for name in first]
    if pl.Series(names).cast(pl.Float64, strict=False).null_count() == 0:
        raise TableError(f"{path} must have the names of the columns in its first line; got numbers")
    for i, row in enumerate(rows):
        if isinstance(row, list) and len(row) != len(names):
            raise TableError(f"{path}: row {i + 1} must have {len(names)} values, like the first line; got {len(row)}")
    if not rows:
        raise TableError(f"{path} has names of columns but no rows")
    names[0] = names[0] or ROW_NUMBERS
    if len(names) > 1 and not names[-1] and (rows[-1].fill_null("") == "").all():  # a separator ends each line
        names, rows = names[:-1], rows[:-1]
    return Raw(_named(path, names, rows), None, separator, said)


def _is_parquet(path: Path) -> bool:
    """Return whether a file is read from where it is: Parquet, not compressed as a whole, with a name for polars."""
    with path.open("rb") as file:
        is_plain = path.suffix.lower() in (".parquet", ".pq") and str(path).isprintable()
        return is_plain and file.read(2) != b"\x1f\x8b"


def _parquet(path: Path, data: bytes, how: Reading) -> Raw:
    """Read all rows, or a uniform sample of `how.rows` in one pass, which holds a few batches in memory."""
    table = pl.scan_parquet(io.BytesIO(data) if data else path, glob=False)
    names, rows, notes = table.collect_schema().names(), table.select(pl.len()).collect().item(), []
    if rows > how.rows:
        chosen = pl.Series(random.Random(how.seed).sample(range(rows), how.rows), dtype=pl.get_index_type())
        place = "row" + max(names, key=len, default="")  # a name that no column has
        table = table.with_row_index(place).filter(pl.col(place).is_in(chosen.implode())).drop(place)
        sampled = f"A uniform sample of {how.rows:,} of the {rows:,} rows was read, without replacement"
        notes.append(f"{sampled}, with the seed {how.seed} (--rows).")
    frame = table.collect(engine="streaming")
    return Raw(_named(path, names, frame.get_columns()), notes=notes)


def _npz(path: Path, data: bytes, how: Reading) -> Raw:
    """Read `X` (rows, n) or images (rows, height, width), or the only such array; vectors beside it are columns."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
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
    x = x.reshape(len(x), math.prod(x.shape[1:])).astype(np.float64)
    names = names or [f"x{i}" for i in range(x.shape[1])]
    if len(names) != x.shape[1]:
        raise TableError(f"{path} must hold {x.shape[1]} names; got {len(names)}")
    odd = {name: array.shape for name, array in arrays.items() if array.shape != (len(x),)}
    if "y" in odd:
        raise TableError(f"{path}: y must have a value for each of the {len(x)} rows of {many[0]}; got {odd['y']}")
    others = [(name, array) for name, array in arrays.items() if name not in odd]
    shapes = ", ".join(f"{name} {shape}" for name, shape in odd.items())
    notes = [f"Arrays that are no columns of {len(x)} values were left out: {shapes}."] if odd else []
    return Raw(_named(path, names, list(x.T)) + others, image, notes=notes)


def _named(path: Path, names: Sequence[str], columns: Sequence[Any]) -> Columns:
    for i, name in enumerate(names):
        if not name:
            raise TableError(f"{path}: column {i + 1} must have a name; got an empty one")
        if name in names[:i]:
            raise TableError(f"{path} must have different names of columns; got {name!r} twice")
    return list(zip(names, columns, strict=True))


def _column(name: str, values: Any, how: Reading) -> Any:
    """Return a series of floats, of which dates are days since 1970; or of strings, which are still to be parsed."""
    column = pl.Series(name, values)
    if column.dtype.is_temporal():
        spans = {pl.Duration: lambda c: c.dt.total_milliseconds(), pl.Time: lambda c: c.cast(pl.Int64) / 1e6}
        in_ms = spans.get(column.dtype.base_type(), lambda c: c.cast(pl.Datetime).dt.epoch("ms"))
        return (in_ms(column) / DAY).cast(pl.Float64)
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        marks = pl.Series(how.missing or (), dtype=pl.String).cast(pl.Float64, strict=False).drop_nulls()
        column = column.cast(pl.Float64).fill_nan(None)
        return column.set(column.is_in(marks).fill_null(False), None)
    return column.cast(pl.String)


def _table(
    source: str,
    frame: Any,
    targets: list[str],
    image: Image,
    notes: list[str],
    levels: int,
    weight: str | None = None,
    groups: str | None = None,
) -> Table:
    if ROW_NUMBERS in frame.columns:
        frame = frame.drop(ROW_NUMBERS)
        notes.append("The first column has no name: it was taken for row numbers and left out.")
    y, target = None, ", ".join(targets) or None
    if targets:
        if empty := [name for name in targets if frame[name].null_count() == len(frame)]:
            raise TableError(f"the target {empty[0]!r} has no values")
        if len(targets) > 1 and (strings := [name for name in targets if frame[name].dtype == pl.String]):
            raise TableError(f"several targets must be numbers; got strings in {some(strings)}")
        if unknown := len(frame) - len(frame.drop_nulls(targets)):
            notes.append(f"{unknown} rows without a target were left out.")
            frame = frame.drop_nulls(targets)
        y = frame.select(targets).to_numpy() if len(targets) > 1 else frame[targets[0]].to_numpy()
        frame = frame.drop(targets)
    by_row: dict[str, Any] = {}
    if weight is not None:
        if frame[weight].dtype != pl.Float64 or frame[weight].null_count() or not (frame[weight] > 0).all():
            raise TableError(f"--weight {weight} must hold a number > 0 in each row")
        by_row["weight"] = frame[weight].to_numpy()
        frame = frame.drop(weight)
    if groups is not None:
        by_row["groups"] = frame[groups].to_numpy()
        frame = frame.drop(groups)
    if not frame.width:
        raise TableError(f"{source} has no columns" + (f" beside the target {target!r}" if target else ""))
    if len(frame) < LEAST_ROWS:
        raise TableError(f"{source} must have at least {LEAST_ROWS} rows; got {len(frame)}")
    if y is not None and y.dtype != object and not (np.abs(y) < HUGE).all():
        raise TableError(f"the target {target!r} must be less than {HUGE:g}; got {np.abs(y).max():g}")
    features, categories, warnings = _features(frame, notes, levels, has_target=y is not None)
    if not features.width:
        raise TableError(
            f"{source} has no columns but identifiers" + (f", beside the target {target!r}" if target else "")
        )
    if categories and len(targets) > 1:
        wide = features.columns[-categories:]
        raise TableError(f"{_have(wide)} more than {levels} strings, which needs one --target; add {leave_out(wide)}")
    image = image if image and features.width == image[0] * image[1] else None
    return Table(
        source, features.columns, features.to_numpy(), y, target, notes, image, tuple(warnings), categories, **by_row
    )


def _features(frame: Any, notes: list[str], most: int, *, has_target: bool) -> tuple[Any, int, list[str]]:
    """Return columns of numbers, how many of the last ones name categories, and warnings.

    A column of strings becomes a column of 0 and 1 for each string, or a category if it has more than `most`.
    """
    numbers = [column for column in frame if column.dtype == pl.Float64]
    strings = {column.name: column.drop_nulls() for column in frame if column.dtype == pl.String}
    levels = {name: sorted(column.unique()) for name, column in strings.items()}
    pairs = [name for name in strings if len(levels[name]) == 2 and len(strings[name]) == len(frame)]
    if empty := [column.name for column in frame if column.null_count() == len(column)]:
        raise TableError(f"{_have(empty)} no values; leave out with --drop")
    if huge := [column.name for column in numbers if (column.abs() >= HUGE).any()]:
        raise TableError(f"{_have(huge)} values of {HUGE:g} or more; leave out with --drop, or rescale")
    warnings = []
    if unique := [name for name, known in strings.items() if len(levels[name]) == len(known) >= LEAST_ROWS]:
        warnings.append(f"{_have(unique)} a different string in each row, like a name, and cannot help: left out.")
    wide = [name for name in strings if name not in unique and len(levels[name]) > most]
    if wide and not has_target:
        got = f"too many different strings ({wide[0]!r}: {len(levels[wide[0]])}; at most {most} become features)"
        raise TableError(f"{_have(wide)} {got}; leave out with --drop, name a --target, or raise --levels")
    if filled := [column.name for column in numbers if column.null_count()]:
        notes.append(f"{_have(filled)} missing values, replaced by the median of the rows that are trained on.")
    if narrow := [name for name in strings if name not in wide and name not in unique]:
        notes.append(f"{_have(narrow)} strings: each value became a feature of its own, 0 or 1.")
    if wide:
        how = f"more than {most} different strings (--levels): each became the mean of the target, out of fold"
        notes.append(f"{_have(wide)} {how}.")
    if identifiers := [column.name for column in numbers if _numbers_rows(column)]:
        hint = f"if they number the rows, add {leave_out(identifiers)}"
        warnings.append(f"{_have(identifiers)} a different whole number in each row: {hint}.")
    columns = []
    for name in frame.columns:
        if name not in levels:
            columns.append(pl.col(name))
        for level in levels[name][name in pairs :] if name in narrow else ():  # the first of two says nothing more
            if f"{name}={level}" in frame.columns:
                raise TableError(f"{level!r} in column {name!r} would be a feature {name}={level}, which is there")
            columns.append((pl.col(name) == level).fill_null(False).cast(pl.Float64).alias(f"{name}={level}"))
    columns += [pl.col(name).rank("dense").cast(pl.Float64) for name in wide]
    return frame.select(columns), len(wide), warnings


def _numbers_rows(column: Any) -> bool:
    """Return whether a column holds each row's number: different integers without gaps, or named like an identifier."""
    if column.null_count() or column.n_unique() < len(column) or (column != column.round()).any():
        return False
    return bool(column.max() - column.min() == len(column) - 1 or NUMBERED.search(column.name))


def _have(names: Sequence[str]) -> str:
    """Return a subject with its verb: "column 'a' has", "columns 'a', 'b' have"."""
    return f"column {names[0]!r} has" if len(names) == 1 else f"columns {some(names)} have"
