"""The scripts behind the tables of docs/sae.md run, the tables are what they wrote, and the example works."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import common, sae, sae_minilm, sae_peers, sae_report, sae_speed
from benchmarks.common import ROOT
from examples import minilm_sae
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, SparseAutoencoderMetrics
from khot.sae import Activations

pytestmark = pytest.mark.slow

TINY = replace(sae.QUICK, seeds=2, steps=3, tokens=2000, tests=500, counts=(2,))


def test_the_table_is_that_of_the_results():
    rows = sae_report.read((ROOT / "benchmarks" / "results" / "sae.csv").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "tables" / "sae.md").read_text(encoding="utf-8") == sae_report.table(rows)


def test_what_the_docs_claim():
    """Straight-through's error bars reach plain TopK's; Feature Choice with equal budgets has one dead latent."""
    rows = sae_report.read((ROOT / "benchmarks" / "results" / "sae.csv").read_text(encoding="utf-8"))

    def reaches(name, figure, sign):
        ours, plain = (sae_report.of(rows, n, figure) for n in (name, sae_report.PLAIN))
        errors = [values.std(ddof=1) / len(values) ** 0.5 for values in (ours, plain)]
        return sign * (ours.mean() - plain.mean()) >= -sum(errors)

    assert reaches("topk, straight-through", "fvu", -1)
    assert reaches("topk, straight-through", "mmcs", 1)
    assert not reaches("topk, sampled", "fvu", -1)  # a negative control
    dead = {name: sae_report.of(rows, f"feature, {name}", "dead") * sae.LATENTS for name in sae.RECIPES}
    assert {name: round(values.sum()) for name, values in dead.items() if values.any()} == {"straight-through": 1}


@pytest.mark.slow
def test_known_dictionaries(monkeypatch, tmp_path):
    monkeypatch.setattr(sae, "COSTS", (0.1,))
    rows = list(sae.rows(TINY))
    names = {row.name for row in rows if row.what == "result"}
    assert len(names) == 3 * 4 + 3
    assert sae_report.read(sae_report.write_rows(rows))[0].name == rows[0].name
    assert "| topk, straight-through |" in sae_report.table(rows)
    sae_report.write_figures(rows, tmp_path)
    assert {p.name for p in tmp_path.glob("*[!k].svg")} == {"sae-density.svg", "sae-l0.svg", "sae-dead.svg"}
    assert len(list(tmp_path.glob("*-dark.svg"))) == 3


def test_the_truth_is_as_said_and_weights_do_not_begin_there():
    truth = sae.world(3, TINY)
    assert float(sae.zipf_rates().sum()) == pytest.approx(4, abs=1e-4)
    torch.testing.assert_close(truth.directions.norm(dim=1), torch.ones(256))
    none = replace(TINY, steps=1, lr=1e-9)
    for row in (next(sae.sparse(truth, "x", "topk", "hard", 3, none)), sae.relu(truth, 3, none, 0.1)):
        assert row.figures["mmcs"] < 0.5


def test_a_verdict():
    def row(name, seed, fvu):
        return sae_report.Row("result", name, seed, 4, 0, {"fvu": fvu})

    plain = [row(sae_report.PLAIN, seed, 0.1 + seed / 100) for seed in range(3)]
    for shift, says in ((0.0, "same"), (0.05, "worse, +0.05"), (-0.05, "better, -0.05")):
        other = [row("other", seed, 0.1 + shift + seed / 100 + 1e-3 * (seed % 2)) for seed in range(3)]
        assert sae_report._verdict(plain + other, "other", "fvu", -1).startswith(says[:6])


def test_speed():
    threads = torch.get_num_threads()
    rows = sae_speed.measure((64, 16, 128, 4), 2)
    torch.set_num_threads(threads)
    assert len(rows) == len(sae_speed.MODELS) * len(sae_speed.CASES)
    assert sae_speed.table(rows).count("| khot, ") == 6


def test_both_models_of_the_race_compute_the_same():
    torch.manual_seed(0)
    dense = sae_speed.Dense(16, 64, 4)
    x = torch.randn(32, 16)
    config = sae_speed.SparseAutoencoderConfig(d_in=16, latents=64, k=4, aux_weight=0.0)
    ours = sae_speed.SparseAutoencoder(config, selector=sae_speed.selectors.hard)
    ours.load_state_dict(dense.state_dict(), strict=False)
    losses = [dense.loss(x), ours(x).loss]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for name, p in dense.named_parameters():
        torch.testing.assert_close(p.grad, getattr(ours, name).grad)


def test_minilm_runs_on_any_activations(monkeypatch):
    monkeypatch.setattr(sae_minilm, "BATCH", 200)
    data = Activations(np.random.default_rng(0).standard_normal((500, 8), dtype=np.float32))
    rows = [sae_minilm.train(data, "feature", "hard", 0, 1)]
    assert "| feature, hard |" in sae_minilm.table(rows, data.tokens)


def test_the_example(monkeypatch, tmp_path, capsys):
    """With a small random model and a tokenizer of its words in place of MiniLM."""
    transformers = pytest.importorskip("transformers")
    vocabulary = ["[PAD]", *dict.fromkeys(minilm_sae.TEXT.read_text(encoding="utf-8").split())]

    class Words:
        pad_token_id = 0

        def encode(self, text, **how):
            return [vocabulary.index(word) for word in text.split()[:3000]]

        def convert_ids_to_tokens(self, ids):
            return [vocabulary[i] for i in ids]

        def __len__(self):
            return len(vocabulary)

    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **shape))
    monkeypatch.setattr(minilm_sae, "minilm", lambda: (model, Words()))
    options = ["--latents", "96", "--k", "4", "--steps", "20", "--batch-size", "256", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["minilm_sae.py", *options])
    minilm_sae.main()
    printed = capsys.readouterr().out
    assert f"layer 3 of the model at {3000 // 128 * 128} tokens" in printed
    assert printed.count("purity") == len(minilm_sae.THEMES)
    assert "latent " in printed
    assert "hear" in (tmp_path / "report.html").read_text(encoding="utf-8")
    words = minilm_sae.TEXT.read_text(encoding="utf-8").split()
    tokens = minilm_sae.stream(" ".join(words), 3).row_tokens()
    assert [tokens.text(row) for row in range(200)] == words[:200]
    assert tokens.documents[126:130].tolist() == [0, 0, 1, 1]


def test_the_edges_of_the_histogram_are_those_of_the_metrics():
    metrics = SparseAutoencoderMetrics()
    metrics.update(SparseAutoencoder(SparseAutoencoderConfig(d_in=4, latents=8, k=2)), torch.randn(16, 4))
    edges = metrics.result()["density_histogram"]["log10_edges"]
    np.testing.assert_allclose(sae_report.EDGES, edges, atol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux keeps the peak of memory there")
@pytest.mark.parametrize("method", ["khot, straight-through", "khot, hard", "khot, batch", "plain dense TopK"])
def test_the_trainers_that_are_compared_learn(method):
    x = torch.randn(640, 4, generator=torch.Generator().manual_seed(0)) @ torch.randn(4, 12)
    tasks = [sae_peers.Task(x, 3, 0, 4e-3, steps, 32, 64) for steps in (1, 60)]
    first, last = (sae_peers.train(method, task) for task in tasks)
    assert last.fvu < 0.8 * first.fvu
    assert last.l0 <= 4
    assert 0 <= last.dead < 1
    assert last.cpu > 0


def test_a_peer_that_is_missing_is_left_out_and_known_runs_are_not_repeated(monkeypatch, capsys):
    monkeypatch.setattr(sae_peers, "installed", lambda method: "" if method in sae_peers.PACKAGES else "1")
    monkeypatch.setattr(sae_peers, "in_process", fake_run)
    plan = {"k": 32, "ks": (8, 32), "rates": (1e-3, 2e-3, 4e-3), "seeds": 2, "steps": 9, "latents": 8, "batch": 4}
    fake_run.calls = 0
    rows = list(sae_peers.runs(Path("x.npy"), [], plan, 1))
    assert {row.method for row in rows} == {m for m in sae_peers.METHODS if m not in sae_peers.PACKAGES}
    assert "SAELens is left out: sae-lens is not installed." in capsys.readouterr().err
    tried = {row.rate for row in rows if row.method == "khot, straight-through" and row.seed == sae_peers.TUNING}
    assert tried == {1e-3, 2e-3, 4e-3}, "the middle is best here, so smaller rates are tried too"
    assert {row.rate for row in rows if row.seed != sae_peers.TUNING} == {2e-3}
    before = fake_run.calls
    assert list(sae_peers.runs(Path("x.npy"), rows, plan, 1)) == rows
    assert fake_run.calls == before
    table = sae_peers.table(rows, 1600)
    assert table.count("\n| khot") == 3
    assert "the largest was the best" not in table
    assert sae_peers.figure(rows) is not None


def fake_run(path, method, *, k, seed, rate, steps, **_):
    fake_run.calls += 1
    return sae_peers.Run(method, k, seed, rate, steps, 0.1 + abs(rate - 2e-3), k, 0.0, 1.0, 10.0, float("nan"))


def test_the_committed_comparison_is_that_of_the_committed_runs():
    rows = [sae_peers.Run(**vars(row)) for row in common.read_rows(common.COMMITTED.results / "sae_peers.csv")]
    committed = (common.COMMITTED.tables / "sae-peers.md").read_text(encoding="utf-8")
    for line in sae_peers.table(rows, 288640).splitlines():
        if line.startswith("| khot"):
            assert line in committed
    of = {method: [r for r in rows if r.method == method and r.k == sae_peers.K] for method in sae_peers.METHODS}
    seeds = {method: len({r.seed for r in found} - {sae_peers.TUNING}) for method, found in of.items()}
    assert min(seeds.values()) >= 2
    for method, count in seeds.items():
        line = next(line for line in committed.splitlines() if line.startswith(f"| {method}"))
        assert ("seeds)" in line) == (count < max(seeds.values())), "the table says where there are fewer"
    fvu, cpu = (
        {m: np.mean([getattr(r, of_what) for r in found if r.seed != sae_peers.TUNING]) for m, found in of.items()}
        for of_what in ("fvu", "cpu")
    )
    assert fvu["khot, straight-through"] == pytest.approx(fvu["sparsify"], rel=0.01)
    assert min(fvu, key=fvu.get) == "khot, batch"
    assert min(fvu["SAELens"], fvu["plain dense TopK"]) > 1.02 * fvu["khot, hard"]
    assert min(cpu, key=cpu.get) == "khot, hard"
    assert cpu["sparsify"] / cpu["khot, straight-through"] == pytest.approx(1.3, abs=0.05), "the docs say so"
