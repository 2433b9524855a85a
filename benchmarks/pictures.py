"""Draw the pictures of the studies again, from the committed results: benchmarks/results → docs/img.

`python -m benchmarks.pictures` measures nothing. It writes the same bytes each time.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

from benchmarks import (
    architectures,
    attention_report,
    estimators_report,
    feature_selection_choices,
    learning_report,
    moe,
    moe_theory,
    ranks_sae,
    regression,
    sae_peers,
    sae_report,
    scaling,
    selection_report,
    sparsity,
    successive_halving,
    temperature,
    vae,
)
from benchmarks.common import COMMITTED, read_rows, write_picture


def _text(name: str) -> str:
    return (COMMITTED.results / f"{name}.csv").read_text(encoding="utf-8")


def _rows(name: str) -> list[Any]:
    return read_rows(COMMITTED.results / f"{name}.csv")


FIGURES: dict[str, Callable[[], Any]] = {
    "study-estimators": lambda: estimators_report.figure(_rows("estimators")),
    "study-regression": lambda: learning_report.figure(regression.STUDY, _rows("regression")),
    "study-vae": lambda: learning_report.figure(vae.STUDY, _rows("vae")),
    "moe-load": lambda: moe.figure(moe.from_csv(_text("moe_load"))),
    "moe-theory": lambda: moe_theory.figure(_rows("moe_theory")),
    "sae-density": lambda: sae_report.density(sae_report.read(_text("sae"))),
    "sae-l0": lambda: sae_report.loss_against_l0(sae_report.read(_text("sae"))),
    "sae-dead": lambda: sae_report.dead(sae_report.read(_text("sae"))),
    "sae-peers": lambda: sae_peers.figure(_rows("sae_peers")),
    "feature-selection": lambda: selection_report.figure(selection_report.from_csv(_text("feature_selection"))),
    "feature-selection-choices": lambda: feature_selection_choices.figure(
        selection_report.from_csv(_text("feature_selection_choices"))
    ),
    "halving-quality": lambda: successive_halving.draw(_rows("successive_halving"), *successive_halving.QUALITY),
    "halving-time": lambda: successive_halving.draw(_rows("successive_halving"), *successive_halving.TIME),
    "attention-row": lambda: attention_report.figure(_rows("attention_row")),
    "ranks-sae": lambda: ranks_sae.figure(_rows("ranks-sae")),
    "temperature-uses": lambda: temperature.figure(temperature.read()),
    "sparsity": lambda: sparsity.figure(
        [sparsity.Row(**vars(r)) for p in sparsity.PLANS for r in _rows(f"sparsity-{p}")]
    ),
    "sparsity-layers": lambda: sparsity.layers_figure(_rows("sparsity-layers")),
    "architectures": lambda: architectures.figure(*architectures.results(COMMITTED.results)),
    "scaling": lambda: scaling.plot(list(csv.DictReader(_text("scaling").splitlines()))),
}
"""What makes each picture, by its name in docs/img."""


def redraw() -> None:
    """Draw all of them."""
    for name, draw in FIGURES.items():
        write_picture(COMMITTED.images / f"{name}.svg", draw())


if __name__ == "__main__":
    redraw()
