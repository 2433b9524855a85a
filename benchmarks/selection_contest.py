"""Which selector, on the most kinds of tables? `KHotSelector` and eleven others, judged by two models on new rows.

Each method chooses k columns of the training rows, which are standardised. A boosted-tree model and a linear one are
then fitted to these columns, and scored on a third of the rows, held out: accuracy for classes, R² for numbers.
`KHotSelector` runs at its defaults. Sets, their k, and those that were looked at during development are in
`contest_sets.py`; development used seeds from 1000 on. One thread. Rows are written as they come, and a run goes on
where the last one ended. Writes `selection_contest.csv`, two tables and a figure of the docs.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import rankdata
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from benchmarks import common
from benchmarks.contest_sets import DEVELOPED, SETS, Table
from benchmarks.rival_gates import GateSelector, StochasticGates
from benchmarks.rivals.selectors import METHODS, linear, quietly
from benchmarks.style import BLUE, GREY, panels, styled
from khot.bench import markdown_table
from khot.sklearn import KHotSelector

SEEDS, STG_STEPS = 3, 600
SLOW = 1000
"""Columns beyond which Boruta, RFE with forests and STG are left out: they have the mean rank of the others there."""
LEFT_OUT = ("Boruta", "RFE, forest", "STG")
BEHIND = 0.05
JUDGES = ("boosted", "linear")
NOTE = "<!-- Written by benchmarks/selection_contest.py; do not edit. -->"


class Row(NamedTuple):
    """A choice and what it is worth."""

    set: str
    method: str
    seed: int
    boosted: float
    linear: float
    found: float
    """The share of the columns that matter; NaN if they are not known."""
    seconds: float


def khot(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """`KHotSelector` at its defaults."""
    task = "classification" if is_class else "regression"
    return KHotSelector(k, task=task, random_state=seed).fit(x, y).get_support(indices=True)


def stg(x: np.ndarray, y: np.ndarray, k: int, is_class: bool, seed: int) -> np.ndarray:
    """Stochastic gates, our own implementation, at the λ and rate of `feature_selection.py`, in fewer steps."""
    how = {"gate_learning_rate": 0.003, "max_steps": STG_STEPS, "seed": seed, "is_class": is_class}
    return GateSelector(k, partial(StochasticGates, strength=0.1), **how).fit(x, y).get_support(indices=True)


CONTEST: dict[str, Any] = {"khot": khot, **METHODS, "STG": stg}


def judge(kind: str, is_class: bool) -> Any:
    """A model at its defaults."""
    if kind == "linear":
        return linear(is_class)
    model = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    return model(random_state=0)


def drawn(name: str, seed: int) -> tuple[Table, np.ndarray]:
    """A set with its columns in random order, and which of them matter."""
    rng = np.random.default_rng([seed, sum(name.encode())])
    table = SETS[name](rng)
    order = rng.permutation(table.x.shape[1])
    return table._replace(x=table.x[:, order]), order < table.true


def measure(name: str, seed: int, methods: Sequence[str]) -> Iterator[Row]:
    """Let each method choose, and judge the choice."""
    table, matters = drawn(name, seed)
    is_class = table.is_class
    x, new, y, y_new = train_test_split(
        table.x, table.y, test_size=1 / 3, random_state=seed, stratify=table.y if is_class else None
    )
    scale = StandardScaler().fit(x)
    x, new = scale.transform(x), scale.transform(new)
    for method in methods:
        if method in LEFT_OUT and x.shape[1] > SLOW:
            continue
        began = time.process_time()
        chosen = quietly(CONTEST[method], x, y, table.k, is_class, seed)
        seconds = time.process_time() - began
        assert len(set(chosen.tolist())) == table.k, (name, method)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores = [judge(kind, is_class).fit(x[:, chosen], y).score(new[:, chosen], y_new) for kind in JUDGES]
        found = float(matters[chosen].sum() / matters.sum()) if matters.any() else float("nan")
        yield Row(name, method, seed, *scores, found, round(seconds, 3))


def means(rows: Sequence[Any], name: str, method: str, kind: str) -> tuple[float, float] | None:
    """The mean over seeds and its standard error; R² below 0 counts as 0."""
    values = [max(getattr(row, kind), 0.0) for row in rows if row.set == name and row.method == method]
    return common.mean_and_error(values) if values else None


def ranks(rows: Sequence[Any], kind: str, sets: Sequence[str]) -> dict[str, list[float]]:
    """The rank of each method on each set, by its mean; equal to a thousandth is a tie, and 1 is the best."""
    methods = list(dict.fromkeys(row.method for row in rows))
    result: dict[str, list[float]] = {method: [] for method in methods}
    for name in sets:
        scores = {m: found[0] for m in methods if (found := means(rows, name, m, kind))}
        places = rankdata([-round(score, 3) for score in scores.values()])
        for method, place in zip(scores, places, strict=True):
            result[method].append(float(place))
    return result


def rank_table(rows: Sequence[Any]) -> str:
    """Mean ranks by both judges, on all sets and on those that were not looked at; recovery, and time."""
    sets = list(dict.fromkeys(row.set for row in rows))
    fresh = [name for name in sets if name not in DEVELOPED]
    methods = list(dict.fromkeys(row.method for row in rows))
    columns = [
        {method: round(float(np.mean(places)), 1) for method, places in ranks(rows, kind, of).items() if places}
        for kind in JUDGES
        for of in (sets, fresh)
    ]
    lines = []
    for method in sorted(methods, key=lambda method: columns[0][method] + columns[2][method]):
        own = [row for row in rows if row.method == method]
        cells = [f"{c[method]:.1f}" if method in c else "–" for c in columns]
        cells = [
            f"**{t}**" if c and c.get(method) == min(c.values()) else t for t, c in zip(cells, columns, strict=True)
        ]
        found = [row.found for row in own if row.found == row.found]
        share = f"{np.mean(found):.0%}" if found else "–"
        lines.append([method, *cells, share, f"{np.median([row.seconds for row in own]):.2f}"])
    heading = ["", "boosted", "boosted, new sets", "linear", "linear, new sets", "true columns found", "median s"]
    notes = (
        f"Mean ranks of {len(lines)} methods (1 is the best) by a boosted-tree model and a linear one on the chosen "
        f"columns: on all {len(sets)} sets, and on the {len(fresh)} that were not looked at while khot was made. "
        f"Seeds: {len({row.seed for row in rows})}. Scores that are equal to a thousandth share a rank. Seconds are of "
        f"one core. Boruta, mRMR and STG are our own implementations. Boruta, forest-RFE and STG are not run on "
        f"more than {SLOW} columns."
    )
    return "\n\n".join([NOTE, markdown_table(heading, lines), notes]) + "\n"


def behind(rows: Sequence[Any]) -> list[tuple[str, str, str, float, float]]:
    """Where khot is behind the best by more than .05 and two standard errors: set, judge, who, by how much, error."""
    found = []
    for name, kind in product(dict.fromkeys(row.set for row in rows), JUDGES):
        scores = {row.method: means(rows, name, row.method, kind) for row in rows if row.set == name}
        best = max(scores, key=lambda method: scores[method][0])
        mine = {row.seed: max(getattr(row, kind), 0.0) for row in rows if (row.set, row.method) == (name, "khot")}
        theirs = {row.seed: max(getattr(row, kind), 0.0) for row in rows if (row.set, row.method) == (name, best)}
        by, error = common.mean_and_error([theirs[seed] - mine[seed] for seed in mine])
        if by > BEHIND and by > 2 * error:
            found.append((name, kind, best, by, error))
    return found


def score_table(rows: Sequence[Any]) -> str:
    """For each set: khot's scores, the best other ones, and the share of true columns."""
    lines = []
    for name in dict.fromkeys(row.set for row in rows):
        table, _ = drawn(name, 0)
        cells = []
        for kind in JUDGES:
            scores = {row.method: means(rows, name, row.method, kind) for row in rows if row.set == name}
            mine = scores.pop("khot")
            best = max(scores, key=lambda method: scores[method][0])
            cells += [f"{mine[0]:.3f} ± {mine[1]:.3f}", f"{scores[best][0]:.3f} ± {scores[best][1]:.3f}, {best}"]
        found = means(rows, name, "khot", "found") if table.true else None
        size = f"{table.x.shape[0]} × {table.x.shape[1]}, {table.k}"
        mark = "" if name in DEVELOPED else " *"
        lines.append([name + mark, size, *cells, f"{found[0]:.0%}" if found else "–"])
    heading = ["", "rows × columns, k", "khot, boosted", "best other", "khot, linear", "best other", "khot found"]
    told = [f"{who} on {name}, {kind} ({by:.3f} ± {error:.3f})" for name, kind, who, by, error in behind(rows)]
    last = f"Ahead of khot by more than {BEHIND} and two standard errors: {', '.join(told) or 'nobody'}."
    notes = "Accuracy, or R² for numbers, on held-out rows: means over seeds ± standard error. * not looked at before."
    return "\n\n".join([NOTE, markdown_table(heading, lines), f"{notes} {last}"]) + "\n"


