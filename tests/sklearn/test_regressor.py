"""`khot.sklearn.KHotRegressor`."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from khot.coding import aicc, gcv
from khot.sklearn import KHotRegressor


def regression(seed=0, m=120, p=30, k=4, targets=None, noise=0.1):
    random = np.random.default_rng(seed)
    x = random.standard_normal((m, p))
    coef = np.zeros((p, targets or 1))
    for j in range(targets or 1):
        coef[random.permutation(p)[:k], j] = random.choice([-1, 1], k) * random.uniform(0.5, 2, k)
    y = x @ coef + 3 + noise * random.standard_normal((m, targets or 1))
    return (x, y, coef) if targets else (x, y[:, 0], coef[:, 0])


X, Y, COEF = regression()


@pytest.mark.slow
@parametrize_with_checks([KHotRegressor(), KHotRegressor(1)])
def test_scikit_learns_own_checks(estimator, check):
    """All of them, with no expected failure."""
    check(estimator)


@pytest.mark.parametrize("k", [4, "auto"])
def test_the_features_are_found(k):
    model = KHotRegressor(k).fit(X, Y)
    assert (model.support_ == (COEF != 0)).all()
    assert (model.coef_[~model.support_] == 0).all()
    np.testing.assert_allclose(model.coef_, COEF, atol=0.05)
    assert model.intercept_ == pytest.approx(3, abs=0.05)
    assert model.score(X, Y) > 0.99
    if k == "auto":
        assert model.path_.loss.shape == (31,)
        assert int(model.path_.support[4].sum()) == 4
    else:
        assert model.path_ is None


def test_the_fit_is_least_squares_on_the_support():
    model = KHotRegressor(4).fit(X, Y)
    plain = LinearRegression().fit(X[:, model.support_], Y)
    np.testing.assert_allclose(model.coef_[model.support_], plain.coef_)
    np.testing.assert_allclose(model.predict(X), plain.predict(X[:, model.support_]))
    ridge = KHotRegressor(4, ridge=5.0).fit(X, Y)
    np.testing.assert_allclose(ridge.coef_[ridge.support_], Ridge(5.0).fit(X[:, ridge.support_], Y).coef_, rtol=1e-8)
    without = KHotRegressor(30, fit_intercept=False).fit(X, Y)
    np.testing.assert_allclose(without.coef_, LinearRegression(fit_intercept=False).fit(X, Y).coef_)
    assert without.intercept_ == 0


def test_the_search_and_the_proof_agree():
    x, y, _ = regression(1, p=12)
    for k in (1, 3, 5):
        searched, proved = (KHotRegressor(k, exact=exact).fit(x, y) for exact in (False, True))
        assert (searched.support_ == proved.support_).all()


def test_weights_are_repetitions():
    weight = np.arange(len(Y)) % 3
    weighted = KHotRegressor(4).fit(X, Y, sample_weight=weight)
    repeated = KHotRegressor(4).fit(np.repeat(X, weight, 0), np.repeat(Y, weight))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_)
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_)
    assert (KHotRegressor(4).fit(X, Y).coef_ != weighted.coef_).any()


@pytest.mark.parametrize("k", [3, "auto"])
def test_several_targets(k):
    x, y, coef = regression(2, k=3, targets=3)
    model = KHotRegressor(k).fit(x, y)
    assert model.coef_.shape == model.support_.shape == (3, 30)
    assert model.intercept_.shape == (3,)
    assert model.support_.T[coef != 0].all()
    assert model.support_.sum() <= 9 + (k == "auto")
    assert model.predict(x).shape == (120, 3)
    alone = KHotRegressor(k).fit(x, y[:, 1])
    np.testing.assert_allclose(alone.coef_, model.coef_[1])


def test_criteria_and_the_end_of_the_path():
    noisy = regression(3, noise=3.0)[:2]
    few, many = (KHotRegressor(criterion=c).fit(*noisy).support_.sum() for c in (KHotRegressor().criterion, aicc))
    assert few < many
    assert KHotRegressor(criterion=gcv).fit(X, Y).support_[COEF != 0].all()
    assert len(KHotRegressor(max_k=2).fit(X, Y).path_.loss) == 3
    wide = np.random.default_rng(0).standard_normal((20, 200))
    assert len(KHotRegressor().fit(wide, wide[:, 0]).path_.loss) == 10, "half the rank, and 0"
    assert KHotRegressor().fit(wide, wide[:, 0]).support_.nonzero()[0].tolist() == [0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_input_and_dtypes(dtype):
    x, y = torch.tensor(X.astype(dtype)), torch.tensor(Y.astype(dtype))
    model = KHotRegressor(4).fit(x, y)
    assert (model.support_ == (COEF != 0)).all()
    assert model.predict(x).shape == (120,)


def test_names_pickles_clones_pipelines_and_grids():
    frame, y = load_diabetes(return_X_y=True, as_frame=True)
    pipe = make_pipeline(StandardScaler().set_output(transform="pandas"), KHotRegressor())
    search = GridSearchCV(pipe, {"khotregressor__k": [1, 4, "auto"]}, cv=3).fit(frame, y)
    assert search.best_params_["khotregressor__k"] != 1
    model = search.best_estimator_[1]
    assert list(model.feature_names_in_) == list(frame.columns)
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert (again.predict(frame) == search.predict(frame)).all()
    assert clone(model).get_params() == model.get_params()
    assert isinstance(frame, pd.DataFrame)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"k": 31}, ValueError, "0 ≤ k ≤ 30"),
        ({"k": 1.5}, TypeError, "`k` must be an int"),
        ({"k": "all"}, ValueError, "`k` must be one of 'auto'"),
        ({"max_k": 31}, ValueError, "0 ≤ k ≤ 30"),
        ({"ridge": -1.0}, ValueError, "`ridge` must be ≥ 0"),
        ({"k": 2, "exchange": -1}, ValueError, "`exchange` must be ≥ 0"),
        ({"k": 15, "exact": True}, ValueError, "enumerates at most"),
    ],
)
def test_bad_parameters_are_said(options, error, words):
    with pytest.raises(error, match=words):
        KHotRegressor(**options).fit(X, Y)


def test_bad_weights_are_said():
    with pytest.raises(ValueError, match=r"[Nn]egative values"):
        KHotRegressor(2).fit(X, Y, sample_weight=-np.ones(len(Y)))
