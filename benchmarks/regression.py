"""Subset selection in linear regression, n = 50, k = 5, by each gradient estimator at an equal budget.

Writes results/regression.csv, docs/tables/study-regression.md and docs/img/study-regression.svg; a few minutes, one
thread. Ctrl-C ends early, and writes what there is.
"""

from __future__ import annotations

import sys

from learning import Columns, knob, main, plus_minus, protocol, summary_table

from khot.bench import _regression
from khot.bench._curves import mean_and_error
from khot.bench._regression import RegressionRow

COLUMNS: Columns = {
    "test loss": lambda r: plus_minus(r["mean"], r["error"], 3),
    "behind": lambda r: plus_minus(r["behind"], r["behind_error"], 3) if r["rank"] > 1 else "–",
    "best on": lambda r: f"{r['wins']}",
    "true features": lambda r: f"{r['recovery']:.1%}",
    "objective": lambda r: f"{r['train']:.3f}",
    "objective, samples": lambda r: f"{r['expected']:.3f}",
    "settings": knob,
}


def table(rows: list[RegressionRow]) -> str:
    """Estimators, the best first; then the true features and greedy selection."""
    below = []
    for name, of in _regression.references(sorted({row.seed for row in rows})).items():
        error = plus_minus(*mean_and_error(of["test"].tolist()), 3)
        found, objective = float(of["recovery"].mean()), float(of["train"].mean())
        below.append([name, error, "–", "–", f"{found:.1%}", f"{objective:.3f}", "–", "–"])
    tuned = "the best by the training objective on ten other seeds"
    return (
        summary_table("regression", _regression.summary(rows), COLUMNS, below)
        + "\n\n"
        + protocol(rows, _regression.FULL, tuned)
        + " Test loss, true features and objective are those of the five greatest scores; the noise alone has a test "
        + "loss of 1. “Objective, samples” is its mean over samples of the design. Greedy forward selection evaluates "
        + "the same objective 240 times in all.\n"
    )


if __name__ == "__main__":
    sys.exit(main("regression", __doc__ or "", _regression, RegressionRow, table))
