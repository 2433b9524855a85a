"""Balanced and spread samples."""

import functools
import math
from collections import Counter
from fractions import Fraction
from functools import cache

import pytest
import torch
from design_cases import A6K3, generator, scores

import khot
from khot._math import balanced
from khot.designs import Budgeted, Cube, LocalPivotal, Pivotal, spatial_order
from khot.testing import check_design

PLACES = torch.rand(60, 2, dtype=torch.float64, generator=generator(3))
PROBS = khot.sigmoid_topk(scores(60), 12)


def cube(probs, k=None, **options):
    n = probs.shape[-1]
    z = torch.stack((torch.arange(n) + 1.0, torch.arange(n).double().cos(), torch.ones(n)), -1)
    return Cube(probs, k, balance=z, **options)


def local(probs, k=None):
    n = probs.shape[-1]
    return LocalPivotal(probs, k, places=torch.stack((torch.arange(n) % 3, torch.arange(n) // 3), -1))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("make", [cube, functools.partial(cube, order="given"), local], ids=["random", "given", "lpm"])
def test_a_design_with_known_variables_is_a_right_design(make):
    check_design(make, draws=40_000)


@pytest.mark.parametrize("is_fair", [False, True], ids=["right", "fair coins"])
@pytest.mark.parametrize("make", [cube, local])
def test_inclusion_probabilities_and_sizes(make, is_fair, monkeypatch):
    """Every frequency within 5 standard errors; not if each move is decided by a fair coin, which loses the mean."""
    unit = balanced.noise.unit
    if is_fair:
        monkeypatch.setattr(balanced.noise, "unit", lambda bits: unit(bits).round())
    p = torch.stack((PROBS, khot.sigmoid_topk(scores(60, seed=1), 5.5), torch.zeros(60).double()))
    p[2, 10:13] = 1
    design = make(p, torch.tensor([12.0, 5.5, 3.0]))
    x = design.sample((1000,), generator=generator())
    is_right = bool(((x.mean(0) - p).abs() <= 5 * (p * (1 - p) / 1000).sqrt()).all())
    assert is_right == (not is_fair)
    if is_fair:
        return
    assert (x.sum(-1)[:, 0] == 12).all()
    assert set(x.sum(-1)[:, 1].tolist()) == {5.0, 6.0}
    assert torch.equal(x[:, 2], p[2].expand(1000, -1))


def test_a_step_of_the_cube_keeps_the_mean_and_the_totals():
    """φ ± λu, each with the other's probability: checked for the direction and both ends, without chance."""
    for v in (1, 2, 3, 5):
        a = scores(200, v, v + 1, seed=v)
        a[:50, -1] = a[:50, 0] * 2  # rows that depend on each other, if there are two
        a[50:60, :, 0] = 0
        w, can_move = balanced._direction(a, torch.ones(200, v + 1, dtype=torch.bool))
        assert can_move.all()
        assert ((a @ w[..., None]).abs().amax((-1, -2)) < 1e-9).all()
        torch.testing.assert_close(w.abs().amax(-1), torch.ones(200, dtype=torch.float64))
    _, can_move = balanced._direction(a[60:], torch.arange(v + 1).expand(140, v + 1) > 0)
    assert not can_move.any(), "as many columns as rows, and independent"
    off = w.clone()
    off[:, 0] += 0.01
    assert ((a[60:] @ off[60:, :, None]).abs().amax((-1, -2)) > 1e-4).all(), "the check finds a wrong direction"


def test_totals_of_balanced_variables_are_exact_but_for_the_landing():
    n, k = 600, 120
    p = khot.sigmoid_topk(0.5 * scores(n), k)
    z = torch.stack((scores(n, seed=1) + 3, scores(n, seed=2).exp()), -1)
    samples = {
        "cube": Cube(p, balance=z).sample((60,), generator=generator()),
        "pivotal": Pivotal(p).sample((60,), generator=generator()),
    }
    spread = {name: khot.horvitz_thompson(z.mT[:, None], x, p).std(-1) for name, x in samples.items()}
    assert spread["cube"][0] < 0.3 * spread["pivotal"][0]
    assert spread["cube"][1] < 0.6 * spread["pivotal"][1], "the variable that is given up first"
    # z = π is balanced already, and a constant column with equal probabilities is the size: nothing changes
    same = Cube(torch.full((8,), 0.5), balance=torch.ones(8, 1)).sample((50,), generator=generator())
    assert (same.sum(-1) == 4).all()


def test_balanced_on_indicators_is_stratified():
    """With indicators of strata whose expected counts are whole, every sample has these counts exactly."""
    strata = torch.arange(40) % 4
    p = torch.full((40,), 0.3, dtype=torch.float64)
    indicators = torch.nn.functional.one_hot(strata).double()
    x = Cube(p, balance=indicators[:, :3] * p[:, None]).sample((200,), generator=generator())
    assert ((x @ indicators) == 3).all()
    y = Pivotal(p).sample((200,), generator=generator())
    assert ((y @ indicators) != 3).any()


def test_the_cube_balanced_on_its_size_alone_has_the_pairs_of_the_tree(monkeypatch):
    """With no variable but the size, and none that waits, it is the pivotal design in the given order, pair by pair."""
    monkeypatch.setattr(balanced, "LAST", 0)
    p = A6K3[None]
    x = balanced.cube(p, p[:, None, :][:, :0], torch.tensor([True]), torch.tensor(7), False, 40_000)
    joint, expected = x.mT @ x / 40_000, Pivotal(A6K3, order="given").joint_probs()
    assert ((joint - expected).abs() <= 5 * (expected * (1 - expected) / 40_000).sqrt() + 1e-12).all()
    other = Pivotal(A6K3, order=torch.tensor([5, 0, 3, 1, 4, 2])).joint_probs()
    assert ((joint - other).abs() > 0.02).any(), "another order has other pairs"


def voronoi(x, probs, places):
    """Stevens and Olsen's measure of spread: the variance of Σπ over the cells of the sample, 1 if well spread."""
    apart = torch.cdist(places, places).masked_fill(x[:, None] == 0, torch.inf)
    cells = torch.zeros_like(x).scatter_add_(-1, apart.argmin(-1), probs.expand(x.shape))
    return ((cells - 1).square() * x).sum(-1) / x.sum(-1)


def test_spread_samples_have_even_cells():
    designs = {
        "local": LocalPivotal(PROBS, places=PLACES),
        "tree": Pivotal(PROBS, order=spatial_order(PLACES)),
        "random": Pivotal(PROBS),
    }
    mean = {
        name: float(voronoi(d.sample((400,), generator=generator()), PROBS, PLACES).mean())
        for name, d in designs.items()
    }
    assert mean["local"] < mean["tree"] < 0.75 * mean["random"], mean


def test_local_pivotal_breaks_ties_at_random_and_duels_with_the_nearest():
    """Four items at ½ in two distant pairs: one of each pair, always, and both of them equally often."""
    places = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    x = LocalPivotal(torch.full((4,), 0.5), places=places).sample((2000,), generator=generator())
    assert (x[:, :2].sum(-1) == 1).all()
    assert (x[:, 2:].sum(-1) == 1).all()
    assert abs(float(x[:, 0].mean()) - 0.5) < 0.056
    # one item between two others, as near to both: it meets the left one in half of the draws that it begins
    tied = torch.tensor([[-1.0], [0.0], [1.0], [50.0]])
    y = LocalPivotal(torch.tensor([0.3, 0.4, 0.3, 1.0]), places=tied).sample((2000,), generator=generator())
    assert abs(float(y[:, 0].mean()) - 0.3) < 0.052


def test_a_spatial_order_is_an_order_of_neighbours():
    order = spatial_order(PLACES)
    assert torch.equal(order.sort().values, torch.arange(60))
    step = (PLACES[order][1:] - PLACES[order][:-1]).norm(dim=-1).mean()
    assert step < 0.4 * (PLACES[1:] - PLACES[:-1]).norm(dim=-1).mean()
    line = scores(37)
    assert torch.equal(spatial_order(line[:, None]), line.argsort())
    both = spatial_order(torch.stack((PLACES, PLACES.flip(-1))))
    assert torch.equal(both[0], order)
    assert spatial_order(torch.zeros(1, 2)).tolist() == [0]


def test_samples_are_the_same_in_parts_and_with_a_seed(monkeypatch):
    design = cube(PROBS)
    x = design.sample((30,), generator=generator())
    assert torch.equal(x, design.sample((30,), generator=generator()))
    monkeypatch.setattr("khot.designs._balanced.AT_ONCE", 5 * 60 * 5)
    parts = design.sample((30,), generator=generator())
    assert parts.shape == x.shape
    assert len(parts.unique(dim=0)) > 25, "the parts have seeds of their own"


def test_balanced_samples_under_transforms_and_in_batches():
    p = khot.sigmoid_topk(scores(3, 2, 10), 4)
    z = scores(2, 10, 2, seed=4)
    for design in (Cube(p, balance=z), LocalPivotal(p, places=z)):
        x = design.expand((5, 3, 2)).sample(generator=generator())
        assert x.shape == (5, 3, 2, 10)
        assert (x.sum(-1) == 4).all()
    rows = torch.vmap(lambda row: cube(row).sample(), randomness="different")(p[:, 0])
    assert (rows.sum(-1) == 4).all()
    y = khot.sample_khot(scores(10).requires_grad_(), 4, design=cube, generator=generator())
    assert y.requires_grad


@pytest.mark.compile
def test_balanced_samples_compile():
    p, z = khot.sigmoid_topk(scores(10), 4), scores(10, 2)
    for make in (lambda t: Cube(t, 4, balance=z), lambda t: LocalPivotal(t, 4, places=z)):
        x = torch.compile(lambda t, make=make: make(t).sample(), fullgraph=True)(p)
        assert x.sum() == 4


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, r"of shape \(…, 6, q\)", lambda: Cube(A6K3, balance=torch.ones(5, 2))),
        (ValueError, r"of shape \(…, 6, q\)", lambda: Cube(A6K3, balance=torch.ones(6))),
        (ValueError, "must be finite", lambda: Cube(A6K3, balance=torch.full((6, 1), torch.nan))),
        (ValueError, "must broadcast", lambda: LocalPivotal(A6K3, places=torch.ones(2, 6, 1))),
        (TypeError, "torch.Tensor", lambda: LocalPivotal(A6K3, places=[1, 2])),
        (ValueError, "'random', 'given'", lambda: Cube(A6K3, balance=torch.ones(6, 1), order="shared")),
        (NotImplementedError, "no tractable", lambda: Cube(A6K3, balance=torch.ones(6, 1)).log_prob(A6K3.round())),
    ],
)
def test_errors_of_balanced_designs(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_budgets_are_spent_on_average_and_never_missed_by_more_than_a_cost():
    """Inclusions within 4.5 standard errors; every cost within the largest, and closer than with `Pivotal`."""
    theta, costs = scores(2, 40), scores(40, seed=1).exp()
    budget = torch.tensor([9.0, 20.0], dtype=torch.float64)
    design = Budgeted(theta, budget, costs=costs)
    torch.testing.assert_close(design.mean @ costs, budget, rtol=1e-12, atol=0)
    torch.testing.assert_close(design.mean, khot.sigmoid_topk(theta, budget, costs=costs))
    x = design.sample((3000,), generator=generator())
    p, spent = design.mean, x @ costs
    assert ((x.mean(0) - p).abs() <= 4.5 * (p * (1 - p) / 3000).sqrt()).all()
    assert (spent - budget).abs().max() <= costs.max()
    assert (x.sum(-1) - p.sum(-1)).abs().max() < 1
    free = khot.designs.Pivotal(p, p.sum(-1)).sample((3000,), generator=generator()) @ costs
    assert ((spent - budget).std(0) < 0.75 * (free - budget).std(0)).all()
    assert (free - budget).abs().max() > costs.max(), "without balance the bound does not hold"


def test_budgeted_samples_learn():
    theta, costs = scores(6).requires_grad_(), torch.arange(1.0, 7.0, dtype=torch.float64).requires_grad_()
    y = khot.estimators.straight_through_sample(Budgeted(theta, 8.0, costs=costs), (50,), generator=generator())
    slopes = torch.autograd.grad((y * scores(6, seed=2)).sum(), (theta, costs))
    assert all(slope.isfinite().all() and (slope != 0).any() for slope in slopes)
    assert Budgeted(theta, 8, costs=costs).expand((3,)).sample((2,)).shape == (2, 3, 6)


@pytest.mark.parametrize(
    ("budget", "theta", "spent"),
    [(0.0, [0.0, 1.0, 2.0], 0.0), (6.0, [0.0, 1.0, 2.0], 6.0), (3.0, [0.0, -torch.inf, torch.inf], 3.0)],
)
def test_budgets_that_leave_no_choice(budget, theta, spent):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        design = Budgeted(torch.tensor(theta, dtype=dtype), budget, costs=torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
        x = design.sample((20,), generator=generator())
        assert ((x.float() @ torch.tensor([1.0, 2.0, 3.0]) - spent).abs() <= 1e-6).all()
    one = Budgeted(torch.zeros(1), 1.0, costs=torch.tensor([2.0])).sample((400,), generator=generator())
    assert 0.35 < one.mean() < 0.65


def test_errors_of_budgets():
    for costs in ([1.0, 0.0], [1.0, -1.0], [1.0, torch.nan]):
        with pytest.raises(ValueError, match="`costs` must be finite and > 0"):
            Budgeted(torch.zeros(2), 1.0, costs=torch.tensor(costs))
    for budget in (torch.tensor(4.0), torch.tensor(-1.0)):
        with pytest.raises(ValueError, match="`budget` must satisfy 0 ≤ budget ≤ 3"):
            Budgeted(torch.zeros(2), budget, costs=torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"`k` must|`costs`|`budget`"):
        Budgeted(torch.zeros(2), 4.0, costs=torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="NaN"):
        Budgeted(torch.tensor([torch.nan, 0.0]), 1.0, costs=torch.tensor([1.0, 2.0]))


def test_items_that_wait_for_the_end_balance_better(monkeypatch):
    """A tree alone hands its extreme items to the root: errors were 1.14 to 1.35 times those of R's `samplecube`."""
    p, z = khot.sigmoid_topk(0.5 * scores(300), 60), scores(300, 1, seed=5).exp()
    spread = []
    for waiting in (balanced.LAST, 0):
        monkeypatch.setattr(balanced, "LAST", waiting)
        x = Cube(p, balance=z).sample((800,), generator=generator())
        spread.append(float((khot.horvitz_thompson(z[:, 0], x, p) / z.sum() - 1).square().mean().sqrt()))
    assert spread[0] < 0.92 * spread[1]


def test_no_order_of_places_that_are_not_known():
    with pytest.raises(ValueError, match="`places` must be finite"):
        spatial_order(torch.tensor([[0.0], [float("nan")]]))


def law_of_duels(probs, places, is_local=True):
    """P(subset) of the second method of Grafström, Lundström and Schelin, by all duels that can come: no chance."""

    @cache
    def law(state):
        items = [i for i, p in enumerate(state) if 0 < p < 1]
        if not items:
            return {state: Fraction(1)}
        total = {}
        for i in items:
            others = [j for j in items if j != i]
            near = min(abs(places[i] - places[j]) for j in others)
            met = [j for j in others if not is_local or abs(places[i] - places[j]) == near]
            for j in met:
                s = state[i] + state[j]
                ends = ((s, 0, state[i] / s), (0, s, state[j] / s))
                if s > 1:
                    ends = ((1, s - 1, (1 - state[j]) / (2 - s)), (s - 1, 1, (1 - state[i]) / (2 - s)))
                for a, b, chance in ends:
                    after = tuple(a if m == i else b if m == j else p for m, p in enumerate(state))
                    for subset, q in law(after).items():
                        total[subset] = total.get(subset, 0) + q * chance / len(items) / len(met)
        return total

    return law(probs)


def test_local_pivotal_samples_have_the_law_of_the_paper():
    """Every subset within 4.5 standard errors of its probability by enumeration; the law of random duels is not."""
    probs = tuple(Fraction(p, 10) for p in (3, 5, 2, 6, 7, 3, 4))
    places = (0, 1, 3, 4, 6, 9, 10)
    exact = law_of_duels(probs, places)
    assert sum(exact.values()) == 1
    assert [sum(q * x[i] for x, q in exact.items()) for i in range(7)] == list(probs)
    draws = 40_000
    design = LocalPivotal(
        torch.tensor([float(p) for p in probs], dtype=torch.float64), places=torch.tensor(places).double()[:, None]
    )
    seen = Counter(tuple(x) for x in design.sample((draws,), generator=generator()).long().tolist())

    def worst(law):
        assert sum(law.values()) == 1
        errors = {x: math.sqrt(float(q) * (1 - float(q)) / draws) for x, q in law.items()}
        return max(abs(seen[x] / draws - float(q)) / errors[x] for x, q in law.items())

    assert set(seen) <= set(exact)
    assert worst(exact) < 4.5
    assert worst(law_of_duels(probs, places, is_local=False)) > 20
