"""`khot.sklearn.KHotNeighborhood`."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_wine, make_friedman1
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import khot
from khot.nn import neighbors_loss
from khot.sklearn import KHotNeighborhood

pytestmark = pytest.mark.slow


def noisy(rows=300, seed=0):
    """One of ten columns says the class, and the others are large noise."""
    random = np.random.default_rng(seed)
    y = np.arange(rows) % 3
    x = 3 * random.standard_normal((rows, 10))
    x[:, 4] = y + 0.2 * random.standard_normal(rows)
    return x, y


@parametrize_with_checks([KHotNeighborhood(random_state=0, max_steps=20), KHotNeighborhood(hidden=(8,), max_steps=5)])
def test_scikit_learns_own_checks(estimator, check):
    """All of them, with no expected failure."""
    check(estimator)


@pytest.mark.parametrize("hidden", [(), (16,)])
@pytest.mark.parametrize("batch_size", [100, 512])
def test_it_finds_the_column_that_matters(hidden, batch_size):
    (x, y), (new, truth) = noisy(seed=0), noisy(seed=1)
    model = KHotNeighborhood(2, hidden=hidden, batch_size=batch_size, random_state=0)
    model = make_pipeline(model, KNeighborsClassifier()).fit(x, y)
    assert KNeighborsClassifier().fit(x, y).score(new, truth) < 0.6
    assert model.score(new, truth) > 0.9
    learned = model[0]
    assert learned.components_.shape == (2, 10)
    assert learned.task_ == "classification"
    assert np.abs(learned.components_[:, 4]).sum() > 3 * np.abs(np.delete(learned.components_, 4, 1)).sum(0).max()
    assert learned.history_[-1]["loss"] < learned.history_[0]["loss"] / 2
    assert learned.history_[-1]["step"] == learned.n_steps_ == 200
    assert list(learned.get_feature_names_out()) == ["khotneighborhood0", "khotneighborhood1"]


@pytest.mark.parametrize("hidden", [(), (16,)])
def test_regression_with_one_and_several_targets(hidden):
    x, y = make_friedman1(500, 10, random_state=0)
    new, truth = make_friedman1(200, 10, random_state=1)
    model = KHotNeighborhood(4, hidden=hidden, random_state=0, temperature=0.3)
    learned = make_pipeline(model, KNeighborsRegressor()).fit(x, y)
    assert learned[0].task_ == "regression"
    assert learned.score(new, truth) > KNeighborsRegressor().fit(x, y).score(new, truth) + 0.1
    both = make_pipeline(clone(model), KNeighborsRegressor()).fit(x, np.stack([y, -y], 1))
    assert both.predict(new).shape == (200, 2)


def test_the_loss_is_that_of_the_map():
    """One step of size almost 0: what is trained is the share of wrong neighbours under the map that is returned."""
    x, y = noisy(100)
    model = KHotNeighborhood(3, 4, max_steps=1, learning_rate=1e-9, random_state=0).fit(x, y)
    z = torch.from_numpy(model.transform(x))
    assert model.history_[0]["loss"] == pytest.approx(float(neighbors_loss(z, torch.from_numpy(y), 4)), abs=1e-5)
    distance = torch.cdist(z, z).square() + torch.eye(100) * 1e9
    assert float(distance.topk(4, largest=False).values[:, -1].mean()) == pytest.approx(1, rel=1e-3)


def test_it_is_repeatable_pickles_and_takes_a_first_map_and_another_relaxation():
    x, y = load_wine(return_X_y=True)
    how = {"max_steps": 20, "random_state": 3, "hidden": (8,)}
    model = KHotNeighborhood(2, **how).fit(x, y)
    z = model.transform(x)
    assert np.array_equal(z, KHotNeighborhood(2, **how).fit(x, y).transform(x))
    assert np.array_equal(z, pickle.loads(pickle.dumps(model)).transform(x))
    first = np.eye(13)[:2]
    other = KHotNeighborhood(2, init=first, relaxation=khot.euclidean_topk, learning_rate=1e-9, max_steps=1).fit(x, y)
    ratio = other.components_[[0, 1], [0, 1]]
    np.testing.assert_allclose(other.components_, first * ratio[0], atol=1e-6 * ratio[0])


def test_in_a_grid_search_with_string_classes():
    x, y = noisy(240)
    names = np.array(["a", "b", "c"])[y]
    pipeline = make_pipeline(KHotNeighborhood(random_state=0), KNeighborsClassifier())
    search = GridSearchCV(pipeline, {"khotneighborhood__n_components": [1, 3]}, cv=3).fit(x, names)
    assert search.best_score_ > 0.8


def test_a_callback_stops_it_and_threads_are_restored():
    seen, before = [], torch.get_num_threads()
    model = KHotNeighborhood(max_steps=80, random_state=0, callback=lambda entry: seen.append(entry) or len(seen) == 3)
    model.fit(*noisy(60))
    assert [entry["step"] for entry in seen] == [2, 4, 6]
    assert model.n_steps_ == 6
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"n_neighbors": 60}, ValueError, "1 ≤ n_neighbors ≤ 59"),
        ({"n_neighbors": 8, "batch_size": 8}, ValueError, "1 ≤ n_neighbors ≤ 7"),
        ({"n_neighbors": 0}, ValueError, "`n_neighbors` must be ≥ 1"),
        ({"n_components": 11}, ValueError, "n_components ≤ 10"),
        ({"n_components": 0}, ValueError, "`n_components` must be ≥ 1"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be > 0"),
        ({"task": "ranking"}, ValueError, "`task` must be one of"),
        ({"hidden": 8}, TypeError, "`hidden` must be a tuple of ints"),
        ({"hidden": (0,)}, ValueError, r"`hidden\[0\]` must be ≥ 1"),
        ({"init": np.eye(4)}, ValueError, r"`init` must have the shape \(10, 10\)"),
    ],
)
def test_bad_parameters(changes, error, says):
    with pytest.raises(error, match=says):
        KHotNeighborhood(**changes).fit(*noisy(60))


def test_bad_data():
    x, y = noisy(60)
    with pytest.raises(ValueError, match="at least 2 classes"):
        KHotNeighborhood().fit(x, np.zeros(60, int))
    x[3, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        KHotNeighborhood().fit(x, y)