@styled
def figure(rows: Sequence[Any]) -> Figure:
    """Mean ranks by both judges."""
    picture, ((axes,),) = panels(1, 1, 5.0)
    sets = list(dict.fromkeys(row.set for row in rows))
    places = {kind: ranks(rows, kind, sets) for kind in JUDGES}
    for method in places["boosted"]:
        at = [float(np.mean(places[kind][method])) for kind in JUDGES]
        axes.plot(*at, "o", color=BLUE if method == "khot" else GREY, ms=9 if method == "khot" else 6)
        axes.annotate(method, at, xytext=(7, 4), textcoords="offset points", color=BLUE if method == "khot" else None)
    axes.set(xlabel="mean rank, boosted trees as judge (1 is the best)", ylabel="mean rank, linear judge")
    axes.grid(True)
    return picture


class Time(NamedTuple):
    """How long a fit of `KHotSelector` takes at its defaults, k = 10, one core."""

    rows: int
    columns: int
    seconds: float
    found: int
    """Of the nine columns that matter, two of them only together."""


def speed(sizes: Sequence[tuple[int, int]]) -> Iterator[Time]:
    """Time fits, after one that is not timed."""
    for i, (rows, n) in enumerate([(200, 20), *sizes]):
        x = np.random.default_rng(0).standard_normal((rows, n))
        y = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * x[:, 3] ** 2 + x[:, 4:9].sum(1)
        y += np.random.default_rng(1).standard_normal(rows)
        began = time.perf_counter()
        chosen = khot(x, y, 10, False, 0)
        if i:
            yield Time(rows, n, round(time.perf_counter() - began, 2), int((chosen < 9).sum()))


