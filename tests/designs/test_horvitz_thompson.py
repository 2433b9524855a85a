"""Totals from samples."""

import pytest
import torch
from design_cases import A6K3, GIVEN, scores

import khot
from khot.designs import Brewer, ConditionalPoisson, Sampford, Systematic


def test_horvitz_thompson_has_no_bias_and_the_variance_it_says():
    y = scores(6).square() + 1
    for design in (GIVEN(A6K3), Systematic(A6K3), ConditionalPoisson(A6K3), Sampford(A6K3), Brewer(A6K3)):
        x = design.enumerate_support()
        p = design.log_prob(x).exp()
        estimate = khot.horvitz_thompson(y, x, design.mean)
        torch.testing.assert_close((p * estimate).sum(), y.sum())
        variance = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs())
        torch.testing.assert_close(variance, (p * (estimate - y.sum()).square()).sum())
        torch.testing.assert_close(variance, design.variance_of_sum(y / design.mean))
    design = Sampford(A6K3)
    x = design.enumerate_support()
    each = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs(), sample=x)
    variance = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs())
    torch.testing.assert_close((design.log_prob(x).exp() * each).sum(), variance)


def test_horvitz_thompson_does_not_read_what_was_not_drawn():
    x, p = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.0, 0.5])
    assert khot.horvitz_thompson(torch.tensor([1.0, torch.nan, 2.0]), x, p) == 6.0
    with pytest.raises(ValueError, match="must broadcast"):
        khot.horvitz_thompson(torch.ones(2), x, p)
    with pytest.raises(TypeError, match="`sample` must be a real"):
        khot.horvitz_thompson(torch.ones(3), [1, 0, 1], p)  # type: ignore[arg-type]
