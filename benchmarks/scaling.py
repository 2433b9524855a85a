"""Time of one row against its length, n = 10³ to 10⁸, forward, one thread; writes `scaling.csv` and a log–log plot.

k is a tenth of n. A contender leaves the race when a call took longer than the limit, when its peak memory at the
length before says that the next would not fit, or when it gives its own reason. Needs khot[plot].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import common
from benchmarks.rivals import ALL
from benchmarks.style import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, WIDTH, YELLOW, styled
from khot.bench import BASELINE, Contender, Report, Settings, measure, records

SAFE_SHARE = 0.7  # of the memory that is available
BYTES = 4  # of a float32 score
# Okabe and Ito's palette, which colour-blind readers can tell apart; markers repeat what the colours say.
OURS = ORANGE
COLOURS = (BLUE, GREEN, YELLOW, SKY, PINK, INK, GREY)
MARKERS = "osD^vP*Xdp<>h"


def lengths(least: int, most: int) -> list[int]:
    """1, 3 × the powers of ten."""
    return [n for power in range(1, 11) for n in (10**power, 3 * 10**power) if least <= n <= most]


def available_memory() -> float:
    """Bytes that may be used; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def leavers(report: Report, next_n: int, limit: float) -> dict[str, str]:
    """Who does not run at the next length, and why."""
    reasons = {}
    for r in report.results:
        peak = max((p for p in (r.allocated, r.resident) if p is not None), default=0.0)
        needed = (1 + peak) * BYTES * next_n
        if r.skipped:
            reasons[r.name] = r.skipped
        elif r.forward is not None and r.forward.median > limit:
            reasons[r.name] = f"a call took {r.forward.median:.1f} s > {limit:g} s at n = {report.settings.n}"
        elif needed > SAFE_SHARE * available_memory():
            reasons[r.name] = f"would need {needed / 1e9:.0f} GB at n = {next_n}"
    return reasons


def run(sizes: list[int], limit: float, budget: float) -> tuple[list[Report], dict[str, str], bool]:
    """The reports by length, why contenders left, and whether Ctrl-C cut it short."""
    running: dict[str, Contender] = {name: contender for name, contender in ALL.items() if name != "hard_topk"}
    reports, left = [], {}

    for n, following in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
        report = measure(running, Settings(shape=(1, n), k=n // 10, backward=False, budget=budget), common.say)
        reports.append(report)
        if report.interrupted:
            return reports, left, True
        reasons = leavers(report, following, limit)
        left |= reasons
        running = {name: contender for name, contender in running.items() if name not in reasons}
        if not running:
            break
    return reports, left, False


@styled
def plot(rows: list[dict[str, Any]]) -> Figure:
    """Draw milliseconds against n, both logarithmic; khot thick, yardsticks dashed."""
    figure = Figure(figsize=(WIDTH, 6), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(name for name in ALL if any(row["name"] == name for row in rows)):
        points = [(int(row["shape"].split("x")[1]), row["forward_ms"]) for row in rows if row["name"] == name]
        points = [(n, float(ms)) for n, ms in points if ms not in ("", None)]
        if not points:
            continue
        is_ours, is_yardstick = name == BASELINE, ALL[name].kind == "reference"
        axes.plot(
            *zip(*points, strict=True),
            label=f"khot {name}" if ALL[name].kind == "khot" else name,
            color=OURS if is_ours else COLOURS[index % len(COLOURS)],
            marker="" if is_ours else MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=3 if is_ours else 1.2,
            linestyle="--" if is_yardstick else "-",
            zorder=3 if is_ours else 2,
        )
    axes.set(xscale="log", yscale="log", xlabel="n, scores in one row", ylabel="forward, ms of CPU time, one thread")
    axes.set_title(f"Soft top-k of n scores, k = n/10, float32; {rows[0]['vectors']}")
    axes.grid(True)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main() -> int:
    parser = common.parser(__doc__, "rows up to 3000, 0.01 seconds each")
    parser.add_argument("--least", type=int, default=10**3, metavar="N", help="shortest row (1000)")
    parser.add_argument("--most", type=int, default=10**8, metavar="N", help="longest row (10⁸)")
    parser.add_argument("--limit", type=float, default=10.0, metavar="S", help="longest call, in seconds (10)")
    parser.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds per contender and n (1)")
    args = parser.parse_args()
    sizes, budget = ([1000, 3000], 0.01) if args.quick else (lengths(args.least, args.most), args.budget)
    if not sizes:
        parser.error(f"--least and --most must enclose 1 or 3 times a power of ten; got {args.least} and {args.most}")
    reports, left, is_interrupted = run(sizes, args.limit, budget)
    rows = [{**row, "vectors": common.vectors()} for report in reports for row in records(report)]
    places = common.places(args)
    common.write(places.results / "scaling.csv", common.to_csv(rows))
    common.write_picture(places.images / "scaling.svg", plot(rows))
    text = [f"to n = {reports[-1].settings.n}", *(f"{name} left: {reason}" for name, reason in left.items())]
    common.show(args, rows, "\n".join(text))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
