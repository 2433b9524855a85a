"""The results of sae.py as a file, a table and pictures."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import common
from benchmarks.style import BLUE, GREEN, GREY, ORANGE, WIDTH, styled
from khot.bench import markdown_table

FIGURES = ("fvu", "dead", "mmcs", "l0")
EDGES = np.arange(-6, 0.01, 0.25)
"""log10 of the densities between which `SparseAutoencoderMetrics` counts latents."""
PLAIN = "topk, hard"
"""What the others are compared with: a plain TopK autoencoder."""
STYLES = {
    "topk": (BLUE, "-", "o"),
    "batch": (GREEN, "--", "s"),
    "feature": (ORANGE, ":", "^"),
    "ReLU + L1": (GREY, "-.", "x"),
}


class Row(NamedTuple):
    """One measurement."""

    what: str
    """"result", "curve" (of training) or "sweep" (over k)."""
    name: str
    seed: int
    k: float
    step: int
    figures: dict[str, float]
    histogram: tuple[int, ...] = ()
    """Latents by log10 of their density."""


def write_rows(rows: list[Row]) -> str:
    """As CSV."""
    columns = ["what", "name", "seed", "k", "step", *FIGURES, "histogram"]
    return common.to_csv([record(row) for row in rows], columns)


def record(row: Row) -> dict[str, object]:
    """Return a row as one line of the CSV."""
    figures = {name: f"{value:.6g}" for name, value in row.figures.items()}
    fixed = {"what": row.what, "name": row.name, "seed": row.seed, "k": row.k, "step": row.step}
    return {**fixed, **figures, "histogram": " ".join(map(str, row.histogram))}


def read(text: str) -> list[Row]:
    """From CSV."""
    rows = []
    for line in csv.DictReader(text.splitlines()):
        figures = {f: float(line[f]) for f in FIGURES if line[f]}
        histogram = tuple(map(int, line["histogram"].split()))
        rows.append(
            Row(line["what"], line["name"], int(line["seed"]), float(line["k"]), int(line["step"]), figures, histogram)
        )
    return rows


def of(rows: list[Row], name: str, figure: str) -> np.ndarray:
    """By seed."""
    return np.array([row.figures[figure] for row in rows if row.what == "result" and row.name == name])


def table(rows: list[Row]) -> str:
    """Means ± standard errors, and how each compares with plain TopK, seed by seed."""
    names = list(dict.fromkeys(row.name for row in rows if row.what == "result"))
    lines = []
    for name in names:
        cells = [_mean(of(rows, name, figure), scale) for figure, scale in zip(FIGURES, (1, 100, 1, 1), strict=True)]
        lines.append([name, *cells, _verdict(rows, name, "fvu", -1), _verdict(rows, name, "mmcs", 1)])
    seeds = len(of(rows, PLAIN, "fvu"))
    return (
        "<!-- Written by benchmarks/sae.py; do not edit. -->\n\n"
        + markdown_table(["", "FVU", "dead, %", "MMCS", "L0", "FVU against plain", "MMCS against plain"], lines)
        + f"\n\nMeans over {seeds} seeds ± standard error, on tokens not trained on. MMCS: the mean over true "
        "directions of the greatest cosine with a latent. Plain is `topk, hard`; the last columns are differences to "
        "it, seed by seed, “same” if within two standard errors.\n"
    )


def _mean(values: np.ndarray, scale: float) -> str:
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{scale * values.mean():.3g} ± {scale * error:.1g}" if error else f"{scale * values.mean():.3g}"


def _verdict(rows: list[Row], name: str, figure: str, sign: int) -> str:
    difference = of(rows, name, figure) - of(rows, PLAIN, figure)
    if name == PLAIN or len(difference) < 2:
        return "–"
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    if abs(difference.mean()) <= 2 * error:
        return "same"
    return f"{'better' if sign * difference.mean() > 0 else 'worse'}, {difference.mean():+.2g}"


def write_figures(rows: list[Row], folder: Path) -> None:
    """The three pictures."""
    for name, draw in (("density", density), ("l0", loss_against_l0), ("dead", dead)):
        common.write_picture(folder / f"sae-{name}.svg", draw(rows))


@styled
def density(rows: list[Row]) -> Figure:
    """Histograms of the latents' densities, straight-through, the first seed."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind, (color, dash, _) in list(STYLES.items())[:3]:
        found = [r for r in rows if (r.what, r.name, r.seed) == ("result", f"{kind}, straight-through", 0)]
        if found:
            axes.stairs(found[0].histogram, EDGES.tolist(), color=color, linestyle=dash, linewidth=2, label=kind)
    axes.set(xlabel="log10 of the fraction of tokens a latent is active for", ylabel="latents")
    axes.legend()
    return figure


@styled
def loss_against_l0(rows: list[Row]) -> Figure:
    """FVU against the active latents a token, k from 2 to 16."""
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    for kind, (color, dash, marker) in STYLES.items():
        found = [r for r in rows if r.what == "sweep" and r.name.startswith(kind)]
        points = sorted((r.figures["l0"], r.figures["fvu"]) for r in found)
        axes.plot(*zip(*points, strict=True), color=color, linestyle=dash, marker=marker, label=kind)
    axes.set(xscale="log", yscale="log", xlabel="active latents a token (L0)", ylabel="FVU")
    axes.legend()
    return figure


@styled
def dead(rows: list[Row]) -> Figure:
    """The fraction of dead latents over training, the mean of the seeds."""
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    selectors = ("hard", "straight-through", "soft", "sampled")
    panels = figure.subplots(1, len(selectors), sharey=True)
    for axes, selector in zip(panels, selectors, strict=True):
        for kind, (color, dash, _) in list(STYLES.items())[:3]:
            found = [r for r in rows if r.what == "curve" and r.name == f"{kind}, {selector}"]
            steps = sorted({r.step for r in found})
            means = [np.mean([r.figures["dead"] for r in found if r.step == step]) for step in steps]
            axes.plot(steps, 100 * np.array(means), color=color, linestyle=dash, label=kind)
        axes.set(title=selector, xlabel="step")
    panels[0].set_ylabel("dead latents, %")
    panels[0].legend()
    return figure
