"""A measurement as records, CSV, JSON, Markdown and a terminal table. Builds them; printing is the command line's."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..kernels import status
from ._files import markdown_table
from ._results import BASELINE, Report, Result, Timing

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS: dict[str, str] = {
    "name": "the contender",
    "kind": "khot, relaxation (a published soft k-hot) or reference (a yardstick, no k-hot)",
    "what": "the method in a few words",
    "shape": "of the scores, rows along the last dim",
    "k": "how many to choose",
    "dtype": "of the scores",
    "device": "cpu or cuda",
    "threads": "threads given to torch",
    "compiled": "whether through torch.compile",
    "clock": "process CPU time or wall time",
    "forward_ms": "median milliseconds of a forward call",
    "forward_p20_ms": "its 20th percentile",
    "forward_p80_ms": "its 80th percentile",
    "forward_samples": "how many samples",
    "both_ms": "median milliseconds of a forward and backward call together",
    "both_p20_ms": "its 20th percentile",
    "both_p80_ms": "its 80th percentile",
    "both_samples": "how many samples",
    "forward_ratio": f"forward_ms over that of {BASELINE}; above 1 is slower than khot",
    "both_ratio": f"both_ms over that of {BASELINE}",
    "allocated": "peak of torch's allocations in a forward call, in units of the input",
    "resident": "peak growth of the process in a forward call, in units of the input",
    "sum_error": "max over rows of |sum − k| / max(k, 1); not for references",
    "out_of_range": "entries outside [0, 1] by more than a rounding; not for references",
    "nans": "NaN entries",
    "flags": "broken promises, separated by semicolons",
    "note": "remarks, such as why there is no backward",
    "skipped": "why there are no figures; empty if there are",
    "interrupted": "whether the measurement was cut short",
    "kernel": "what serves khot's operators on the CPU",
    "malloc": "glibc's thresholds if the environment sets them, else default: then large outputs pay page faults",
    "torch": "version of torch",
    "cpu": "the processor",
}
HEADINGS = ("contender", "forward", "× khot", "forward + backward", "× khot", "memory", "|Σ−k|", "range", "NaN")


def environment() -> dict[str, str]:
    """What the figures depend on besides the settings."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    malloc = " ".join(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("MALLOC_"))
    return {
        "kernel": status().get("cpu", "unknown"),
        "malloc": malloc or "default",
        "torch": torch.__version__,
        "cpu": f"{cpu}, {os.cpu_count()} cores",
    }


def records(report: Report) -> list[dict[str, Any]]:
    """One flat dict per contender with the keys of `COLUMNS`; `None` where there is no figure."""
    s, around = report.settings, environment()
    forward, both = _baseline(report)
    shared = {
        "shape": "x".join(map(str, s.shape)),
        "k": s.k,
        "dtype": str(s.dtype).removeprefix("torch."),
        "device": s.device,
        "threads": s.threads,
        "compiled": s.compile,
        "clock": s.clock,
        "interrupted": report.interrupted,
        **around,
    }
    rows = []
    for r in report.results:
        row = {
            "name": r.name,
            "kind": r.rival.kind,
            "what": r.rival.what,
            **_times("forward", r.forward),
            **_times("both", r.both),
            "forward_ratio": _ratio(r.forward, forward),
            "both_ratio": _ratio(r.both, both),
            **{key: getattr(r, key) for key in ("allocated", "resident", "sum_error", "out_of_range", "nans")},
            "flags": "; ".join(r.flags),
            "note": r.note,
            "skipped": r.skipped,
            **shared,
        }
        rows.append({key: row[key] for key in COLUMNS})
    return rows


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """The records with a header line; empty where there is no figure."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_json(rows: Iterable[dict[str, Any]]) -> str:
    """The records as a list; a NaN or infinite figure becomes a string, since JSON has no such numbers."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps([{key: plain(value) for key, value in row.items()} for row in rows], indent=1, ensure_ascii=False)


def to_markdown(report: Report) -> str:
    """A table for a README, with a line on what it shows and one on what was skipped."""
    parts = [caption(report) + ".", markdown_table(HEADINGS, _cells(report))]
    if skipped := [f"`{r.name}` ({r.skipped})" for r in report.results if r.skipped]:
        parts.append("Skipped: " + "; ".join(skipped) + ".")
    return "\n\n".join(parts) + "\n"


def to_table(report: Report) -> Table:
    """A table for the terminal; needs rich."""
    from rich.table import Table

    table = Table(title=caption(report), title_justify="left", pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    styles = {"khot": "bold", "reference": "dim"}
    measured = [r for r in report.results if not r.skipped]
    for r, cells in zip(measured, _cells(report), strict=True):
        table.add_row(*cells, style="red" if r.flags else styles.get(r.rival.kind, ""))
    return table


def caption(report: Report) -> str:
    """What was measured, in a line."""
    s, around = report.settings, environment()
    how = f"{threads(s.threads)}, {s.clock}{', torch.compile' * s.compile}"
    where = f"{around['cpu']}, {around['kernel'].partition(' (')[0]} kernel" if s.device == "cpu" else s.device
    dtype = str(s.dtype).removeprefix("torch.")
    text = f"{'×'.join(map(str, s.shape))}, k = {s.k:g}, {dtype}; {how}; {where}; torch {around['torch']}"
    text += f"; {around['malloc']}" * (around["malloc"] != "default")
    return text + "; interrupted, partial" * report.interrupted


def threads(count: int) -> str:
    """The number with its noun."""
    return f"{count} thread{'s' * (count != 1)}"


def _cells(report: Report) -> list[list[str]]:
    """The table's rows as text, skipped contenders left out."""
    forward, both = _baseline(report)
    return [
        [
            r.name,
            _span(r.forward),
            _number(_ratio(r.forward, forward), ".2f"),
            _span(r.both),
            _number(_ratio(r.both, both), ".2f"),
            _number(_peak(r), ".1f"),
            _number(r.sum_error, ".0e") + "!" * ("does not sum to k" in r.flags),
            _number(r.out_of_range, "d"),
            _number(r.nans, "d"),
        ]
        for r in report.results
        if not r.skipped
    ]


def _baseline(report: Report) -> tuple[Timing | None, Timing | None]:
    """Forward, and forward and backward, of the contender that ratios refer to."""
    return next(((r.forward, r.both) for r in report.results if r.name == BASELINE), (None, None))


def _peak(result: Result) -> float | None:
    """The larger of the two views of the memory."""
    return max((peak for peak in (result.allocated, result.resident) if peak is not None), default=None)


def _times(prefix: str, timing: Timing | None) -> dict[str, float | None]:
    values = [None] * 4 if timing is None else [*(1e3 * t for t in timing[:3]), timing.samples]
    return dict(zip((f"{prefix}_ms", f"{prefix}_p20_ms", f"{prefix}_p80_ms", f"{prefix}_samples"), values, strict=True))


def _ratio(timing: Timing | None, base: Timing | None) -> float | None:
    return None if timing is None or base is None else timing.median / base.median


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _span(timing: Timing | None) -> str:
    """The median and the spread with three digits, in µs or ms."""
    if timing is None:
        return "–"
    scale, unit = (1e6, "µs") if timing.median < 1e-3 else (1e3, "ms")
    median, p20, p80 = (f"{t * scale:.3g}" if t * scale < 1000 else f"{t * scale:.0f}" for t in timing[:3])
    return f"{median} {unit}" + f" ({p20}–{p80})" * (timing.samples > 1)
