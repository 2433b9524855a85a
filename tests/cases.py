"""The table that drives the battery: every relaxation, with what it promises; and the scores of the robustness grid."""

from typing import Any, NamedTuple

import grid
import torch
from torch import Tensor

import khot
from khot.testing._laws import Relaxation


class Case(NamedTuple):
    fn: Relaxation
    promises: dict[str, Any]


RELAXATIONS = {
    "sigmoid_topk": Case(khot.sigmoid_topk, {"quantile": torch.logit}),
}


def scores(name: str, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A named vector of the robustness grid, the same at every call."""
    return grid.scores(name, n, torch.Generator().manual_seed(0)).to(dtype)
