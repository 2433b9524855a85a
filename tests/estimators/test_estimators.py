"""Gradient estimators: bias by enumeration, the theorem of straight-through, and controls that must fail."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
from khot import estimators
from khot.designs import Brewer, ConditionalPoisson, Design, Pivotal, PlackettLuce, Sampford, Systematic
from khot.estimators import takes_objective
from khot.estimators._loss import others
from khot.testing import check_estimator
from khot.testing._estimator import exact_gradient, objectives

pytestmark = pytest.mark.slow

P = torch.tensor(
    [0.2, 0.5, 0.45, 0.8, 0.35, 0.7], dtype=torch.float64
)  # no partial sum is whole, where laws have kinks
THETA = torch.tensor([0.9, -0.4, 0.3, -1.1, 0.2], dtype=torch.float64)
DESIGNS = {
    "conditional Poisson": ConditionalPoisson(logits=THETA, k=2),
    "conditional Poisson, probs": ConditionalPoisson(P),
    "pivotal": Pivotal(P, order="given"),
    "pivotal, fixed order": Pivotal(P).fix_order(torch.Generator().manual_seed(0)),
    "pivotal, logits": Pivotal(logits=THETA, k=2, order="given"),
    "systematic": Systematic(logits=THETA, k=2),
    "Sampford": Sampford(P),
    "Brewer": Brewer(logits=THETA, k=2),
}
EVERY = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())
UNBIASED = (estimators.score_function, estimators.rloo, estimators.taylor_control_variate)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@EVERY
@pytest.mark.parametrize("estimator", UNBIASED)
def test_unbiased_estimators_are(design, estimator):
    check_estimator(estimator, design=design)


@EVERY
def test_straight_through_is_exact_for_affine_objectives(design):
    check_estimator(estimators.straight_through_sample, design=design, degree=1)


@EVERY
def test_second_order_straight_through_is_exact_for_quadratic_ones(design):
    check_estimator(estimators.reinmax, design=design, degree=2)


def test_baselines_leave_no_bias():
    for options in (
        {"baseline": 1.7},
        {"baseline": torch.tensor(-0.3)},
        {"coordinate_baseline": torch.randn(5, dtype=torch.float64, generator=generator())},
    ):
        for count in (1, 2):
            check_estimator(functools.partial(estimators.score_function, **options), num_samples=count)
    per_coordinate = torch.randn(6, dtype=torch.float64, generator=generator())
    check_estimator(
        functools.partial(estimators.score_function, coordinate_baseline=per_coordinate), design=DESIGNS["pivotal"]
    )
    check_estimator(functools.partial(estimators.taylor_control_variate, baseline=0.4), num_samples=1)


def test_straight_through_has_no_variance_for_affine_objectives():
    theta = THETA.clone().requires_grad_()
    for design in (ConditionalPoisson(logits=theta, k=2), Pivotal(logits=theta, k=2), Sampford(logits=theta, k=2)):
        x = estimators.straight_through_sample(design, (20,), generator=generator())
        slope = torch.arange(5.0, dtype=torch.float64)
        each = torch.stack([torch.autograd.grad((row * slope).sum(), theta, retain_graph=True)[0] for row in x])
        assert each.var(0).max() < 1e-28


def test_bias_of_straight_through_on_quadratics_is_half_the_slope_of_the_covariance():
    """E ĝ − ∇E f = −½ Σ Q_ij ∇C_ij, for a zero-diagonal Q."""
    square = torch.randn(5, 5, dtype=torch.float64, generator=generator())
    square = square + square.mT
    square.fill_diagonal_(0)

    def fn(x: Tensor) -> Tensor:
        return ((x @ square) * x).sum(-1) / 2

    for make in (ConditionalPoisson, functools.partial(Pivotal, order="given"), Sampford, Brewer):
        theta = THETA.clone().requires_grad_()
        design = make(logits=theta, k=2)
        x = design.enumerate_support()
        p = design.log_prob(x).exp().detach()
        (expected,) = torch.autograd.grad((p[:, None] * (x @ square) * design.mean).sum(), theta)
        (slope,) = torch.autograd.grad((square * design.covariance_matrix).sum(), theta)
        torch.testing.assert_close(expected - exact_gradient(design, fn, theta), -slope / 2, atol=1e-12, rtol=0)


@EVERY
def test_straight_through_is_of_first_order(design):
    """For f = g(h·x), the relative bias falls as h: the objective's second-order part is that much smaller."""
    if design.parameter is design.probs:
        return
    network = objectives(len(design.probs))["tanh network"][1]
    relative = []
    for h in (0.1, 0.01):
        theta = design.parameter.detach().clone().requires_grad_()
        moved = design.with_parameter(theta)
        x = moved.enumerate_support()

        def fn(x: Tensor, h: float = h) -> Tensor:
            return network(h * x)

        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(leaf).sum(), leaf)
        p = moved.log_prob(x).exp().detach()
        (expected,) = torch.autograd.grad((p[:, None] * slope * moved.mean).sum(), theta)
        exact = exact_gradient(moved, fn, theta)
        relative.append(float((expected - exact).norm() / exact.norm()))
    order = math.log10(relative[0] / relative[1])
    assert order > 0.8, relative


