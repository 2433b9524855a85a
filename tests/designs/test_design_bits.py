"""The same seed gives the same bits, from one version of khot to the next."""

import functools
import hashlib

import pytest
import torch
from design_cases import A6K3, ALL, generator

import khot
from khot.designs import Pivotal

SHARED = functools.partial(Pivotal, order="shared")
PROBS = {
    "six": A6K3,
    "certain": torch.tensor([1.0, 0.0, 0.3, 0.7, 0.5, 0.5, 0.0], dtype=torch.float64),
    "few of many": torch.full((100,), 0.02, dtype=torch.float64),
    "float32 rows": torch.tensor([[0.25, 0.5, 0.75, 0.5], [0.125, 0.875, 0.375, 0.625]]),
}
DIGESTS = {
    "pivotal": "2fa9801b690ca422",
    "pivotal, given order": "154c41d1165dade6",
    "systematic": "894eb1384ef6d6c9",
    "conditional Poisson": "de00a7dda1d48847",
    "Sampford": "d7d65c2a40bae31d",
    "Brewer": "5d1887c595926827",
    "Pareto": "b0e13e5af7497339",
    "Plackett-Luce": "4c3b1b4707bafb0c",
    "shared order": "6d03cb461c6f5023",
}


def digest(design: object) -> str:
    """A hash of 40 samples for each vector of probabilities."""
    bits = hashlib.sha256()
    for probs in PROBS.values():
        bits.update(design(probs).sample((40,), generator=generator(7)).to(torch.uint8).numpy().tobytes())
    return bits.hexdigest()[:16]


@pytest.mark.parametrize("name", DIGESTS)
def test_samples_have_the_bits_of_earlier_versions(name):
    assert digest({**ALL, "shared order": SHARED}[name]) == DIGESTS[name]


def test_relaxed_samples_have_the_numbers_of_earlier_versions():
    y = khot.sample_relaxed_khot(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2, temperature=0.5, generator=generator())
    torch.testing.assert_close(y, torch.tensor([1.0000, 0.7486, 0.2046, 0.0467]), atol=1e-4, rtol=0)
