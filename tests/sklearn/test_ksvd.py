"""`khot.sklearn.KSVD`."""

import functools
import os
import pickle
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import khot
from khot.coding import (
    gradient_update,
    least_squares_update,
    omp,
    power_update,
    soft_pursuit,
    svd_update,
    thresholding_pursuit,
)
from khot.sklearn import KSVD


def sparse_data(seed=0, m=600, n=20, d=10, k=2, noise=0.01):
    """Signals that are made of k of n atoms, and the atoms."""
    random = np.random.default_rng(seed)
    atoms = random.standard_normal((n, d))
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    chosen = np.argsort(random.random((m, n)), axis=1)[:, :k]
    x = np.einsum("mk,mkd->md", random.standard_normal((m, k)), atoms[chosen])
    return x + noise * random.standard_normal(x.shape), atoms


def found(model, atoms):
    return int((np.abs(model.components_ @ atoms.T).max(0) > 0.99).sum())


X, ATOMS = sparse_data(1)


@pytest.mark.slow
@parametrize_with_checks([KSVD(random_state=0, max_iter=5)])
def test_scikit_learns_own_checks(estimator, check):
    """All of them, with no expected failure."""
    check(estimator)


def test_the_atoms_are_found():
    model = KSVD(20, n_nonzero_coefs=2, tol=0, random_state=0).fit(X)
    assert found(model, ATOMS) >= 19
    code = model.transform(X)
    assert ((code != 0).sum(1) <= 2).all()
    assert np.square(X - model.inverse_transform(code)).sum(1).mean() < 0.05 * np.square(X).sum(1).mean()
    assert model.n_iter_ == len(model.error_) <= 100
    assert min(model.error_) < 0.1 * model.error_[0]
    np.testing.assert_allclose(np.linalg.norm(model.components_, axis=1), 1)
    first = KSVD(20, n_nonzero_coefs=2, max_iter=1, random_state=0).fit(X)
    assert found(first, ATOMS) < 10, "a control: one turn is not enough"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_input_of_both_kinds_and_dtypes(kind, dtype):
    x = X.astype(dtype)
    given = torch.tensor(x, requires_grad=True) if kind == "torch" else x
    model = KSVD(20, n_nonzero_coefs=2, max_iter=5, random_state=0).fit(given)
    assert model.components_.dtype == dtype
    assert model.transform(given).dtype == dtype
    assert model.inverse_transform(torch.tensor(model.transform(x))).dtype == dtype
    assert (KSVD(20, n_nonzero_coefs=2, max_iter=5, random_state=0).fit(x).components_ == model.components_).all()


@pytest.mark.parametrize(
    "options",
    [
        {"coder": thresholding_pursuit},
        {"coder": functools.partial(omp, positive=True)},
        {"coder": functools.partial(soft_pursuit, hard=True, steps=6)},
        {"coder": functools.partial(soft_pursuit, hard=True, steps=6, relaxation=khot.laplace_topk)},
        {"coder": functools.partial(soft_pursuit, hard=True, steps=6, relaxation=khot.sample_khot)},
        {"update": svd_update},
        {"update": power_update},
        {"update": least_squares_update},
        {"update": gradient_update},
    ],
    ids=["thresholding", "positive", "soft", "laplace", "sampled", "svd", "power", "least squares", "gradient"],
)
def test_coders_and_updates_are_arguments(options):
    torch.manual_seed(0)
    model = KSVD(20, n_nonzero_coefs=2, max_iter=12, tol=0, random_state=0, **options).fit(X[:300])
    assert ((model.transform(X) != 0).sum(1) <= 2).all()
    assert min(model.error_) < 0.75 * model.error_[0]


def test_a_sampled_soft_coder_finds_the_atoms_too():
    torch.manual_seed(0)
    coder = functools.partial(soft_pursuit, hard=True, steps=6, relaxation=khot.sample_khot)
    model = KSVD(20, n_nonzero_coefs=2, max_iter=25, tol=0, coder=coder, random_state=0).fit(X)
    assert found(model, ATOMS) >= 15


def test_atoms_that_are_dead_or_twice_there_are_replaced():
    start = ATOMS.copy()
    start[3], start[5] = start[4], -start[4]  # twice there
    start[7] = np.eye(10)[0] * 1e-9
    start[:, :] = np.where(np.arange(20)[:, None] == 9, np.ones(10), start)
    model = KSVD(20, n_nonzero_coefs=2, dict_init=start, random_state=0).fit(X)
    assert found(model, ATOMS) >= 19
    alike = np.abs(model.components_ @ model.components_.T) - np.eye(20)
    assert alike.max() < 0.99


def test_a_dictionary_of_zeros_and_signals_of_zeros():
    model = KSVD(4, n_nonzero_coefs=1, max_iter=3, random_state=0).fit(np.zeros((30, 6)))
    assert np.isfinite(model.components_).all()
    assert (model.transform(np.zeros((5, 6))) == 0).all()
    few = KSVD(40, n_nonzero_coefs=2, max_iter=3, random_state=0).fit(X[:10])
    assert np.isfinite(few.components_).all()
    assert few.error_[-1] < 1e-20, "ten signals are ten atoms"


