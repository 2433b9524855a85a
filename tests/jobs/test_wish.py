"""Groups, costs and rows that belong together, as the command reads them."""

import numpy as np
import pytest

from khot.jobs import select, select_report
from khot.jobs._trust import splits
from khot.jobs.select import Table, TableError, Wish, read_costs, read_groups

pytestmark = pytest.mark.slow
NAMES = ["a", "b,1", "colour=green", "colour=red", "city→x", "city→y", "town"]


def test_a_group_could_not_name_a_feature_with_a_comma():
    assert read_groups(['g=a,"b,1"'], NAMES) == {"g": ["a", "b,1"]}


def test_groups_of_a_column_of_strings():
    """A target-encoded one has a feature that is named like it, or one for each class; the latter count as one."""
    assert read_groups(["town"], NAMES, {"town": ["town"]}) == {"town": ["town"]}
    assert read_groups(["sex"], ["sex=male", "a"]) == {"sex": ["sex=male"]}
    assert read_groups(["colour"], NAMES) == {"colour": ["colour=green", "colour=red"]}
    classes = np.array(["x", "y", "z"] * 4)
    table = Table("t", ["a", "city"], np.zeros((12, 2)), classes, "y", [], None, categories=1)
    names, together = table.features("classification"), table.together("classification")
    assert together == {"city": ["city→x", "city→y", "city→z"]}
    assert len(Wish(groups=read_groups([], names, together)).units(names)) == 2
    assert read_groups(["g=a,city→x"], names, together) == {"g": ["a", "city→x"]}
    assert table.together("regression") == {"city": ["city"]}
    assert read_groups([], names, {"city": ["city"]}) == {}
    with pytest.raises(TableError, match="at least two features"):
        read_groups(["a"], NAMES)
    with pytest.raises(TableError, match="at least two features"):
        read_groups(["g=a"], NAMES)


@pytest.mark.parametrize("text", ["name;cost\na;1,5\nb;2\n", "a\t1,5\nb\t2\n", "a,1.5\nb,2\n"])
def test_costs_with_semicolons_or_decimal_commas(tmp_path, text):
    (tmp_path / "costs.csv").write_text(text)
    assert read_costs(tmp_path / "costs.csv") == {"a": 1.5, "b": 2.0}


def test_costs_of_a_column_of_strings():
    """All levels without a cost are named at once, and the column may have one."""
    names = ["a", "colour=green", "colour=red"]
    with pytest.raises(TableError, match=r"'colour=green', 'colour=red' lack one \(or give one to .*: 'colour'\)"):
        Wish(costs={"a": 1.0}, budget=3.0).selector(0, names, "auto", 0)
    wish = Wish(costs={"a": 9.0, "colour": 2.0}, budget=3.0).with_priced_columns(names)
    assert wish.units(names) == [("a", [0]), ("colour", [1, 2])]
    assert wish.selector(0, names, "auto", 0).costs.tolist() == [9, 1, 1]
    assert wish.too_dear(names) == ["a"]


def test_one_feature_explains():
    """It was "1 features of 7 keep"."""
    table = Table("t", ["a", "b"], np.zeros((12, 2)), np.arange(12.0), "y", [], None)
    result = select.Selection(table, "regression", 1, 0, "linear", features=[select.Feature("a", 1, 1.0)])
    score = select.Score(0.5, 0.1, (0.5, 0.5))
    result.scores = {"khot": score, "all features": score}
    assert select_report.headline(result).startswith("1 feature of 1 explains 50.0 % of the variance; all")


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_rows_of_one_group_were_on_both_sides(task):
    groups, x = np.repeat(np.arange(12), 5), np.zeros((60, 1))
    for train, test in splits(x, np.arange(60) % 2, task, 5, groups):
        assert not {*groups[train]} & {*groups[test]}
    assert len(splits(x, np.arange(60) % 2, task, 5, groups)) == 5


@pytest.mark.long
def test_a_selection_with_weights_groups_and_several_targets():
    """Rows with little weight contradict the others: without the weights, the other column is chosen."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 3))
    weight = np.where(np.arange(120) % 3, 0.01, 10.0)
    y = np.where(np.arange(120) % 3, 4 * x[:, 0], x[:, 1])[:, None] * [1.0, -2.0]
    given = Table("t", ["a", "b", "c"], x, y, "y, z", [], None)
    together = given._replace(weight=weight, groups=np.repeat(np.arange(30.0), 4))
    for table, name in ((given, "a"), (together, "b")):
        result = select.select(table, select.find_task_of(table, "auto"), 1)
        assert [feature.name for feature in result.chosen] == [name]
    assert "SelectKBest" not in result.scores
    assert result.scores["khot"].mean > 0.9
    assert 0.5 < result.chosen[0].loss <= 1.1


def test_a_group_has_no_name_of_a_feature_outside_it():
    """`--group a=b,c` took the feature a into the group, too, in silence."""
    names = ["a", "b", "c", "colour=green", "colour=red"]
    for text in ("a=b,c", "colour=a,b", "colour=a,colour=red"):
        with pytest.raises(TableError, match="--group needs a name that no other feature has"):
            read_groups([text], names)
    assert read_groups(["a=a,b"], names) == {"a": ["a", "b"]}
