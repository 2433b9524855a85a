"""Losses of rows, objectives of one batch, and estimates from distinct subsets."""

import functools
import itertools

import pytest
import torch
from design_cases import generator, scores

from khot import estimators
from khot._math import drawn_sets
from khot.designs import ConditionalPoisson, Pivotal, PlackettLuce

THETA = scores(5)
LOSSES = (
    estimators.score_function,
    estimators.rloo,
    estimators.taylor_control_variate,
    estimators.reinmax,
    functools.partial(estimators.distinct_subsets, num_samples=3),
    functools.partial(estimators.unordered_set, num_samples=3),
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
        for estimator in (estimators.distinct_subsets, estimators.unordered_set):
            loss = estimator(design, objective, num_samples=count, generator=generator())
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


def test_rebar_is_biased_if_its_second_noise_has_no_gradient(monkeypatch):
    """The control of the test above: the same 20,000 rows find it."""
    right = estimators._control._drawn_given
    monkeypatch.setattr(estimators._control, "_drawn_given", lambda *given: right(*given).detach())
    theta = THETA.expand(20_000, 5).clone().requires_grad_()
    rows = estimators.rebar(PlackettLuce(logits=theta, k=2), objective, per_row=True, generator=generator())
    (each,) = torch.autograd.grad(rows.sum(), theta)
    one = THETA.clone().requires_grad_()
    (expected,) = torch.autograd.grad(exact(PlackettLuce(logits=one, k=2)), one)
    assert ((each.mean(0) - expected).abs() > 4.5 * each.std(0) / 20_000**0.5).any()


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
    # of one ranking of θ instead of those that were drawn, the law is another
    given_one = _drawn_given(theta, theta.topk(3).indices, second)
    assert ((given_one - theta).mean(0) - 0.5772156649).abs().gt(4.5 * error).any()
    assert not torch.equal((theta + second).topk(3).indices, ranking)


def test_errors_of_rebar():
    with pytest.raises(TypeError, match="PlackettLuce"):
        estimators.rebar(ConditionalPoisson(logits=THETA, k=2), objective)
    with pytest.raises(ValueError, match="one k, 1 ≤ k < 5"):
        estimators.rebar(PlackettLuce(logits=THETA, k=5), objective)
    with pytest.raises(ValueError, match="must be differentiable"):
        estimators.rebar(PlackettLuce(logits=THETA, k=2), lambda x: (x > 0.5).double().sum(-1))


def by_orders(p, chosen):
    """P(a set is drawn one by one ∝ p), the sum over all orders."""
    total = 0.0
    for order in itertools.permutations(chosen):
        left, chance = 1.0, 1.0
        for i in order:
            chance, left = chance * p[i] / left, left - p[i]
        total += chance
    return total


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("k", "wrong"), [(1, None), (2, None), (2, "baseline"), (2, "ratio")])
def test_unordered_sets_have_no_bias(count, k, wrong, monkeypatch):
    """The mean over all sets of subsets, weighted by their chances, is the exact gradient to 1e-10; not if altered."""
    one = THETA.clone().requires_grad_()
    truth = exact(ConditionalPoisson(logits=one, k=k))
    (expected,) = torch.autograd.grad(truth, one)
    support = ConditionalPoisson(logits=THETA, k=k).enumerate_support()
    p = ConditionalPoisson(logits=THETA, k=k).log_prob(support).exp()
    sets = torch.tensor(list(itertools.combinations(range(len(p)), count)))
    count = min(count, len(p))
    chance = torch.tensor([by_orders(p.tolist(), s) for s in sets.tolist()], dtype=torch.float64)
    assert abs(chance.sum() - 1) < 1e-12
    noise = torch.zeros(len(sets), len(p), dtype=torch.float64).scatter_(1, sets, 1e4)
    monkeypatch.setattr(estimators._subsets.noise, "gumbel", lambda *_: noise)
    right = drawn_sets.ratios
    altered = {"baseline": lambda one, two: (one, 0.9 + 0 * two), "ratio": lambda one, two: (1.01 * one, two)}
    if wrong:
        monkeypatch.setattr(estimators._subsets.drawn_sets, "ratios", lambda *t: altered[wrong](*right(*t)))
    theta = THETA.expand(len(sets), 5).clone().requires_grad_()
    rows = estimators.unordered_set(ConditionalPoisson(logits=theta, k=k), objective, num_samples=count, per_row=True)
    (each,) = torch.autograd.grad(rows.sum(), theta)
    is_right = (chance @ each - expected).abs().max() < 1e-10 and (wrong or abs(chance @ rows - truth) < 1e-10)
    assert is_right == (wrong is None)


def test_ratios_of_sets_are_those_of_their_orders():
    """Unlike probabilities, also with a set that leaves almost nothing, and one with a place that holds none."""
    p = torch.tensor([0.5, 0.3, 0.1, 0.0999, 1e-4], dtype=torch.float64)
    for chosen in ((0, 1, 2, 3), (2, 4), (0, 3, 4), (0,)):
        rest = 1 - p[list(chosen)].sum()
        log_p = torch.cat((p[list(chosen)].log(), torch.tensor([-torch.inf], dtype=torch.float64)))[None]
        one, two = drawn_sets.ratios(log_p, rest[None])

        def chance(items, rest=rest):  # as if the others of `chosen` were not there
            kept = (p / (rest + p[list(items)].sum())).tolist()
            return by_orders(kept, items)

        for a, i in enumerate(chosen):
            without = [s for s in chosen if s != i]
            assert one[0, a] == pytest.approx(chance(without) / chance(chosen), rel=1e-9)
            for b, j in enumerate(chosen):
                pair = 1.0 if i == j else chance([s for s in without if s != j]) / chance(without)
                assert two[0, a, b] == pytest.approx(pair, rel=1e-9)


def test_errors_of_unordered_sets():
    with pytest.raises(ValueError, match="`num_samples` must be ≥ 2"):
        estimators.unordered_set(ConditionalPoisson(logits=THETA, k=2), objective, num_samples=1)
    with pytest.raises(TypeError, match="`design` must be"):
        estimators.unordered_set(torch.distributions.OneHotCategorical(logits=THETA), objective)
    theta = torch.tensor([0.3, -torch.inf, 1.0, torch.inf, -0.5], dtype=torch.float64, requires_grad=True)
    loss = estimators.unordered_set(ConditionalPoisson(logits=theta, k=2), objective, num_samples=9)
    assert torch.autograd.grad(loss, theta)[0].isfinite().all()
