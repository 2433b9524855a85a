"""`khot.sklearn.KHotSelector`."""

import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, make_friedman1
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import khot
from khot import estimators
from khot.designs import ConditionalPoisson
from khot.sklearn import Gate, KHotSelector, find_task, number_of_features, splicing
from khot.sklearn._selector import standardised

pytestmark = pytest.mark.slow


def xor(seed, rows=3000):
    """The product of two of twenty columns: none of them alone says anything."""
    x = np.random.default_rng(seed).standard_normal((rows, 20))
    return x, (x[:, 0] * x[:, 1] > 0).astype(int)


@parametrize_with_checks([KHotSelector(random_state=0), KHotSelector(random_state=0, strategy=Gate(max_steps=60))])
def test_scikit_learns_own_checks(estimator, check):
    """All of them, with no expected failure."""
    check(estimator)


def gate(k, **how):
    """The selector that all was before there was a portfolio."""
    return KHotSelector(k, random_state=how.pop("seed", 0), callback=how.pop("callback", None), strategy=Gate(**how))


def test_the_gate_finds_features_that_matter_only_together():
    x, y = xor(0)
    selector = gate(2).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [0, 1]
    assert selector.inclusion_probabilities_.sum() == pytest.approx(2)
    assert (np.argsort(-selector.scores_)[:2] < 2).all()
    budgets = [entry["budget"] for entry in selector.history_]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == 2
    assert set(selector.history_[0]) == {"step", "steps", "budget", "train_loss", "validation_loss"}


def test_without_the_falling_budget_it_does_not():
    """A negative control: samples of two of twenty hold both in one of 190 cases."""
    x, y = xor(0)
    assert gate(2, annealed=0.0).fit(x, y).get_support(indices=True).tolist() != [0, 1]


@pytest.mark.parametrize("make", [KHotSelector, lambda k, random_state: gate(k, max_steps=400)])
def test_regression_and_reconstruction(make):
    x, y = make_friedman1(1000, 20, random_state=0)
    selector = make(5, random_state=0).fit(x, y)
    assert selector.task_ == "regression"
    assert selector.get_support(indices=True).tolist() == [0, 1, 2, 3, 4]
    generator = np.random.default_rng(0)
    sources = generator.standard_normal((800, 3))
    x = np.concatenate([sources, sources @ generator.standard_normal((3, 9))], 1)
    x[:, 3:] += 2 * generator.standard_normal((800, 9))
    selector = make(3, random_state=0).fit(x)
    assert selector.task_ == "reconstruction"
    assert selector.get_support(indices=True).tolist() == [0, 1, 2]


def test_pandas_in_and_out():
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    names = load_breast_cancer().target_names[y]
    selector = KHotSelector(0.1, random_state=0).set_output(transform="pandas").fit(x, names)
    assert isinstance(selector.transform(x), pd.DataFrame)
    assert list(selector.transform(x).columns) == list(selector.get_feature_names_out())
    assert selector.classes_.tolist() == ["benign", "malignant"]
    assert selector.get_support().sum() == 3


def test_in_a_pipeline_under_grid_search_and_pickled():
    x, y = load_breast_cancer(return_X_y=True)
    pipe = make_pipeline(KHotSelector(random_state=0, strategy=splicing), LogisticRegression(max_iter=5000))
    search = GridSearchCV(pipe, {"khotselector__n_features_to_select": [1, 5]}, cv=2).fit(x, y)
    assert search.best_params_["khotselector__n_features_to_select"] == 5
    selector = search.best_estimator_[0]
    again = pickle.loads(pickle.dumps(selector))
    assert (again.transform(x) == selector.transform(x)).all()
    assert clone(selector).get_params() == selector.get_params()


@pytest.mark.parametrize("strategy", [KHotSelector().strategy, Gate(max_steps=60)])
def test_the_same_seed_gives_the_same_scores_in_any_order_of_rows(strategy):
    x, y = xor(1, rows=300)
    first = KHotSelector(2, random_state=3, strategy=strategy).fit(x, y)
    state = torch.random.get_rng_state()
    again = KHotSelector(2, random_state=3, strategy=strategy).fit(x[::-1], y[::-1])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (again.scores_ == first.scores_).all()
    if isinstance(strategy, Gate):
        assert (KHotSelector(2, random_state=4, strategy=strategy).fit(x, y).scores_ != first.scores_).any()


@pytest.mark.parametrize("strategy", [KHotSelector().strategy, Gate(max_steps=60)])
def test_weights_are_repetitions(strategy):
    x, y = xor(2, rows=200)
    weight = np.arange(200) % 3
    weighted = KHotSelector(2, random_state=0, strategy=strategy).fit(x, y, sample_weight=weight)
    repeated = KHotSelector(2, random_state=0, strategy=strategy).fit(np.repeat(x, weight, 0), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.scores_, repeated.scores_, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="at least one non-zero"):
        KHotSelector(2).fit(x, y, sample_weight=np.zeros(200))


@pytest.mark.parametrize(
    "swap",
    [
        {"relaxation": khot.euclidean_topk},
        {"design": None},
        {"design": khot.designs.Systematic},
        {"design": ConditionalPoisson, "estimator": estimators.simple},
        {"estimator": partial(estimators.relaxed, temperature=0.5)},
        {"design": ConditionalPoisson, "estimator": estimators.rloo},
        {"design": ConditionalPoisson, "estimator": estimators.taylor_control_variate},
        {"hidden": ()},
    ],
)
def test_one_line_swaps(swap):
    x, y = load_breast_cancer(return_X_y=True)
    selector = gate(3, max_steps=60, **swap).fit(x, y)
    assert selector.get_support().sum() == 3
    chosen = selector.transform(x)
    score = LogisticRegression(max_iter=5000).fit(chosen, y).score(chosen, y)
    assert score > 0.85


