"""khot against the field at the shapes that matter: `speed.csv`, `speed.md`, and the tables of the docs and the README.

Every shape is one interleaved measurement, with one thread (process CPU time) and with all (wall time); ratios compare
contenders of one measurement only. Outputs of 32 MB and more pay page faults at each call unless malloc's thresholds
are raised (see `khot.bench.measure`); the page says which it was. Ctrl-C ends early, writes what was measured and
exits with 130. The tables of the docs and the README change only with a complete run.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common
from benchmarks.common import COMMITTED, ROOT
from benchmarks.rivals import ALL
from khot.bench import (
    BASELINE,
    Report,
    Settings,
    environment,
    markdown_table,
    measure,
    records,
    threads,
    to_markdown,
)

NOTE = "<!-- Written by benchmarks/speed.py; do not edit. -->"
Record = dict[str, Any]


class Case(NamedTuple):
    """One shape: rows × n, and k."""

    rows: int
    n: int
    k: int

    @classmethod
    def of(cls, row: Record) -> Case:
        """The case of a record."""
        return cls(*map(int, row["shape"].split("x")), int(float(row["k"])))

    def __str__(self) -> str:
        n, k = ("10⁶" if self.n == 10**6 else self.n), ("10⁵" if self.k == 10**5 else self.k)
        return f"{self.rows}×{n}, k = {k}"


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
README = {
    "torch.sigmoid": "`torch.sigmoid`",
    "torch.softmax": "`torch.softmax`",
    "torch.topk": "`torch.topk` (hard)",
    "halley": "the paper's method (Halley)",
    "lapsum": "LapSum",
    "lml": "LML",
    "entmax.budget_bisect": "entmax `budget_bisect`",
}
README_CASES = (CASES[0], CASES[2], CASES[3], CASES[4], CASES[7])


def by_threads(rows: list[Record]) -> dict[int, list[Record]]:
    """The records by number of threads."""
    return {
        count: [r for r in rows if int(r["threads"]) == count] for count in sorted({int(r["threads"]) for r in rows})
    }


def table(rows: list[Record], cell: Callable[[Record], str], names: dict[str, str], cases: tuple[Case, ...]) -> str:
    """Contenders × shapes."""
    cells = {(row["name"], Case.of(row)): "skipped" if row["skipped"] else cell(row) for row in rows}
    return markdown_table(
        ["", *map(str, cases)],
        ([label, *(cells.get((name, case), "–") for case in cases)] for name, label in names.items()),
    )


def pair(form: Callable[[float], str], suffix: str) -> Callable[[Record], str]:
    """A cell with a figure of the forward, and of forward and backward."""

    def cell(row: Record) -> str:
        values = (row[f"{part}_{suffix}"] for part in ("forward", "both"))
        return " / ".join("–" if value in ("", None) else form(float(value)) for value in values)

    return cell


def short(ratio: float) -> str:
    """Two digits."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def ratios(rows: list[Record]) -> str:
    """How many times khot's time each contender takes; for the docs."""
    parts = [NOTE]
    for count, chosen in by_threads(rows).items():
        names = {row["name"]: f"`{row['name']}`" for row in chosen if row["name"] != BASELINE}
        cases = tuple(dict.fromkeys(map(Case.of, chosen)))
        parts += [
            f"{threads(count)} ({chosen[0]['clock']}), {chosen[0]['vectors']}:",
            table(chosen, pair(short, "ratio"), names, cases),
        ]
    return "\n\n".join(parts) + "\n"


def readme(rows: list[Record]) -> str:
    """The README's extract of that."""
    chosen = by_threads(rows)[1]
    cpu, version, vectors = (chosen[0][key] for key in ("cpu", "torch", "vectors"))
    where = f"One thread, one interleaved run of `benchmarks/speed.py`; {cpu}; {vectors} ({version})."
    return "\n\n".join([where, table(chosen, pair(short, "ratio"), README, README_CASES)])


def with_table(text: str, rows: list[Record]) -> str:
    """The README's text with its table replaced."""
    return common.fill(text, "speed", readme(rows))


def losses(rows: list[Record]) -> str:
    """Where khot is slower than a contender that chooses, softly or hard, as sigmoid and softmax do not."""
    others = ("torch.sigmoid", "torch.softmax", "hard_topk")
    lines = [
        f"- {Case.of(row)}, {threads(int(row['threads']))}: `{row['name']}` takes "
        f"{float(row['forward_ratio']):.2f} of khot's time"
        for row in rows
        if row["forward_ratio"] not in ("", None) and float(row["forward_ratio"]) < 1 and row["name"] not in others
    ]
    return "\n".join(lines) or "Nowhere here."


