"""The studies of sparse networks run, and their tables are what they wrote."""

import json
import sys

import pytest
import torch

from benchmarks import architectures, flops, sparsity
from benchmarks.common import COMMITTED
from benchmarks.rivals.pruning import METHODS
from benchmarks.sparsity_problems import Characters, Transformer, passages, problems, text

pytestmark = pytest.mark.slow


def run(module, monkeypatch, capsys, tmp_path, *options):
    monkeypatch.setattr(sys, "argv", ["study.py", "--quick", "--json", "--out", str(tmp_path), *options])
    threads = torch.get_num_threads()
    try:
        assert module.main() == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_quality(monkeypatch, capsys, tmp_path):
    plan = sparsity.QUICK._replace(seeds=(0,))
    monkeypatch.setattr(sparsity, "QUICK", plan)
    monkeypatch.setattr(sparsity, "SHOWN_LAYERS", ("RigL", sparsity.OURS))
    rows = run(sparsity, monkeypatch, capsys, tmp_path)
    assert {row["method"] for row in rows} == {*METHODS, sparsity.OURS}
    assert all(row["kept"] <= 8448 for row in rows if row["method"] != "dense")
    assert {row["kept"] for row in rows if row["method"] == sparsity.OURS} == {8448}
    before = (tmp_path / "sparsity-digits.csv").read_text(encoding="utf-8")
    lines = before.splitlines(keepends=True)
    (tmp_path / "sparsity-digits.csv").write_text("".join(lines[:-3]), encoding="utf-8")
    run(sparsity, monkeypatch, capsys, tmp_path, "--resume")
    after = (tmp_path / "sparsity-digits.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    assert [line.rpartition(",")[0] for line in after] == [line.rpartition(",")[0] for line in lines]  # but for times
    assert (tmp_path / "sparsity-layers.svg").exists()


def test_characters(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be. " * 50, encoding="utf-8")
    whole, kinds = text(path)
    data = passages(path, 32, 10, 4, 0)
    assert data.train.shape == data.train_y.shape == (10, 32)
    assert torch.equal(data.train[:, 1:], data.train_y[:, :-1])
    assert kinds == len(set("to be or not to be. "))
    torch.manual_seed(0)
    model = Transformer(kinds, Characters())
    x = whole[:32].unsqueeze(0)
    changed = x.clone()
    changed[0, 20:] = 0
    same = torch.isclose(model(x), model(changed), atol=1e-5)[0].all(0)
    assert same[:20].all()  # no place sees a later one
    problem = problems(None, path)["characters"]._replace(steps=2)
    row = sparsity.measure(problem, "characters", 0.1, sparsity.OURS, 0, 0.01, 1.0)
    assert row.kept <= 0.1 * sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.long
def test_flops(monkeypatch, capsys, tmp_path):
    rows = run(flops, monkeypatch, capsys, tmp_path)
    for row in rows:
        if row.get("way") in (flops.BY_FLOPS, flops.UNIFORM):
            assert row["flops"] <= row["budget"]
    assert len([row for row in rows if "time" in row]) == len(flops.BUDGETS)


def test_flops_are_those_of_the_layers():
    model = flops.network((16, 32, 64), 28)
    convolutions = 2 * 9 * (16 * 28**2 + 16 * 32 * 14**2 + 32 * 64 * 7**2)
    assert flops.counted(model, torch.zeros(1, 1, 28, 28)) == (
        convolutions + 2 * 10 * 1024,
        9 * (16 + 512 + 2048) + 10240,
    )


@pytest.mark.long
def test_architectures(monkeypatch, capsys, tmp_path):
    rows = run(architectures, monkeypatch, capsys, tmp_path)
    assert {row["search"] for row in rows} == set(architectures.SEARCHES)
    assert all(row["cost"] <= architectures.LIMIT for row in rows if row["budget"] != "none")


def test_ranks_count_what_is_better():
    table = {architectures.name_of(genome): i / 125 for i, genome in enumerate(architectures.GENOMES)}
    best = architectures.GENOMES[-1]
    assert architectures.judged("", 0, best, float("inf"), table).rank == 1
    assert architectures.judged("", 0, architectures.GENOMES[-3], float("inf"), table).rank == 3
    assert architectures.cost(best) > architectures.LIMIT


def test_the_tables_are_those_of_the_results():
    results, tables = COMMITTED.results, COMMITTED.tables
    rows = [row for name in sparsity.PLANS for row in sparsity.read(results / f"sparsity-{name}.csv")]
    assert sparsity.report(rows) == (tables / "sparsity.md").read_text(encoding="utf-8")
    for name, plan in sparsity.PLANS.items():
        for density in plan.densities:
            for method in sparsity.ENTRANTS:
                found = sparsity.scored(rows, name, density, method)
                assert set(found) == set(plan.seeds)
                assert not set(plan.tuning) & set(found)
    kept = {(row.problem, row.density): row.kept for row in rows if row.method == sparsity.OURS or row.density == 1}
    for row in rows:  # within the budget, but for the dense network; ours exactly
        most = kept[row.problem, row.density]
        assert row.kept == most if row.method == sparsity.OURS else row.kept <= most
    members = architectures.read(results / "architectures.csv", architectures.Member)
    assert len(members) == 125 * 3
    found = architectures.read(results / "architecture_search.csv", architectures.Row)
    assert architectures.report(members, found) == (tables / "architectures.md").read_text(encoding="utf-8")
    assert {
        len([r for r in found if (r.search, r.budget) == (s, b)])
        for s in architectures.SEARCHES
        for b in ("none", "25%")
    } == {10}
    narrow = flops.read(results / "flops.csv", flops.Row)
    assert flops.report(narrow) == (tables / "flops.md").read_text(encoding="utf-8")
    assert all(row.flops <= row.budget for row in narrow if row.way == flops.BY_FLOPS)
    times = flops.read(results / "flops_time.csv", flops.Time)
    assert flops.time_report(times) == (tables / "flops-time.md").read_text(encoding="utf-8")
