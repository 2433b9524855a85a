"""The reproductions of the audit, A1 to A11, as it gave them. What broke is tested in full by tests named after it."""

import inspect
from functools import partial

import pytest
import torch
from design_cases import generator
from torch.distributions import Categorical, MixtureSameFamily

import khot
from khot import estimators
from khot._math import counts, high_entropy, order_sampling
from khot.designs import Brewer, ConditionalPoisson, Pareto, Pivotal, PlackettLuce, RelaxedKHot, Sampford, Systematic

THETA = torch.tensor([0.9, -0.4, 0.3, -1.1, 0.2], dtype=torch.float64)
BITS = (torch.arange(32)[:, None] >> torch.arange(5) & 1).double()


@pytest.mark.parametrize("design", [PlackettLuce, Pareto])
def test_a1_means_of_order_designs_have_a_gradient(design):
    theta = THETA.clone().requires_grad_()
    x = estimators.straight_through_sample(design(logits=theta, k=2), generator=generator())
    assert torch.autograd.grad(x[0], theta)[0].abs().sum() > 0.1
    loss = estimators.taylor_control_variate(
        design(logits=theta, k=2), lambda s: s @ THETA, num_samples=4, generator=generator()
    )
    expected = torch.autograd.grad(design(logits=theta, k=2).mean @ THETA, theta)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], expected)


@pytest.mark.parametrize("design", [ConditionalPoisson, Sampford, Brewer])
def test_a2_a_mixture_over_sizes_sums_to_one(design):
    law = design(logits=THETA.expand(3, -1), k=torch.tensor([1.0, 2.0, 3.0]), validate_args=False)
    mixture = MixtureSameFamily(Categorical(torch.ones(3)), law, validate_args=False)
    assert abs(mixture.log_prob(BITS).exp().sum() - 1) < 1e-6  # the weights are float32


@pytest.mark.parametrize(("make", "true"), [(Systematic, 147.12), (lambda p, k: Pivotal(p, k, order="given"), 121.06)])
def test_a3_variances_of_fractional_sizes(make, true):
    p, y = torch.tensor([0.2, 0.35, 0.45, 0.1, 0.6, 0.55], dtype=torch.float64), torch.arange(1.0, 7.0)
    design = make(p, 2.25)
    assert khot.horvitz_thompson_variance(y, p, design.joint_probs()) == pytest.approx(true, abs=0.01)
    assert design.variance_of_sum(y / p) == pytest.approx(true, abs=0.01)


def test_a4_sizes_of_relaxed_and_perturbed_samples():
    assert estimators.xie_ermon(Pivotal(logits=THETA, k=0), generator=generator()).sum() == 0
    for call in (estimators.xie_ermon, estimators.imle):
        with pytest.raises(ValueError, match="integer"):
            call(Pivotal(logits=THETA, k=1.5))


def test_a5_relaxed_densities_in_float32():
    """Within 1e-3 nats at T = 0.1, where the density of y was off by up to 64 nats."""
    theta = torch.randn(20, dtype=torch.float64, generator=generator())
    exact, single = (RelaxedKHot(0.1, logits=theta.to(t), k=5) for t in (torch.float64, torch.float32))
    value = exact.rsample_logits((2000,), generator=generator())
    off = single.log_prob_of_logits(value.float()).double() - exact.log_prob_of_logits(value.float().double())
    assert off.abs().max() < 1e-3


def test_a6_constants_of_sampford_are_taken_by_rows(monkeypatch):
    """Parts of 60 rows give what the whole does; it took 25 KB of memory for each row."""
    theta, k = torch.randn(500, 5, dtype=torch.float64, generator=generator()), torch.full((500,), 2.0).double()
    whole = high_entropy.pareto_constants(theta, k)
    monkeypatch.setattr(high_entropy, "AT_ONCE", 10_000)
    torch.testing.assert_close(high_entropy.pareto_constants(theta, k), whole, rtol=1e-13, atol=0)


