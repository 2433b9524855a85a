"""Rankings of Plackett and Luce, divergences from conditional Poisson, and many samples at once."""

from itertools import permutations

import pytest
import torch
from design_cases import A6K3, EVERY_EXACT, GIVEN, generator, scores
from torch.distributions import kl_divergence

import khot
from khot.designs import ConditionalPoisson, Pareto, Pivotal, PlackettLuce, Sampford, Systematic

THETA = scores(5)


def by_hand(theta, ranking):
    weights, left, result = theta.exp(), set(range(len(theta))), 1.0
    for item in ranking:
        result = result * weights[item] / sum(weights[i] for i in left)
        left.remove(item)
    return result


@pytest.mark.parametrize("k", [1, 3, 5])
def test_probabilities_of_rankings_by_hand(k):
    design = PlackettLuce(logits=THETA, k=k)
    rankings = torch.tensor(list(permutations(range(5), k)))
    got = design.log_prob_of_ranking(rankings).exp()
    expected = torch.stack([by_hand(THETA, r.tolist()) for r in rankings])
    torch.testing.assert_close(got, expected)
    if k > 1:
        with pytest.raises(AssertionError):  # of the last item first
            torch.testing.assert_close(design.log_prob_of_ranking(rankings.flip(-1)).exp(), expected)
    torch.testing.assert_close(got.sum(), torch.ones((), dtype=torch.float64))
    sets = torch.zeros(len(rankings), 5, dtype=torch.float64).scatter_(1, rankings, 1.0)
    for subset in design.enumerate_support():
        mass = got[(sets == subset).all(-1)].sum()
        torch.testing.assert_close(mass.log(), design.log_prob(subset), atol=1e-12, rtol=1e-10)


def test_frequencies_of_rankings():
    design, draws = PlackettLuce(logits=THETA[:4], k=2), 60_000
    drawn = design.sample_ranking((draws,), generator=generator())
    rankings = torch.tensor(list(permutations(range(4), 2)))
    counts = (drawn[:, None] == rankings).all(-1).sum(0).double()
    expected = design.log_prob_of_ranking(rankings).exp() * draws
    assert ((counts - expected).square() / expected).sum() < 31.3  # χ² of 11 degrees of freedom, 0.001
    assert ((counts - expected.flip(0)).square() / expected.flip(0)).sum() > 31.3


def test_rankings_have_gradients_batches_and_edges():
    k = torch.tensor([2, 4])
    theta = scores(2, 4).requires_grad_()
    rankings = PlackettLuce(logits=theta, k=k).sample_ranking((3,), generator=generator())
    assert rankings.shape == (3, 2, 4)
    assert (rankings[:, 0, 2:] == -1).all()
    assert torch.equal(rankings[:, 1].sort(-1).values, torch.arange(4).expand(3, 4))
    assert torch.autograd.gradcheck(lambda t: PlackettLuce(logits=t, k=k).log_prob_of_ranking(rankings), (theta,))
    forced = PlackettLuce(logits=torch.tensor([0.0, torch.inf, -torch.inf, torch.inf, 1.0]), k=3)
    drawn = forced.sample_ranking((200,), generator=generator())
    assert (drawn[:, :2].sort(-1).values == torch.tensor([1, 3])).all()
    assert len(drawn[:, 0].unique()) == 2
    torch.testing.assert_close(forced.log_prob_of_ranking(torch.tensor([3, 1, 4])).exp(), torch.tensor(0.7310586 / 2))
    free = PlackettLuce(logits=forced.parameter, k=3, validate_args=False)
    assert free.log_prob_of_ranking(torch.tensor([3, 1, 2])) == -torch.inf
    assert free.log_prob_of_ranking(torch.tensor([3, 3, 4])) == -torch.inf
    weights = PlackettLuce(torch.tensor([0.0, 0.5, 0.5, 1.0]))
    assert (weights.sample_ranking((50,), generator=generator()) != 0).all()


@pytest.mark.parametrize("ranking", [[0, 0], [0], [0, 5], [0.0, 1.0]])
def test_what_is_no_ranking(ranking):
    with pytest.raises(ValueError, match="`ranking` must hold"):
        PlackettLuce(logits=THETA, k=2).log_prob_of_ranking(torch.tensor(ranking))


@EVERY_EXACT
def test_divergences_of_exact_designs_by_enumeration(design):
    make = GIVEN if design is Pivotal else design
    p, other = make(A6K3), make(A6K3.flip(0))
    for q in (ConditionalPoisson(logits=scores(6, seed=3), k=3), ConditionalPoisson(A6K3)):
        x = p.enumerate_support()
        log_p, log_q = p.log_prob(x), q.log_prob(x)
        expected = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum()
        torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-9, atol=1e-11)
        with pytest.raises(AssertionError):  # of other items
            torch.testing.assert_close(kl_divergence(other, q), expected, rtol=1e-9, atol=1e-11)
    assert kl_divergence(p, ConditionalPoisson(logits=scores(6), k=2)) == torch.inf
    with pytest.raises(NotImplementedError):
        kl_divergence(q, p) if design is not ConditionalPoisson else kl_divergence(q, Sampford(A6K3))


def test_divergences_of_approximate_designs_use_their_own_mean(monkeypatch):
    for p in (PlackettLuce(A6K3), Pareto(A6K3)):
        q = ConditionalPoisson(A6K3)
        x = p.enumerate_support()
        expected = (p.log_prob(x).exp() * (p.log_prob(x) - q.log_prob(x))).sum()
        torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-8, atol=1e-10)
        monkeypatch.setattr(type(p), "mean", property(lambda design: design.probs))  # the probabilities asked for
        with pytest.raises(AssertionError):
            torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-8, atol=1e-10)
    certain = ConditionalPoisson(torch.tensor([1.0, 0.5, 0.5, 0.0], dtype=torch.float64))
    assert kl_divergence(Systematic(torch.full((4,), 0.5, dtype=torch.float64)), certain) == torch.inf


def test_many_samples_at_once_have_the_bits_of_the_design_and_a_gradient():
    x = scores(3, 6).requires_grad_()
    y = khot.sample_khot(x, 2, sample_shape=(4, 5), generator=generator())
    design = Pivotal(khot.sigmoid_topk(x.detach(), 2), 2)
    assert torch.equal(y.detach(), design.sample((4, 5), generator=generator()))
    (got,) = torch.autograd.grad(y[..., 0].sum(), x)
    (one,) = torch.autograd.grad(khot.sigmoid_topk(x, 2)[..., 0].sum(), x)
    torch.testing.assert_close(got, 20 * one)
    for dim in (0, -2):
        moved = khot.sample_khot(x.mT, 2, dim=dim, sample_shape=(7,), generator=generator())
        assert torch.equal(moved.mT.detach(), design.sample((7,), generator=generator()))


@pytest.mark.parametrize("design", [Sampford, ConditionalPoisson])
def test_no_divergence_between_other_items(design):
    with pytest.raises(ValueError, match="the same items; got 4 and 5"):
        kl_divergence(design(logits=torch.zeros(4), k=2), ConditionalPoisson(logits=torch.zeros(5), k=2))
