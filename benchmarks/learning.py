"""What the two learning problems' scripts share: arguments, progress, and files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from figures import svg

from khot.bench import markdown_table, write
from khot.bench._curves import from_csv, to_csv
from khot.bench._learning import BUDGET, Row, Settings

ROOT = Path(__file__).parents[1]
Columns = dict[str, Callable[[dict[str, Any]], str]]


def main(name: str, doc: str, module: ModuleType, row: type[Row], table: Callable[[list[Any]], str]) -> int:
    """Run, and write the CSV, the table and the figure; they are made from the CSV."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of all, settings not tuned: under a minute")
    parser.add_argument("--redraw", action="store_true", help="only the table and the figure, from the CSV there is")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: benchmarks/results, docs/tables, docs/img; out/ with --quick"
    )
    args = parser.parse_args()
    out = Path("out") if args.quick and args.out is None else args.out  # not over the full results
    results = (out or ROOT / "benchmarks" / "results") / f"{name}.csv"
    settings, start = module.QUICK if args.quick else module.FULL, time.perf_counter()
    if not args.redraw:
        rows = module.run(**vars(settings), on_progress=progress)
        if not rows:
            return 130
        write(results, to_csv(rows))
        print(f"\n{time.perf_counter() - start:.0f} s", file=sys.stderr)
    rows = from_csv(row, results.read_text(encoding="utf-8"))
    write((out or ROOT / "docs" / "tables") / f"study-{name}.md", table(rows))
    write((out or ROOT / "docs" / "img") / f"study-{name}.svg", svg(module.figure(rows)))
    print(table(rows))
    is_whole = {r.estimator for r in rows if r.step == settings.steps} == set(module.CONTENDERS)
    return 0 if args.redraw or is_whole else 130


def progress(label: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{100 * done // total:3d} %  {label:<40}", end="", file=sys.stderr, flush=True)


def summary_table(script: str, lines: list[dict[str, Any]], columns: Columns, below: list[list[str]]) -> str:
    """A row for each estimator, the best first, and lines below to compare with."""
    cells = [[f"`{line['estimator']}`", *(show(line) for show in columns.values())] for line in lines]
    table = markdown_table(["", *columns], [*cells, *below])
    return f"<!-- Written by benchmarks/{script}.py; do not edit. -->\n\n{table}\n\n{verdict(lines)}"


def verdict(lines: list[dict[str, Any]]) -> str:
    """Who is first, and who cannot be told from it."""
    first, *rest = lines
    near = [f"`{line['estimator']}`" for line in rest if line["behind"] <= 2 * line["behind_error"]]
    others = "all others are behind it by more than two standard errors of the difference"
    told = f"within two standard errors of the difference: {', '.join(near)}"
    return f"First is `{first['estimator']}`; {told if near else others}."


def plus_minus(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def knob(line: dict[str, Any]) -> str:
    return f"{line['rate']:g}" + (f", {line['knob']:g}" if line["knob"] else "")


def protocol(rows: list[Any], full: Settings, tuned: str) -> str:
    seeds, steps = len({row.seed for row in rows}), max(row.step for row in rows)
    how = tuned if steps == full.steps else "not tuned"
    return (
        f"Means over {seeds} seeds ± standard error after {steps} steps of Adam, {BUDGET} evaluations of the objective "
        f"each for all (`taylor`: {BUDGET - 1} samples and π); “behind” is the difference to the first, seed by seed. "
        f"The last column is the learning rate and, where there is one, λ or the temperature: {how}."
    )