class SharedByRows(Pivotal):
    """Every row has the draw of the first."""

    def sample(self, sample_shape=(), **options):
        return super().sample(sample_shape, **options)[..., :1, :].expand(*sample_shape, *self.parameter.shape)


def detached(design, fn, *, num_samples, generator):
    return estimators.rloo(design, lambda x: fn(x).detach(), num_samples=num_samples, generator=generator)


def test_a7_the_checks_find_what_they_missed():
    """One specimen of each; the eight are controls of the tests of `check_design` and `check_estimator`."""
    with pytest.raises(AssertionError):
        khot.testing.check_design(
            SharedByRows(torch.tensor([0.2, 0.5, 0.5, 0.8], dtype=torch.float64).expand(2, -1)), draws=20_000
        )
    with pytest.raises(AssertionError):
        khot.testing.check_estimator(detached)


def test_a8_numbers_in_docstrings():
    assert "0.003 nats" not in inspect.getdoc(Sampford)
    assert "0.28" not in inspect.getdoc(PlackettLuce)
    worst = PlackettLuce(torch.tensor([1.0] + [0.1] * 50, dtype=torch.float64), 6)
    assert 0.3 < (worst.mean - worst.probs).abs().max() < 1 / torch.e


def test_a9_more_subsets_than_can_be_printed():
    with pytest.raises(NotImplementedError, match=r"10\^"):
        ConditionalPoisson(logits=torch.zeros(20_000), k=10_000).enumerate_support()
    reward = estimators.rloo(ConditionalPoisson(logits=THETA, k=2), lambda x: x[..., 0] > 0.5, generator=generator())
    assert reward.isfinite()


@pytest.mark.parametrize("kind", [ConditionalPoisson, Sampford, Systematic, Brewer, partial(Pivotal, order="given")])
def test_a9_pairs_that_do_not_fit_into_memory(kind):
    """The error was the allocator's: "you tried to allocate 8000000000000 bytes"."""
    design = kind(torch.full((1_000_000,), 0.5), 500_000, validate_args=False)
    with pytest.raises(MemoryError, match=r"8000 GB of pairs.*variance_of_sum"):
        design.joint_probs()
    if isinstance(design, Pivotal):
        with pytest.raises(MemoryError, match="8000 GB"):
            _ = design.covariance_matrix


def test_a10_batches_of_inclusions_take_few_nodes_and_few_terms(monkeypatch):
    """What took 0.15 ms a row of 8 and 100 of 4096 is listed for few items; for many, few scores stand for all."""
    seen = []
    chance = order_sampling.chance_of_others
    monkeypatch.setattr(order_sampling, "chance_of_others", lambda a, *of: seen.append(a.shape) or chance(a, *of))
    monkeypatch.setattr(counts, "by_products", None)
    for n, k in ((8, 2), (4096, 64), (4096, 2048)):
        mean = PlackettLuce(logits=torch.randn(2, n, dtype=torch.float64, generator=generator()), k=k).mean
        torch.testing.assert_close(mean.sum(-1), torch.full((2,), float(k), dtype=torch.float64), rtol=0, atol=1e-10)
    assert all(n < 128 and nodes <= 2 * 50 for n, nodes in seen)
    assert seen


def test_a11_smaller_ones():
    with pytest.raises(ValueError, match="`k` must be given"):
        Pivotal(torch.full((50_000,), 0.1, dtype=torch.bfloat16))
    theta = THETA.clone().requires_grad_()
    assert Brewer(logits=theta, k=5).log_prob(torch.ones(5, dtype=torch.float64)).requires_grad
    assert Systematic(logits=theta, k=2).joint_probs().requires_grad
    other, poisson = Sampford(logits=THETA, k=2), ConditionalPoisson(logits=THETA, k=2)
    x = poisson.enumerate_support()
    p, q = other.log_prob(x), poisson.log_prob(x)
    torch.testing.assert_close(torch.distributions.kl_divergence(other, poisson), (p.exp() * (p - q)).sum())
