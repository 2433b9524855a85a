"""Wrong estimators that the shipped check must find."""

import pytest
import torch
from torch import Tensor

from khot import estimators
from khot.designs import Design
from khot.testing import check_estimator

pytestmark = pytest.mark.slow


def surrogate(design: Design, x: Tensor, losses: Tensor, weight: Tensor) -> Tensor:
    extra = (weight.detach() * design.log_prob(x)).mean()
    return losses.mean() + extra - extra.detach()


def other_value(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    """The right gradient, of a sum instead of a mean."""
    loss = estimators.rloo(design, fn, num_samples=num_samples, generator=generator)
    return loss + (num_samples - 1) * loss.detach()


def no_gradient_of_fn(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    return estimators.rloo(design, lambda x: fn(x).detach(), num_samples=num_samples, generator=generator)


def right_for_two_samples(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    """Divides by N/2, where it should by N − 1."""
    x = design.sample((num_samples,), generator=generator)
    losses = fn(x)
    return surrogate(design, x, losses, (losses - losses.mean(0)) * num_samples / (num_samples / 2))


def mean_over_the_batch(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    """A baseline that is the mean over all rows, its own included."""
    x = design.sample((num_samples,), generator=generator)
    losses = fn(x)
    return surrogate(design, x, losses, losses - losses.mean())


def no_gradient(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    return fn(design.sample((num_samples,), generator=generator)).mean()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (other_value, "the value is not the mean loss"),
        (no_gradient_of_fn, "does not get its ordinary gradient"),
        (right_for_two_samples, "affine with 3 samples: relative bias"),
        (mean_over_the_batch, "affine in a batch of two: relative bias 0.25"),
        (no_gradient, "no gradient in the design's parameter"),
    ],
)
def test_the_check_fails(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_estimator(wrong)


def test_the_check_passes():
    check_estimator(estimators.rloo)
