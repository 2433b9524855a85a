"""Turn a measurement into records, CSV, JSON, Markdown and a terminal table. The command line prints them."""

import csv
import io
import json
import math
from collections.abc import Iterable
from typing import Any

from .._extras import require
from ._contenders import BASELINE
from ._measure import Report, environment, threads

COLUMNS = (
    *("name", "kind", "what", "shape", "k", "dtype", "device", "threads", "compiled", "clock"),
    *("forward_ms", "forward_p20_ms", "forward_p80_ms", "forward_samples"),
    *("both_ms", "both_p20_ms", "both_p80_ms", "both_samples", "forward_ratio", "both_ratio"),
    *("allocated", "resident", "sum_error", "out_of_range", "nans", "flags", "note", "skipped"),
    *("interrupted", "kernel", "malloc", "torch", "cpu"),
)
"""The keys of `records`; docs/speed.md says what each means."""
HEADINGS = ("contender", "forward", "× khot", "forward + backward", "× khot", "memory", "|Σ−k|", "range", "NaN")
NARROW = 5  # how many of them a narrow terminal has
WIDE = 130  # columns of a terminal that has them all


def records(report: Report) -> list[dict[str, Any]]:
    """Return one flat dict per contender with the keys of `COLUMNS`; `None` where there is no figure."""
    s = report.settings
    shared = vars(s) | environment() | {"clock": s.clock, "compiled": s.compile, "interrupted": report.interrupted}
    shared |= {"shape": "x".join(map(str, s.shape)), "dtype": str(s.dtype).removeprefix("torch.")}
    base, rows = next((r for r in report.results if r.name == BASELINE), None), []
    for r in report.results:
        row = shared | vars(r) | {"kind": r.contender.kind, "what": r.contender.what, "flags": "; ".join(r.flags)}
        for part in ("forward", "both"):
            timing, unit = getattr(r, part), getattr(base, part, None)
            values = [None] * 4 if timing is None else [*(1e3 * t for t in timing[:3]), timing.samples]
            row |= zip((f"{part}{key}" for key in ("_ms", "_p20_ms", "_p80_ms", "_samples")), values, strict=True)
            row[f"{part}_ratio"] = timing.median / unit.median if timing and unit else None
        rows.append({key: row[key] for key in COLUMNS})
    return rows


def markdown_table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Make a Markdown table with the first column on the left and the others on the right."""
    heading = [text.replace("|", "\\|") for text in heading]
    lines = [heading, [":---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """Return the records as CSV with a header line; empty where there is no figure."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_json(rows: Iterable[dict[str, Any]]) -> str:
    """Return the records as a JSON list; a NaN or infinite figure becomes a string, since JSON has no such numbers."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps([{key: plain(v) for key, v in row.items()} for row in rows], indent=1, ensure_ascii=False)


def to_markdown(report: Report) -> str:
    """Make a table for a README, with a line on what it shows and one on what was skipped."""
    parts = [caption(report) + ".", markdown_table(HEADINGS, map(_cells, _measured(report)))]
    if skipped := [f"`{r.name}` ({r.skipped})" for r in report.results if r.skipped]:
        parts.append("Skipped: " + "; ".join(skipped) + ".")
    return "\n\n".join(parts) + "\n"


def to_table(report: Report, width: int = WIDE) -> Any:
    """Make a table for a terminal: khot, torch, then others; times and ratios alone below `WIDE` columns."""
    table = require("rich.table", extra="cli").Table(title=caption(report), title_justify="left", pad_edge=False)
    columns = len(HEADINGS) if width >= WIDE else NARROW
    for index, heading in enumerate(HEADINGS[:columns]):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    groups: dict[str, list[dict[str, Any]]] = {"bold": [], "dim": [], "": []}
    for row in _measured(report):
        groups["bold" if row["kind"] == "khot" else "dim" if row["name"].startswith("torch.") else ""].append(row)
    for look, rows in groups.items():
        for row in rows:
            table.add_row(*_cells(row, columns > NARROW)[:columns], style="red" if row["flags"] else look)
        table.add_section()
    return table


def conclusion(report: Report) -> str:
    """Say in a sentence what σ_k costs; empty if torch.softmax was not measured."""
    plain = next((row for row in _measured(report) if row["name"] == "torch.softmax"), {})
    if not plain.get("forward_ratio"):
        return ""
    both = f" ({1 / plain['both_ratio']:.2g}× with the backward pass)" if plain["both_ratio"] else ""
    return f"σ_k costs {1 / plain['forward_ratio']:.2g}× torch.softmax at this shape{both}."


def caption(report: Report) -> str:
    """Say in a line what was measured."""
    s, around = report.settings, environment()
    how = f"{threads(s.threads)}, {s.clock}{', torch.compile' * s.compile}"
    where = f"{around['cpu']}, {around['kernel'].partition(' (')[0]} kernel" if s.device == "cpu" else s.device
    dtype = str(s.dtype).removeprefix("torch.")
    text = f"{'×'.join(map(str, s.shape))}, k = {s.k:g}, {dtype}; {how}; {where}; torch {around['torch']}"
    text += f"; {around['malloc']}" * (around["malloc"] != "default")
    return text + "; interrupted, partial" * report.interrupted


def _measured(report: Report) -> list[dict[str, Any]]:
    return [row for row in records(report) if not row["skipped"]]


def _cells(row: dict[str, Any], has_spread: bool = True) -> list[str]:
    """Return a record as the text of a row of the table."""
    peaks = [peak for peak in (row["allocated"], row["resident"]) if peak is not None]
    return [
        row["name"],
        _time(row, "forward", has_spread),
        _number(row["forward_ratio"], ".2f"),
        _time(row, "both", has_spread),
        _number(row["both_ratio"], ".2f"),
        _number(max(peaks, default=None), ".1f"),
        _number(row["sum_error"], ".0e") + "!" * ("does not sum to k" in row["flags"]),
        _number(row["out_of_range"], "d"),
        _number(row["nans"], "d"),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _time(row: dict[str, Any], part: str, has_spread: bool) -> str:
    """Format the median, and the spread, with three digits, in µs or ms."""
    if row[f"{part}_ms"] is None:
        return "–"
    scale, unit = (1e3, "µs") if row[f"{part}_ms"] < 1 else (1, "ms")
    times = (scale * row[f"{part}{key}_ms"] for key in ("", "_p20", "_p80"))
    median, p20, p80 = (f"{t:.3g}" if t < 1000 else f"{t:.0f}" for t in times)
    return f"{median} {unit}" + f" ({p20}–{p80})" * (has_spread and row[f"{part}_samples"] > 1)
