from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import sindy
from benchmarks.common import COMMITTED, read_rows


@pytest.mark.parametrize("name", sindy.SYSTEMS)
def test_the_truth_is_what_the_data_obey(name):
    """Terms and coefficients of the tables explain the derivatives of the simulation, to its accuracy."""
    task = sindy.make_task(name, sindy.SYSTEMS[name].degree, 0.0, 0)
    left = task.derivatives - task.library @ task.truth.T
    assert np.abs(left[20:-20]).max() < 0.02 * np.abs(task.derivatives).max()


def test_a_run():
    task = sindy.make_task("Lotka–Volterra", 2, 0.001, 0)
    rows = {row.method: row for row in sindy.compare("Lotka–Volterra", 2, 0.001, 0, task)}
    assert rows["KHotOptimizer(k) *"].exact
    assert rows["KHotOptimizer(k) *"].error < 0.01
    assert rows["STLSQ, best threshold *"].exact >= rows["STLSQ"].exact
    assert all((row.missing + row.extra == 0) == row.exact for row in rows.values())
    text = sindy.table(list(rows.values()))
    assert text.count("\n| ") == len(rows) + 2
    assert "| KHotOptimizer(k) \\* | 100 | 100 |" in text


def test_every_system_and_degree_counts_the_same():
    one = SimpleNamespace(system="a", degree=2, noise=0.1, exact=True)
    other = SimpleNamespace(system="b", degree=2, noise=0.1, exact=False)
    assert sindy.percent([one, other, other, other]) == "50"
    assert sindy.percent([]) == "–"


def test_the_tables_are_those_of_the_results():
    rows = read_rows(COMMITTED.results / "sindy.csv")
    for row in rows:
        row.exact = row.exact == "True"
    assert (COMMITTED.tables / "sindy.md").read_text(encoding="utf-8") == sindy.table(rows)
    assert (COMMITTED.tables / "sindy-systems.md").read_text(encoding="utf-8") == sindy.systems_table(rows)
    seeds = {(row.system, row.degree, row.noise, row.seed) for row in rows}
    assert len({row.system for row in rows}) == 6
    assert len(seeds) == 15 * (1 + 4 * 10) + (1 + 4 * 3)


def test_beside_proven_optima():
    rows = read_rows(COMMITTED.results / "sindy_miosr.csv")
    for row in rows:
        row.exact = row.exact == "True"
    assert (COMMITTED.tables / "sindy-miosr.md").read_text(encoding="utf-8") == sindy.table(rows)
    mine, its = ([row for row in rows if row.method == method] for method in ("KHotOptimizer(k) *", "MIOSR(k) *"))
    assert len(mine) == len(its) == 15 * (1 + 4 * 10)
    assert sum(row.exact for row in mine) >= sum(row.exact for row in its)


def test_only_runs_that_every_method_has_are_compared():
    run = SimpleNamespace(system="a", degree=2, noise=0.1, seed=0, method="x")
    other = SimpleNamespace(**{**vars(run), "method": "y"})
    alone = SimpleNamespace(**{**vars(run), "seed": 1})
    assert sindy.common_tasks([run, other, alone]) == [run, other]


def test_mixed_integer_optima_are_found_where_the_licence_allows():
    pytest.importorskip("gurobipy", reason="gurobipy is not installed")
    task = sindy.make_task("Lotka–Volterra", 2, 0.001, 0)
    rows = list(sindy.compare("Lotka–Volterra", 2, 0.001, 0, task, sindy.TOLD))
    assert [row.method for row in rows] == ["KHotOptimizer(k) *", "MIOSR(k) *"]
    assert all(row.exact for row in rows)
    wide = sindy.Task(np.eye(600), np.eye(600)[:, :2], np.eye(600)[:2])
    assert sindy.mixed_integer(wide) == {}
