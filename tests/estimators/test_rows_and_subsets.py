"""Losses of rows, objectives of one batch, and estimates from distinct subsets."""

import functools

import pytest
import torch
from design_cases import generator, scores

from khot import estimators
from khot.designs import ConditionalPoisson, Pivotal, PlackettLuce

THETA = scores(5)
LOSSES = (
    estimators.score_function,
    estimators.rloo,
    estimators.taylor_control_variate,
    estimators.reinmax,
    functools.partial(estimators.distinct_subsets, num_samples=3),
)


def objective(x):
    return (x * torch.arange(1.0, 6.0, dtype=torch.float64)).sum(-1).sin() + x[..., 0] * x[..., 2]


@pytest.mark.parametrize("estimator", LOSSES)
def test_losses_of_rows_have_the_mean_and_the_gradient_of_their_mean(estimator):
    theta = scores(3, 5).requires_grad_()
    design = ConditionalPoisson(logits=theta, k=2)
    rows = estimator(design, objective, per_row=True, generator=generator())
    mean = estimator(design, objective, generator=generator())
    assert rows.shape == (3,)
    torch.testing.assert_close(rows.mean(), mean)
    (of_rows,) = torch.autograd.grad(rows.mean(), theta, retain_graph=True)
    (of_mean,) = torch.autograd.grad(mean, theta)
    torch.testing.assert_close(of_rows, of_mean)
    (first,) = torch.autograd.grad(rows[0], theta)
    assert (first[1:] == 0).all()
    assert (first[0] != 0).any()


def test_objectives_of_one_batch_see_one_batch_at_a_time():
    data, seen = scores(3, 5, seed=1), []

    def fn(x):
        seen.append(x.shape)
        return (x * data).sum(-1).square()

    design = ConditionalPoisson(logits=scores(3, 5), k=2)
    many = estimators.rloo(design, estimators.over_samples(fn), num_samples=4, generator=generator())
    assert seen == [(3, 5)] * 4
    once = estimators.rloo(design, lambda x: (x * data).sum(-1).square(), num_samples=4, generator=generator())
    torch.testing.assert_close(many, once)
    taylor = estimators.taylor_control_variate(design, estimators.over_samples(fn), generator=generator())
    assert taylor.isfinite()
    assert estimators.over_samples(objective, batch_dims=0)(torch.zeros(2, 3, 5, dtype=torch.float64)).shape == (2, 3)


def exact(design):
    """E[f] of a design by enumeration; differentiable."""
    x = design.enumerate_support()
    return (design.log_prob(x).exp() * objective(x)).sum(0)


@pytest.mark.parametrize("make", [ConditionalPoisson, PlackettLuce, functools.partial(Pivotal, order="given")])
def test_all_subsets_are_the_exact_expectation(make):
    theta = THETA.clone().requires_grad_()
    design = make(logits=theta, k=2)
    for count in (10, 99):
        loss = estimators.distinct_subsets(design, objective, num_samples=count, generator=generator())
        torch.testing.assert_close(loss, exact(design))
        expected = torch.autograd.grad(exact(design), theta)
        torch.testing.assert_close(torch.autograd.grad(loss, theta), expected)


@pytest.mark.parametrize("baseline", [0.0, 1.5])
def test_distinct_subsets_have_no_bias(baseline):
    """20,000 rows with one θ, four of ten subsets each: every coordinate within 4.5 standard errors."""
    theta = THETA.expand(20_000, 5).clone().requires_grad_()
    design = ConditionalPoisson(logits=theta, k=2)
    fn = functools.partial(estimators.distinct_subsets, num_samples=4, baseline=baseline, per_row=True)
    rows = fn(design, objective, generator=generator())
    (each,) = torch.autograd.grad(rows.sum(), theta)
    one = THETA.clone().requires_grad_()
    truth = exact(ConditionalPoisson(logits=one, k=2))
    (expected,) = torch.autograd.grad(truth, one)
    assert ((each.mean(0) - expected).abs() < 4.5 * each.std(0) / 20_000**0.5).all()
    assert abs(rows.mean() - truth) < 4.5 * rows.std() / 20_000**0.5
    wrong = each * 0.95
    assert ((wrong.mean(0) - expected).abs() > 4.5 * wrong.std(0) / 20_000**0.5).any(), "the check finds a bias of 5 %"
    other = estimators.score_function(design, objective, num_samples=4, per_row=True, generator=generator())
    (independent,) = torch.autograd.grad(other.sum(), theta)
    if baseline == 0:
        assert each.var(0).sum() < independent.var(0).sum(), "four distinct subsets say more than four with repeats"


