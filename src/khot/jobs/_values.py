"""What the strings of a column say: numbers, dates, times, booleans and missing values."""

from collections.abc import Sequence
from typing import Any

from .._extras import require
from ._text import Reading, TableError, leave_out, some

pl = require("polars", extra="select")

MISSING = ("na", "n/a", "n.a.", "#n/a", "#na", "<na>", "nan", "null", "(null)", "none", "?", "-", "--", ".")
SPREADSHEET = ("#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!")  # errors in a cell, which are missing too
WORDS = ("unknown", "nil", "missing", "not available", "n.d.")  # missing beside numbers; they may be categories
TRUTHS = (("true", "false"), ("yes", "no"), ("y", "n"), ("t", "f"), ("on", "off"))
SPACES = " \u00a0\u202f'’"  # what separates thousands in any file, beside a comma or a point
UNIT = "%|[$€£¥₹]|EUR|USD|GBP|CHF"
NUMERAL = rf"[0-9.,][0-9.,{SPACES}]*?(?:[eE][+-]?[0-9]+)?"
DRESSED = rf"^(\(?)([+\-\x{{2212}}]?) ?({UNIT})? ?([+\-\x{{2212}}]?)({NUMERAL})[ \x{{a0}}]?({UNIT})?(\)?)$"
DATE = (
    r"^(?:[0-9]{4}([-/.])[0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4}"
    r"|[0-9]{1,2}[-. ]{1,2}[A-Za-z]{3,9}[-. ]{1,2}[0-9]{4}|[A-Za-z]{3,9} [0-9]{1,2},? [0-9]{4})(?:[T ][0-9]{1,2}:.*)?$"
)
DAYS = ("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
SHORT = ("%d %b %Y", "%d-%b-%Y", "%d. %b %Y", "%b %d, %Y", "%b %d %Y")
IN_WORDS = (*SHORT, *(form.replace("b", "B") for form in SHORT))
TIMES = ("", " %H:%M", " %H:%M:%S%.f", "T%H:%M", "T%H:%M:%S%.f", "T%H:%M:%S%.f%#z")
CLOCK = r"^([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9](?:\.[0-9]+)?))?$"
DAY = 86_400_000  # milliseconds
MARKS = 5  # most different strings beside numbers that are taken as missing
SURE = 0.9  # share of numbers from which a column with few different strings is one of numbers too
LOOKED_AT = 200  # values that are looked at before all are

Seen = dict[str, list[str]]  # what was assumed, and of which columns


def parsed(columns: Sequence[Any], how: Reading, separator: str, target: str | None) -> tuple[list[Any], list[str]]:
    """Turn series of strings into numbers where the values are numbers, dates or booleans; say what was assumed."""
    seen: Seen = {}
    texts, made, said = {}, {}, list[str]()
    is_plain = {column.name: how == how._replace(missing=None, dates=None) and _is_plain(column) for column in columns}
    for column in columns:
        name = column.name
        texts[name] = column if is_plain[name] else _without_missing(column, how, seen)
        if is_plain[name]:
            continue
        for attempt in (_date, _clock, _truth):
            found = attempt(texts[name], how, seen, said, name == target)
            if found is not None:
                made[name] = found
                break
    if how.dates is not None and texts and not any(what.startswith("dates") for what in seen):
        raise TableError(f"--dates must fit all values of a column; got {how.dates}, which fits none")
    left = {name: text for name, text in texts.items() if name not in made}
    for name, text in left.items():
        left[name] = text if is_plain[name] else _without_odd(_undressed(text, seen), how, said)
    made |= _numbers(left, how.decimal, separator, seen)
    return [made.get(name, text) for name, text in texts.items()], [
        *(f"{what} in {some(seen[what])}" for what in seen),
        *said,
    ]


def _is_plain(text: Any) -> bool:
    """Return whether all values are numbers as Python writes them, and none is missing."""
    if not len(text) or text.head(LOOKED_AT).cast(pl.Float64, strict=False).null_count():
        return False
    made = text.cast(pl.Float64, strict=False)
    return not (made.null_count() or made.is_nan().any())


def _without_missing(column: Any, how: Reading, seen: Seen) -> Any:
    """Return a column in which missing values are null; "-" is a value where there is "+" as well."""
    text = column.cast(pl.String).str.strip_chars()
    lower = text.str.to_lowercase()
    marks = [mark.strip().lower() for mark in ((*MISSING, *SPREADSHEET) if how.missing is None else how.missing)]
    if how.missing is None and (lower == "+").any():
        marks.remove("-")
    is_mark = lower.is_in(marks).fill_null(False)
    if how.missing is None and is_mark.any():
        written = " ".join(sorted(text.filter(is_mark).unique()))
        seen.setdefault(f"{written} as missing (--missing)", []).append(column.name)
    return text.set(is_mark | (lower == "").fill_null(True), None)


def _without_odd(text: Any, how: Reading, said: list[str], pattern: str = "", what: str = "numbers") -> Any:
    """Return a column of numbers (or of what fits a pattern) in which the few other strings are null, and say so."""
    values = text.drop_nulls()
    hits = values.str.contains(pattern) if pattern else _fit_either(values)
    share = float(hits.mean() or 0.0)
    if share <= 0.5 or share == 1:
        return text
    odd = values.filter(~hits)
    kinds = odd.unique().sort().to_list()
    words = [kind for kind in kinds if how.missing is None and kind.lower() in WORDS]
    few = len(kinds) - len(words) <= MARKS
    if (share < SURE or not few) and len(words) < len(kinds) and values.n_unique() <= how.levels:
        return text  # categories, some of which are numbers
    told = f"{text.name!r} holds {len(values) - len(odd)} {what} and "
    if few:
        quoted = ", ".join('"' + kind + '"' for kind in kinds)
        said.append(f"{told}{quoted}, taken as missing (--missing)")
        return text.set(text.is_in(kinds).fill_null(False), None)
    if how.missing is not None:
        said.append(f"{told}{len(odd)} other values: taken as strings (--missing)")
        return text
    fix = f"say which are missing with --missing, or add {leave_out([text.name])}"
    raise TableError(f"column {told}{len(odd)} other values, such as {kinds[0]!r}: {fix}")


def _fit_either(values: Any) -> Any:
    return values.str.contains(_number(".")) | values.str.contains(_number(","))


def _undressed(text: Any, seen: Seen) -> Any:
    """Return numbers without signs of percent and currencies, with − as -, and (1) as -1; other strings as they are."""
    if not text.head(1).len() or not text.str.contains(rf"[\x{{2212}}()]|{UNIT}").any():
        return text
    parts = text.str.extract_groups(DRESSED).struct.unnest()
    parts.columns = ["open", "sign", "before", "inner", "number", "after", "close"]
    parts = parts.with_columns(pl.all().fill_null(""))
    fits = (parts["number"] != "") & ((parts["open"] == "(") == (parts["close"] == ")"))
    units = set((parts["before"] + parts["after"]).filter(fits).unique())
    if fits.sum() * 2 <= len(text) - text.null_count():
        return text
    if len(units - {""}) > 1 or units == {"", "%"}:
        got = " and ".join(sorted(unit or "none" for unit in units))
        fix = f"write them alike, or add {leave_out([text.name])}"
        raise TableError(f"the numbers of column {text.name!r} must have one unit; got {got}: {fix}")
    for unit in units - {""}:
        seen.setdefault(f"numbers without their {unit}", []).append(text.name)
    if (parts["open"] == "(").any():
        seen.setdefault("numbers in parentheses as negative ones", []).append(text.name)
    minus = (parts["open"] == "(") | (parts["sign"] + parts["inner"]).str.contains(r"[-\x{2212}]")
    bare = pl.select(pl.when(minus).then(pl.lit("-")).otherwise(pl.lit(""))).to_series() + parts["number"]
    return bare.zip_with(fits, text).alias(text.name)


def _truth(text: Any, how: Reading, seen: Seen, said: list[str], is_target: bool) -> Any:
    """Return 1 and 0 for a column of booleans. A target of yes and no keeps these names of its classes."""
    if text.null_count() == len(text) or text.head(LOOKED_AT).n_unique() > 7:
        return None
    lower = text.str.to_lowercase()
    for yes, no in TRUTHS[: 1 if is_target else None]:
        if lower.drop_nulls().is_in([yes, no]).all():
            seen.setdefault(f"{yes} and {no} as 1 and 0", []).append(text.name)
            return (lower == yes).cast(pl.Float64)
    return None


def _date(text: Any, how: Reading, seen: Seen, said: list[str], is_target: bool) -> Any:
    """Return days since 1970 for a column of dates. A day stands before a month where both orders are possible."""
    if how.dates is None:
        text = _without_odd(text, how, said, DATE, "dates") if _may_be(text, DATE) else text
    values = text.drop_nulls()
    if not len(values) or (how.dates is None and not values.str.contains(DATE).all()):
        return None
    forms = [how.dates] if how.dates else [day + time for time in TIMES for day in (*DAYS, *IN_WORDS)]
    fits = [form for form in forms if not values.str.to_datetime(form, strict=False).null_count()]
    if not fits:
        return None
    doubt = f", though {fits[1]} fits too" if len(fits) > 1 and "b" not in fits[0].lower() else ""
    seen.setdefault(f"dates, {fits[0]}{doubt} (--dates), as days since 1970", []).append(text.name)
    return text.str.to_datetime(fits[0], time_unit="ms").dt.epoch("ms") / DAY


def _clock(text: Any, how: Reading, seen: Seen, said: list[str], is_target: bool) -> Any:
    """Return the part of the day that has passed, in [0, 1), for a column of times."""
    if not _may_be(text, CLOCK):
        return None
    text = _without_odd(text, how, said, CLOCK, "times of day")
    if not text.drop_nulls().str.contains(CLOCK).all():
        return None
    hour, minute, second = (text.str.extract(CLOCK, i).cast(pl.Float64) for i in (1, 2, 3))
    seen.setdefault("times of day, as parts of a day", []).append(text.name)
    return (hour * 3600 + minute * 60 + second.fill_null(0.0)) * 1000 / DAY


def _may_be(text: Any, pattern: str) -> bool:
    """Return whether the first values fit a pattern, most of them."""
    return bool((text.drop_nulls().head(LOOKED_AT).str.contains(pattern).mean() or 0.0) > 0.5)


def _numbers(texts: dict[str, Any], decimal: str | None, separator: str, seen: Seen) -> dict[str, Any]:
    """Return the columns of numbers: plain ones, and those with decimal commas or separated thousands.

    "1,234" can be read in two ways. The other columns decide, then the separator; where they do not, it is an error.
    """
    plain = {name: text.cast(pl.Float64, strict=False) for name, text in texts.items()}
    is_plain = {name: made.null_count() == texts[name].null_count() for name, made in plain.items()}
    result = {name: made.fill_nan(None) for name, made in plain.items() if is_plain[name]}
    marked = {name: text.str.contains("[.,]").any() for name, text in texts.items()}
    fits = {name: {mark for mark in ".," if _fits(text, mark)} for name, text in texts.items()}
    sure = {mark: any(marked[name] and fits[name] == {mark} for name in texts) for mark in ".,"}
    doubtful = [name for name in texts if marked[name] and fits[name] == {".", ","}]
    is_decided = decimal is not None or sure["."] != sure[","] or (separator in ",;" and not sure[","])
    if not is_decided and (unclear := [n for n in doubtful if n not in result or sure[","]]):
        raise _two_ways(texts[unclear[0]])
    has_commas = sure[","] if sure["."] != sure[","] else separator == ";" and any(n not in result for n in doubtful)
    if decimal is None and separator != "," and not has_commas and not sure["."]:
        thousands = [name for name in doubtful if _counts(texts[name])]
        if separator == ";" and (unclear := [name for name in doubtful if name not in thousands]):
            raise _two_ways(texts[unclear[0]])
        has_commas = bool(thousands)
    usual = decimal or ("," if has_commas else ".")
    for name, text in texts.items():
        if not fits[name] and _mixes_marks(text):
            raise _two_marks(text)
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


def _two_ways(text: Any) -> TableError:
    example = text.filter(text.str.contains("[.,]"))[0]
    return TableError(f"column {text.name!r} has numbers such as {example}: add --decimal , or --decimal .")


def _mixes_marks(text: Any) -> bool:
    """Return whether all values are numbers, some with a decimal comma and others with a point."""
    values = text.drop_nulls()
    return bool(_fit_either(values.head(LOOKED_AT)).all() and _fit_either(values).all())


def _two_marks(text: Any) -> TableError:
    values = text.drop_nulls()
    one, other = (values.filter(~values.str.contains(_number(mark)))[0] for mark in ",.")
    fix = f"write them alike, or add {leave_out([text.name])}"
    return TableError(f"column {text.name!r} must have one decimal mark; got {one} and {other}: {fix}")


def _counts(text: Any) -> bool:
    """Return whether points separate thousands: numbers below a thousand have none, and there are some.

    Decimals of a fixed number of digits would have a point in each value, and others not always three digits.
    """
    whole = text.filter(~text.str.contains(".", literal=True))
    return bool(len(whole) and (whole.cast(pl.Float64, strict=False).abs() < 1000).all())


def _fits(text: Any, mark: str) -> bool:
    """Return whether all values are numbers with a decimal mark; the first ones are looked at first."""
    values, pattern = text.drop_nulls(), _number(mark)
    return bool(values.head(LOOKED_AT).str.contains(pattern).all() and values.str.contains(pattern).all())


def _number(decimal: str) -> str:
    """Return a pattern of numbers with a decimal mark, and thousands separated by a space or the other mark."""
    thousands = f"[{SPACES}{',' if decimal == '.' else '.'}]"
    whole = f"(?:[0-9]+|[1-9][0-9]{{0,2}}(?:{thousands}[0-9]{{3}})+)"
    return rf"^[+-]?(?:{whole}(?:[{decimal}][0-9]*)?|[{decimal}][0-9]+)(?:[eE][+-]?[0-9]+)?$"
