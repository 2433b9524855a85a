"""Yardsticks: torch's own operators. They are no soft k-hots; they say what a pass, a selection or a sort costs."""

from __future__ import annotations

import torch
from torch import Tensor

from ._rival import Rival


def sigmoid(x: Tensor, k: float) -> Tensor:
    """One exponential and one division per score: the least that σ_k could cost."""
    return torch.sigmoid(x)


def softmax(x: Tensor, k: float) -> Tensor:
    """The one-hot counterpart."""
    return torch.softmax(x, -1)


def topk(x: Tensor, k: float) -> Tensor:
    """Hard top-k, values and indices; the gradient goes through the values."""
    return torch.topk(x, int(k), -1).values


def sort(x: Tensor, k: float) -> Tensor:
    """A full sort, values and indices; the gradient goes through the values."""
    return torch.sort(x, -1).values


REFERENCES: dict[str, Rival] = {
    "torch.sigmoid": Rival(fn=sigmoid, what="element by element, no constraint", kind="reference"),
    "torch.softmax": Rival(fn=softmax, what="sums to 1", kind="reference"),
    "torch.topk": Rival(fn=topk, what="hard: values and indices", kind="reference"),
    "torch.sort": Rival(fn=sort, what="hard: values and indices", kind="reference"),
}