def test_errors_of_distinct_subsets():
    with pytest.raises(ValueError, match="`num_samples` must be ≥ 1"):
        estimators.distinct_subsets(ConditionalPoisson(logits=THETA, k=2), objective, num_samples=0)
    with pytest.raises(NotImplementedError, match="At most 100000"):
        estimators.distinct_subsets(ConditionalPoisson(logits=scores(60), k=20), objective)


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.6])
def test_rebar_has_no_bias(scale):
    """20,000 rows with one θ: every coordinate within 4.5 standard errors of the exact gradient."""
    theta = THETA.expand(20_000, 5).clone().requires_grad_()
    design = PlackettLuce(logits=theta, k=2)
    rows = estimators.rebar(design, objective, scale=scale, per_row=True, generator=generator())
    (each,) = torch.autograd.grad(rows.sum(), theta)
    one = THETA.clone().requires_grad_()
    truth = exact(PlackettLuce(logits=one, k=2))
    (expected,) = torch.autograd.grad(truth, one)
    assert ((each.mean(0) - expected).abs() < 4.5 * each.std(0) / 20_000**0.5).all()
    assert abs(rows.mean() - truth) < 4.5 * rows.std() / 20_000**0.5


def test_rebar_has_less_variance_where_soft_samples_are_like_hard_ones():
    """For a smooth objective; for one that oscillates between hard samples it has more."""
    theta = THETA.expand(20_000, 5).clone().requires_grad_()
    design = PlackettLuce(logits=theta, k=2)

    def variance(fn, scale):
        rows = estimators.rebar(design, fn, scale=scale, per_row=True, generator=generator())
        (each,) = torch.autograd.grad(rows.sum(), theta)
        return float(each.var(0).sum())

    def smooth(x):
        return 3 + (x * scores(5, seed=9)).sum(-1).square()

    assert variance(smooth, 1.0) < 0.5 * variance(smooth, 0.0)
    assert variance(objective, 1.0) > variance(objective, 0.0)


def test_noise_given_a_ranking_has_the_law_of_the_noise():
    """z̃ has the ranking it was drawn for, and over all rankings the law of z, by its mean and variance."""
    from khot._math import noise
    from khot.estimators._control import _drawn_given
    from khot.ops import uniform

    theta = THETA.expand(40_000, 5)
    first, second = (noise.gumbel(theta.shape, theta, generator(s), uniform) for s in (1, 2))
    ranking = (theta + first).topk(3).indices
    z = _drawn_given(theta, ranking, second)
    assert torch.equal(z.topk(3).indices, ranking)
    error = (z - theta).std(0) / 200
    assert ((z - theta).mean(0) - 0.5772156649).abs().le(4.5 * error).all()
    assert ((z - theta).var(0) / (torch.pi**2 / 6) - 1).abs().max() < 0.06


def test_errors_of_rebar():
    with pytest.raises(TypeError, match="PlackettLuce"):
        estimators.rebar(ConditionalPoisson(logits=THETA, k=2), objective)
    with pytest.raises(ValueError, match="one k, 1 ≤ k < 5"):
        estimators.rebar(PlackettLuce(logits=THETA, k=5), objective)
    with pytest.raises(ValueError, match="must be differentiable"):
        estimators.rebar(PlackettLuce(logits=THETA, k=2), lambda x: (x > 0.5).double().sum(-1))