def test_a_callback_sees_the_history_and_can_stop():
    x, y = xor(0, rows=300)
    seen = []

    def stop(entry):
        seen.append(entry)
        return len(seen) == 3

    selector = gate(2, callback=stop).fit(x, y)
    assert selector.history_ == seen
    assert len(seen) == 3
    assert selector.get_support().sum() == 2


def test_tasks_are_found():
    assert find_task(np.array(["a", "b"])) == "classification"
    assert find_task(np.array([True, False])) == "classification"
    assert find_task(np.array([0.0, 1.0, 2.0])) == "classification"
    assert find_task(np.array([0.5, 1.0])) == "regression"
    assert find_task(np.arange(100)) == "regression"
    assert find_task(np.arange(30) % 30) == "regression"
    assert find_task(np.arange(900) % 30) == "classification"
    assert find_task(np.zeros((5, 2))) == "regression"
    x = np.random.default_rng(0).standard_normal((50, 3))
    assert KHotSelector(1, task="regression", strategy=splicing).fit(x, np.arange(50) % 2).task_ == "regression"
    two = KHotSelector(1, strategy=splicing).fit(x, x[:, :2])
    assert two.task_ == "regression"


@pytest.mark.parametrize(
    ("given", "n", "k"), [(None, 9, 4), (None, 1, 1), (3, 9, 3), (0.5, 9, 4), (1.0, 9, 9), (0.01, 9, 1)]
)
def test_numbers_of_features(given, n, k):
    assert number_of_features(given, n) == k


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (10, ValueError, "1 ≤ k ≤ 9"),
        (0, ValueError, "1 ≤ k ≤ 9"),
        (1.5, ValueError, "0 < fraction ≤ 1"),
        ("3", TypeError, "an int, a float, .auto. or None; got str"),
        (True, TypeError, "got bool"),
    ],
)
def test_bad_numbers_of_features(given, error, says):
    with pytest.raises(error, match=says):
        number_of_features(given, 9)


def test_numpy_integers_are_settings():
    x, y = xor(0, rows=60)
    sizes = {"max_steps": 20, "batch_size": 16, "patience": 10}
    plain = gate(2, hidden=(8,), **sizes).fit(x, y)
    small = {name: np.uint8(size) for name, size in sizes.items()}
    wide = gate(np.int64(2), seed=np.int64(0), hidden=(np.int32(8),), **small).fit(x, y)
    assert (wide.scores_ == plain.scores_).all()


def test_bad_tasks():
    x = np.random.default_rng(0).standard_normal((20, 3))
    with pytest.raises(ValueError, match="`task` must be one of 'auto', 'classification'"):
        KHotSelector(1, task="clustering").fit(x)
    with pytest.raises(ValueError, match="`y` must be given for regression"):
        KHotSelector(1, task="regression").fit(x)
    with pytest.raises(ValueError, match="at least 2 classes; got one class"):
        KHotSelector(1).fit(x, np.zeros(20))


@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e300])
def test_units_do_not_matter(scale):
    x, y = xor(0, rows=300)
    plain, scaled = (KHotSelector(2, random_state=0).fit(x * by, y) for by in (1.0, scale))
    weight = np.ones(len(x))
    np.testing.assert_allclose(standardised(x, weight), standardised(x * scale, weight), rtol=1e-6, atol=1e-7)
    assert (scaled.get_support() == plain.get_support()).all()


def test_a_training_that_diverges_is_an_error():
    x, y = xor(0, rows=300)
    with pytest.raises(ValueError, match="training diverged"):
        gate(2, max_steps=30, learning_rate=1e20).fit(x, y)


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ({"max_steps": 0}, ValueError, "`max_steps` must be ≥ 1; got 0"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be ≥ 1"),
        ({"patience": None}, TypeError, "`patience` must be an int"),
        ({"hidden": 64}, TypeError, "such as \\(64, 64\\); got int"),
        ({"hidden": (0,)}, ValueError, "must be ≥ 1; got 0"),
        ({"learning_rate": -1.0}, ValueError, "`learning_rate` must be > 0"),
        ({"gate_learning_rate": float("nan")}, ValueError, "`gate_learning_rate` must be > 0"),
        ({"annealed": 2.0}, ValueError, "0 ≤ annealed ≤ 1; got 2.0"),
        ({"validation_fraction": 1.0}, ValueError, "0 ≤ validation_fraction < 1"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be > 0"),
    ],
)
def test_bad_settings(bad, error, says):
    x, y = xor(0, rows=50)
    with pytest.raises(error, match=says):
        gate(2, **bad).fit(x, y)


def test_a_pair_without_a_gradient_is_an_error():
    x, y = xor(0, rows=50)

    def without(design, sample_shape=(), *, generator=None):
        return design.sample(sample_shape, generator=generator)

    with pytest.raises(ValueError, match="this pair gives none"):
        gate(2, estimator=without, max_steps=2).fit(x, y)


def test_the_history_has_means():
    x, y = xor(0, rows=300)
    history = gate(2, max_steps=85).fit(x, y).history_
    assert [entry["step"] for entry in history[-3:]] == [82, 84, 85]
    assert history[-1]["train_loss"] > 0.7 * history[-2]["train_loss"]


def test_constant_columns_do_no_harm():
    x, y = xor(0, rows=400)
    x[:, 5] = 1e6
    x[:, 6] = 0.1
    selector = KHotSelector(2, random_state=0).fit(x, y)
    assert np.isfinite(selector.scores_).all()


def test_the_extra_is_named():
    code = "import sys; sys.modules['sklearn'] = None\nimport khot.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "'.[sklearn]'" in done.stderr