def test_streams():
    model = KSVD(20, n_nonzero_coefs=2, random_state=0)
    for start in range(0, 60 * 100, 100):
        model.partial_fit(X[start % 600 : start % 600 + 100])
    assert model.n_iter_ == len(model.error_) == 60
    assert found(model, ATOMS) >= 12
    again = KSVD(20, n_nonzero_coefs=2, random_state=0).fit(X)
    assert again.partial_fit(X[:100]).n_iter_ == again.n_iter_
    with pytest.raises(ValueError, match="9 features, but KSVD is expecting 10"):
        model.partial_fit(X[:, :9])


def test_small_batches_do_not_lose_the_atoms_they_do_not_use():
    """A regression: an atom that one batch of five did not use was replaced."""
    model = KSVD(20, n_nonzero_coefs=2, random_state=0).fit(X)
    before = found(model, ATOMS)
    for start in range(0, 100, 5):
        model.partial_fit(X[start : start + 5])
    assert found(model, ATOMS) >= before - 4


def test_ctrl_c_keeps_the_best_so_far():
    turns = []

    def interrupt(turn, error):
        turns.append(error)
        if turn == 3:
            os.kill(os.getpid(), signal.SIGINT)

    model = KSVD(20, n_nonzero_coefs=2, max_iter=1000, tol=0, random_state=0, callback=interrupt).fit(X)
    assert model.n_iter_ == 4
    assert model.error_ == turns
    other = KSVD(20, n_nonzero_coefs=2, max_iter=1000, tol=0, random_state=0, callback=lambda turn, _: turn == 3)
    assert (other.fit(X).components_ == model.components_).all()


def test_a_tolerance_stops_signals_early():
    model = KSVD(20, n_nonzero_coefs=6, tolerance=0.2, max_iter=20, random_state=0).fit(X)
    code = model.transform(X)
    left = np.linalg.norm(X - model.inverse_transform(code), axis=1)
    counts = (code != 0).sum(1)
    assert (left[counts < 6] <= 0.2 + 1e-12).all()
    first = KSVD(20, n_nonzero_coefs=6, tolerance=0.2, max_iter=1, random_state=0).fit(X)
    assert counts.mean() < 0.8 * (first.transform(X) != 0).sum(1).mean(), "a learned dictionary needs fewer atoms"


def test_names_pickles_and_clones():
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(10)])
    model = KSVD(5, n_nonzero_coefs=2, max_iter=3, random_state=0).set_output(transform="pandas").fit(frame)
    assert list(model.transform(frame).columns) == ["ksvd0", "ksvd1", "ksvd2", "ksvd3", "ksvd4"]
    assert model.feature_names_in_[0] == "f0"
    again = pickle.loads(pickle.dumps(model))
    assert (again.transform(frame) == model.transform(frame)).all(axis=None)
    assert clone(model).get_params() == model.get_params()


def test_in_a_pipeline_under_grid_search():
    pipe = make_pipeline(KSVD(20, max_iter=5, random_state=0), LogisticRegression())
    y = np.abs(X @ ATOMS[0]) > 0.5
    search = GridSearchCV(pipe, {"ksvd__n_nonzero_coefs": [1, 2]}, cv=2).fit(X, y)
    assert search.best_estimator_[0].components_.shape == (20, 10)


def test_defaults_and_the_same_seed():
    one, two = (KSVD(max_iter=3, random_state=1).fit(X) for _ in range(2))
    assert one.components_.shape == (10, 10)
    assert one.n_components_ == 10
    assert (one.components_ == two.components_).all()
    assert (KSVD(max_iter=3, random_state=2).fit(X).components_ != one.components_).any()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_components": 0}, ValueError, "`n_components` must be ≥ 1"),
        ({"n_nonzero_coefs": 0}, ValueError, "`n_nonzero_coefs` must be ≥ 1"),
        ({"n_components": 4, "n_nonzero_coefs": 5}, ValueError, "5"),
        ({"n_nonzero_coefs": 1.5}, TypeError, "`n_nonzero_coefs` must be an int"),
        ({"max_iter": 0}, ValueError, "`max_iter` must be ≥ 1"),
        ({"tol": -1.0}, ValueError, "`tol` must be ≥ 0"),
        ({"tolerance": -1.0}, ValueError, "`tolerance` must be ≥ 0"),
        ({"dict_init": np.ones((3, 10))}, ValueError, r"`dict_init` must have the shape \(10, 10\); got \(3, 10\)"),
    ],
)
def test_bad_parameters_are_said(options, error, words):
    with pytest.raises(error, match=words):
        KSVD(**options).fit(X)


def test_a_code_of_another_width_is_said():
    model = KSVD(5, max_iter=1, random_state=0).fit(X)
    with pytest.raises(ValueError, match="must have 5 columns, one for each atom; got 4"):
        model.inverse_transform(np.ones((2, 4)))
