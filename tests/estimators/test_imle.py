"""Implicit maximum likelihood, its noise and its adaptive step."""

import math

import pytest
import scipy.stats
import torch

from khot import _torch, estimators
from khot.designs import Pivotal, PlackettLuce
from khot.estimators._surrogate import sum_of_gamma

pytestmark = pytest.mark.slow


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sum_of_gamma_is_a_share_of_a_gumbel_variable():
    """k of them sum to about Gumbel(0, 1): mean γ = .5772 less the tail of the harmonic series, variance π²/6."""
    k = torch.tensor(5.0, dtype=torch.float64)
    noise = sum_of_gamma(torch.Size((40_000, 5)), k, 100, torch.zeros((), dtype=torch.float64), generator())
    total = noise.sum(-1)
    assert abs(float(total.mean()) - 0.5772) < 0.03
    assert abs(float(total.var()) - math.pi**2 / 6) < 0.08


def test_imle_moves_towards_lower_loss():
    theta = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    cost = torch.tensor([3.0, 1.0, 2.0, 0.0, 5.0, 4.0], dtype=torch.float64)
    g = generator()
    for step in (2.5, estimators.AdaptiveStep()):
        theta.data.zero_()
        for _ in range(300):
            x = estimators.imle(PlackettLuce(logits=theta, k=2), step=step, generator=g)
            (gradient,) = torch.autograd.grad((x * cost).sum(), theta)
            theta.data -= 0.1 * gradient
        assert set(theta.topk(2).indices.tolist()) == {1, 3}


def test_adaptive_steps_adapt():
    step = estimators.AdaptiveStep(start=0.001, rate=0.01)
    theta = torch.tensor([3.0, 2.0, -2.0, -3.0], requires_grad=True)
    g = generator()
    for _ in range(200):
        x = estimators.imle(PlackettLuce(logits=theta, k=2), (32,), step=step, noise_temperature=0.1, generator=g)
        x[..., 0].sum().backward()
    assert step.strength > 0.1


def test_an_adaptive_step_was_nan_beside_certain_items():
    step = estimators.AdaptiveStep()
    probs = torch.tensor([1.0, 0.0, 0.4, 0.6], dtype=torch.float64, requires_grad=True)
    x = estimators.imle(Pivotal(probs), (20,), step=step, generator=generator())
    assert (x.sum(-1) == 2).all()
    assert math.isfinite(float(step.step(torch.tensor([math.inf, -math.inf, 3.0, 4.0]), torch.ones(4))))
    assert float(step.step(torch.tensor([math.inf, 3.0, 4.0]), torch.tensor([0.0, 0.6, 0.8]))) == pytest.approx(5.0)
    (gradient,) = torch.autograd.grad((x * torch.arange(4.0)).sum(), probs)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", [0.05, 0.3, 1.0, 2.5])
def test_gamma_noise_without_the_private_function_of_torch(monkeypatch, shape):
    """The test of Kolmogorov and Smirnov: a right sampler fails with probability 1e-3, over the choice of the seed."""
    concentration = torch.full((20_000,), shape, dtype=torch.float64)
    laws = []
    for is_there in (True, False):
        if not is_there:
            monkeypatch.setattr(_torch, "_sample_gamma", None)
        first, again = (_torch.standard_gamma(concentration, generator()) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, _torch.standard_gamma(concentration, generator(1)))
        assert scipy.stats.kstest(first.numpy(), scipy.stats.gamma(shape).cdf).pvalue > 1e-3
        assert scipy.stats.kstest(first.numpy(), scipy.stats.gamma(1.1 * shape).cdf).pvalue < 1e-3  # the control
        laws.append(first)
    assert not torch.equal(*laws)
    design = PlackettLuce(logits=torch.zeros(4), k=2)
    assert (estimators.imle(design, (9,), generator=generator()).sum(-1) == 2).all()
