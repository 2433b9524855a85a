"""The study of certified attention runs, its controls fail, and its tables are those of its results."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention, attention_report, attention_speed
from benchmarks.common import COMMITTED, read_rows, svg
from examples import certified_minilm

pytestmark = pytest.mark.slow
QUICK = attention.QUICK


def test_the_controls_fail_and_nothing_else_does():
    rows = list(attention.soundness(QUICK))
    assert len(rows) == 9
    assert all((row.violations > 100) == row.way.startswith("control") for row in rows)
    assert all(row.rows == QUICK.rows for row in rows)


def test_heads_are_within_epsilon_and_outputs_within_their_budget():
    text = attention.TEXT.read_text(encoding="utf-8")
    model, passages, loss = attention.characters(text[:5000], QUICK)
    rows = [*attention.tightness(QUICK), *attention.of_model("a model", model.kept, True)]
    assert loss > 0
    assert passages.shape == (QUICK.passages, QUICK.tokens)
    assert sum(row.violations for row in rows) == 0
    assert all(row.worst <= 1 for row in rows if row.way in attention_report.WAYS)
    k = {
        way: sum(row.k for row in rows if row.way == way) for way in ("oracle", "multi-gap", "known head", "single gap")
    }
    assert list(k.values()) == sorted(k.values())
    weights = attention.one_row(model, passages, text[:5000])
    assert len(weights) == QUICK.tokens
    assert "<svg" in svg(attention_report.figure(weights))


def test_the_rule_for_gaussian_scores():
    rows = list(attention.gaussian(QUICK))
    assert {row.n for row in rows} == set(QUICK.lengths)
    assert all(0 < row.k <= row.n for row in rows)


def test_the_tables_are_those_of_the_results():
    rows = read_rows(COMMITTED.results / "attention.csv")
    for name, text in attention_report.tables(rows).items():
        assert (COMMITTED.tables / f"attention-{name}.md").read_text(encoding="utf-8") == text
    real = [row for row in rows if not row.way.startswith("control")]
    assert sum(row.violations for row in real) == 0
    assert all(row.rows >= 1_000_000 for row in real if row.study == "soundness")
    assert all(row.violations > 1000 for row in rows if row.way.startswith("control"))
    close = [row for row in rows if row.study == "gaussian" and row.n == 16384 and row.way == "oracle"]
    assert all(abs(row.k / row.n - row.value) < 0.005 for row in close if row.case in ("σ = 1", "σ = 2"))
    assert len({row.case for row in rows if row.study == "models"}) == 8  # two layers of one model, six of the other
    times = read_rows(COMMITTED.results / "attention_speed.csv")
    assert attention_speed.report(times) == (COMMITTED.tables / "attention-speed.md").read_text(encoding="utf-8")


def test_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention_speed.py", "--quick", "--json", "--out", str(tmp_path)])
    threads = torch.get_num_threads()
    assert attention_speed.main() == 0
    torch.set_num_threads(threads)
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["sharp", "moderate"]
    assert all(row["sdpa"] > 0 for row in rows)
    assert "| 1 × 512 | sharp |" in (tmp_path / "attention-speed.md").read_text(encoding="utf-8")


def test_when_it_pays():
    row = {"heads": 1, "n": 9, "kind": "sharp", "entropy": 1, "k": 1, "scored": 1, "refused": 0, "distance": 0}
    fast = SimpleNamespace(**row, sdpa=100.0, certified=30.0, by_torch=90.0, append=20.0, build=500.0)
    assert "| 10 tokens |" in attention_speed.report([fast])
    slow = SimpleNamespace(**row, sdpa=40.0, certified=30.0, by_torch=90.0, append=20.0, build=500.0)
    assert "| never |" in attention_speed.report([slow])


def test_the_example_runs_on_any_encoder(monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", reason="khot[hf] is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()

    def tokenizer(lines, **options):
        mask = torch.ones(len(lines), 12, dtype=torch.int64)
        mask[0, 8:] = 0
        return {"input_ids": torch.arange(12).repeat(len(lines), 1), "attention_mask": mask}

    monkeypatch.setattr(certified_minilm, "load", lambda: (model, tokenizer))
    monkeypatch.setattr(sys, "argv", ["certified_minilm.py", "--lines", "3", "--epsilon", "0.2"])
    certified_minilm.main()
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3
    assert shown[0].startswith("layer 1: ")
    assert float(shown[-1].split()[-1]) > 0.9
    monkeypatch.setattr(sys, "argv", ["certified_minilm.py", "--epsilon", "2"])
    with pytest.raises(ValueError, match="`epsilon` must"):
        certified_minilm.main()
