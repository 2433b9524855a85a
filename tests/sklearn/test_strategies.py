"""Strategies of `KHotSelector`: what they find, groups, costs, k from the data, and how held-out rows decide."""

from itertools import combinations

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from khot.sklearn import Choice, KHotSelector, Portfolio, gating, splicing, surfaces, trees
from khot.sklearn._blocks import RIDGE, Blocks, Item, Purse
from khot.sklearn._portfolio import judged, within_error

pytestmark = pytest.mark.slow


def normal(rows, n, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, n))


def chosen(k, x, y, strategy=None, **how):
    more = {} if strategy is None else {"strategy": strategy}
    return KHotSelector(k, random_state=0, **more, **how).fit(x, y).get_support(indices=True).tolist()


def blocks_of(x, y, k, folds=5, costs=None):
    purse = Purse(np.ones(x.shape[1]) if costs is None else costs, k)
    items = [Item((j,), x[:, [j]]) for j in range(x.shape[1])]
    return Blocks(items, y, np.ones(len(x)), np.arange(len(x)) % folds, purse)


def test_held_out_losses_are_those_of_cross_validation():
    x, folds = normal(60, 6), np.arange(60) % 4
    y = x[:, :2] @ np.array([[1.0, 0.5], [0.0, 2.0]]) + normal(60, 2, 1)
    loss = blocks_of(x, y, 2, 4).losses([(0, 3), (1, 2, 4)])
    for got, own in zip(loss, ([0, 3], [1, 2, 4]), strict=True):
        root = np.sqrt(RIDGE) * np.eye(len(own))
        for fold in range(4):
            train = folds != fold
            a, b = np.vstack([x[train][:, own], root]), np.vstack([y[train], np.zeros((len(own), 2))])
            error = y[~train] - x[~train][:, own] @ np.linalg.lstsq(a, b, rcond=None)[0]
            assert got[fold] == pytest.approx((error**2).sum() / (y**2).sum(), rel=1e-9)
    big = 1000 * x  # the penalty vanishes
    model = LinearRegression(fit_intercept=False)
    error = y - cross_val_predict(model, big[:, [0, 3]], y, cv=PredefinedSplit(folds))
    assert blocks_of(big, y, 2, 4).loss((0, 3)) == pytest.approx((error**2).sum() / (y**2).sum(), rel=1e-6)


def test_gains_are_differences_of_training_errors():
    x, y = 1000 * normal(50, 5), normal(50, 2, 1)
    blocks = blocks_of(x, y, 3, folds=1)
    base, gains = blocks.loss((1, 2)), blocks.gains((1, 2))
    for j in (0, 3, 4):
        assert gains[j] == pytest.approx(base - blocks.loss((1, 2, j)), rel=1e-4)


def test_a_product_counts_only_if_all_its_units_are_chosen():
    x = normal(80, 3)
    y = x[:, [0]] * x[:, [1]]
    items = [*(Item((j,), x[:, [j]]) for j in range(3)), Item((0, 1), x[:, [0]] * x[:, [1]])]
    blocks = Blocks(items, y, np.ones(80), np.arange(80) % 5, Purse(np.ones(3), 2))
    assert blocks.columns((0, 2)).tolist() == [0, 2]
    assert sorted(blocks.columns((0, 1))) == [0, 1, 3]
    assert blocks.forward() == (0, 1)
    assert blocks.loss((0, 1)) < 0.01 < 0.5 < blocks.loss((0, 2))


def test_a_budget_is_spent_as_enumeration_would():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x, costs = rng.standard_normal((300, 7)), rng.uniform(0.5, 5, 7)
        y = x @ rng.uniform(0.2, 2, 7) + 0.1 * rng.standard_normal(300)
        sets = [s for r in range(1, 8) for s in combinations(range(7), r) if costs[list(s)].sum() <= 8]
        z, t = (x - x.mean(0)) / x.std(0), (y - y.mean())[:, None]
        blocks = blocks_of(z, t, 8, costs=costs)
        found = chosen(None, x, y, splicing, costs=costs, budget=8)
        assert costs[found].sum() <= 8
        assert blocks.loss(found) <= min(blocks.loss(s) for s in sets) + 0.02


