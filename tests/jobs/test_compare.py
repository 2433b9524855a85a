"""The comparison of choices, and the verdict on it."""

import numpy as np
import pytest

from khot.jobs import _compare, select, select_report

pytestmark = pytest.mark.slow


def test_methods_choose_without_the_rows_that_are_scored(monkeypatch):
    """A choice made on all rows finds noise that fits them: on pure noise, scores are those of chance."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((60, 300)), np.arange(60) % 2
    monkeypatch.setattr(_compare, "methods", lambda *_: {"SelectKBest": [_compare.SelectKBest(k=5)]})
    ((_, score),) = select.compare(x, y, "classification", 5)
    assert 0.25 < score.mean < 0.75
    leaked = _compare.SelectKBest(k=5).fit_transform(x, y)  # a negative control
    monkeypatch.setattr(_compare, "methods", lambda *_: {"all": ["passthrough"]})
    ((_, score),) = select.compare(leaked, y, "classification", 5)
    assert score.mean > 0.75


@pytest.mark.slow
@pytest.mark.long
def test_the_units_of_the_target_do_not_matter():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((80, 12))
    y = x[:, 10] + x[:, 11]
    found = [dict(select.compare(x, y * s, "regression", 2))["L1"] for s in (1.0, 1e-3)]
    assert found[0].mean > 0.9
    assert found[1].mean == pytest.approx(found[0].mean, abs=1e-6)


def test_an_unaffordable_method_is_left_out():
    assert "RFE" in select.methods("classification", 5, (100, 50), 0)
    assert "RFE" not in select.methods("classification", 1, (100, 1), 0)
    assert "RFE" not in select.methods("classification", 5, (10_000, 1000), 0)


@pytest.mark.parametrize("task", ["classification", "reconstruction"])
def test_random_choices_are_the_first_of_a_seeded_order(task):
    x = np.random.default_rng(0).standard_normal((20, 9))
    y = x if task == "reconstruction" else np.arange(20) % 2
    for i, selector in enumerate(select.methods(task, 4, x.shape, 7)["random"]):
        order = np.random.default_rng(7 + i).permutation(9)
        assert selector.fit(x, y).get_support(indices=True).tolist() == sorted(order[:4].tolist())


def verdict(task="classification", **folds):
    result = select.Selection(select.digits(), task, 5, 0, "linear")
    result.scores = {
        name: select.Score(float(np.mean(each)), float(np.std(each)), tuple(each)) for name, each in folds.items()
    }
    return select_report.verdict(result)


def test_the_headline_is_for_a_manager():
    result = select.Selection(select.digits(), "classification", 2, 0, "linear")
    result.features = [select.Feature(name, i, 0.0) for i, name in enumerate(result.table.names)]
    assert select_report.headline(result) == ""
    result.scores = {
        name: select.Score(mean, 0.0, (mean,)) for name, mean in (("khot", 0.9012), ("all features", 0.969))
    }
    assert select_report.headline(result) == "2 pixels of 64 reach 90.1 % accuracy; all of them reach 96.9 %."
    result.scores["khot"] = select.Score(-0.1, 0.0, (-0.1,))
    assert select_report.headline(result) == ""


def test_the_verdict_names_what_a_linear_model_cannot_see():
    """On x0·x1 it said only that no choice is ahead of another, by a model that sees no products."""
    result = select.Selection(select.digits(), "regression", 2, 0, "linear")
    result.candidates = [{"candidate": "surfaces", "linear": 0.45, "boosted": 0.85, "score": 0.65, "error": 0.0}]
    result.scores = {"khot": select.Score(0.45, 0.0, (0.45, 0.45))}
    assert "R² 0.85 against 0.45: compare with --model forest." in select_report.verdict(result)
    result.model = "forest"
    assert "forest" not in select_report.verdict(result)
    result.model, result.candidates[0]["linear"] = "linear", 0.8
    assert "forest" not in select_report.verdict(result)


def test_only_khot_finds_two_columns_that_matter_together():
    seen = []
    found = select.xor(0, lambda label, done, total: seen.append((label.split()[-1], done, total)))
    assert {name: f.right == 2 for name, f in found.items()} == {
        "khot": True,
        "SelectKBest": False,
        "L1": False,
        "RFE": False,
    }
    assert found["khot"].accuracy > 0.95
    assert all(0.4 < found[name].accuracy < 0.6 for name in select.RIVALS)
    assert seen[0] == ("khot", 0, 4)
    result = select.Selection(select.digits(), "classification", 2, 0, "linear", xor=found)
    assert select_report.xor_verdict(result).endswith("Both were found by khot alone.")
    result.xor = {"khot": found["L1"]}
    assert select_report.xor_verdict(result).endswith("Nobody found both.")


def test_the_verdict_is_honest():
    """Folds are compared one by one: a difference that is the same in all is told, whatever their spread."""
    wide = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    step = np.array([0.09, 0.1, 0.1, 0.1, 0.11])
    assert verdict(khot=wide + step, RFE=wide, L1=wide - 0.1).startswith(
        "khot's choice is ahead of the best other one, RFE's, by 0.100 ± 0.003."
    )
    assert verdict(khot=wide, RFE=wide + step) == "RFE's choice is ahead of khot's by 0.100 ± 0.003: take that one."
    assert verdict(khot=wide, RFE=wide[::-1] + 0.01).startswith(
        "khot's choice and RFE's cannot be told apart: RFE's is ahead by 0.010 ±"
    )
    same = "There is no practical difference between khot's choice and RFE's."
    assert verdict(khot=wide, RFE=wide) == same
    assert verdict(khot=wide, RFE=wide - 0.001) == same  # "ahead by 0.001 ± 0.000" it used to say
    assert verdict(khot=wide, RFE=wide - 0.004) != same
    assert verdict(RFE=wide) == "The comparison was cut short."
    assert verdict(khot=wide, random=wide + step) == "It is no better than random features."
    assert verdict(khot=wide + step, random=wide) == ""
    assert "no score" in verdict(khot=wide * np.nan, RFE=wide)
    assert verdict(khot=wide, RFE=wide * np.nan) == ""
    assert verdict("regression", khot=-wide - step, RFE=-wide).endswith("No choice predicts the target at all.")