# Controls ------------------------------------------------------------------------------------------------------------


def selfish(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    """A baseline that includes its own sample."""
    x = design.sample((num_samples,), generator=generator)
    losses = fn(x)
    surrogate = ((losses - losses.mean(0)) * design.log_prob(x)).mean()
    return losses.mean() + surrogate - surrogate.detach()


def gumbel_scored_as_poisson(design: Design, fn, *, num_samples: int, generator: torch.Generator) -> Tensor:
    """Samples of one law, scores of another."""
    x = PlackettLuce(logits=design.logits, k=design.k).sample((num_samples,), generator=generator)
    losses = fn(x)
    surrogate = ((losses - others(losses, False)) * design.log_prob(x)).mean()
    return losses.mean() + surrogate - surrogate.detach()


def test_the_check_finds_a_baseline_that_includes_its_own_sample():
    with pytest.raises(AssertionError, match=r"affine: relative bias 0\.5\n"):
        check_estimator(selfish)


def test_the_check_finds_samples_that_are_scored_with_another_law():
    with pytest.raises(AssertionError, match="affine: relative bias"):
        check_estimator(gumbel_scored_as_poisson)


@pytest.mark.parametrize("biased", [estimators.imle, estimators.relaxed, estimators.stochastic_times_smooth])
def test_the_check_finds_biased_samples(biased):
    with pytest.raises(AssertionError, match="affine"):
        check_estimator(biased, degree=1)


def test_straight_through_of_gumbel_samples_with_other_marginals_is_biased_at_first_order():
    def mixed(design: Design, sample_shape, *, generator: torch.Generator) -> Tensor:
        hard = PlackettLuce(logits=design.logits, k=design.k).sample(sample_shape, generator=generator)
        return khot.straight_through(hard, design.mean)

    check_estimator(mixed, degree=1)  # affine: the sample does not matter
    with pytest.raises(AssertionError, match="quadratic"):
        check_estimator(mixed, degree=2)


# Their interface -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [*UNBIASED, estimators.reinmax])
def test_loss_estimators_in_a_batch(estimator):
    """The value is the mean loss, rows do not mix, and what else the objective depends on has its own gradient."""
    theta = torch.randn(3, 6, dtype=torch.float64, generator=generator()).requires_grad_()
    weight = torch.randn(6, dtype=torch.float64, generator=generator(1)).requires_grad_()
    design = ConditionalPoisson(logits=theta, k=2)

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    loss = estimator(design, fn, num_samples=4, generator=generator())
    assert loss.shape == ()
    x = design.sample((4,), generator=generator())
    torch.testing.assert_close(loss, fn(x).mean())
    gradient, own = torch.autograd.grad(loss, (theta, weight))
    (expected,) = torch.autograd.grad(fn(x).mean(), weight)
    torch.testing.assert_close(own, expected)
    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    loss = estimator(design, lambda x: fn(x) * mask, num_samples=4, generator=generator())
    (masked,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(masked[[0, 2]], gradient[[0, 2]])
    assert (masked[1] == 0).all()


def test_black_boxes_need_no_derivative():
    theta = THETA.clone().requires_grad_()
    design = ConditionalPoisson(logits=theta, k=2)

    def fn(x: Tensor) -> Tensor:
        return torch.as_tensor((x.numpy() @ THETA.detach().numpy()).round())

    for estimator in (estimators.score_function, estimators.rloo):
        estimator(design, fn, num_samples=4, generator=generator()).backward()
    assert theta.grad is not None
    assert theta.grad.abs().sum() > 0


def test_more_samples_less_variance():
    _, fn = objectives(5)["tanh network"]
    theta = THETA.expand(300, 5).clone().requires_grad_()
    design = ConditionalPoisson(logits=theta, k=2)

    def spread(count: int) -> float:
        loss = estimators.rloo(design, fn, num_samples=count, generator=generator()) * len(theta)
        return float(torch.autograd.grad(loss, theta)[0].var(0).sum())

    assert spread(16) < spread(2) / 8


def test_minimum_variance_baseline_is_the_best():
    _, fn = objectives(5)["quadratic"]
    design = ConditionalPoisson(logits=THETA, k=2)
    x = design.enumerate_support()
    p = design.log_prob(x).exp()
    score = x - design.mean

    def variance(b: Tensor) -> Tensor:
        estimate = (fn(x)[:, None] - b) * score
        return (p[:, None] * estimate.square()).sum(0) - (p[:, None] * estimate).sum(0).square()

    samples = design.sample((200_000,), generator=generator())
    best = estimators.minimum_variance_baseline(design, samples, fn(samples))
    for shift in (-0.3, 0.3):
        assert (variance(best + shift) > variance(best)).all()
    exact = (p[:, None] * score.square() * fn(x)[:, None]).sum(0) / (p[:, None] * score.square()).sum(0)
    torch.testing.assert_close(best, exact, atol=0.05, rtol=0)


def test_antithetic_samples_leave_no_bias():
    slope = torch.randn(8, dtype=torch.float64, generator=generator())
    theta = torch.randn(8, dtype=torch.float64, generator=generator(1))
    rows = theta.expand(20_000, 8).clone().requires_grad_()
    design = Pivotal(logits=rows, k=3, order="given")

    def fn(x: Tensor) -> Tensor:
        return (x @ slope).square()

    one = theta.clone().requires_grad_()
    exact = exact_gradient(Pivotal(logits=one, k=3, order="given"), fn, one)
    for estimator in (estimators.score_function, estimators.rloo, estimators.taylor_control_variate):
        loss = estimator(design, fn, num_samples=4, antithetic=True, generator=generator()) * len(rows)
        (each,) = torch.autograd.grad(loss, rows)
        z = (each.mean(0) - exact) / (each.std(0) / len(rows) ** 0.5)
        assert z.abs().max() < 4.5, estimator
    with pytest.raises(ValueError, match="`num_samples` must be ≥ 4"):
        estimators.rloo(design, fn, num_samples=2, antithetic=True)
    x = estimators.straight_through_sample(design, (6,), antithetic=True, generator=generator())
    assert (x.sum(-1) == 3).all()


def test_bad_calls():
    design = ConditionalPoisson(logits=THETA, k=2)
    with pytest.raises(ValueError, match="`num_samples` must be ≥ 2; got 1"):
        estimators.rloo(design, lambda x: x.sum(-1), num_samples=1)
    with pytest.raises(ValueError, match=r"one loss for each sample, the shape \(4,\).*got \(\)"):
        estimators.rloo(design, lambda x: x.sum(), num_samples=4)
    with pytest.raises(TypeError, match="`design` must be a ConditionalPoisson; got Sampford"):
        estimators.simple(Sampford(P))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`step` must be > 0"):
        estimators.imle(design, step=0.0)
    with pytest.raises(NotImplementedError, match="fix_order"):
        estimators.rloo(Pivotal(P), lambda x: x.sum(-1))
    with pytest.raises(ValueError, match="`baseline` must broadcast"):
        estimators.score_function(design, lambda x: x.sum(-1), baseline=torch.zeros(3))


def test_relaxed_and_xie_ermon_samples():
    design = PlackettLuce(logits=THETA, k=2)
    soft = estimators.relaxed(design, (50,), temperature=0.5, generator=generator())
    torch.testing.assert_close(soft.sum(-1), torch.full((50,), 2.0, dtype=torch.float64))
    hard = estimators.relaxed(design, (50,), hard=True, generator=generator())
    assert ((hard == 0) | (hard == 1)).all()
    other = estimators.xie_ermon(design, (50,), temperature=0.5, generator=generator())
    torch.testing.assert_close(other.sum(-1), torch.full((50,), 2.0, dtype=torch.float64))
    sharp = estimators.xie_ermon(design, (50,), temperature=1e-3, generator=generator())
    torch.testing.assert_close(sharp.round(), hard, atol=1e-6, rtol=0)


def test_xie_ermon_of_certain_items_was_nan():
    probs = torch.tensor([[1.0, 0.0, 0.3, 0.7], [0.2, 0.5, 0.5, 0.8], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    leaf = probs.clone().requires_grad_()
    y = estimators.xie_ermon(Pivotal(leaf), (50,), generator=generator())
    torch.testing.assert_close(y.sum(-1), torch.full((50, 3), 2.0, dtype=torch.float64))
    assert (y[:, 0, :2] == torch.tensor([1.0, 0.0])).all()
    assert (y[:, 2] == probs[2]).all()
    rest = estimators.xie_ermon(Pivotal(probs[1]), (50,), generator=generator())
    assert rest.isfinite().all()
    (gradient,) = torch.autograd.grad((y * torch.arange(4.0)).sum(), leaf)
    assert gradient.isfinite().all()
    assert gradient[0, 2:].abs().min() > 0
    assert (gradient[2] == 0).all()
    nothing = estimators.xie_ermon(PlackettLuce(logits=THETA, k=0), generator=generator())
    assert (nothing == 0).all()
    bad = THETA.clone()
    bad[1] = torch.nan
    law = PlackettLuce(logits=bad, k=2, validate_args=False)
    assert estimators.xie_ermon(law, generator=generator()).isnan().all()
    with pytest.raises(NotImplementedError, match="same integer k"):
        estimators.xie_ermon(PlackettLuce(logits=torch.zeros(2, 4), k=torch.tensor([1, 2])))


def test_numpy_numbers_as_sizes_and_counts():
    design, expected = (ConditionalPoisson(logits=THETA, k=k) for k in (np.int64(2), 2))
    for estimator in (estimators.straight_through_sample, estimators.relaxed, estimators.xie_ermon, estimators.imle):
        got, wanted = (estimator(d, (np.int64(3),), generator=generator()) for d in (design, expected))
        assert torch.equal(got, wanted)
    for estimator in (*UNBIASED, estimators.reinmax):
        got, wanted = (
            estimator(d, lambda x: x[..., 0], num_samples=np.int64(4), generator=generator())
            for d in (design, expected)
        )
        assert torch.equal(got, wanted)


def test_the_kind_of_an_estimator_is_told_by_a_parameter_named_fn():
    assert all(takes_objective(estimator) for estimator in (*UNBIASED, estimators.reinmax, selfish))
    assert not any(takes_objective(e) for e in (estimators.simple, estimators.imle, estimators.relaxed))
    assert takes_objective(functools.partial(estimators.rloo, num_samples=4))
