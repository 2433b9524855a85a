"""Wishes of `KHotSelector` that broke: budgets, ranks, processes and Ctrl-C, memory, and bad strategies."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import sparse

from khot.sklearn import Choice, Gate, KHotSelector, Portfolio, splicing, trees
from khot.sklearn import _selector as selector_file
from khot.sklearn._gate import by_scores
from khot.sklearn._problem import Problem

pytestmark = pytest.mark.slow


def normal(rows, n, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, n))


@pytest.mark.parametrize("n", [3, 4, 6])
def test_the_most_useful_feature_costs_more_than_the_budget(n):
    """Trees halved down to it, and had nothing left: "zero-size array to reduction operation minimum"."""
    x = normal(150, n)
    y = 3 * x[:, 0] + x[:, 1]
    found = KHotSelector(costs=[5] + [1] * (n - 1), budget=3 if n > 3 else 1, random_state=0).fit(x, y)
    assert found.get_support()[:2].tolist() == [False, True]
    assert found.inclusion_probabilities_[0] == 0
    assert found.scores_[0] == found.scores_.min()
    assert KHotSelector(costs=[5, 1, 1], budget=3, strategy=trees).fit(x[:, :3], y).get_support()[1:].all()


def test_scores_of_units_that_are_all_too_dear():
    x = normal(20, 2)
    few = selector_file.Purse(np.array([2.0, 3.0]), 1.0)
    columns = (np.array([0]), np.array([1]))
    problem = Problem(x, x[:, :1], None, np.ones(20), np.arange(20) % 5, columns, few, "regression")
    assert by_scores(problem, np.array([1.0, 2.0])).units == ()


def test_a_tiny_precise_effect_outranked_a_large_one():
    """Ranks were of standard errors: of y = a + 0.1 b, b was the first."""
    for seed in range(3):
        x = normal(300, 6, seed)
        y = x[:, 0] + 0.1 * x[:, 1] + 0.01 * normal(300, 1, 9)[:, 0]
        found = KHotSelector(2, random_state=0, strategy=splicing).fit(x, y)
        assert np.argsort(-found.scores_)[:2].tolist() == [0, 1]
        assert found.scores_[0] == pytest.approx(np.var(x[:, 0]) / np.var(y), abs=0.15)  # the loss without it
        assert found.scores_[1] == pytest.approx(0.01, abs=0.01)
        assert (found.errors_[:2] > 0).all()
    only = KHotSelector(2, strategy=Gate(max_steps=5), random_state=0).fit(x, y)
    assert np.isnan(only.errors_).all()


def test_sparse_columns_were_as_many_for_any_number_of_rows(monkeypatch):
    monkeypatch.setattr(selector_file, "CELLS", 120_000)
    monkeypatch.setattr(selector_file, "FEWEST", 100)
    x = sparse.random(4000, 3000, 0.01, random_state=0, format="csr")
    shapes = []

    def look(problem):
        shapes.append(problem.x.shape)
        return splicing(problem)

    y = x[:, :3].toarray().sum(1)
    found = KHotSelector(3, strategy=look).fit(x, y)
    assert found.get_support(indices=True).tolist() == [0, 1, 2]
    assert KHotSelector(3, strategy=look).fit(x[:, :300], y).get_support(indices=True).tolist() == [0, 1, 2]
    assert shapes == [(1200, 100), (1200, 100)]
    with pytest.raises(ValueError, match="must be ≤ 100 for a sparse X with 1200 rows"):
        KHotSelector(101, strategy=look).fit(x, y)


def too_many(problem):
    return Choice(tuple(range(problem.k + 1)), np.arange(len(problem.units)) + 0.0)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: {"strategy": too_many}, ValueError, r"must choose 2 units \(k\); got 3"),
        (lambda: {"strategy": lambda p: Choice((0, 0), np.zeros(4))}, ValueError, "different units from 0 to 3"),
        (lambda: {"strategy": lambda p: Choice((0, 1), np.zeros(3))}, ValueError, "a score to each of 4 units"),
        (lambda: {"strategy": lambda p: [0, 1]}, TypeError, "must return a khot.sklearn.Choice; got list"),
        (lambda: {"strategy": "trees"}, TypeError, "must be a function of a Problem .* got 'trees'"),
        (lambda: {"strategy": Portfolio(strategies=())}, ValueError, "must have at least 1 strategy"),
        (lambda: {"strategy": Portfolio(strategies="trees")}, TypeError, "must be functions of a Problem"),
        (lambda: {"strategy": Portfolio(n_jobs=0)}, ValueError, "`n_jobs` must be None, an int ≥ 1"),
        (lambda: {"strategy": splicing, "n_jobs": 2}, ValueError, "`n_jobs` needs a Portfolio"),
        (lambda: {"groups": [0, 1]}, TypeError, r"must hold lists of columns, such as \[\[0, 1\], \[4, 5\]\]; got 0"),
        (lambda: {"groups": [[0, 1.5]]}, ValueError, "numbers from 0 to 3; got 1.5"),
    ],
)
def test_bad_strategies_and_groups_were_errors_inside(make, error, says):
    x = normal(30, 4)
    with pytest.raises(error, match=says):
        KHotSelector(2, **make()).fit(x, x[:, 0])


def test_a_curve_asks_one_strategy():
    """Each fold asked the whole portfolio, which took 10 s for 2000 × 50."""
    x, asked = normal(300, 12), []

    def counted(problem):
        asked.append(problem.k)
        return splicing(problem)

    both = Portfolio(strategies=(counted, trees))
    found = KHotSelector("auto", max_features=11, strategy=both, random_state=0).fit(x, x[:, 0] + x[:, 1])
    assert found.get_support(indices=True).tolist() == [0, 1]
    assert asked == [10] * 3 + [11] * 5 + [2] * 4


WORK = """
import os, sys, time
import numpy as np
from khot._process import interruptible
from khot.sklearn import KHotSelector, Portfolio, splicing
def slow(problem):
    time.sleep(0.5)
    return splicing(problem)
x = np.random.default_rng(0).standard_normal((400, 5))
seen = []
with interruptible() as is_interrupted:
    def watch(entry):
        seen.append(entry.get("done"))
        print(entry.get("done"), flush=True)
        return is_interrupted()
    both = Portfolio(strategies=(splicing, slow))
    found = KHotSelector(2, strategy=both, n_jobs=2, random_state=0, callback=watch).fit(x, x[:, 0] + x[:, 1])
print("kept", *found.get_support(indices=True), is_interrupted(), len(found.history_), flush=True)
"""


@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signals of POSIX")
@pytest.mark.parametrize("after", [b"0", b"1"])
def test_ctrl_c_broke_the_pool_and_lost_everything(after):
    """The terminal sends it to the whole group: while processes start, and while they work."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", WORK], **how)
    while process.stdout.readline().strip() != after:
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert b"kept 0 1 True" in out, (out, err)
    assert b"Traceback" not in err
    assert b"Warning" not in err


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_a_process_that_is_killed_is_done_without():
    x = normal(400, 5)
    me = os.getpid()

    def dies(problem):
        if os.getpid() != me:
            os.kill(os.getpid(), signal.SIGKILL)
        return splicing(problem)

    entries = []
    both = Portfolio(strategies=(splicing, dies), n_jobs=2)
    found = KHotSelector(2, strategy=both, callback=entries.append, random_state=0).fit(x, x[:, 0] + x[:, 1])
    assert found.get_support(indices=True).tolist() == [0, 1]
    assert len(found.history_) == 2
    assert entries[-1]["done"] >= 3
