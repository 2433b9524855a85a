"""Text files as people have them: what is found out about encodings, separators, numbers, dates and missing values."""

import codecs
import csv
import io
import re
from collections.abc import Sequence
from shlex import quote
from typing import Any, NamedTuple

from .._extras import require

pl = require("polars", extra="select")

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LISTED = 5  # largest number of names in a message


class TableError(ValueError):
    """A table cannot be used; the message is one line."""


class Reading(NamedTuple):
    """Say how to read a file. What is None is found out from the file."""

    separator: str | None = None  # between values
    decimal: str | None = None  # "." or ","; the other one then separates thousands
    encoding: str | None = None
    missing: tuple[str, ...] | None = None  # what stands for a missing value, beside nothing
    dates: str | None = None  # a format, as strftime has it
    levels: int = 20  # largest number of different strings in a column of which each becomes a feature
    rows: int = 300_000  # of a Parquet file with more rows, a uniform sample of so many is read
    seed: int = 0  # of that sample


AUTOMATIC = Reading()


def leave_out(names: Sequence[str]) -> str:
    """Return the options that leave out the first few columns."""
    return " ".join(f"--drop {quote(name)}" for name in names[:LISTED])


def some(names: Sequence[str]) -> str:
    """Return the first few names, quoted, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(repr, names[:LISTED])) + more


def split(data: bytes, how: Reading) -> tuple[list[str], Any, str, list[str]]:
    """Return the first line of a text file, the columns below it, the separator, and what was assumed.

    Columns are series of strings; or the other lines, as lists, if these are not all as long as the first.
    """
    text, said = _decoded(data, how.encoding)
    del data
    given = {"tab": "\t", "\\t": "\t"}.get(how.separator or "", how.separator)
    if given is not None and len(given) != 1:
        raise TableError(f"--separator must be one character, or tab; got {given!r}")
    first, _, rest = text.partition("\n")
    if re.fullmatch(r"sep=[^0-9A-Za-z]\s*", first, re.IGNORECASE):  # as Excel has it
        given, text = given or first[4], rest
        said.append(f"the line {first.strip()} as the separator of the rest")
    skipped = 0
    while text.startswith("#"):  # comments; names may begin so too, where the next line has as many values
        first, _, rest = text.partition("\n")
        separator = given or max(SEPARATORS, key=rest.partition("\n")[0].count)
        if first.count(separator) == rest.partition("\n")[0].count(separator) > 0:
            break
        text, skipped = rest, skipped + 1
    if skipped:
        said.append(f"{skipped} line{'s' * (skipped > 1)} of comments, left out")
    separator = given or max(SEPARATORS, key=text.partition("\n")[0].count)
    if given is None and separator != ",":
        said.append(f"{SEPARATORS[separator]} between values (--separator)")
    quick = _quickly(text, separator)
    if quick is not None:
        return *quick, separator, said
    lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if line]
    if not lines:
        return [], [], separator, said
    if any(len(line) != len(lines[0]) for line in lines):
        return lines[0], lines[1:], separator, said
    return lines[0], [pl.Series(values, dtype=pl.String) for values in zip(*lines[1:], strict=True)], separator, said


def _quickly(text: str, separator: str) -> tuple[list[str], list[Any]] | None:
    """Return the first line and the columns, by polars; None if quotes, blank or ragged lines need a slower reader."""
    if '"' in text or text.count("\r") != text.count("\r\n") or not separator.isascii():
        return None
    first, _, rest = text.partition("\n")
    names = first.rstrip("\r").split(separator)
    lines = rest.count("\n") + (not rest.endswith("\n"))
    if len(names) < 2 or not rest or rest.count(separator) != lines * (len(names) - 1):
        return None
    how: dict[str, Any] = {"has_header": False, "separator": separator, "quote_char": None, "infer_schema_length": 0}
    try:
        frame = pl.read_csv(rest.encode(), **how)
    except pl.exceptions.PolarsError:  # such as a line that is too long
        return None
    return (names, frame.get_columns()) if frame.shape == (lines, len(names)) else None


def _decoded(data: bytes, encoding: str | None) -> tuple[str, list[str]]:
    if encoding is not None:
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise TableError(f"--encoding must be one that Python knows, such as latin-1; got {encoding!r}") from None
        return data.decode(encoding).removeprefix("\ufeff"), []
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16"), ["text as UTF-16 (--encoding)"]
    if b"\0" in data:
        raise TableError("the file must be text; got zero bytes in it")
    marked = ["text as UTF-8 with a byte order mark (--encoding)"] if data.startswith(codecs.BOM_UTF8) else []
    try:
        return data.decode("utf-8-sig"), marked
    except UnicodeDecodeError:
        pass
    try:  # the superset of latin-1 that Windows writes; five of its bytes mean nothing
        return data.decode("cp1252"), ["text as latin-1 (cp1252), since it is not UTF-8 (--encoding)"]
    except UnicodeDecodeError:
        return data.decode("latin-1"), ["text as latin-1, since it is not UTF-8 (--encoding)"]
