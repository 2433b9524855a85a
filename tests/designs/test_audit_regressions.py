"""Defects that an audit of designs found, each by its own name."""

import pytest
import torch
from design_cases import A6K3, EVERY, generator, scores
from torch.distributions import Categorical, MixtureSameFamily

import khot
from khot._math import high_entropy, subsets
from khot.designs import Brewer, ConditionalPoisson, Pareto, Pivotal, PlackettLuce, Sampford

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


@pytest.mark.parametrize("design", [PlackettLuce, Pareto])
def test_means_of_approximate_designs_had_no_gradient(design):
    theta = scores(2, 5).requires_grad_()
    k = torch.tensor([2, 3])
    assert torch.autograd.gradcheck(lambda t: design(logits=t, k=k).mean, (theta,))
    assert torch.autograd.gradgradcheck(lambda t: design(logits=t, k=k).mean, (theta,))
    (expected,) = torch.autograd.grad(design(logits=theta, k=k).mean[:, 0].sum(), theta)
    for transform in (torch.func.grad, torch.func.jacfwd):
        got = transform(lambda t: design(logits=t, k=k).mean[:, 0].sum())(theta.detach())
        torch.testing.assert_close(got, expected)
    x = design(logits=theta, k=k).sample((4,), generator=generator())
    assert torch.func.grad(lambda t: design(logits=t, k=k).log_prob(x).sum())(theta.detach()).isfinite().all()
    certain = torch.tensor([torch.inf, 0.3, -torch.inf, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(design(logits=certain, k=2).mean[1], certain)
    assert gradient.isfinite().all()
    assert gradient[0] == gradient[2] == 0
    assert abs(gradient.sum()) < 1e-12
    weights = torch.tensor([0.0, 0.6, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(design(weights, 2).mean[1], weights)[0].isfinite().all()


@EVERY
@pytest.mark.parametrize("k", [0, 5])
def test_log_probs_without_a_choice_had_no_gradient(design, k):
    if design is Pivotal:
        return
    theta = scores(5).requires_grad_()
    d = design(logits=theta, k=k)
    for value in (d.log_prob(torch.full((5,), k / 5)), d.mean.sum()):
        (gradient,) = torch.autograd.grad(value, theta)
        assert gradient.abs().max() < 1e-12


def test_constants_and_joint_probabilities_by_parts(monkeypatch):
    """Sampling 1e5 rows of 8 took 2.5 GB, and the pairs of 64 rows of 2000 took 12 GB."""
    p, k = khot.sigmoid_topk(scores(40, 6), 3), torch.full((40,), 3.0, dtype=torch.float64)
    designs = (Sampford(p, 3), ConditionalPoisson(p, 3), Pareto(p, 3))
    whole = [high_entropy.pareto_constants(p.logit(), k), *(d.joint_probs() for d in designs)]
    monkeypatch.setattr(high_entropy, "AT_ONCE", 500)
    monkeypatch.setattr(subsets, "MOST_PAIRS", 100)
    parts = [high_entropy.pareto_constants(p.logit(), k), *(d.joint_probs() for d in designs)]
    for each, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("design", [Sampford, Pareto])
def test_variances_of_sums_took_all_pairs(design):
    for d in (design(A6K3), design(torch.tensor([1.0, 0.0, 0.4, 0.6, 0.3, 0.7], dtype=torch.float64))):
        x = d.enumerate_support()
        p, a = d.log_prob(x).exp(), scores(2, 6)
        sums = x @ a.mT
        expected = p @ sums.square() - (p @ sums).square()
        torch.testing.assert_close(d.variance_of_sum(a), expected, rtol=1e-12, atol=1e-14)
    large = design(logits=scores(20_000), k=300)
    weights = scores(20_000, seed=1)
    sums = large.sample((400,), generator=generator()) @ weights
    assert 0.7 < float(large.variance_of_sum(weights) / sums.var()) < 1.4  # 5.6 standard errors are 0.4


@EVERY
def test_more_subsets_than_an_integer_can_print(design):
    """10^6018 of them raised a ValueError about digits, which no one catches as "not offered"."""
    d = design(logits=torch.zeros(20_000), k=10_000)
    with pytest.raises(NotImplementedError, match=r"20000 items have about 10\^6018\.\d of size 10000"):
        d.enumerate_support()


def test_half_precision_sums_that_hide_the_size():
    """Of rows of 50000 in bfloat16, one in thirty drew 4999 or 5001 instead of 5000."""
    p = khot.sigmoid_topk(scores(50_000), 5000).to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"`k` must be given if rounding hides .* may be off by 0\.\d+ in torch.bfloat16"
    ):
        Pivotal(p)
    assert Pivotal(p, 5000).sample(generator=generator()).double().sum() == 5000
    assert Pivotal(khot.sigmoid_topk(scores(64), 8).to(torch.bfloat16)).k == 8


def test_natural_parameters_had_another_gauge_than_their_gradient():
    theta = scores(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ConditionalPoisson(khot.sigmoid_topk(t, 2), 2).logits, (theta,))
    certain = torch.tensor([1.0, 0.0, 0.3, 0.7], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ConditionalPoisson(certain).logits[2], certain)
    assert gradient.isfinite().all()


def test_straight_through_distributions_have_antithetic_pairs():
    design = khot.designs.KHotStraightThrough(A6K3)
    y = design.rsample((10,), generator=generator(), antithetic=True)
    assert torch.equal(y, design.sample((10,), generator=generator(), antithetic=True))
