"""`Choice`: k of n operations, alone and with a shared budget."""

import itertools

import pytest
import torch
from torch import nn

import khot
from khot._math import budgets
from khot.nn import Choice, perturbation_scores, selectors, sparsity
from khot.nn.sparsity import Sparsifier

SELECTORS = [selectors.soft, selectors.straight_through, selectors.sampled, selectors.hard]


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.calls = factor, 0

    def forward(self, x):
        self.calls += 1
        return self.factor * x


def factors(k=2, **settings):
    return Choice([Times(f) for f in (1.0, 10.0, 100.0, 1000.0)], k, **settings)


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: s.__name__)
def test_the_output_is_the_weighted_sum_and_only_the_chosen_run(selector):
    choice = factors(selector=selector)
    choice.scores.data = torch.tensor([0.0, 3.0, 1.0, 2.0])
    choice.generator = torch.Generator().manual_seed(0)
    mask = choice.mask().detach()
    choice.generator.manual_seed(0)
    y = choice(torch.ones(1))
    expected = float((mask * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum())
    assert float(y.detach()) == pytest.approx(expected)
    assert [op.calls for op in choice.operations] == [int(m > 0) for m in mask]
    if selector is not selectors.soft:
        assert sum(op.calls for op in choice.operations) == 2
    if selector is not selectors.hard:
        y.backward()
        assert choice.scores.grad.abs().max() > 0
    assert float(choice.eval()(torch.ones(1))) == 1010.0
    assert choice.chosen() == [1, 3]
    kept = choice.finalize()
    assert float(kept(torch.ones(1))) == 1010.0
    assert float(choice.finalize(torch.tensor([5.0, 1.0, 4.0, 0.0])).eval()(torch.ones(1))) == 101.0


def test_perturbation_finds_the_operation_that_matters():
    choice = Choice([Times(1.0), Times(5.0), Times(2.0)])
    choice.scores.data = torch.tensor([3.0, 0.0, 0.0])
    model = nn.Sequential(choice).eval()
    scores = perturbation_scores(model, lambda: float(model(torch.ones(1))))
    mixed = choice.soft_mask().detach() @ torch.tensor([1.0, 5.0, 2.0])
    without = choice.soft_mask(1).detach() @ torch.tensor([1.0, 5.0, 2.0])
    assert float(scores["0"][1]) == pytest.approx(float(mixed - without))
    assert choice.chosen() == [0]
    assert choice.chosen(scores["0"]) == [1]
    assert choice.given is None
    with pytest.raises(ValueError, match="more than k = 1 operations"):
        perturbation_scores(Choice([nn.Identity()]), lambda: 0.0)


def budgeted(mask, budget, steps=20, seed=0):
    torch.manual_seed(seed)
    costs = [1.0, 7.0, 20.0, 3.0]
    model = nn.Sequential(*[Choice([nn.Linear(3, 3) for _ in costs], costs=costs) for _ in range(3)])
    for choice in model:
        choice.scores.data = torch.randn(4)
    return model, Sparsifier(model, budget, steps=steps, units=sparsity.choices, mask=mask, freeze=1.0)


@pytest.mark.parametrize("mask", [sparsity.soft, sparsity.straight_through, sparsity.sampled])
def test_choices_share_a_budget(mask):
    model, sparsifier = budgeted(mask, 24)
    optimizer, x = torch.optim.Adam(model.parameters(), 0.1), torch.randn(5, 3)
    for step in range(20):
        budget = 24 + (60 - 24) * max(0.0, 1 - step / 10) ** 3
        masks = torch.stack([choice.mask().detach() for choice in model])
        torch.testing.assert_close(masks.sum(1), torch.ones(3))
        cost = float((masks.double() * model[0].costs).sum())
        assert cost == pytest.approx(sparsifier.cost(), rel=1e-6)
        if mask is not sparsity.sampled:
            assert cost <= budget * (1 + 1e-6)
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsifier.step()
    expected = model.eval()(x)
    kept = sparsifier.finalize()
    assert [type(part) for part in kept] == [nn.Linear] * 3
    torch.testing.assert_close(kept(x), expected, rtol=0, atol=1e-6)


def test_the_soft_budget_is_met_with_equality_where_it_binds():
    model, sparsifier = budgeted(sparsity.soft, 9, steps=0)
    (pool,) = sparsifier.pools
    x = torch.cat([choice.scores for choice in model]).detach().double().requires_grad_()

    def mask(x):
        return pool.pose(x, 0.0, torch.tensor(1.0, dtype=torch.float64), 0).soft()

    assert float((mask(x).detach() * pool.costs).sum()) == pytest.approx(9, rel=1e-6)
    assert torch.autograd.gradcheck(mask, x, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_no_exchange_within_the_budget_is_better(seed):
    model, sparsifier = budgeted(sparsity.straight_through, 24, steps=0, seed=seed)
    (pool,) = sparsifier.pools
    x = torch.cat([choice.scores for choice in model]).detach()
    values = pool.values.view(3, 4)
    left = 24 - float((values.double() * model[0].costs).sum())
    assert left >= 0
    for row, scores in zip(values, x.view(3, 4), strict=True):
        old = int(row.argmax())
        better = [i for i in range(4) if scores[i] > scores[old] and model[0].costs[i] - model[0].costs[old] <= left]
        assert better == []


def test_bad_choices():
    for settings, match in (
        ({"k": 5}, "0 ≤ k ≤ 4"),
        ({"costs": [1.0]}, "one number per operation, 4"),
        ({"costs": [1.0, 2.0, 0.0, 1.0]}, "must be > 0"),
        ({"temperature": 0.0}, "`temperature` must be > 0"),
    ):
        with pytest.raises(ValueError, match=match):
            factors(**settings)
    with pytest.raises(ValueError, match="must be ≥ 3, the least that can be kept; got 2"):
        budgeted(sparsity.soft, 2)
    with pytest.raises(ValueError, match="`score` must use θ"):
        Sparsifier(nn.Sequential(factors()), 2, steps=1, units=sparsity.choices, score=sparsity.magnitude)


@pytest.mark.parametrize("seed", range(5))
def test_greedy_takes_by_falling_score_what_fits(seed):
    """Against a loop; and the charge of products of sums, against every item that is left."""
    generator = torch.Generator().manual_seed(seed)
    x, costs = torch.randn(12, generator=generator), torch.randint(1, 9, (12,), generator=generator).double()
    kept, left = budgets.greedy(x, costs, 20.0), 20.0
    for i in x.argsort(descending=True).tolist():
        assert bool(kept[i]) == (costs[i] <= left)
        left -= float(costs[i]) if costs[i] <= left else 0.0

    def charge(m):
        return 3 * m[:6].sum() * m[6:].sum() + m[:6].sum()

    taken = budgets.charged(x, charge, 40.0).double()
    assert float(charge(taken)) <= 40
    for i in torch.nonzero(taken == 0).flatten():
        assert float(charge(taken.index_fill(0, i, 1.0))) > 40
    order = x.argsort(descending=True).tolist()
    count = next(c for c in itertools.count() if not bool(taken[order[c]]))
    assert float(charge(torch.zeros(12).double().index_fill(0, torch.tensor(order[: count + 1]), 1.0))) > 40


@pytest.mark.parametrize("has_budget", [False, True])
def test_log_prob_gives_the_gradient_of_the_expected_loss(has_budget):
    """By enumeration: Σ p·f·∇log p over all pairs of operations is ∇E f."""
    torch.manual_seed(0)
    costs = [[1, 2, 3], [1, 4, 2]]
    found = [Choice([nn.Identity(), nn.ReLU(), nn.Tanh()], costs=c, selector=selectors.drawn).double() for c in costs]
    model, f = nn.Sequential(*found), torch.randn(3, 3, dtype=torch.float64)
    for choice in found:
        nn.init.normal_(choice.scores)
    if has_budget:
        flat = khot.nn.schedules.between(khot.nn.schedules.linear, 0, 0)
        how = {"units": sparsity.choices, "mask": sparsity.drawn, "density_schedule": flat, "freeze": 1.0}
        Sparsifier(model, 4, steps=10, **how)
    model(torch.ones(2, dtype=torch.float64))
    assert all(choice.scores.grad is None for choice in found)
    first, second = (choice.given.probs() if has_budget else choice.soft_mask() for choice in found)
    if has_budget:
        spent = (torch.cat([first, second]).detach() * torch.tensor(costs).flatten()).sum()
        assert float(spent) <= 4 + 1e-6
    expected = torch.autograd.grad((first[:, None] * second * f).sum(), [c.scores for c in found], retain_graph=True)
    total = 0.0
    for i, j in itertools.product(range(3), repeat=2):
        found[0].last, found[1].last = i, j
        weight = float(first[i].detach() * second[j].detach() * f[i, j])
        total = total + weight * (found[0].log_prob() + found[1].log_prob())
    for one, other in zip(torch.autograd.grad(total, [c.scores for c in found]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_log_prob_needs_one_operation_that_was_drawn():
    for k in (1, 2):
        choice = Choice([nn.Identity(), nn.ReLU(), nn.Tanh()], k, selector=selectors.drawn)
        with pytest.raises(ValueError, match=f"must follow a call of a Choice with k = 1; got k = {k}"):
            choice.log_prob()