@pytest.mark.parametrize(
    ("strategies", "of"),
    [
        ((splicing, surfaces, trees, gating, None), lambda x: x[:, 2] - x[:, 5] + 2 * x[:, 7]),
        ((surfaces, trees, gating, None), lambda x: np.abs(x[:, 2]) + np.abs(x[:, 5]) - 1.5 * np.abs(x[:, 7])),
    ],
)
def test_strategies_find_what_they_can(strategies, of):
    x = normal(900, 15)
    y = of(x) + 0.2 * normal(900, 1, 1)[:, 0]
    for strategy in strategies:
        assert chosen(3, x, y, strategy) == [2, 5, 7], strategy


def test_features_that_matter_only_together_are_found():
    x = normal(1000, 20)
    assert chosen(2, x, x[:, 3] * x[:, 7] > 0) == [3, 7]
    assert chosen(3, x, x[:, 3] * x[:, 7] * x[:, 11] > 0) == [3, 7, 11]
    assert chosen(3, x, x[:, 3] * x[:, 7] * x[:, 11] > 0, splicing) != [3, 7, 11]  # a negative control


@pytest.mark.slow
@pytest.mark.long
def test_a_hundred_rows_and_five_thousand_columns():
    right = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, true = rng.standard_normal((100, 5000)), rng.permutation(5000)[:10]
        y = x[:, true] @ (2 * rng.choice([-1, 1], 10)) + 0.5 * rng.standard_normal(100)
        right += len({*chosen(10, x, y)} & {*true.tolist()})
    assert right >= 27  # of 30


def test_the_portfolio_says_what_each_strategy_scored():
    x = normal(700, 12)
    y = x[:, 0] * x[:, 1] + 0.1 * normal(700, 1, 1)[:, 0]
    selector = KHotSelector(2, random_state=0).fit(x, y)
    names = [row["candidate"] for row in selector.history_]
    assert set(names) == {"splicing", "surfaces", "trees", "gating"}
    assert names[-1] == "splicing"
    scores = [row["score"] for row in selector.history_]
    assert scores == sorted(scores, reverse=True)
    assert (selector.scores_[[0, 1]] > 0).all()
    assert (np.delete(selector.scores_, [0, 1]) <= 0).all()
    assert selector.inclusion_probabilities_.sum() == pytest.approx(2)
    assert selector.inclusion_probabilities_[[0, 1]].min() > 0.9


def test_a_strategy_of_your_own_and_one_that_looks_at_held_out_rows_too():
    """Held-out rows are those the strategy never saw: choosing by noise scores nothing."""

    def last(problem):
        return Choice((len(problem.units) - 1,), np.arange(len(problem.units), dtype=float))

    seen = []

    def spy(problem):
        seen.append(len(problem.x))
        return splicing(problem)

    x = normal(200, 6)
    assert chosen(1, x, x[:, 0], last) == [5]
    assert chosen(1, x, x[:, 0], Portfolio(strategies=(last, spy))) == [0]
    assert sorted(set(seen)) == [160, 200]  # four folds of five, then all


def test_scores_of_judges_are_of_rows_held_out():
    """On pure noise, the best of many columns is worth nothing."""
    x, y = normal(120, 400), normal(120, 1, 1)[:, 0]
    selector = KHotSelector(5, random_state=0).fit(x, y)
    assert max(row["linear"] for row in selector.history_) < 0.1
    caught = []

    def catch(problem):
        caught.append(problem)
        return splicing(problem)

    leaked = KHotSelector(5, strategy=catch, random_state=0).fit(x, y)  # a negative control: chosen on all rows
    units = np.flatnonzero(leaked.get_support()).tolist()
    assert judged(caught[0], 0, units)["linear"] > 0.2


@pytest.mark.long
def test_k_from_the_data():
    x = normal(400, 12)
    y = x[:, 1] - 2 * x[:, 4] + x[:, 6] + 0.5 * normal(400, 1, 1)[:, 0]
    selector = KHotSelector("auto", max_features=8, random_state=0).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [1, 4, 6]
    assert [row["k"] for row in selector.curve_] == list(range(1, 9))
    assert within_error([{"k": 1, "score": 0.5, "error": 0.0}, {"k": 2, "score": 0.6, "error": 0.2}]) == 1
    assert KHotSelector(2, random_state=0, strategy=splicing).fit(x, y).curve_ == []


