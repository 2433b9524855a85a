"""Defects that an audit of designs found, each by its own name."""

import pytest
import torch
from design_cases import EVERY, scores
from torch.distributions import Categorical, MixtureSameFamily

from khot.designs import Brewer, Pivotal

BITS = (torch.arange(32)[:, None] >> torch.arange(5) & 1).double()  # all subsets of five items


@EVERY
def test_values_of_another_size_had_a_probability_if_unvalidated(design):
    """A mixture over sizes summed to 2.5 with conditional Poisson, to 2.6 with Sampford, to 3 with Brewer."""
    if design is Pivotal:
        return
    theta = scores(3, 5).requires_grad_()
    d = design(logits=theta, k=torch.tensor([1.0, 2.0, 3.0]), validate_args=False)
    mixture = MixtureSameFamily(Categorical(torch.ones(3, dtype=torch.float64)), d, validate_args=False)
    assert abs(mixture.log_prob(BITS).exp().sum() - 1) < 1e-12
    each = d.log_prob(BITS[:, None])
    (gradient,) = torch.autograd.grad(each[each > -torch.inf].square().sum(), theta)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_values_of_another_size_are_not_too_many_for_brewer():
    d = Brewer(logits=scores(20), k=3, validate_args=False)
    assert d.log_prob(torch.ones(20, dtype=torch.float64)) == -torch.inf
    with pytest.raises(ValueError, match="support"):
        Brewer(logits=scores(20), k=3).log_prob(torch.ones(20, dtype=torch.float64))
