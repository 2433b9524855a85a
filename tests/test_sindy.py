import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pysindy
import pytest
import torch
from pysindy.optimizers import STLSQ, EnsembleOptimizer, WrappedOptimizer
from pysindy.utils import supports_multiple_targets
from scipy.integrate import solve_ivp
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.utils.validation import check_is_fitted

from khot.coding import bic, splice
from khot.sindy import KHotOptimizer, _divide, floored_ebic

SIZES = [2, 3, 2]
NAMES = ["x", "y", "z"]
TRUTH = [{"x": -10, "y": 10}, {"x": 28, "y": -1, "x z": -1}, {"z": -8 / 3, "x y": 1}]


def simulate(slope, start, time, step):
    t = np.arange(0, time, step)
    return t, solve_ivp(slope, (0, time), start, "LSODA", t_eval=t, rtol=1e-10, atol=1e-12).y.T


def lorenz(noise=0.0, seed=0, time=6.0):
    def slope(_, u):
        x, y, z = u
        return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]

    t, x = simulate(slope, (-8.0, 8.0, 27.0), time, 0.003)
    return t, x + noise * x.std(0) * np.random.default_rng(seed).standard_normal(x.shape)


def model(optimizer, degree=2, **options):
    return pysindy.SINDy(optimizer=optimizer, feature_library=pysindy.PolynomialLibrary(degree), **options)


def fitted(optimizer, noise=0.0, degree=2, seed=0):
    t, x = lorenz(noise, seed)
    return model(optimizer, degree, differentiation_method=pysindy.SmoothedFiniteDifference()).fit(
        x, t, feature_names=NAMES
    )


def found(sindy):
    """The terms of each equation, by name."""
    names = sindy.get_feature_names()
    return [{names[j]: row[j] for j in row.nonzero()[0]} for row in sindy.coefficients()]


def same_terms(sindy):
    return [set(equation) for equation in found(sindy)] == [set(equation) for equation in TRUTH]


def regression(rows=80, terms=12, equations=3, seed=0, noise=0.01):
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal((rows, terms))
    coef = np.zeros((equations, terms))
    for i, k in enumerate(SIZES[:equations]):
        coef[i, rng.choice(terms, k, replace=False)] = rng.uniform(1, 2, k)
    return theta, theta @ coef.T + noise * rng.standard_normal((rows, equations)), coef


# ── finding equations ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("degree", [2, 3])
def test_the_equations_of_lorenz(noise, degree):
    for optimizer in (KHotOptimizer(SIZES), KHotOptimizer(total=7), KHotOptimizer()):
        sindy = fitted(optimizer, noise, degree)
        assert same_terms(sindy), optimizer
        for equation, truth in zip(found(sindy), TRUTH, strict=True):
            assert all(value == pytest.approx(truth[name], rel=0.02 + 2 * noise) for name, value in equation.items())


def test_plain_bic_overfits_what_has_no_noise():
    """A control: the floor is what stops it."""
    assert same_terms(fitted(KHotOptimizer(criterion=floored_ebic)))
    assert fitted(KHotOptimizer(criterion=bic)).optimizer.complexity > 20


def test_thresholds_fail_where_exact_sizes_do_not():
    """A control: with a library of degree 5 and noise, a threshold takes wrong terms, and k right ones."""
    assert same_terms(fitted(KHotOptimizer(SIZES), 0.02, degree=5))
    assert not same_terms(fitted(STLSQ(), 0.02, degree=5))


def test_predict_simulate_score_and_print(capsys):
    sindy = fitted(KHotOptimizer())
    t, x = lorenz()
    assert sindy.score(x, t) > 0.999
    assert sindy.predict(x[:5]).shape == (5, 3)
    np.testing.assert_allclose(sindy.simulate(x[0], t[:200]), x[:200], rtol=0.01, atol=0.1)
    sindy.print()
    assert "(x)' = -" in capsys.readouterr().out
    assert sindy.complexity == 7


