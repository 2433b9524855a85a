"""The contest of selectors: its sets, its methods, and how ranks and losses are told."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import selection_contest as contest
from benchmarks.contest_sets import DEVELOPED, SETS
from benchmarks.rivals.selectors import METHODS, quietly

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SETS)
def test_sets_are_tables(name):
    table, matters = contest.drawn(name, 0)
    assert len(table.x) == len(table.y)
    assert 1 <= table.k < table.x.shape[1]
    assert np.isfinite(table.x).all()
    assert matters.sum() == table.true
    assert len(np.unique(table.y)) > 1
    assert not table.is_class or np.unique(table.y, return_counts=True)[1].min() > 10


def test_a_third_of_the_sets_was_not_looked_at():
    assert set(DEVELOPED) <= set(SETS)
    assert 3 * (len(SETS) - len(DEVELOPED)) >= len(SETS)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("Boruta", "RFE, forest")])
@pytest.mark.parametrize("is_class", [True, False])
def test_rivals_find_two_strong_columns(method, is_class):
    x = np.random.default_rng(0).standard_normal((300, 8))
    y = 2 * x[:, 3] - 2 * x[:, 6] + 0.1 * x[:, 0]
    chosen = quietly(METHODS[method], x, (y > 0).astype(int) if is_class else y, 2, is_class, 0)
    assert sorted(chosen.tolist()) == [3, 6]


def row(method, seed, score):
    return SimpleNamespace(set="XOR", method=method, seed=seed, boosted=score, linear=0.5, found=1.0, seconds=0.1)


def test_ranks_and_what_is_said_of_a_loss():
    rows = [row("khot", s, 0.8 + 0.01 * s) for s in range(3)] + [row("F test", s, 0.9 + 0.01 * s) for s in range(3)]
    assert contest.ranks(rows, "boosted", ["XOR"]) == {"khot": [2.0], "F test": [1.0]}
    assert contest.ranks(rows, "linear", ["XOR"]) == {"khot": [1.5], "F test": [1.5]}
    ((name, kind, best, by, _),) = contest.behind(rows)
    assert (name, kind, best) == ("XOR", "boosted", "F test")
    assert by == pytest.approx(0.1)
    assert "F test on XOR, boosted (0.100 ± 0.000)" in contest.score_table(rows)
    assert "| khot | 2.0 |" in contest.rank_table(rows).replace("**", "")
    assert contest.behind([row("khot", s, 0.9) for s in range(3)] + rows[3:]) == []
