"""The benchmark of feature selection runs, its sets are what they say, and its tables are those of its results."""

import gzip

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import feature_selection as selection
from benchmarks import feature_selection_choices as choices
from benchmarks import selection_report as report
from benchmarks.common import ROOT
from benchmarks.rival_gates import Concrete, GateSelector, L2XGate, StochasticGates
from benchmarks.selection_sets import KNOWN, mnist, switch, xor_in_noise

pytestmark = pytest.mark.slow


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", KNOWN)
def test_sets(name):
    make, _ = KNOWN[name]
    known = make(0, 400)
    assert known.x.shape == (400, known.truth.shape[-1])
    assert (known.truth.sum(-1) == known.k).all()
    assert set(np.unique(known.y)) == {0, 1}
    assert not np.array_equal(known.x, make(1, 400).x)


LOGITS = {
    "XOR": lambda a, b, c, d: a * b,
    "orange skin": lambda a, b, c, d: a**2 + b**2 + c**2 + d**2 - 4,
    "additive": lambda a, b, c, d: -100 * np.sin(2 * a) + 2 * abs(b) + c + np.exp(-d),
    "additive, code's": lambda a, b, c, d: -100 * np.sin(0.2 * a) + abs(b) + c + np.exp(-d) - 2.4,
}


@pytest.mark.parametrize("name", LOGITS)
def test_labels_have_the_logit_of_the_formula(name):
    known = KNOWN[name][0](0, 10_000)
    logit = LOGITS[name](*known.x[:, :4].T)
    p = 1 / (1 + np.exp(-logit.clip(-500, 500)))
    open_ones = np.abs(logit) < 1  # where a wrong formula shows most
    for part in (open_ones & (logit > 0), open_ones & (logit < 0)):
        error = np.sqrt((p * (1 - p))[part].sum()) / part.sum()
        assert known.y[part].mean() == pytest.approx(p[part].mean(), abs=4 * error)


def test_switch_follows_the_tenth_column():
    known = switch(0, 1000)
    assert known.truth[known.x[:, 9] > 3][:, [0, 1, 2, 3, 9]].all()
    assert known.truth[known.x[:, 9] < -3][:, [4, 5, 6, 7, 9]].all()
    assert not known.truth[:, 8].any()


def test_judge():
    truth = np.array([True, True, False, False])
    assert selection.judge(np.array([True, False, True, False]), None, truth) == {"found": 0.5, "whole": 0.0}
    rows = np.array([[True, True, False, False], [False, False, True, True]])
    scores = np.array([4.0, 3.0, 2.0, 1.0])
    result = selection.judge(np.array([True, True, False, False]), scores, rows)
    assert result == {"found": 0.5, "whole": 0.5, "median rank": 2.5}


@pytest.mark.slow
@pytest.mark.parametrize("gate", [Concrete, StochasticGates])
def test_rivals_find_xor(gate):
    """With two columns of noise; with eighteen, the concrete selector is less sure."""
    known = xor_in_noise(0, 1000)
    rate = {Concrete: selection.CONCRETE_RATE, StochasticGates: selection.STG_RATE}[gate]
    found = GateSelector(2, gate, gate_learning_rate=rate, max_steps=200).fit(known.x[:, :4], known.y)
    assert found.get_support(indices=True).tolist() == [0, 1]


def test_duplicates_of_the_concrete_selector_are_filled_up():
    gate = Concrete(4, 3, seeded())
    with torch.no_grad():
        gate.logits[:] = torch.tensor([[9.0, 0.0, 0.0, 0.0], [9.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    assert gate.scores().topk(3).indices.sort().values.tolist() == [0, 2, 3]


def test_temperatures_of_the_concrete_selector():
    gate, x = Concrete(4, 3, seeded()), torch.eye(4)
    first, last = (torch.stack([gate(x, done, seeded()) for _ in range(3)]) for done in (0.0, 1.0))
    assert first.max() < 0.6  # a mixture
    assert ((last > 0.9) | (last < 0.1)).float().mean() > 0.8


def test_stochastic_gates():
    gate = StochasticGates(3, 1, seeded(), strength=2.0)
    with torch.no_grad():
        gate.mu[:] = torch.tensor([5.0, -5.0, -0.5])
    assert gate(torch.ones(50, 3), 0.0, seeded())[:, :2].unique(dim=0).tolist() == [[1.0, 0.0]]
    assert gate.penalty().item() == pytest.approx(2 * (1 + 0 + 0.5) / 3)


def test_l2x_takes_at_most_k():
    gate = L2XGate(nn.Linear(6, 6), 2)
    mask = gate.mask(torch.randn(20, 6), generator=seeded())
    assert (mask.sum(-1) < 2.01).all()
    assert gate.eval().mask(torch.randn(20, 6)).sum(-1).tolist() == [2.0] * 20


@pytest.mark.long
@pytest.mark.slow
def test_recovery_and_scores_run(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "REAL", {"breast cancer": selection.REAL["breast cancer"]})
    with pytest.warns(), torch.random.fork_rng():
        rows = [*selection.recovery([0], less=100, names=["switch", "XOR, 18 noise"]), *selection.scores([0], less=100)]
    assert {row.measure for row in rows} == {"found", "whole", "median rank", "linear", "forest"}
    assert all(0 <= row.value <= 1 for row in rows if row.measure != "median rank")
    assert report.from_csv(report.to_csv(rows)) == [row._replace(value=float(f"{row.value:.6g}")) for row in rows]
    assert "| khot, for each row, relaxed | " in report.recovery_table(rows)
    assert "| all features | " in report.scores_table(rows)
    report.figure(rows).savefig(tmp_path / "figure.svg")


def test_who_is_ahead():
    rows = [
        report.Row("a", 1, method, seed, "found", seed / 10 + by)
        for method, by in (("khot", 0), ("L1", 0.1))
        for seed in range(3)
    ]
    assert report.told(rows, {"a": {"set": "a"}}) == "Ahead of khot: L1 on a (0.100 ± 0.000)."
    assert report.told(rows[:3], {"a": {"set": "a"}}) == "No method is ahead of khot."


def test_mnist_is_read(tmp_path):
    images = np.arange(2 * 4, dtype=np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes(16) + images.tobytes())
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes([3, 7])))
    x, y = mnist(tmp_path)
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert y.tolist() == [3, 7]


@pytest.mark.parametrize("name", choices.variants())
def test_every_choice_trains(name):
    """Scores are finite and have moved."""
    known = xor_in_noise(0, 300)
    how = choices.variants()[name]
    found = choices.KHotSelector(2, random_state=0, strategy=choices.Gate(max_steps=12, **how)).fit(
        known.x[:, :5], known.y
    )
    assert np.isfinite(found.scores_).all()
    assert np.ptp(found.scores_) > 0


def test_choices_run(tmp_path):
    rows = list(choices.run([0], steps=10, names=[choices.DEFAULT, "design: Systematic"]))
    assert len(rows) == 4
    assert "| design: Systematic | " in choices.table(rows)
    choices.figure(rows).savefig(tmp_path / "figure.svg")


@pytest.mark.parametrize(
    ("page", "table", "csv"),
    [
        ("recovery", report.recovery_table, "feature_selection"),
        ("scores", report.scores_table, "feature_selection"),
        ("choices", choices.table, "feature_selection_choices"),
    ],
)
def test_the_tables_are_those_of_the_results(page, table, csv):
    rows = report.from_csv((ROOT / "benchmarks" / "results" / f"{csv}.csv").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "tables" / f"feature-selection-{page}.md").read_text(encoding="utf-8") == table(rows)