def speed_table(times: Sequence[Any]) -> str:
    """A line for each size."""
    lines = [[f"{t.rows:,} × {t.columns:,}", f"{t.seconds:.2f}", f"{t.found} of 9"] for t in times]
    return "\n\n".join([NOTE, markdown_table(["rows × columns", "seconds", "found"], lines)]) + "\n"


def main() -> int:
    parser = common.parser(__doc__, "one seed, four sets, six methods: under a minute")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="1000 for development")
    parser.add_argument("--set", action="append", choices=list(SETS), metavar="NAME", help="repeat for more")
    parser.add_argument("--method", action="append", choices=list(CONTEST), metavar="NAME", help="repeat for more")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after about so many; run again to go on")
    parser.add_argument("--speed", action="store_true", help="only how long khot takes, at three sizes")
    parser.add_argument("--redraw", action="store_true", help="only the tables and the figure, from the CSV there is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    places, began = common.places(args, is_partial=bool(args.set or args.method or args.first)), time.monotonic()
    if args.speed:
        with threadpool_limits(1):
            times = list(speed(((2000, 50),) if args.quick else ((2000, 50), (10_000, 1000), (100_000, 1000))))
        common.write(places.results / "selection_speed.csv", common.to_csv(times))
        common.write_table(places.tables / "selection-speed.md", speed_table(times))
        common.show(args, times, speed_table(times))
        return 0
    path = places.results / "selection_contest.csv"
    names = args.set or (["wine", "XOR", "steps", "linear 300 × 100"] if args.quick else list(SETS))
    methods = args.method or (["khot", "F test", "lasso path", "RFE, linear", "mRMR"] if args.quick else list(CONTEST))
    seeds = range(args.first, args.first + (1 if args.quick else args.seeds))
    rows: list[Any] = common.read_rows(path) if path.is_file() and not args.quick else []
    done = {(row.set, row.method, row.seed) for row in rows}
    with threadpool_limits(1):
        for seed, name in [] if args.redraw else product(seeds, names):
            wanted = [method for method in methods if (name, method, seed) not in done]
            if args.seconds and time.monotonic() - began > args.seconds:
                return 130
            new = list(measure(name, seed, wanted))
            if new:
                rows += new
                _save(path, rows)
                common.say(f"{name}, seed {seed}", len(rows), len(rows))
    common.write_table(places.tables / "selection-contest.md", rank_table(rows))
    common.write_table(places.tables / "selection-contest-sets.md", score_table(rows))
    common.write_picture(places.images / "selection-contest.svg", figure(rows))
    common.show(
        args, [vars(row) if not isinstance(row, tuple) else row for row in rows], rank_table(rows) + score_table(rows)
    )
    return 0


def _save(path: Path, rows: Sequence[Any]) -> None:
    records = [row._asdict() if isinstance(row, tuple) else vars(row) for row in rows]
    common.write(path, common.to_csv(records, Row._fields, digits=6))


if __name__ == "__main__":
    sys.exit(main())