@pytest.mark.filterwarnings("ignore::pysindy.utils._axes.AxesWarning")
def test_weak_and_custom_libraries():
    t, x = lorenz(0.05)
    library = pysindy.WeakPDELibrary(
        pysindy.PolynomialLibrary(2, include_bias=False), spatiotemporal_grid=t, K=200, diff_kwargs={"order": 2}
    )
    weak = pysindy.SINDy(optimizer=KHotOptimizer(SIZES), feature_library=library).fit(x, t, feature_names=NAMES)
    assert same_terms(weak), "five per cent of noise: the weak form averages it"
    custom = pysindy.CustomLibrary([lambda u: u, lambda u, v: u * v], [lambda u: u, lambda u, v: f"{u} {v}"])
    clean = pysindy.SINDy(optimizer=KHotOptimizer(), feature_library=custom)
    t, x = lorenz()
    assert same_terms(clean.fit(x, t, feature_names=NAMES))


def test_several_trajectories_and_control():
    rng = np.random.default_rng(0)
    t = np.linspace(0, 5, 1500)
    runs, controls = [], []
    for start in rng.uniform(-1, 1, (3, 2)):
        runs.append(simulate(lambda s, x: [x[1], -2 * x[0] + np.sin(3 * s)], start, 5.0, 5 / 1500)[1])
        controls.append(np.sin(3 * t[: len(runs[-1])])[:, None])
    sindy = model(KHotOptimizer([1, 2])).fit(runs, t=5 / 1500, u=controls, feature_names=["x", "v", "u"])
    assert [set(equation) for equation in found(sindy)] == [{"v"}, {"x", "u"}]


@pytest.mark.parametrize(
    "kind", [{"bagging": True}, {"library_ensemble": True}, {"bagging": True, "library_ensemble": True}]
)
def test_ensembles(kind):
    theta, y, coef = regression()
    np.random.seed(0)  # noqa: NPY002 (pysindy draws from numpy's global state)
    ensemble = EnsembleOptimizer(KHotOptimizer(SIZES), n_models=9, **kind).fit(theta, y)
    assert len(ensemble.coef_list) == 9
    assert ((np.abs(ensemble.coef_) > 0.5) == (coef != 0)).all()


# ── what pysindy's own tests ask of every optimizer ──────────────────────────────────────────────────────────────────


def test_fit_sets_what_pysindy_reads():
    theta, y, coef = regression()
    optimizer = KHotOptimizer(SIZES)
    with pytest.raises(NotFittedError):
        check_is_fitted(optimizer)
    assert optimizer.fit(theta, y) is optimizer
    check_is_fitted(optimizer)
    assert optimizer.coef_.shape == coef.shape
    assert optimizer.intercept_ == 0
    assert (optimizer.ind_ == (coef != 0)).all()
    assert optimizer.complexity == 7
    np.testing.assert_allclose(optimizer.predict(theta), theta @ optimizer.coef_.T)
    np.testing.assert_array_equal(optimizer.Theta_, theta)
    assert KHotOptimizer(3).fit(theta, y[:, 0]).coef_.shape == (1, 12), "one equation as a vector"


def test_what_is_not_fitted_says_so():
    for ask in (lambda o: o.predict(np.ones((1, 3))), lambda o: o.complexity):
        with pytest.raises(NotFittedError):
            ask(KHotOptimizer(2))


@pytest.mark.parametrize("options", [{}, {"normalize_columns": True}, {"copy_X": False}], ids=str)
def test_inside_a_wrapper_and_with_every_option_of_the_base_class(options):
    theta, y, coef = regression(noise=0.0)
    assert supports_multiple_targets(KHotOptimizer(2))
    given = theta.copy()
    wrapped = WrappedOptimizer(KHotOptimizer(**options), unbias=False)  # one equation at a time, so k is one number
    for optimizer in (KHotOptimizer(SIZES, **options), wrapped):
        optimizer.fit(theta.copy(), y)
        np.testing.assert_allclose(optimizer.coef_, coef, atol=1e-10)
    kept = KHotOptimizer(SIZES, **options).fit(theta, y, sample_weight=np.tile([0.0, 1.0], 40))
    np.testing.assert_allclose(kept.coef_, coef, atol=1e-10)
    if options.get("copy_X", True):
        np.testing.assert_array_equal(theta, given)
    one = WrappedOptimizer(KHotOptimizer(1), unbias=False).fit(theta[:, :1], theta[:, 0])
    assert one.coef_.shape == (1, 1)


