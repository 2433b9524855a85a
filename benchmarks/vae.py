"""A k-subset variational autoencoder of digits, n = 32, k = 8, by each gradient estimator at an equal budget.

Writes results/vae.csv, docs/tables/study-vae.md and docs/img/study-vae.svg; under ten minutes, one thread. Needs
scikit-learn. Ctrl-C ends early, and writes what there is.
"""

from __future__ import annotations

import sys

from learning import Columns, knob, main, plus_minus, protocol, summary_table

from khot.bench import _vae
from khot.bench._vae import VaeRow

COLUMNS: Columns = {
    "negative bound": lambda r: plus_minus(r["mean"], r["error"], 2),
    "behind": lambda r: plus_minus(r["behind"], r["behind_error"], 2) if r["rank"] > 1 else "–",
    "best on": lambda r: f"{r['wins']}",
    "reconstruction": lambda r: f"{r['reconstruction']:.2f}",
    "KL": lambda r: f"{r['divergence']:.2f}",
    "settings": knob,
}


def table(rows: list[VaeRow]) -> str:
    """Estimators, the best first."""
    tuned = "the best by 200 images of neither set, on another seed, after half as many steps"
    return (
        summary_table("vae", _vae.summary(rows), COLUMNS, [])
        + "\n\n"
        + protocol(rows, _vae.FULL, tuned)
        + " Nats for each of 400 held-out images; less is better. All are coded by samples of conditional Poisson but "
        + "`relaxed` and `xie_ermon`, which get Plackett–Luce, the law that they relax.\n"
    )


if __name__ == "__main__":
    sys.exit(main("vae", __doc__ or "", _vae, VaeRow, table))
