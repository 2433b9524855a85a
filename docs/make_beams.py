"""Draw a beam search with its inclusion probabilities: `python docs/make_beams.py` writes docs/img/beam-tree*.svg."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import write_picture
from benchmarks.style import BLUE, FAINT, INK, STYLE
from khot.search import Beams, Choice, beam_search, proportional, sampled

OUT = Path(__file__).parent / "img"
LETTERS, LENGTH, K = "abcd", 3, 3
SEED = 5


def searched() -> tuple[Beams, list[tuple[Tensor, list[int]]]]:
    """Search a small model; return the beams, and for each step π of all continuations and which were drawn."""
    table = (1.8 * torch.randn(400, 4, generator=torch.Generator().manual_seed(4))).log_softmax(-1)
    steps = []

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * 4 + tokens + 1
        return table[state], state

    def select(log_probs: Tensor, log_weights: Tensor, k: int, **options: torch.Generator | None) -> Choice:
        choice = sampled(log_probs, log_weights, k, **options)
        steps.append((proportional(log_weights[0].double(), k), choice.slots[0].tolist()))
        return choice

    vars(select)["is_random"] = True
    draw = torch.Generator().manual_seed(SEED)
    start = {"start": torch.tensor([0]), "length": LENGTH, "generator": draw}
    return beam_search(step, torch.tensor([-1]), K, select=partial(select), **start), steps


def beam_tree() -> Figure:
    """Each column shows the continuations of the beams drawn before; the drawn ones go on."""
    beams, steps = searched()
    fig, ax = plt.subplots(figsize=(10, 5.6), layout="constrained")
    before = [(0.0, "", 1.0)]  # height, letters and inclusion probability of each beam
    ax.text(-0.06, 0, "start", ha="right", va="center")
    for t, (pi, drawn) in enumerate(steps):
        heights = (torch.linspace(1, -1, len(pi)) * (1 if t else 0.7)).tolist()
        after = []
        for i, (height, p) in enumerate(zip(heights, pi.tolist(), strict=True)):
            parent, text, q = before[i // len(LETTERS)]
            is_drawn = i in drawn
            color = BLUE if is_drawn else FAINT
            ax.plot(
                [t + 0.17 * (t > 0), t + 0.72],
                [parent, height],
                color=color,
                linewidth=2.4 if is_drawn else 1,
                zorder=1 + is_drawn,
            )
            letter = LETTERS[i % len(LETTERS)]
            ax.text(t + 0.76, height, letter, color=INK if is_drawn else FAINT, va="center")
            ax.text(t + 0.84, height, f"π {p:.2f}", color=color, va="center", fontsize=10.5)
            if is_drawn:
                after.append((height, text + letter, q * p))
        before = after
        ax.text(t + 0.8, 1.17, f"step {t + 1}", ha="center")
    probs = zip(beams.tokens[0], beams.log_probs[0].exp().tolist(), strict=True)
    chance = {"".join(LETTERS[v] for v in y): p for y, p in probs}
    for height, text, q in before:
        ax.text(LENGTH + 0.22, height, f"{text}   Q = {q:.2f}   p/Q = {chance[text] / q:.2f}", va="center", fontsize=11)
    total = sum(chance[text] / q for _, text, q in before)
    ax.text(LENGTH + 0.22, -1.2, f"the weights p/Q sum to {total:.2f}", va="center", fontsize=11)
    ax.set(xlim=(-0.35, LENGTH + 1.6), ylim=(-1.3, 1.28))
    ax.axis("off")
    return fig


if __name__ == "__main__":
    mpl.use("svg")
    with mpl.rc_context(STYLE):
        write_picture(OUT / "beam-tree.svg", beam_tree())
