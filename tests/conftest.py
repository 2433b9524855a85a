import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def validated_distributions():
    """torch.compile turns validation off for the whole process, and other tests compile."""
    torch.distributions.Distribution.set_default_validate_args(True)