def test_the_result_is_that_of_splice():
    theta, y, _ = regression(noise=0.5)
    expected = splice(torch.tensor(theta), torch.tensor(y), SIZES).coef.mT
    np.testing.assert_allclose(KHotOptimizer(SIZES, unbias=False).fit(theta, y).coef_, expected)
    np.testing.assert_allclose(KHotOptimizer(SIZES).fit(theta, y).coef_, expected, atol=1e-12)


def test_history():
    theta, y, coef = regression()
    optimizer = KHotOptimizer(max_k=5).fit(theta, y)
    assert [np.count_nonzero(step, 1).tolist() for step in optimizer.history_[:-1]] == [[k] * 3 for k in range(6)]
    np.testing.assert_array_equal(optimizer.history_[-1] != 0, coef != 0)
    assert optimizer.path_.loss.shape == (6, 3)
    assert [step.shape for step in KHotOptimizer(2).fit(theta, y).history_] == [(3, 12)]


@pytest.mark.parametrize("options", [{"k": SIZES}, {"total": 7}, {}], ids=str)
def test_normalised_columns_change_nothing_but_rounding(options):
    theta, y, coef = regression()
    theta = theta * np.logspace(-6, 6, 12)
    plain = KHotOptimizer(**options).fit(theta, y)
    normal = KHotOptimizer(**options, normalize_columns=True).fit(theta, y)
    assert (plain.coef_ != 0).tolist() == (coef != 0).tolist()
    np.testing.assert_allclose(normal.coef_, plain.coef_, rtol=1e-6)
    np.testing.assert_allclose(normal.history_[-1], plain.history_[-1], rtol=1e-6)


def test_ridge_is_taken_back_by_unbias():
    theta, y, coef = regression()
    biased = KHotOptimizer(SIZES, ridge=30.0, unbias=False).fit(theta, y)
    unbiased = KHotOptimizer(SIZES, ridge=30.0, unbias=True).fit(theta, y)
    assert (biased.ind_ == unbiased.ind_).all()
    assert np.linalg.norm(biased.coef_) < 0.9 * np.linalg.norm(unbiased.coef_)
    for i in range(3):
        chosen = coef[i] != 0
        plain = LinearRegression(fit_intercept=False).fit(theta[:, chosen], y[:, i])
        np.testing.assert_allclose(unbiased.coef_[i, chosen], plain.coef_)


def test_sample_weights_are_repetitions():
    theta, y, _ = regression(noise=2.0)
    weights = np.random.default_rng(1).integers(1, 4, len(y))
    weighted = KHotOptimizer(SIZES, unbias=False).fit(theta, y, sample_weight=weights)
    repeated = KHotOptimizer(SIZES, unbias=False).fit(np.repeat(theta, weights, 0), np.repeat(y, weights, 0))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-10)
    wrong = y.copy()
    wrong[:40] = 7.0
    trusted = KHotOptimizer(SIZES).fit(theta, wrong, sample_weight=np.repeat([0.0, 1.0], 40))
    np.testing.assert_allclose(trusted.coef_, KHotOptimizer(SIZES).fit(theta[40:], y[40:]).coef_, atol=1e-8)


def test_pickles_clones_and_parameters():
    theta, y, _ = regression()
    optimizer = KHotOptimizer([2, 3, 2], ridge=0.1, costs=np.ones(12))
    copied = clone(optimizer)
    assert copied.get_params().keys() == optimizer.get_params().keys()
    assert not hasattr(copied, "path_")
    for each in (KHotOptimizer(), optimizer):
        each.fit(theta, y)
        restored = pickle.loads(pickle.dumps(each))
        np.testing.assert_array_equal(restored.coef_, each.coef_)
        np.testing.assert_array_equal(clone(each).fit(theta, y).coef_, each.coef_)
    optimizer.set_params(k=1, costs=None)
    assert optimizer.fit(theta, y).complexity == 3
    assert "KHotOptimizer(k=1" in repr(optimizer)


