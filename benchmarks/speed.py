"""khot against the field at the shapes that matter; writes `speed.csv`, `speed.md` and the table of the docs.

Every shape is one interleaved measurement, with one thread (process CPU time) and with all (wall time); ratios compare
contenders of one measurement only. Outputs of 32 MB and more pay page faults at each call unless malloc's thresholds
are raised (see `khot.bench._measure`); the page says which it was. Ctrl-C ends early, writes what was measured and
exits with 130.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from khot.bench import BASELINE, CONTENDERS, Report, Settings, environment, measure, records, to_csv, to_markdown


class Case(NamedTuple):
    """One shape: rows × n, and k."""

    rows: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.rows}×{self.n}, k={self.k}"


CASES = (
    Case(1, 1_000_000, 100_000),
    Case(512, 16_384, 1638),
    Case(512, 16_384, 64),
    Case(4096, 64, 6),
    Case(64, 1024, 102),
    Case(16, 16, 4),
    Case(16, 64, 4),
    Case(16, 256, 4),
    Case(16, 16_384, 2),
)
BUSY = 0.5  # load average before the first measurement from which wall times mean little


def summary(reports: list[Report]) -> str:
    """Contenders × shapes: milliseconds of the forward, and of forward and backward."""
    columns = [Case(r.settings.rows, r.settings.n, int(r.settings.k)) for r in reports]
    lines = ["| contender | " + " | ".join(map(str, columns)) + " |", "| :--- |" + " ---: |" * len(columns)]
    for index, contender in enumerate(reports[0].results):
        cells = []
        for report in reports:
            result = report.results[index]
            times = (f"{t.median * 1e3:.3g}" if t else "–" for t in (result.forward, result.both))
            cells.append("skipped" if result.skipped else " / ".join(times))
        lines.append(f"| {contender.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(reports: list[Report]) -> str:
    """Contenders × shapes: how many times khot's time each takes, forward and forward and backward; for the docs."""
    lines = ["<!-- Written by benchmarks/speed.py; do not edit. -->"]
    for threads in sorted({r.settings.threads for r in reports}):
        chosen = [r for r in reports if r.settings.threads == threads]
        columns = [str(Case(r.settings.rows, r.settings.n, int(r.settings.k))) for r in chosen]
        cells: dict[str, list[str]] = {}
        for report in chosen:
            for row in records(report):
                pair = (
                    "–" if row[f"{part}_ratio"] is None else _short(row[f"{part}_ratio"])
                    for part in ("forward", "both")
                )
                cells.setdefault(row["name"], []).append("skipped" if row["skipped"] else " / ".join(pair))
        lines += ["", f"{threads} thread{'s' * (threads > 1)} ({chosen[0].settings.clock}):", ""]
        lines += ["| | " + " | ".join(columns) + " |", "| :--- |" + " ---: |" * len(columns)]
        lines += [f"| {name} | " + " | ".join(row) + " |" for name, row in cells.items() if name != BASELINE]
    return "\n".join(lines) + "\n"


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def losses(rows: list[dict[str, Any]]) -> str:
    """Where khot is slower than a contender that chooses, softly or hard, as sigmoid and softmax do not."""
    others = ("torch.sigmoid", "torch.softmax")
    lines = [
        f"- {row['shape']}, k = {row['k']}, {row['threads']} thread{'s' * (row['threads'] > 1)}: "
        f"`{row['name']}` takes {row['forward_ratio']:.2f} of khot's time"
        for row in rows
        if row["forward_ratio"] is not None and row["forward_ratio"] < 1 and row["name"] not in others
    ]
    return "\n".join(lines) or "Nowhere here."


def page(reports: list[Report], load: float) -> str:
    """`speed.md`; `load` is the machine's load average before the first measurement."""
    rows = [row for report in reports for row in records(report)]
    parts = [
        "# Speed",
        "Written by `benchmarks/speed.py`. float32, standard normal scores, temperature 1, medians. Rows of one table "
        "column were measured in turns. The published methods are khot's re-implementations, in `khot.bench.rivals`; "
        "`torch.*` are yardsticks, not soft k-hots. Memory is the peak of a forward call in units of the input. "
        f"malloc: {environment()['malloc']}.",
    ]
    for threads in sorted({r.settings.threads for r in reports}):
        chosen = [r for r in reports if r.settings.threads == threads]
        name = f"{threads} thread{'s' * (threads > 1)}"
        parts += [f"## {name}: forward / forward and backward, ms ({chosen[0].settings.clock})", summary(chosen)]
        if threads > 1 and load > BUSY:
            parts.append(f"Other work ran beside it (load average {load:.1f} at the start): wall times mean little.")
    parts += ["## Where khot's forward is slower", losses(rows), "## Shape by shape"]
    parts += [to_markdown(report).rstrip() for report in reports]
    return "\n\n".join(parts) + "\n"


def run(
    cases: list[Case], threads: list[int], budget: float, say: Callable[[str, int, int], None]
) -> tuple[list[Report], bool]:
    """The reports, and whether Ctrl-C cut them short."""
    reports: list[Report] = []
    for count in threads:
        for case in cases:
            settings = Settings(shape=(case.rows, case.n), k=case.k, threads=count, budget=budget)
            where = f"{case}, {count} thread{'s' * (count > 1)}"
            report = measure(
                CONTENDERS, settings, lambda label, done, total, at=where: say(f"{at}: {label}", done, total)
            )
            reports.append(report)
            if report.interrupted:
                return reports, True
    return reports, False


def write(path: Path, text: str) -> None:
    """Replace a file in one step, so that an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = torch.get_num_threads()
    parser.add_argument("--budget", type=float, default=3.0, metavar="S", help="seconds per contender and shape (3)")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}), help=f"default: 1 and {every}")
    parser.add_argument("--cases", type=int, nargs="+", metavar="I", help=f"which of the {len(CASES)} shapes, from 0")
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results, metavar="DIR", help="default: benchmarks/results")
    args = parser.parse_args()
    if min(args.threads) < 1 or args.budget <= 0:
        parser.error(f"--threads must be ≥ 1 and --budget > 0; got {args.threads} and {args.budget:g}")
    if args.cases and not all(0 <= i < len(CASES) for i in args.cases):
        parser.error(f"--cases must satisfy 0 ≤ I < {len(CASES)}; got {args.cases}")
    cases = [CASES[i] for i in args.cases] if args.cases else list(CASES)

    def say(label: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{label:<72}{done:>5}/{total}", end="", file=sys.stderr, flush=True)

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    reports, is_interrupted = run(cases, args.threads, args.budget, say)
    write(args.out / "speed.csv", to_csv(row for report in reports for row in records(report)))
    write(args.out / "speed.md", page(reports, load))
    write(args.out / "ratios.md", ratios(reports))
    if args.out == results:
        write(Path(__file__).parents[1] / "docs" / "tables" / "speed.md", ratios(reports))
    broken = [f"{r.name}: {'; '.join(r.flags)}" for report in reports for r in report.results if r.flags]
    ours = any(text.startswith(f"{BASELINE}:") for text in broken)
    print(f"\n{len(reports)} measurements; see {args.out}", *dict.fromkeys(broken), sep="\n", file=sys.stderr)
    return 130 if is_interrupted else int(ours)


if __name__ == "__main__":
    sys.exit(main())
