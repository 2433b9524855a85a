"""Text files as people have them: what is found out about encodings, separators, numbers, dates and missing values."""

import codecs
import csv
import io
from collections.abc import Sequence
from shlex import quote
from typing import Any, NamedTuple

from .._extras import require

pl = require("polars", extra="select")

MISSING = ("na", "n/a", "#n/a", "nan", "null", "none", "?", "-", "--", ".")
TRUTHS = (("true", "false"), ("yes", "no"), ("y", "n"), ("t", "f"), ("on", "off"))
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
SPACES = " \u00a0\u202f'’"  # what separates thousands in any file, beside a comma or a point
DATE = r"^(?:[0-9]{4}([-/.])[0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4})(?:[T ][0-9]{1,2}:.*)?$"
DAYS = ("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
TIMES = ("", " %H:%M", " %H:%M:%S%.f", "T%H:%M", "T%H:%M:%S%.f", "T%H:%M:%S%.f%#z")
DAY = 86_400_000  # milliseconds
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


def split(data: bytes, how: Reading) -> tuple[list[list[str]], str, list[str]]:
    """Return the lines of a text file as values, the separator, and what was assumed."""
    text, said = _decoded(data, how.encoding)
    given = {"tab": "\t", "\\t": "\t"}.get(how.separator or "", how.separator)
    if given is not None and len(given) != 1:
        raise TableError(f"--separator must be one character, or tab; got {given!r}")
    separator = given or max(SEPARATORS, key=text.partition("\n")[0].count)
    if how.separator is None and separator != ",":
        said.append(f"{SEPARATORS[separator]} between values (--separator)")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return [line for line in lines if line], separator, said


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


def parsed(columns: Sequence[Any], how: Reading, separator: str, target: str | None) -> tuple[list[Any], list[str]]:
    """Turn series of strings into numbers where all values are numbers, dates or booleans; say what was assumed."""
    seen: dict[str, list[str]] = {}  # what was assumed, and of which columns
    texts = {column.name: _without_missing(column, how, seen) for column in columns}
    made = {}
    for name, text in texts.items():
        for attempt in (_date(text, how.dates, seen), _truth(text, seen, is_target=name == target)):
            made.update({name: attempt} if attempt is not None else {})
    if how.dates is not None and texts and not any(what.startswith("dates") for what in seen):
        raise TableError(f"--dates must fit all values of a column; got {how.dates}, which fits none")
    made |= _numbers({name: text for name, text in texts.items() if name not in made}, how.decimal, separator, seen)
    return [made.get(name, text) for name, text in texts.items()], [f"{what} in {some(seen[what])}" for what in seen]


def _without_missing(column: Any, how: Reading, seen: dict[str, list[str]]) -> Any:
    """Return a column in which missing values are null; "-" is a value where there is "+" as well."""
    text = column.cast(pl.String).str.strip_chars()
    lower = text.str.to_lowercase()
    marks = [mark.strip().lower() for mark in (MISSING if how.missing is None else how.missing)]
    if how.missing is None and (lower == "+").any():
        marks.remove("-")
    is_mark = lower.is_in(marks).fill_null(False)
    if how.missing is None and is_mark.any():
        written = " ".join(sorted(text.filter(is_mark).unique()))
        seen.setdefault(f"{written} as missing (--missing)", []).append(column.name)
    return text.set(is_mark | (lower == "").fill_null(True), None)


def _truth(text: Any, seen: dict[str, list[str]], *, is_target: bool) -> Any:
    """Return 1 and 0 for a column of booleans. A target of yes and no keeps these names of its classes."""
    lower = text.str.to_lowercase()
    for yes, no in TRUTHS[: 1 if is_target else None]:
        if text.null_count() < len(text) and lower.drop_nulls().is_in([yes, no]).all():
            seen.setdefault(f"{yes} and {no} as 1 and 0", []).append(text.name)
            return (lower == yes).cast(pl.Float64)
    return None


def _date(text: Any, given: str | None, seen: dict[str, list[str]]) -> Any:
    """Return days since 1970 for a column of dates. A day stands before a month where both orders are possible."""
    values = text.drop_nulls()
    if not len(values) or (given is None and not values.str.contains(DATE).all()):
        return None
    forms = [given] if given else [day + time for time in TIMES for day in DAYS]
    fits = [form for form in forms if not values.str.to_datetime(form, strict=False).null_count()]
    if not fits:
        return None
    doubt = f", though {fits[1]} fits too" if len(fits) > 1 else ""
    seen.setdefault(f"dates, {fits[0]}{doubt} (--dates), as days since 1970", []).append(text.name)
    return text.str.to_datetime(fits[0], time_unit="ms").dt.epoch("ms") / DAY


def _numbers(texts: dict[str, Any], decimal: str | None, separator: str, seen: dict[str, list[str]]) -> dict[str, Any]:
    """Return the columns of numbers: plain ones, and those with decimal commas or separated thousands.

    "1,234" can be read in two ways. The other columns decide, then the separator; where they do not, it is an error.
    """
    plain = {name: text.cast(pl.Float64, strict=False) for name, text in texts.items()}
    is_plain = {name: made.null_count() == texts[name].null_count() for name, made in plain.items()}
    result = {name: made.fill_nan(None) for name, made in plain.items() if is_plain[name]}
    fits = {n: {mark for mark in ".," if t.drop_nulls().str.contains(_number(mark)).all()} for n, t in texts.items()}
    marked = {name: text.str.contains("[.,]").any() for name, text in texts.items()}
    sure = {mark: any(marked[name] and fits[name] == {mark} for name in texts) for mark in ".,"}
    doubtful = [name for name in texts if marked[name] and fits[name] == {".", ","}]
    is_decided = decimal is not None or sure["."] != sure[","] or (separator in ",;" and not sure[","])
    if not is_decided and (unclear := [n for n in doubtful if n not in result or sure[","]]):
        example = texts[unclear[0]].filter(texts[unclear[0]].str.contains("[.,]"))[0]
        raise TableError(f"column {unclear[0]!r} has numbers such as {example}: add --decimal , or --decimal .")
    has_commas = sure[","] if sure["."] != sure[","] else separator == ";" and any(n not in result for n in doubtful)
    usual = decimal or ("," if has_commas else ".")
    for name, text in texts.items():
        marks = fits[name] & ({usual} if usual in fits[name] or decimal else {".", ","})
        if not marks or (name in result and (marks == {"."} or not marked[name])):
            continue  # not numbers, or plain ones
        mark, other = (",", ".") if "," in marks else (".", ",")
        gaps = f"[{SPACES}{other}]"
        result[name] = text.str.replace_all(gaps, "").str.replace(mark, ".", literal=True).cast(pl.Float64)
        if text.str.contains(gaps).any():
            seen.setdefault("separated thousands (--decimal)", []).append(name)
        if mark == "," and text.str.contains(",", literal=True).any():
            seen.setdefault("decimal commas (--decimal)", []).append(name)
    return result


def _number(decimal: str) -> str:
    """Return a pattern of numbers with a decimal mark, and thousands separated by a space or the other mark."""
    thousands = f"[{SPACES}{',' if decimal == '.' else '.'}]"
    whole = f"(?:[0-9]+|[1-9][0-9]{{0,2}}(?:{thousands}[0-9]{{3}})+)"
    return rf"^[+-]?(?:{whole}(?:[{decimal}][0-9]*)?|[{decimal}][0-9]+)(?:[eE][+-]?[0-9]+)?$"