def test_an_initial_guess_is_checked_and_not_used():
    theta, y, _ = regression()
    guess = np.ones((3, 12))
    np.testing.assert_array_equal(
        KHotOptimizer(2, initial_guess=guess).fit(theta, y).coef_, KHotOptimizer(2).fit(theta, y).coef_
    )
    with pytest.raises(ValueError, match="initial_guess shape is incompatible"):
        KHotOptimizer(2, initial_guess=guess[:2]).fit(theta, y)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_costs_are_a_budget():
    theta, y, coef = regression(noise=0.0)
    j = int(np.flatnonzero(coef[0])[0])
    costs = np.ones(12)
    costs[j] = 5.0
    optimizer = KHotOptimizer(2, costs=costs).fit(theta, y)
    assert not optimizer.ind_[:, j].any()
    assert (optimizer.ind_.sum(1) <= 2).all()
    assert KHotOptimizer(6, costs=list(costs)).fit(theta, y).ind_[0, j]


def test_a_total_is_divided_as_all_divisions_say():
    rng = np.random.default_rng(0)
    for _ in range(20):
        loss = torch.tensor(np.sort(rng.exponential(size=(5, 3)), 0)[::-1].copy())
        total = int(rng.integers(0, 13))
        value = loss.log()
        options = [(i, j, total - i - j) for i in range(5) for j in range(5) if 0 <= total - i - j <= 4]
        best = min(options, key=lambda o: float(sum(value[k, e] for e, k in enumerate(o))))
        assert _divide(loss, total).tolist() == list(best)


def test_a_large_total_looks_further():
    theta, y, _ = regression(terms=13)
    assert KHotOptimizer(total=36, exchange=1).fit(theta, y).complexity == 36, "more than 10 for each"
    assert KHotOptimizer(total=0).fit(theta, y).complexity == 0


THETA, Y, _ = regression()
BAD = {
    "k": (KHotOptimizer(13), ValueError, r"0 ≤ k ≤ 12"),
    "fraction": (KHotOptimizer(1.5), TypeError, "`k` must be an int"),
    "length": (KHotOptimizer([1, 2]), ValueError, "or 3, one for each target; got 2"),
    "word": (KHotOptimizer("best"), ValueError, "`k` must be one of 'auto'; got 'best'"),
    "both": (KHotOptimizer(2, total=5), ValueError, "cannot both be given; got k=2 and total=5"),
    "total": (KHotOptimizer(total=37), ValueError, "0 ≤ total ≤ 36"),
    "total of max_k": (KHotOptimizer(total=7, max_k=2), ValueError, r"0 ≤ total ≤ 6 \(`max_k` times"),
    "path": (KHotOptimizer(max_k=13), ValueError, r"0 ≤ max_k ≤ 12"),
    "costs": (KHotOptimizer(2, costs=[1, 2]), ValueError, "must be 12 numbers > 0, one for each term"),
    "free": (KHotOptimizer(2, costs=np.zeros(12)), ValueError, "must be 12 numbers > 0"),
    "budget": (KHotOptimizer(costs=np.ones(12)), ValueError, "`costs` need a budget"),
    "ridge": (KHotOptimizer(2, ridge=-1.0), ValueError, "`ridge` must be ≥ 0"),
    "exchange": (KHotOptimizer(2, exchange=-1), ValueError, "`exchange` must be ≥ 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said(name):
    optimizer, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        optimizer.fit(THETA, Y)


@pytest.mark.long
def test_a_missing_pysindy_is_said():
    code = "import sys; sys.modules['pysindy'] = None\nimport khot.sindy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install '.[sindy]'" in done.stderr
    done = subprocess.run([sys.executable, "-c", "import khot, sys; assert 'pysindy' not in sys.modules"], check=False)
    assert done.returncode == 0, "khot itself does not import it"


@pytest.mark.slow
@pytest.mark.long
def test_the_example_finds_the_equations_and_draws_them(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "find_lorenz.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    bare = re.sub(r"-?\d+(?:\.\d+)? +(?=[1a-z])", "", done.stdout)  # without coefficients
    true, exact, threshold = ([line.split() for line in part.splitlines()[1:]] for part in bare.split("\n\n"))
    assert exact == true
    assert threshold != true
    assert (tmp_path / "lorenz.png").stat().st_size > 10_000
