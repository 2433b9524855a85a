"""The table that drives the battery: every relaxation, with what it promises; and the scores of the robustness grid."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import khot
from khot._math import cdfs
from khot.relaxations import Relaxation
from khot.testing import score_vector


class Case(NamedTuple):
    fn: Relaxation
    promises: dict[str, Any]


RELAXATIONS = {
    "sigmoid_topk": Case(khot.sigmoid_topk, {"quantile": torch.logit}),
    "laplace_topk": Case(khot.laplace_topk, {"quantile": cdfs.LAPLACE.quantile}),
    "normal_topk": Case(khot.normal_topk, {"quantile": torch.special.ndtri}),
    "cauchy_topk": Case(khot.cauchy_topk, {"quantile": lambda p: torch.tan(torch.pi * (p - 0.5))}),
    "euclidean_topk": Case(khot.euclidean_topk, {"quantile": lambda p: p, "smooth": False}),
    "power_topk": Case(khot.power_topk, {"quantile": lambda p: p ** (1 / 3), "symmetric": False, "smooth": False}),
}


PROMISED = {torch.float32: 1e-6, torch.float64: 1e-9}
"""How far entries, and sums in units of max(k, 1), may be off in the docs' words, for the hardest rows."""


def scores(name: str, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A named vector of the robustness grid, the same at every call."""
    return score_vector(name, n).to(dtype)
