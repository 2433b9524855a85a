"""The tables and the picture of the study of certified attention (benchmarks/attention.py)."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.style import BLUE, FAINT, GREEN, INK, ORANGE, panels, styled
from khot.attention import known_head, multi_gap, single_gap, smallest_k, tail_mass
from khot.bench import markdown_table

EPSILONS = (0.1, 0.01)
WAYS = ("oracle", "multi-gap", "known head", "single gap", "balls", "boxes", "balls, half")
WRITTEN = "<!-- Written by benchmarks/attention.py; do not edit. -->\n\n"


@styled
def figure(weights: list[Any], epsilon: float = 0.1) -> Figure:
    """Return a row of attention with its head, and what each certificate knows of the rest."""
    scores = torch.tensor([w.score for w in weights], dtype=torch.float64)
    p, k = scores.softmax(-1), int(smallest_k(scores, epsilon))
    order = scores.argsort(descending=True)
    drawn, grid = panels(1, 2, 4.2, width_ratios=[3, 2])
    axis, other = grid[0]
    is_head = torch.zeros(len(p), dtype=torch.bool).scatter(0, order[:k], True)
    for keep, colour, label in ((True, BLUE, f"head: {k} keys"), (False, ORANGE, f"tail: {len(p) - k} keys")):
        at = (is_head == keep).nonzero().flatten()
        axis.vlines(at, 0, p[at], color=colour, linewidth=1.6, label=f"{label}, mass {float(p[at].sum()):.3f}")
    axis.set(
        xlabel="key (position of a character)",
        ylabel="attention",
        ylim=(0, 1.3 * float(p.max())),
        title="One row of attention",
    )
    axis.legend(loc="upper left")
    places = torch.arange(1, len(p) + 1)
    lines = {"tail mass": (tail_mass, BLUE), "multi-gap, 16": (multi_gap, GREEN)}
    lines |= {"known head": (known_head, ORANGE), "single gap": (single_gap, FAINT)}
    for name, (rule, colour) in lines.items():
        bound = rule(scores, None)
        found = (bound <= epsilon).nonzero().flatten()
        size = int(found[0]) + 1 if len(found) else len(p)
        other.plot(places, bound, color=colour, label=f"{name}: k = {size}")
    other.axhline(epsilon, color=INK, linewidth=1, linestyle=":")
    other.annotate(f"ε = {epsilon:g}", (0.01, epsilon), xycoords=("axes fraction", "data"), ha="left", va="bottom")
    other.set(yscale="log", ylim=(1e-3, 1.2), xlabel="k, keys in the head", title="What is certified of the tail")
    other.legend(loc="lower left")
    return drawn


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _cell(rows: list[Any], field: str, form: str = ".1f", **where: Any) -> str:
    for row in rows:
        if all(getattr(row, name) == value for name, value in where.items()):
            return format(getattr(row, field), form)
    return "–"


def ways_table(rows: list[Any], study: str) -> str:
    """Return the mean k of each rule, the keys that cells score, refusals, and the worst distance, by case and ε."""
    rows = [row for row in rows if row.study == study]
    heading = ["", "ε", "oracle k", "multi-gap k", "known-head k", "single-gap k (refused)", "balls: k, scored"]
    heading += ["boxes: scored", "refused at half", "largest distance/ε"]
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        n = next(row.n for row in rows if row.case == case)
        for epsilon in EPSILONS:
            at = {"case": case, "epsilon": epsilon}
            mine = [row for row in rows if row.case == case and row.epsilon == epsilon and row.way in WAYS]
            gap = (
                f"{_cell(rows, 'k', way='single gap', **at)} ({_cell(rows, 'refused', '.0%', way='single gap', **at)})"
            )
            balls = f"{_cell(rows, 'k', way='balls', **at)}, {_cell(rows, 'scored', way='balls', **at)}"
            rules = [_cell(rows, "k", way=way, **at) for way in ("oracle", "multi-gap", "known head")]
            rest = [_cell(rows, "scored", way="boxes", **at), _cell(rows, "refused", ".0%", way="balls, half", **at)]
            label = case if f"{n}" in case else f"{case}, n = {n}"
            lines.append([label, f"{epsilon:g}", *rules, gap, balls, *rest, f"{max(row.worst for row in mine):.4f}"])
    return markdown_table(heading, lines)


def tables(rows: list[Any]) -> dict[str, str]:
    """Return the tables by name."""
    made = {}
    sound = [row for row in rows if row.study == "soundness"]
    lines = [[row.way, f"{row.rows:,}", f"{row.violations:,}"] for row in sound]
    made["soundness"] = markdown_table(["certificate", "rows", "rows with a bound below the truth"], lines)
    for study in ("tightness", "models"):
        if any(row.study == study for row in rows):
            made[study] = ways_table(rows, study)
    lines = []
    for row in (row for row in rows if row.study == "gaussian" and row.way == "oracle"):
        known = _cell(rows, "k", ".0f", study="gaussian", way="known head", case=row.case, epsilon=row.epsilon, n=row.n)
        share = f"{float(known) / row.n:.3f}"
        lines.append([f"{row.n}", row.case, f"{row.epsilon:g}", f"{row.value:.3f}", f"{row.k / row.n:.3f}", share])
    made["gaussian"] = markdown_table(["n", "", "ε", "rule k/n", "measured k/n", "known head k/n"], lines)
    lines = []
    for case in dict.fromkeys(row.case for row in rows if row.study == "bounds"):
        entropy = _cell(rows, "value", ".0f", case=case, way="exp(entropy)")
        loose = [_cell(rows, "value", ".1f", study="bounds", case=case, way=w) for w in ("2Cτ", "diameter", "variance")]
        out = []
        for budget in (0.1, 0.01):
            at = {"case": case, "way": "output", "epsilon": budget}
            out.append(f"{_cell(rows, 'k', **at)} ({_cell(rows, 'worst', '.2f', **at)})")
        lines.append([case, entropy, *loose, *out])
    heading = ["", "exp(entropy)", "2Cτ", "τ · diameter", "variance", "k for .1 (error/budget)", "k for .01"]
    made["bounds"] = markdown_table(heading, lines)
    lines = []
    for row in (row for row in rows if row.study == "embeddings" and row.way == "mean"):
        low = _cell(rows, "value", ".5f", study="embeddings", way="lowest", epsilon=row.epsilon)
        lines.append([f"{row.epsilon:g}", f"{row.k:.0%}", f"{row.value:.5f}", low])
    if lines:
        made["embeddings"] = markdown_table(["ε", "keys used", "cosine, mean", "cosine, lowest"], lines)
    return {name: f"{WRITTEN}{text}\n" for name, text in made.items()}
