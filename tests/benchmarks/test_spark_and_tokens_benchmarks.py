"""The studies of Spark layers and token pruning run, the rival is what it says, and the tables are what they wrote."""

import json
import sys

import pytest
import torch

from benchmarks import spark, tokens, tokens_minilm
from benchmarks.common import COMMITTED, read_rows
from benchmarks.rivals.tokens import dtopk

pytestmark = pytest.mark.slow


def test_dtopk_is_its_formula_and_gives_scores_no_gradient():
    scores = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    kept = dtopk(scores, ratio)
    rank = (scores[:, None] <= scores[:, :, None]).sum(-1).double() / 12  # of each entry, in (0, 1]
    soft = torch.sigmoid(12 * (rank - ratio[:, None]))
    assert torch.equal(kept.detach(), (soft >= 0.5).double())
    g = torch.randn(3, 12, dtype=torch.float64)
    to_scores, to_ratio = torch.autograd.grad(kept, (scores, ratio), g, allow_unused=True)
    assert to_scores is None
    torch.testing.assert_close(to_ratio, torch.autograd.grad(soft, ratio, g)[0])
    mask = torch.arange(12) < 8
    assert (dtopk(scores, ratio, mask.expand(3, 12))[:, 8:] == 0).all()


@pytest.mark.parametrize("problem", tokens.PROBLEMS)
def test_problems_are_what_they_say(problem):
    data = tokens.PROBLEMS[problem].data(0)
    assert data.train.shape[1] == (32 if "32" in problem else 16)
    assert set(data.train_y.tolist()) == set(range(data.classes))
    if "32" in problem:
        same = (data.train[..., :2].sign().prod(-1) > 0).sum(-1).double()
        assert abs(float(same.mean()) - 4) < 0.1, "four tokens have two marks of equal sign"


@pytest.mark.parametrize("method", tokens.METHODS)
def test_every_method_learns_something_and_keeps_what_it_is_told(method):
    model, row = tokens.train("digits, 16 patches", method, 0.25, 0, 20)
    assert all(p.isfinite().all() for p in model.parameters())
    assert row.kept == pytest.approx(1.0 if method == "all tokens" else 0.25, abs=0.08 if method == "DTop-K" else 1e-6)
    assert row.off == 0 or method == "DTop-K"


@pytest.mark.long
def test_small_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        tokens, "METHODS", {name: tokens.METHODS[name] for name in ("all tokens", "σ_k, learned counts")}
    )
    for module, name in ((spark, "spark"), (tokens, "tokens")):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--json", "--out", str(tmp_path)])
        assert module.main() == 0
        assert json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["tokens.py", "--quick", "--json", "--resume", "--out", str(tmp_path)])
    monkeypatch.setattr(tokens, "train", None)  # all is done
    monkeypatch.setattr(tokens, "figure", lambda *_: tokens.Figure())
    assert tokens.main() == 0
    assert {path.name for path in tmp_path.glob("*.md")} == {
        "spark-counts.md", "spark-model.md", "spark-speed.md", "tokens.md",
    }  # fmt: skip


def test_the_tables_are_those_of_the_results():
    for name, (_, table) in spark.PARTS.items():
        rows = read_rows(COMMITTED.results / f"{name}.csv")
        assert table(rows) == (COMMITTED.tables / f"{name}.md").read_text(encoding="utf-8")
    rows = tokens.read(COMMITTED.results / "tokens.csv")
    assert tokens.report(rows) == (COMMITTED.tables / "tokens.md").read_text(encoding="utf-8")
    assert {(r.problem, r.method, r.share, r.seed) for r in rows} == {
        each[:4] for each in tokens.asked(tokens.PROBLEMS)
    }
    assert all(len(problem.seeds) == 5 for problem in tokens.PROBLEMS.values())
    assert all(row.off == 0 for row in rows if row.method.startswith("σ_k")), "the total is met exactly"
    rows = read_rows(COMMITTED.results / "tokens_minilm.csv")
    assert tokens_minilm.report(rows) == (COMMITTED.tables / "tokens-minilm.md").read_text(encoding="utf-8")


def test_what_the_page_says_of_speed():
    rows = read_rows(COMMITTED.results / "spark-speed.csv")
    at = {(row.group, row.case): row.microseconds for row in rows}
    million = "operator, n = 1000000"
    assert at[million, "statistical_topk"] <= 0.2 * at[million, "torch.topk"]
    assert at[million, "statistical_topk"] <= 3 * at[million, "torch.sigmoid"]
    step = "FFN, width 1024, 1 token"
    assert at[step, "gated FFN, 4096 neurons"] >= 1.5 * at[step, "SparkFFN, 6144 neurons, sparse"]
