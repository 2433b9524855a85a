"""What each choice in `khot.sklearn.Gate` does: relaxation, design and estimator, each changed alone.

On digits, k = 10, the accuracy of logistic regression on the chosen pixels, cross-validated: a seed is a fold, and the
choice is made without it. On XOR with 18 columns of noise, k = 2, the share of the two found. 400 steps of training in
place of 1000, since some designs are slow. One thread. Writes `feature_selection_choices.csv`, and a table and a figure
of the docs. Ctrl-C ends early, and writes what there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import khot
from benchmarks import common
from benchmarks.common import mean_and_error
from benchmarks.selection_report import Row, from_csv, to_csv, values
from benchmarks.selection_sets import xor_in_noise
from benchmarks.style import BLUE, GREEN, ORANGE, PINK, panels, styled
from khot import estimators
from khot.bench import markdown_table
from khot.designs import Brewer, ConditionalPoisson, PlackettLuce, Sampford, Systematic
from khot.sklearn import Gate, KHotSelector

STEPS = 400
DEFAULT = "defaults: sigmoid_topk, Pivotal, straight_through_sample"
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "relaxation": {
        "laplace_topk": {"relaxation": khot.laplace_topk},
        "normal_topk": {"relaxation": khot.normal_topk},
        "cauchy_topk": {"relaxation": khot.cauchy_topk},
        "euclidean_topk": {"relaxation": khot.euclidean_topk},
        "power_topk, p = 1.5": {"relaxation": partial(khot.power_topk, p=1.5)},
    },
    "design": {
        "None: no samples": {"design": None},
        "Systematic": {"design": Systematic},
        "Sampford": {"design": Sampford},
        "Brewer": {"design": Brewer},
        "ConditionalPoisson, as SIMPLE": {"design": ConditionalPoisson},
    },
    "estimator": {
        "straight_through_sample, antithetic": {
            "estimator": partial(estimators.straight_through_sample, antithetic=True)
        },
        "stochastic_times_smooth": {"estimator": estimators.stochastic_times_smooth},
        "relaxed": {"estimator": estimators.relaxed},
        "imle": {"estimator": estimators.imle},
        "xie_ermon, PlackettLuce": {"estimator": estimators.xie_ermon, "design": PlackettLuce},
        "rloo, Sampford": {"estimator": estimators.rloo, "design": Sampford},
        "taylor_control_variate, Sampford": {"estimator": estimators.taylor_control_variate, "design": Sampford},
        "reinmax, Sampford": {"estimator": estimators.reinmax, "design": Sampford},
    },
}
COLOURS = {"": ORANGE, "relaxation": BLUE, "design": GREEN, "estimator": PINK}
PANELS = {"digits": "accuracy on digits, k = 10", "XOR, 18 noise": "share found of XOR's two, 18 noise"}


def variants() -> dict[str, dict[str, Any]]:
    """Every choice with its arguments, the defaults first."""
    return {DEFAULT: {}} | {f"{part}: {name}": how for part, of in CHOICES.items() for name, how in of.items()}


def on_digits(seed: int, **how: Any) -> float:
    """Accuracy on fold `seed` of five."""
    x, y = load_digits(return_X_y=True)
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y))
    chosen, held = folds[seed % 5]
    steps = (
        StandardScaler(),
        KHotSelector(10, random_state=seed, strategy=Gate(**how)),
        LogisticRegression(max_iter=1000),
    )
    return float(make_pipeline(*steps).fit(x[chosen], y[chosen]).score(x[held], y[held]))


def on_xor(seed: int, **how: Any) -> float:
    """The share of the two features that is found."""
    known = xor_in_noise(seed, 3000)
    support = KHotSelector(2, random_state=seed, strategy=Gate(**how)).fit(known.x, known.y).get_support()
    return float(support[known.truth].mean())


def run(seeds: Iterable[int], steps: int = STEPS, names: Sequence[str] = ()) -> Iterator[Row]:
    """Every choice on both sets, seed by seed."""
    for seed in seeds:
        for name, how in variants().items():
            if not names or name in names:
                yield Row("digits", 10, name, seed, "accuracy", on_digits(seed, max_steps=steps, **how))
                yield Row("XOR, 18 noise", 2, name, seed, "found", on_xor(seed, max_steps=steps, **how))


def table(rows: Sequence[Row]) -> str:
    """A line for each choice: what it reaches, and the difference to the defaults, seed by seed."""
    lines = []
    for name in dict.fromkeys(row.method for row in rows):
        digits, xor = (values(rows, set=set, method=name) for set in PANELS)
        base = values(rows, set="digits", method=DEFAULT)
        by = [a - b for a, b in zip(digits, base, strict=False)]
        change = "–" if name == DEFAULT else _plus_minus(by, "+")
        lines.append([name, _plus_minus(digits), change, _plus_minus(xor) if xor else "–"])
    seeds = len({row.seed for row in rows})
    return (
        "<!-- Written by benchmarks/feature_selection_choices.py; do not edit. -->\n\n"
        + markdown_table(["", "digits, k = 10", "against the defaults", "XOR, 18 noise, found"], lines)
        + f"\n\nMeans over {seeds} seeds ± standard error, {STEPS} steps of training. Estimators that need the "
        + "probabilities of subsets have `Sampford`, the fastest design that knows them; `xie_ermon` wants scores that "
        + "are finite, and has `PlackettLuce`. Of the designs, `Pareto` and `PlackettLuce` are missing: their "
        + "inclusion probabilities have no gradient, which straight-through needs.\n"
    )


def _plus_minus(of: Sequence[float], sign: str = "") -> str:
    mean, error = mean_and_error(of)
    return f"{mean:{sign}.3f} ± {error:.3f}"


@styled
def figure(rows: Sequence[Row]) -> Figure:
    """Dots with standard errors, a panel for each set; the line is the defaults'."""
    names = list(dict.fromkeys(row.method for row in rows))
    picture, (grid,) = panels(1, len(PANELS), 0.3 * len(names) + 1, sharey=True)
    for axes, (name, label) in zip(grid, PANELS.items(), strict=True):
        for place, method in enumerate(names):
            if found := values(rows, set=name, method=method):
                mean, error = mean_and_error(found)
                colour = COLOURS["" if method == DEFAULT else method.split(":")[0]]
                axes.errorbar(mean, place, xerr=error, fmt="o", color=colour, ms=6, capsize=3)
                if method == DEFAULT:
                    axes.axvline(mean, color=colour, linewidth=1, linestyle=":", zorder=0)
        axes.set(xlabel=fill(label, 27), **({} if name == "digits" else {"xlim": (0, 1.05)}))
        axes.grid(True, axis="x")
    grid[0].set_yticks(np.arange(len(names)), names)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    return picture


def main() -> int:
    parser = common.parser(__doc__, "one seed, 40 steps: under a minute")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--redraw", action="store_true", help="only the table and the figure, from the CSV there is")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds must be ≥ 1; got {args.seeds}")
    torch.set_num_threads(1)
    places, is_interrupted = common.places(args), False
    results = places.results / "feature_selection_choices.csv"
    if not args.redraw:
        seeds, steps = (1, 40) if args.quick else (args.seeds, STEPS)
        measured: list[Row] = []
        is_interrupted = common.collect(run(range(seeds), steps), measured)
        if not measured:
            return 130
        common.write(results, to_csv(measured))
    rows = from_csv(results.read_text(encoding="utf-8"))
    common.write_table(places.tables / "feature-selection-choices.md", table(rows))
    common.write_picture(places.images / "feature-selection-choices.svg", figure(rows))
    common.show(args, rows, table(rows))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