def with_vectors(reports: list[Report]) -> list[Record]:
    """The records of all reports, with the widths in use."""
    return [{**row, "vectors": common.vectors()} for report in reports for row in records(report)]


def page(reports: list[Report], load: float) -> str:
    """`speed.md`; `load` is the machine's load average before the first measurement."""
    rows = with_vectors(reports)
    parts = [
        "# Speed",
        "Written by `benchmarks/speed.py`. float32, standard normal scores, temperature 1, medians. Rows of one table "
        "column were measured in turns. The published methods are our re-implementations (`benchmarks/rivals`); "
        "`torch.*` are yardsticks, not soft k-hots. Memory is the peak of a forward call in units of the input. "
        f"malloc: {environment()['malloc']}. {common.vectors()}.",
    ]
    for count, chosen in by_threads(rows).items():
        names = {row["name"]: row["name"] for row in chosen}
        cases = tuple(dict.fromkeys(map(Case.of, chosen)))
        parts.append(f"## {threads(count)}: forward / forward and backward, ms ({chosen[0]['clock']})")
        parts.append(table(chosen, pair("{:.3g}".format, "ms"), names, cases))
        if count > 1 and load > BUSY:
            parts.append(f"Other work ran beside it (load average {load:.1f} at the start): wall times mean little.")
    parts += ["## Where khot's forward is slower", losses(rows), "## Shape by shape"]
    parts += [to_markdown(report).rstrip() for report in reports]
    return "\n\n".join(parts) + "\n"


def run(
    cases: list[Case], counts: list[int], budget: float, say: Callable[[str, int, int], None]
) -> tuple[list[Report], bool]:
    """The reports, and whether Ctrl-C cut them short."""
    reports: list[Report] = []
    for count in counts:
        for case in cases:
            where = f"{case}, {threads(count)}"
            settings = Settings(shape=(case.rows, case.n), k=case.k, threads=count, budget=budget)
            report = measure(
                ALL,
                settings,
                lambda label, done, total, at=where: say(f"{at}: {label}", done, total),
            )
            reports.append(report)
            if report.interrupted:
                return reports, True
    return reports, False


def write_all(reports: list[Report], load: float, folder: Path) -> None:
    """Write `speed.csv` and `speed.md`."""
    common.write(folder / "speed.csv", common.to_csv(with_vectors(reports)))
    common.write(folder / "speed.md", page(reports, load))


def read(path: Path) -> list[Record]:
    """The records of a `speed.csv`, as text."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> int:
    parser = common.parser(__doc__, "the small shapes, one thread, 0.01 seconds each")
    every = torch.get_num_threads()
    parser.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds per contender and shape (1)")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}), help=f"default: 1 and {every}")
    parser.add_argument("--cases", type=int, nargs="+", metavar="I", help=f"which of the {len(CASES)} shapes, from 0")
    args = parser.parse_args()
    if min(args.threads) < 1 or args.budget <= 0:
        parser.error(f"--threads must be ≥ 1 and --budget > 0; got {args.threads} and {args.budget:g}")
    if args.cases and not all(0 <= i < len(CASES) for i in args.cases):
        parser.error(f"--cases must satisfy 0 ≤ I < {len(CASES)}; got {args.cases}")
    cases = [CASES[i] for i in args.cases] if args.cases else list(CASES)
    counts, budget = args.threads, args.budget
    if args.quick:
        cases, counts, budget = [case for case in cases if case.rows * case.n <= 4096], [1], 0.01
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    reports, is_interrupted = run(cases, counts, budget, common.say)
    places = common.places(args)
    write_all(reports, load, places.results)
    if places == COMMITTED and not args.cases and not is_interrupted and 1 in args.threads:
        rows = read(COMMITTED.results / "speed.csv")
        common.write_table(COMMITTED.tables / "speed.md", ratios(rows))
        common.write(ROOT / "README.md", with_table((ROOT / "README.md").read_text(encoding="utf-8"), rows))
    broken = dict.fromkeys(f"{r.name}: {'; '.join(r.flags)}" for report in reports for r in report.results if r.flags)
    text = "\n".join([f"{len(reports)} measurements; see {places.results}", *broken])
    common.show(args, (row for report in reports for row in records(report)), text)
    return 130 if is_interrupted else int(any(text.startswith(f"{BASELINE}:") for text in broken))


if __name__ == "__main__":
    sys.exit(main())
