"""The designs that tests go through, and seeded inputs."""

import functools

import pytest
import torch
from torch import Tensor

from khot.designs import Brewer, ConditionalPoisson, Pareto, Pivotal, PlackettLuce, Sampford, Systematic

A6K3 = torch.tensor([0.07, 0.17, 0.41, 0.61, 0.83, 0.91], dtype=torch.float64)
GIVEN = functools.partial(Pivotal, order="given")
EXACT = {
    "pivotal": Pivotal,
    "pivotal, given order": GIVEN,
    "systematic": Systematic,
    "conditional Poisson": ConditionalPoisson,
    "Sampford": Sampford,
    "Brewer": Brewer,
}
ALL = {**EXACT, "Pareto": Pareto, "Plackett-Luce": PlackettLuce}
EVERY = pytest.mark.parametrize("design", ALL.values(), ids=ALL.keys())
EVERY_EXACT = pytest.mark.parametrize("design", EXACT.values(), ids=EXACT.keys())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))
