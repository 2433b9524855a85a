"""Defects that an audit of estimators found, each by its own name."""

import pytest
import torch

from khot import estimators
from khot.designs import ConditionalPoisson, Pareto, Pivotal, PlackettLuce
from khot.testing import check_estimator

THETA = torch.tensor([0.9, -0.4, 0.3, -1.1, 0.2], dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("k", [1.5, torch.tensor(1.5), torch.tensor([1.0, 2.5])])
def test_fractional_sizes_gave_nan_or_other_sums(k):
    """`imle` was NaN, `xie_ermon` summed to ⌊k⌋, and hard relaxed samples were NaN if k was a tensor."""
    design = Pivotal(logits=THETA.expand(2, -1), k=k)
    for call in (
        lambda: estimators.imle(design),
        lambda: estimators.xie_ermon(design),
        lambda: estimators.relaxed(design, hard=True),
    ):
        with pytest.raises(ValueError, match=r"`k` must be an integer.*; got [12]\.5"):
            call()
    assert estimators.relaxed(design).sum(-1).sub(torch.as_tensor(k)).abs().max() < 1e-6


@pytest.mark.parametrize("estimator", [estimators.imle, estimators.xie_ermon, estimators.relaxed])
def test_sizes_of_nought_and_infinite_scores(estimator):
    """`xie_ermon` summed to 1 at k = 0, and was NaN beside +inf."""
    theta = torch.tensor([torch.inf, 0.3, -torch.inf, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    nothing = estimator(Pivotal(logits=theta.detach().clamp(-1, 1), k=0), (3,), generator=generator())
    assert (nothing == 0).all()
    y = estimator(Pivotal(logits=theta, k=3), (20,), generator=generator())
    torch.testing.assert_close(y.sum(-1), torch.full((20,), 3.0, dtype=torch.float64))
    assert (y[:, 0] == 1).all()
    assert (y[:, 2] == 0).all()
    (gradient,) = torch.autograd.grad((y * THETA).sum(), theta)
    assert gradient.isfinite().all()
    assert gradient[0] == gradient[2] == 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("design", [PlackettLuce, Pareto])
def test_designs_whose_mean_had_no_gradient_were_biased(design):
    """The relative bias of `taylor_control_variate` was 1, and straight-through samples had no gradient at all."""
    for d in (design(logits=THETA, k=2), design(torch.tensor([0.2, 0.5, 0.45, 0.85], dtype=torch.float64))):
        for estimator in (estimators.taylor_control_variate, estimators.score_function):
            check_estimator(estimator, design=d)
        check_estimator(estimators.reinmax, design=d, degree=2)
        check_estimator(estimators.straight_through_sample, design=d, degree=1)


class Unlearned(Pivotal):
    """A design whose mean has no gradient."""

    mean = property(lambda self: self.probs.detach())


@pytest.mark.parametrize(
    "call",
    [
        lambda d: estimators.taylor_control_variate(d, lambda x: x.sum(-1)),
        lambda d: estimators.reinmax(d, lambda x: x.sum(-1)),
        estimators.straight_through_sample,
        estimators.stochastic_times_smooth,
    ],
)
def test_a_mean_without_a_gradient_is_an_error(call):
    theta = THETA.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"`design\.mean` must be differentiable.*`Unlearned` is not.*`rloo`"):
        call(Unlearned(logits=theta, k=2, order="given"))
    call(Unlearned(logits=THETA, k=2, order="given"))
    with torch.no_grad():
        call(Unlearned(logits=theta, k=2, order="given"))


LOSSES = [estimators.score_function, estimators.rloo, estimators.taylor_control_variate, estimators.reinmax]
SAMPLES = [estimators.straight_through_sample, estimators.relaxed, estimators.xie_ermon, estimators.imle]
SAMPLES += [estimators.stochastic_times_smooth]


@pytest.mark.parametrize("estimator", LOSSES[:2])
def test_rewards_that_are_counts_or_hits_raised(estimator):
    theta = THETA.clone().requires_grad_()
    design = ConditionalPoisson(logits=theta, k=2)
    for fn in (lambda x: x[..., 0] > 0.5, lambda x: x[..., 0].long()):
        value = estimator(design, fn, num_samples=8, generator=generator())
        expected = estimator(design, lambda x: x[..., 0], num_samples=8, generator=generator())
        assert value == expected
        assert torch.equal(*(torch.autograd.grad(v, theta)[0] for v in (value, expected)))


@pytest.mark.parametrize("estimator", LOSSES[2:])
def test_objectives_without_a_derivative_are_told_of_rloo(estimator):
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    design = ConditionalPoisson(logits=THETA.clone().requires_grad_(), k=2)
    for fn in (lambda x: x[..., 0].detach().round(), lambda x: weight * x[..., 0].detach(), lambda x: x[..., 0] > 0.5):
        with pytest.raises(ValueError, match=r"`fn` must be differentiable .*; it is not\. `rloo` takes"):
            estimator(design, fn, generator=generator())


@pytest.mark.parametrize("estimator", LOSSES[:3])
def test_objectives_that_change_their_samples_are_found(estimator):
    design = ConditionalPoisson(logits=THETA, k=2, validate_args=False)
    with pytest.raises(ValueError, match="`fn` must not change its samples in place"):
        estimator(design, lambda x: x.mul_(2).sum(-1), num_samples=4, generator=generator())


@pytest.mark.parametrize("estimator", [*LOSSES, *SAMPLES])
def test_distributions_of_torch_are_told_what_a_design_is(estimator):
    law = torch.distributions.OneHotCategorical(logits=THETA)
    with pytest.raises(TypeError, match="`design` must be"):
        estimator(law, lambda x: x.sum(-1)) if estimator in LOSSES else estimator(law)