def test_groups_count_as_one():
    x = normal(500, 10)
    y = x[:, 0] + x[:, 3] + x[:, 8] + x[:, 5] + 0.1 * normal(500, 1, 1)[:, 0]
    selector = KHotSelector(2, groups=[[0, 3, 8], [1, 2]], random_state=0).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [0, 3, 5, 8]
    assert selector.inclusion_probabilities_[[0, 1, 4, 5, 6, 7, 9]].sum() == pytest.approx(2)  # one of each group
    assert np.ptp(selector.scores_[[0, 3, 8]]) == 0
    assert chosen(1, x, x[:, 1] * x[:, 2], groups=[[0, 3, 8], [1, 2]]) == [1, 2]  # they matter together


@pytest.mark.long
def test_several_targets_sparse_columns_and_groups_of_rows():
    x = normal(400, 12)
    assert chosen(3, x, np.column_stack([x[:, 3] + x[:, 4], x[:, 5]])) == [3, 4, 5]
    wide = sparse.random(300, 6000, 0.02, random_state=0, format="csr")
    y = wide[:, :3].toarray().sum(1)
    selector = KHotSelector(3, random_state=0, strategy=splicing).fit(wide, y)
    assert selector.get_support(indices=True).tolist() == [0, 1, 2]
    assert selector.transform(wide).shape == (300, 3)
    dense = KHotSelector(3, random_state=0, strategy=splicing).fit(wide[:, :50].toarray(), y)
    same = KHotSelector(3, random_state=0, strategy=splicing).fit(wide[:, :50], y)
    np.testing.assert_allclose(same.scores_, dense.scores_, rtol=1e-6, atol=1e-8)
    folds = []

    def look(problem):
        folds.append(problem.fold)
        return splicing(problem)

    people = np.repeat(np.arange(20), 20)
    x[:, 11] = people  # tells in which fold a row is
    KHotSelector(2, strategy=look).fit(x, x[:, 0], groups=people)
    assert sorted(np.bincount(folds[0])) == [80] * 5
    assert chosen(2, x, x[:, 0] + x[:, 1], Portfolio(strategies=(splicing, trees), n_jobs=2)) == [0, 1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"groups": [[0, 9]]}, "names? columns of X, or their numbers from 0 to 3; got 9"),
        ({"groups": [["a", "b"]]}, "got 'a'"),
        ({"groups": [[0, 1], [1, 2]]}, "in one of `groups`, once"),
        ({"costs": [1, 1, 1, 1]}, "`costs` and `budget` must be given together"),
        ({"costs": [1, 1, 1], "budget": 1}, "4 finite numbers > 0"),
        ({"costs": [2, 3, 4, 5], "budget": 1}, "`budget` must be ≥ 2, the lowest cost"),
        ({"costs": [2, 3, 4, 5], "budget": 5, "n_features_to_select": 2}, "must be None if there is a `budget`"),
        ({"max_features": 2}, '`max_features` needs `n_features_to_select="auto"`'),
        ({"n_features_to_select": "some"}, "must be one of 'auto'"),
        ({"n_features_to_select": 5}, "1 ≤ k ≤ 4"),
    ],
)
def test_bad_wishes(how, says):
    x = normal(30, 4)
    with pytest.raises(ValueError, match=says):
        KHotSelector(**how).fit(x, x[:, 0])


def test_constant_targets_and_few_rows():
    x = normal(30, 4)
    with pytest.raises(ValueError, match="at least 2 classes"):
        KHotSelector(2).fit(x, np.ones(30))
    assert len(chosen(2, x, np.full(30, 0.5))) == 2
    assert len(chosen(2, x[:3], x[:3, 0])) == 2
    for rows in range(12, 20):  # classes that a line says nothing of left the choice empty
        assert chosen(1, np.arange(float(rows))[:, None], np.arange(rows) % 2, splicing) == [0]
    with pytest.raises(ValueError, match="label for each of the 30 rows"):
        KHotSelector(2).fit(x, x[:, 0], groups=np.arange(5))
