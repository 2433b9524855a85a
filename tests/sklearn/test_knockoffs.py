"""Knockoffs: their covariances, and the share of false discoveries in simulations."""

import numpy as np
import pytest

from khot.sklearn import Discoveries, gaussian_knockoffs, knockoffs
from khot.sklearn._knockoffs import _threshold

pytestmark = pytest.mark.slow

Q, RUNS = 0.2, 60


def correlated(rng, rows, n, r=0.4):
    x = rng.standard_normal((rows, n))
    for j in range(1, n):
        x[:, j] = r * x[:, j - 1] + (1 - r * r) ** 0.5 * x[:, j]
    return x


def test_a_column_and_its_knockoff_can_be_exchanged():
    x = 3 * correlated(np.random.default_rng(0), 40_000, 5) + 7
    copy = gaussian_knockoffs(x, seed=1)
    own, other = np.cov(x, rowvar=False), np.cov(copy, rowvar=False)
    across = (x - x.mean(0)).T @ (copy - copy.mean(0)) / len(x)
    np.testing.assert_allclose(other, own, atol=0.2)
    np.testing.assert_allclose((across - own)[~np.eye(5, dtype=bool)], 0, atol=0.2)
    s = np.diag(own - across) / np.diag(own)
    assert np.ptp(s) < 0.05
    assert s.min() > 0.5  # far enough from the column itself
    np.testing.assert_allclose(copy.mean(0), x.mean(0), atol=0.1)


def test_the_threshold_is_that_of_knockoff_plus():
    w = np.array([5.0, 4, 3, 2.5, 2, -1, 1, 0])
    assert _threshold(w, 0.2) == 2.0  # five above, none below: (1 + 0) / 5
    assert _threshold(w, 0.34) == 1.0  # (1 + 1) / 6
    assert _threshold(w[:4], 0.2) == np.inf
    found = Discoveries(w >= 2, w, 2.0, 0.2)
    assert found.names(list("abcdefgh")) == list("abcde")


def simulate(task, select, runs=RUNS, r=0.4):
    """The share of false ones among the discoveries, and the share of true ones found, of each run."""
    false, power = [], []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        x, true = correlated(rng, 300, 30, r), rng.permutation(30)[:10]
        value = 0.5 * x[:, true] @ rng.choice([-1, 1], 10)
        y = value + rng.standard_normal(300) if task == "regression" else value + rng.logistic(size=300) / 2 > 0
        found = np.flatnonzero(select(x, y, seed))
        false.append(len({*found} - {*true}) / max(len(found), 1))
        power.append(len({*found} & {*true}) / 10)
    return np.array(false), np.array(power)


@pytest.mark.long
def test_false_discoveries_are_rare_enough_and_true_ones_are_found():
    """FDR ≤ q within two standard errors of the simulation; the power is stated in the docs."""
    false, power = simulate("regression", lambda x, y, seed: knockoffs(x, y, Q, seed=seed).selected)
    assert false.mean() <= Q + 2 * false.std(ddof=1) / RUNS**0.5
    assert power.mean() > 0.85


@pytest.mark.long
def test_classes():
    select = lambda x, y, seed: knockoffs(x, y, Q, task="classification", seed=seed).selected  # noqa: E731
    false, power = simulate("classification", select, runs=8)
    assert false.mean() <= Q + 2 * false.std(ddof=1) / 8**0.5
    assert power.mean() > 0.5


def test_without_the_knockoffs_of_each_column_the_bound_breaks():
    """A negative control: columns of independent noise are no knockoffs of correlated columns that share a cause."""

    def wrong(x, y, seed):
        both = np.hstack([x, np.random.default_rng(seed).standard_normal(x.shape)])
        own, other = np.split(np.abs(both.T @ (y - y.mean())), 2)  # marginal statistics
        return own - other >= _threshold(own - other, Q)

    false, _ = simulate("regression", wrong, r=0.7)
    assert false.mean() > Q + 4 * false.std(ddof=1) / RUNS**0.5


def test_nothing_is_found_where_nothing_is():
    rng = np.random.default_rng(0)
    hits = sum(
        knockoffs(rng.standard_normal((100, 20)), rng.standard_normal(100), Q, seed=i).selected.any() for i in range(20)
    )
    assert hits <= 9  # FDR ≤ .2 of all-null runs: at most one run in five, and luck


@pytest.mark.parametrize(("bad", "says"), [({"q": 0}, "q"), ({"q": 1.0}, "0 ≤ q < 1"), ({"task": "other"}, "task")])
def test_bad_input(bad, says):
    x = np.random.default_rng(0).standard_normal((50, 3))
    with pytest.raises(ValueError, match=says):
        knockoffs(x, x[:, 0], **bad)
