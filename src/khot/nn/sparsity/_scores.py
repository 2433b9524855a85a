"""Scores: what makes an item worth keeping. A `Score` is a function of what is known of items to a number for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _check
from ...relaxations import hard_topk


class Known(NamedTuple):
    """Hold what a score may use; all by item, (count,)."""

    magnitude: Tensor
    """Σ|w| over the item's weights, differentiable."""
    theta: Tensor | None
    """The learned numbers θ, differentiable; None if the score learns none."""
    gradient: Tensor | None
    """Σ|∂loss/∂(w·mask)| of the last backward pass; None if the score does not ask for it, or before the first."""
    kept: Tensor | None
    """The mask in force, in [0, 1]; None at first, and if masks follow the weights without `every`."""
    progress: float
    """The share of all steps that are done, in [0, 1]."""


@dataclass(frozen=True)
class Score:
    """Say how items are scored: a function, and what it needs.

    Args:
        function: of `Known` to scores (count,), differentiable.
        start: if given, the score learns numbers θ, one per item: a function of the magnitudes, divided by their mean
            over their tensor, to where θ starts.
        is_relative: whether the temperature is in units of the mean score of what is kept, so that it suits weights of
            any size.
        needs_gradient: whether `Known.gradient` is wanted.
        resets: whether a weight that is kept anew starts at 0.

    Examples:
        >>> squared = khot.nn.sparsity.Score(lambda known: known.magnitude.square())
        >>> sparsifier = khot.nn.sparsity.Sparsifier(torch.nn.Linear(4, 4), 0.5, steps=0, score=squared)
        >>> sparsifier.density()
        0.5
    """

    function: Callable[[Known], Tensor]
    start: Callable[[Tensor], Tensor] | None = None
    is_relative: bool = True
    needs_gradient: bool = False
    resets: bool = False


def _magnitude(known: Known) -> Tensor:
    return known.magnitude


def _learned(known: Known) -> Tensor:
    assert known.theta is not None
    return known.theta


def _product(known: Known) -> Tensor:
    assert known.theta is not None
    return known.magnitude * known.theta


def _itself(magnitude: Tensor) -> Tensor:
    return magnitude


magnitude = Score(_magnitude)
"""|w|, as in Spartan: weights that are small are dropped, and weights that the loss wants back grow."""

learned = Score(_learned, start=_itself, is_relative=False)
"""Numbers θ that are learned beside the weights; they start at the magnitudes, in units of their mean in each
tensor."""

magnitude_times_learned = Score(_product, start=torch.ones_like)
"""|w|·θ, with θ that starts at 1."""


def gradient_growth(fraction: float = 0.3, *, until: float = 0.75) -> Score:
    """Return RigL's score: drop the smallest weights that are kept, and grow where the gradient is largest.

    At each update the share `fraction/2·(1 + cos(π·t))` of the kept items is dropped, with t from 0 to 1 at `until`.
    Use it with `mask=hard` and an `every` of some hundred steps. Reference: Evci et al., "Rigging the lottery" (2020).

    Args:
        fraction: the share that is replaced at first.
        until: from this share of all steps on, nothing is replaced.

    Examples:
        >>> rigl = dict(score=khot.nn.sparsity.gradient_growth(), mask=khot.nn.sparsity.hard, every=100)
        >>> khot.nn.sparsity.Sparsifier(torch.nn.Linear(8, 8), 0.25, steps=1000, **rigl).density()
        1.0
    """
    _check.fraction("fraction", fraction)
    _check.fraction("until", until)
    return Score(_Growth(float(fraction), float(until)), needs_gradient=True, resets=True)


@dataclass(frozen=True)
class _Growth:
    fraction: float
    until: float

    def __call__(self, known: Known) -> Tensor:
        size, gradient, kept = known.magnitude.detach(), known.gradient, known.kept
        if gradient is None or kept is None:
            return size
        t = min(1.0, known.progress / self.until) if self.until else 1.0
        share = self.fraction / 2 * (1 + torch.cos(torch.tensor(torch.pi * t)).item())
        count = int(kept.sum())
        stays = hard_topk(size.masked_fill(kept == 0, -torch.inf), count - int(share * count)) > 0
        above = gradient.max() + 1  # what stays is worth more than any gradient
        return torch.where(stays, above + size, gradient)
