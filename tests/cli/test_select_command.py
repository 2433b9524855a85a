"""`khot select`: the command, its errors, its report, and interruptions."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import polars as pl
import pytest
from select_tables import khot
from typer.testing import CliRunner

from khot.cli._app import app

pytestmark = pytest.mark.slow


def test_parquet_without_a_reader(tmp_path, monkeypatch):
    path = tmp_path / "table.parquet"
    pl.DataFrame({"a": [1.0]}).write_parquet(path)
    monkeypatch.setitem(sys.modules, "polars", None)
    done = khot(path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "'.[select]'" in done.stderr


@pytest.mark.long
def test_a_sample_of_many_rows_is_said(tmp_path):
    x = np.random.default_rng(0).standard_normal((200, 2))
    pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": 2 * x[:, 0]}).write_parquet(tmp_path / "a.parquet")
    arguments = (tmp_path / "a.parquet", "--target", "y", "-k", 1, "--seed", 5)
    done = khot(*arguments, "--rows", 60, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    said = "A uniform sample of 60 of the 200 rows was read, without replacement, with the seed 5 (--rows)."
    assert said in " ".join(done.stdout.split())
    assert said in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "--rows must be ≥ 1; got 0" in khot(*arguments, "--rows", 0).stderr


@pytest.mark.long
def test_odd_files_come_through(tmp_path):
    """One feature, and a name that is not UTF-8."""
    path = tmp_path / os.fsdecode(b"bad\xff.csv")
    path.write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    done = khot(path, "--target", "y", "-k", 1, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "RFE" not in done.stdout


@pytest.mark.long
def test_standard_input_and_what_was_assumed_of_it():
    """A German file with a copy of the target, a constant, names, and a column twice."""
    lines, x = ["alter;größe;groß;kopie;eins;name;ziel"], np.random.default_rng(0).standard_normal((40, 3))
    for i, (a, b, c) in enumerate(x.round(3)):
        y = a + b
        lines.append(f"{a};{b};{b + 0.05 * c:.3f};{2 * y:.3f};1;Person {i};{y:.3f}".replace(".", ","))
    data = "\n".join(lines).encode("latin-1")
    done = CliRunner().invoke(app, ["select", "-", "--target", "ziel", "-k", "2"], input=data)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    for part in (
        "2 of 5 features, regression, 40 rows, standard input",
        "Assumed of the file: text as latin-1 (cp1252), since it is not UTF-8 (--encoding); semicolons between values",
        "decimal commas (--decimal) in 'alter', 'größe', 'groß', 'kopie', 'ziel'.",
        "Warning: column 'name' has a different string in each row",
        "Warning: The same value in all rows, which cannot help: 'eins'.",
        "Warning: Predicts the target alone, without error or nearly so: 'kopie'.",
        "add --drop kopie",
        "chosen in folds",
    ):
        assert part in said, part
    done = CliRunner().invoke(app, ["select", "-"], input=b"")
    assert (done.exit_code, done.stderr) == (2, "khot select: - is empty.\n")


def broken_npz(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 not a zip file")
    return [path]


def pickled_npz(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.array([[object()]], dtype=object))
    return [tmp_path / "a.npz"]


def two_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones((20, 2)), b=np.ones((20, 3)))
    return [tmp_path / "a.npz"]


def text(name, content, *arguments):
    def make(tmp_path):
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return [tmp_path / name, *arguments]

    return make


def priced(costs, budget):
    """A table with the columns a, b and c, and a file of costs."""

    def make(tmp_path):
        (tmp_path / "costs.csv").write_text(costs)
        return [*text("a.csv", "a,b,c\n" + ROWS)(tmp_path), "--costs", tmp_path / "costs.csv", "--budget", budget]

    return make


ROWS = "".join(f"{i},{i % 2},{i % 3}\n" for i in range(20))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: [t / "nosuch.csv"], "is missing"),
        (lambda t: [t], "is not a file"),
        (text("a.txt", "x"), "must end in .csv"),
        (text("a.csv", ""), "is empty"),
        (text("a.csv", "a,b\n"), "no rows"),
        (text("a.csv", "a,b\n1,2\n3\n"), "row 2 must have 2 values, like the first line; got 1"),
        (text("a.csv", "1,2\n3,4\n"), "names of the columns in its first line"),
        (text("a.csv", "a,b,a\n" + ROWS), "'a' twice"),
        (text("a.csv", "a,,b\n" + ROWS), "column 2 must have a name"),
        (text("a.csv", b"a,b\n\xff\xfe,1\n", "--encoding", "utf-8"), "cannot be read as .csv"),
        (text("a.csv", b"a,b\n1,\0\n"), "must be text; got zero bytes"),
        (text("a.csv.gz", b"\x1f\x8b not gzip"), "cannot be read as .csv"),
        (text("a.gz", b"x"), "or one of these and .gz; got .gz"),
        (text("a.csv", "a,b,c\n" + ROWS, "--encoding", "klingon"), "such as latin-1; got 'klingon'"),
        (text("a.csv", "a,b,c\n" + ROWS, "--separator", ";;"), "must be one character, or tab; got ';;'"),
        (
            text("a.csv", "a,b,c\n" + ROWS, "--dates", "%d.%m.%Y"),
            "--dates must fit all values of a column; got %d.%m.%Y",
        ),
        (text("a.csv", "a,b,c\n" + ROWS, "--levels", "0", "-k", "1"), "--levels must be ≥ 1; got 0"),
        (text("a.tsv", "a\tb\n" + "1,234\t1\n2,345\t2\n" * 20, "-k", "1"), "numbers such as 1,234: add --decimal"),
        (text("a.csv", "a\n" + "".join(f"w{i}\n" for i in range(30)), "-k", "1"), "no columns but identifiers"),
        (text("a.csv", "a,b,c\n1,2,3\n"), "at least 10 rows; got 1"),
        (text("a.csv", "alpha,beta,c\n" + ROWS, "--target", "betta"), "did you mean 'beta'"),
        (text("a.csv", "a,b,c\n" + ROWS, "--target", "zzzz"), "there are 'a', 'b', 'c'"),
        (text("a.csv", "a,b,c\n" + ROWS, "--drop", "zzzz"), "no such column: 'zzzz'"),
        (text("a.csv", "a,b,c\n" + ROWS, "--target", "c", "-k", "3"), "1 ≤ k ≤ 2 (number of features); got 3"),
        (text("a.csv", "a,b,c\n" + ROWS, "--target", "c", "-k", "0"), "got 0"),
        (
            text("a.csv", "a,b,c\n" + ROWS, "--drop", "a", "--drop", "b", "--target", "c"),
            "no columns beside the target",
        ),
        (text("a.csv", "a,b\n" + "1,\n" * 20, "-k", "1"), "column 'b' has no values"),
        (text("a.csv", "a,b\n" + "1,inf\n" * 20, "-k", "1"), "column 'b' has values of 1e+100 or more"),
        (text("a.csv", "a,b\n" + "1,1e200\n2,1\n" * 20, "--target", "b", "-k", "1"), "must be less than 1e+100"),
        (text("a.csv", "a=y,a,b\n" + "1,x,1\n2,y,2\n" * 20, "-k", "1"), "would be a feature a=y"),
        (text("a.csv", "a,b\n" + "1,x\n" * 20 + "1,y\n", "--target", "b", "-k", "1"), "got 1 of 'y'"),
        (text("a.csv", "a,b\n" + "1,x\n" * 20, "--target", "b", "-k", "1"), "at least 2 classes; got 1, 'x'"),
        (
            text("a.csv", "a,b\n" + "".join(f"w{i % 30},1\n" for i in range(60)), "-k", "1"),
            "too many different strings",
        ),
        (text("a.csv", "a,b,c\n" + ROWS, "--task", "regression", "-k", "1"), "--task regression needs --target"),
        (
            text("a.csv", "a,b\n" + "1,x\n2,y\n" * 20, "--target", "b", "--task", "regression", "-k", "1"),
            "holds strings",
        ),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--seed", "-1"), "0 ≤ seed"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "some"), "-k must be a whole number or auto; got 'some'"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--max-k", "3"), "--max-k needs -k auto"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "auto", "--max-k", "0"), "--max-k must be ≥ 1; got 0"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--jobs", "0"), "--jobs must be ≥ 1; got 0"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--group", "g=a,d"), "--group g: no such feature: 'd'"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--group", "a"), "at least two features"),
        (
            text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--group", "g=a,b", "--group", "h=b,c"),
            "'b' must be in one --group; got 'g' and 'h'",
        ),
        (text("a.csv", "a,b,c\n" + ROWS, "--budget", "3"), "--budget needs --costs"),
        (text("a.csv", "a,b,c\n" + ROWS, "--costs", "none.csv", "--budget", "1"), "none.csv is missing"),
        (priced("a,2\nb,3\n", 9), "a cost for each feature; 'c' lack one"),
        (priced("a,2\nb,3\nc,4\n", 1), "--budget must be ≥ 2, the cost of the cheapest feature; got 1"),
        (priced("a,2\nb,3\nc,4\nd,4\n", 9), "a cost for 'd', which the table does not have"),
        (priced("a,2\nb,-3\n", 9), "line 2 of"),
        (priced("name,cost\na\n", 9), "must be a name, a comma and a number"),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--false-discoveries", "0.1"), "needs a target and 0 < Q < 1"),
        (text("a.parquet", "not parquet"), "cannot be read as .parquet"),
        (broken_npz, "cannot be read as .npz"),
        (pickled_npz, "cannot be read as .npz"),
        (two_arrays, "must hold features X"),
        (lambda t: ["--target", "y"], "--target, --drop and how to read need a FILE"),
        (lambda t: ["--decimal", ","], "--target, --drop and how to read need a FILE"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, make, says):
    place = tmp_path / "in"
    place.mkdir()
    done = khot(*make(place), "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_no_permission_to_write(table, tmp_path, monkeypatch):
    locked = tmp_path / "locked"
    locked.mkdir()
    real = os.access  # root may write anywhere
    monkeypatch.setattr(
        os, "access", lambda path, mode: (str(path), mode) != (str(locked), os.W_OK) and real(path, mode)
    )
    for options in (("--out", locked), ("--report", locked / "r.html")):
        done = khot(table, "--target", "label", "-k", 2, *options)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert "no permission" in done.stderr
    done = khot(table, "--target", "label", "-k", 2, "--report", tmp_path)
    assert "must be a file; got a directory" in done.stderr
    done = khot(table, "--target", "label", "-k", 2, "--out", table / "sub")
    assert "cannot be made" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_json_is_one_object(table, tmp_path):
    done = khot(table, "--target", "label", "-k", 2, "--json", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"selected", "scores", "task", "k", "seed", "report", "complete"} | {
        *("candidates", "cost", "curve", "discoveries", "notes", "warnings")
    }
    assert found["complete"]
    assert (len(found["notes"]), found["warnings"]) == (3, [])
    assert [f["rank"] for f in found["selected"]] == [1, 2]
    assert set(found["selected"][0]) == {
        "name",
        "rank",
        "inclusion_probability",
        "stability",
        "subsamples",
        "stand_ins",
        "loss",
        "error",
    }
    assert set(found["scores"]) == {"khot", "all features", "random", "SelectKBest", "L1", "RFE"}
    assert all(set(score) == {"mean", "std"} for score in found["scores"].values())
    assert (found["task"], found["k"], found["seed"]) == ("classification", 2, 0)
    assert found["report"] == str(tmp_path / "out" / "report.html")
    assert json.loads((tmp_path / "out" / "selection.json").read_text()) == found
    rows = list(csv.DictReader((tmp_path / "out" / "features.csv").read_text().splitlines()))
    assert [row["name"] for row in rows if row["selected"] == "1"] == [f["name"] for f in found["selected"]]
    assert len(rows) == 6
    assert sum(float(row["inclusion_probability"]) for row in rows) == pytest.approx(2, abs=1e-4)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "selection.json", "features.csv"}
    again = khot(table, "--target", "label", "-k", 2, "--json")
    assert json.loads(again.stdout)["selected"] == found["selected"]
    assert json.loads(again.stdout)["report"] is None


@pytest.mark.slow
@pytest.mark.long
def test_the_digits_in_a_terminal():
    done = khot("-k", 5)
    assert done.exit_code == 0, done.output
    assert "5 of 64 features" in done.stdout
    assert done.stdout.count("██") == 5
    assert "pixel_" in done.stdout
    assert "RFE" in done.stdout
    assert "khot's choice" in done.stdout or "ahead of khot's" in done.stdout
    assert "1. Two columns that matter only together: who finds them?" in done.stdout
    assert re.search(r"5 pixels of 64 reach \d\d\.\d % accuracy; all of them reach \d\d\.\d %\.", done.stdout)
    assert re.search(r"This took \d+ s\.\nNext", done.stdout)


@pytest.mark.long
def test_a_table_of_your_own_ends_with_a_link_a_sentence_and_the_time(table, tmp_path):
    done = khot(table, "--target", "label", "-k", 2, "--report", tmp_path / "r.html")
    assert f"Report, with pictures: {(tmp_path / 'r.html').as_uri()}" in done.stdout.replace("\n", "").replace(
        "pictures:f", "pictures: f"
    )
    assert "features of 6 reach" in done.stdout
    assert re.search(r"This took \d+ s\.\n$", done.stdout)
    assert "Next" not in done.stdout  # they did that just now
    assert "XOR" not in done.stdout


@pytest.mark.long
def test_progress_says_where_it_goes():
    """ "1 features too many" meant nothing to a reader."""
    from khot.jobs import select as job

    seen = []
    table = job.digits()
    few = table._replace(x=table.x[:200, :16], y=table.y[:200] % 2, names=table.names[:16], image=None)
    job.select(few, "classification", 5, on_progress=lambda *entry: seen.append(entry))
    labels = [label for label, _, _ in seen]
    assert labels[0] == "choosing"
    assert [label for label in labels if label == "choosing   surfaces"]
    assert all(done <= total for _, done, total in seen)
    assert [label for label in labels if label.startswith("comparing  khot")]


@pytest.mark.slow
@pytest.mark.long
def test_k_groups_costs_and_knockoffs(table, tmp_path):
    """What is asked for is in the JSON object, the terminal and the report."""
    (tmp_path / "costs.csv").write_text("feature,cost\nalpha,5\nbeta,1\ngamma,1\ndelta,1\ncolour,2\n")
    report, given = tmp_path / "r.html", (table, "--target", "label", "--group", "colour")
    done = khot(*given, "-k", "auto", "--max-k", 3, "--false-discoveries", 0.5, "--report", report)
    assert done.exit_code == 0, done.output
    assert "is the smallest number whose score is within a standard error of the best" in " ".join(done.stdout.split())
    assert "nockoffs" in done.stdout
    assert "The held-out score against the number of features" in report.read_text()
    found = json.loads(khot(*given, "--costs", tmp_path / "costs.csv", "--budget", 6, "--json").stdout)
    assert {feature["name"] for feature in found["selected"]} == {"alpha", "beta"}
    assert found["k"] == 2
    assert {row["candidate"] for row in found["candidates"]} == {"splicing", "surfaces", "trees", "gating"}
    assert any("know no groups and no costs" in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.long
def test_regression_and_reconstruction(table):
    done = khot(table, "--target", "alpha", "--drop", "label", "-k", 2, "--json", "--model", "forest")
    found = json.loads(done.stdout)
    assert found["task"] == "regression"
    done = khot(table, "--drop", "label", "-k", 2, "--json")
    found = json.loads(done.stdout)
    assert found["task"] == "reconstruction"
    assert set(found["scores"]) == {"khot", "all features", "random", "PCA, not a choice"}
    assert found["scores"]["all features"]["mean"] > 0.9
    assert found["scores"]["khot"]["mean"] <= found["scores"]["PCA, not a choice"]["mean"] + 0.05


def test_help_teaches():
    done = khot("--help")
    assert "houses.csv --target price" in done.stdout
    both = [subprocess.run([sys.executable, "-m", "khot", "select", "--help"], capture_output=True, check=True).stdout]
    assert b"houses.csv" in both[0]


def test_without_scikit_learn():
    code = "import sys; sys.modules['sklearn'] = None; sys.argv = ['khot', 'select']\nimport khot_cli\nkhot_cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "'.[select]'" in done.stderr, done.stderr.count("\n")) == (2, True, 1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "after"), [(signal.SIGINT, "choosing"), (signal.SIGINT, "comparing"), (signal.SIGKILL, "choosing")]
)
def test_a_killed_run_leaves_all_or_nothing(tmp_path, how, after):
    """`tests/kill_select.py` does it at random moments, many times."""
    from kill_select import start, state_of

    process = start(tmp_path / "out", wait_for=after)
    time.sleep(0.2)
    process.send_signal(how)
    process.wait(60)
    assert state_of(tmp_path / "out") == ("whole" if how == signal.SIGINT else "nothing")
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
