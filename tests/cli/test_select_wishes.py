"""`khot select` with weights, groups of rows, several targets and a budget."""

import json
import re

import numpy as np
import pytest
from select_tables import khot

pytestmark = pytest.mark.slow


@pytest.fixture
def visits(tmp_path):
    """Two targets, with the weight of each row and whose it is."""
    x = np.random.default_rng(0).standard_normal((80, 3)).round(3)
    rows = [f"{a},{b},{c},{a + b:.3f},{a - b:.3f},p{i // 4},{1 + i % 2}" for i, (a, b, c) in enumerate(x)]
    (tmp_path / "visits.csv").write_text("\n".join(["a,b,c,pain,sleep,who,share", *rows]))
    return tmp_path / "visits.csv"


@pytest.mark.long
def test_weights_groups_of_rows_and_several_targets(visits):
    """The last --target won in silence, and there were no options for the others."""
    given = ("--target", "pain", "--target", "sleep", "--rows-of", "who", "--weight", "share", "-k", 2, "--json")
    found = json.loads(khot(visits, *given).stdout)
    assert {feature["name"] for feature in found["selected"]} == {"a", "b"}
    assert found["task"] == "regression"
    assert any("Rows of one 'who' are on one side of every split: 20 groups." in note for note in found["notes"])
    assert all(feature["loss"] > 0.1 for feature in found["selected"])


@pytest.mark.long
def test_what_is_too_dear_is_said(visits):
    (visits.parent / "costs.csv").write_text("a;9\nb;1\nc;1,5\n")
    drop = ("--drop", "sleep", "--drop", "who", "--drop", "share")
    given = (visits, "--target", "pain", *drop, "--costs", visits.parent / "costs.csv", "--budget", 2)
    done = khot(*given)
    assert "Left out, since they cost more than the budget of 2 alone: 'a'." in " ".join(done.stdout.split())
    assert re.search(r"The choice costs 1(\.5)? of the budget of 2\.", done.stdout)
    assert "1 feature of 3 explains" in done.stdout or "feature of" not in done.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("-k", 3, "--budget", 2), "-k and --budget exclude each other: leave one out; got -k 3, --budget 2"),
        (("--target", "nobody"), "no such column: 'nobody'"),
        (("--weight", "who"), "--weight who must hold a number > 0 in each row"),
        (("--weight", "pain"), "a column can be only one of --target, --weight, --rows-of and --drop"),
        (("--rows-of", "nobody"), "no such column: 'nobody'"),
        (("--target", "sleep", "--task", "classification"), "needs one --target; got several"),
        (("--target", "who"), "several targets must be numbers; got strings in 'who'"),
        (("--rows-of", "who", "--false-discoveries", 0.2, "-k", 1), "neither --weight nor --rows-of"),
    ],
)
def test_wishes_that_were_ignored_or_unknown(visits, given, says):
    done = khot(visits, "--target", "pain", *given)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr
