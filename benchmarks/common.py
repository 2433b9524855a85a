"""What the scripts share: options, where results go, and rows as CSV, JSON, Markdown and pictures.

Every script takes `--quick` (little of everything, to out/), `--json` (print the rows, and nothing else, to stdout) and
`--out DIR`. Without options it writes the committed files: benchmarks/results, docs/tables and docs/img.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure

from benchmarks.style import dark

ROOT = Path(__file__).resolve().parents[1]
PICTURES = (".svg", ".png", ".pdf")
Progress = Callable[[str, int, int], None]
"""Called with a label, the work done so far, and all of it."""


class Places(NamedTuple):
    """The folders that a script writes to."""

    results: Path
    tables: Path
    images: Path


COMMITTED = Places(ROOT / "benchmarks" / "results", ROOT / "docs" / "tables", ROOT / "docs" / "img")


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Make a parser with the shared options; `quick` says what `--quick` does."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help=f"{quick}; to out/")
    result.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else, to stdout")
    result.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results, docs/tables and docs/img")
    return result


def places(args: argparse.Namespace, is_partial: bool = False) -> Places:
    """Return where to write: `--out`, or out/ if the run is quick or partial, or the committed files."""
    if args.out is None and not args.quick and not is_partial:
        return COMMITTED
    return Places(*[args.out or Path("out")] * 3)


def write(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)


def fill(page: str, name: str, content: str) -> str:
    """Return a page with what stands between `<!-- name -->` and `<!-- /name -->` replaced."""
    head, start, rest = page.partition(f"<!-- {name} -->")
    _, end, tail = rest.partition(f"<!-- /{name} -->")
    if not end:
        raise LookupError(f"The page must have <!-- {name} --> and, after it, <!-- /{name} -->; it has not both.")
    return f"{head}{start}\n\n{content.strip()}\n\n{end}{tail}"


def pages_with(name: str) -> list[Path]:
    """Return the pages of the docs that show a table."""
    return [
        page for page in sorted((ROOT / "docs").rglob("*.md")) if f"<!-- table: {name} -->" in page.read_text("utf-8")
    ]


def write_table(path: Path, content: str) -> None:
    """Write a table; if it is a committed one, also into the pages that show it."""
    write(path, content)
    for page in pages_with(path.stem) if path.parent == COMMITTED.tables else []:
        write(page, fill(page.read_text(encoding="utf-8"), f"table: {path.stem}", content))


def record(row: Any) -> dict[str, Any]:
    """Return a row, which may be a dict, a NamedTuple or a dataclass, as a dict."""
    if isinstance(row, dict):
        return row
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row._asdict()


class StudyFiles(NamedTuple):
    """Where a study of estimators writes; `None` for what is not written."""

    csv: Path | None
    markdown: Path | None
    plot: Path | None


def add_study_options(parser: argparse.ArgumentParser, estimators: Iterable[str]) -> None:
    """Add the options that the three studies of estimators share."""
    parser.add_argument(
        "--estimator", action="append", choices=list(estimators), metavar="NAME", help="repeat for more; default: all"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows here, and not to --out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here, and not to --out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save the picture here: .svg, .png or .pdf")


def study_files(
    parser: argparse.ArgumentParser, args: argparse.Namespace, name: str, is_partial: bool = False
) -> StudyFiles:
    """Return the files to write: those named, or else the three of the study; exit if one cannot be written."""
    files = StudyFiles(args.csv, args.markdown, args.plot)
    if not any(files):
        at = places(args, is_partial or bool(args.estimator))
        files = StudyFiles(at.results / f"{name}.csv", at.tables / f"study-{name}.md", at.images / f"study-{name}.svg")
    if files.plot and files.plot.suffix not in PICTURES:
        parser.error(f"--plot must end in {', '.join(PICTURES)}; got {files.plot}")
    for path in filter(None, files):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            parser.error(f"{path.parent} cannot be made: {problem.strerror}")
    return files


def write_if(path: Path | None, text: Callable[[], str]) -> None:
    """Write a file, if it is wanted; a table also into its pages."""
    if path is not None:
        (write_table if path.suffix == ".md" else write)(path, text())


def to_csv(rows: Sequence[Any], columns: Sequence[str] | None = None, digits: int | None = None) -> str:
    """Return rows as CSV with a header line; floats are cut to so many significant digits, if given."""
    records = [record(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(records[0]), lineterminator="\n")
    writer.writeheader()
    for each in records:
        writer.writerow({k: f"{v:.{digits}g}" if digits and isinstance(v, float) else v for k, v in each.items()})
    return text.getvalue()


def to_json(rows: Iterable[Any]) -> str:
    """Return rows as a JSON list; a number that is not finite becomes a string, since JSON has no such numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps([plain(record(row)) for row in rows], indent=1, ensure_ascii=False)


def show(args: argparse.Namespace, rows: Iterable[Any], text: str) -> None:
    """Print the rows if `--json` was given, else the text."""
    print(to_json(rows) if args.json else text)


def vectors() -> str:
    """Return the widths of the vectors in use, khot's and torch's: ratios depend on both."""
    from khot.kernels import cpu  # here: the other checkout of checkouts.py may be older than that name

    width = "without a library" if cpu.LIBRARY is None else cpu.PATHS[cpu.LIBRARY.khot_path()]
    return f"khot {width}, torch {torch.backends.cpu.get_cpu_capability()}"


def say(label: str, done: int, total: int) -> None:
    """Show progress on a terminal's stderr."""
    if sys.stderr.isatty():
        print(f"\r{label:<72}{done:>5}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def collect(rows: Iterable[Any], into: list[Any], total: int | None = None) -> bool:
    """Append rows as they come, and say so; return whether Ctrl-C ended it early."""
    try:
        for row in rows:
            into.append(row)
            say(", ".join(str(v) for v in list(record(row).values())[:5])[:72], len(into), total or len(into))
    except KeyboardInterrupt:
        return True
    return False


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is 0 for one value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def svg(figure: Figure) -> str:
    """Return a figure as SVG with fixed ids and no date: the same figure gives the same text."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "khot"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="none")
    return text.getvalue()


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure as name.svg, and as name-dark.svg for dark grounds; or as .png or .pdf, on white."""
    if path.suffix == ".svg":
        content = svg(figure)
        write(path, content)
        write(path.with_name(f"{path.stem}-dark.svg"), dark(content))
        return
    raw = io.BytesIO()
    figure.savefig(raw, format=path.suffix[1:], dpi=150, facecolor="white")
    write(path, raw.getvalue())


def read_rows(path: Path) -> list[SimpleNamespace]:
    """Return the lines of a CSV, with numbers as numbers."""

    def value(text: str) -> Any:
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
        return text

    with path.open(encoding="utf-8", newline="") as file:
        return [SimpleNamespace(**{k: value(v) for k, v in line.items()}) for line in csv.DictReader(file)]
