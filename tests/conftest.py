import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; threads of theirs would wait for one another
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def validated_distributions():
    """torch.compile turns validation off for the whole process, and other tests compile."""
    torch.distributions.Distribution.set_default_validate_args(True)
