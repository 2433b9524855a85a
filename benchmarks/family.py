"""What each member of the family costs, in units of `torch.sigmoid` at the same shape; the table of the docs.

One thread, process CPU time, medians of one interleaved run a shape.
"""

from __future__ import annotations

import sys

from benchmarks import common
from benchmarks.rivals import ALL
from khot.bench import Report, Settings, environment, markdown_table, measure, records

CASES = (((1, 1_000_000), 100_000), ((64, 1024), 102), ((4096, 64), 6))
MEMBERS = ("sigmoid_topk", "laplace_topk", "normal_topk", "cauchy_topk", "euclidean_topk", "power_topk")
QUICK = (((4, 256), 25), ((64, 64), 6))
BASE = "torch.sigmoid"


def table(reports: list[Report]) -> str:
    """Members × shapes, forward / forward and backward."""

    def cell(report: Report, name: str) -> str:
        results = {result.name: result for result in report.results}
        mine, base = results[name], results[BASE]
        pairs = ((mine.forward, base.forward), (mine.both, base.both))
        ratios = (a.median / b.median for a, b in pairs if a and b)
        return " / ".join(f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" for ratio in ratios)

    heading = ["", *("×".join(map(str, r.settings.shape)) + f", k = {r.settings.k}" for r in reports)]
    lines = [[f"`{name}`", *(cell(report, name) for report in reports)] for name in (*MEMBERS, "lapsum")]
    return (
        "<!-- Written by benchmarks/family.py; do not edit. -->\n\n"
        + markdown_table(heading, lines)
        + "\n\nTimes of `torch.sigmoid`'s, forward / forward and backward, float32, T = 1, one thread; "
        + f"{environment()['cpu']}; {common.vectors()}. `lapsum` is our re-implementation of LapSum's sort-based "
        + "closed form, the same function as `laplace_topk`.\n"
    )


def main() -> int:
    parser = common.parser(__doc__, "two small shapes, 0.01 seconds each")
    parser.add_argument("--budget", type=float, default=2.0, metavar="S", help="seconds per member and shape (2)")
    args = parser.parse_args()
    budget, cases = (0.01, QUICK) if args.quick else (args.budget, CASES)
    contenders = {name: ALL[name] for name in (*MEMBERS, "lapsum", BASE)}
    reports = [measure(contenders, Settings(shape=shape, k=k, budget=budget), common.say) for shape, k in cases]
    text = table(reports)
    common.write_table(common.places(args).tables / "family-speed.md", text)
    common.show(args, (row for report in reports for row in records(report)), text)
    return 130 if any(report.interrupted for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
