"""`khot select`: tables from files, the comparison, the command, and the report."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import polars as pl
import pytest
from typer.testing import CliRunner

from khot.cli._app import app
from khot.jobs import _charts, _compare, _html, _select, _table
from khot.jobs._readers import TableError
from khot.sklearn import KHotSelector


@pytest.fixture
def quick(monkeypatch):
    """Little training; the rest as it is."""
    monkeypatch.setitem(KHotSelector.__init__.__kwdefaults__, "max_steps", 40)


@pytest.fixture
def table(tmp_path):
    """Two columns that say it, two that do not, one of strings, one with holes."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((60, 4))
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["alpha", "beta", "gamma", "delta", "colour", "label"])
        for i, row in enumerate(x):
            cells = [f"{v:.4f}" for v in row]
            cells[3] = "" if i % 10 == 0 else cells[3]
            writer.writerow([*cells, ["red", "green", "NA"][i % 3], "yes" if row[0] + row[1] > 0 else "no"])
    return path


def khot(*arguments):
    return CliRunner().invoke(app, ["select", *map(str, arguments)])


def rewritten(path, old, new):
    path.write_text(path.read_text().replace(old, new))
    return path


# Tables --------------------------------------------------------------------------------------------------------------


def test_a_csv_file(table):
    found = _table.read(table, "label")
    assert found.names == ["alpha", "beta", "gamma", "delta", "colour=green", "colour=red"]
    assert found.x.shape == (60, 6)
    assert set(found.y) == {"yes", "no"}
    assert found.x[:3, 4].tolist() == [0, 1, 0]
    known = [v for i, v in enumerate(found.x[:, 3]) if i % 10]
    assert found.x[0, 3] == pytest.approx(np.median(known))
    assert found.notes == [
        "column 'delta' has missing values, replaced by the median.",
        "column 'colour' has strings: each value became a feature of its own, 0 or 1.",
    ]
    assert _table.read(table, None, ["colour", "label"]).names == ["alpha", "beta", "gamma", "delta"]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_and_a_byte_order_mark(table, separator):
    text = table.read_text().replace(",", separator)
    table.write_text("\ufeff" + text, encoding="utf-8")
    assert _table.read(table, "label").names[0] == "alpha"


@pytest.mark.parametrize("library", [pl, pd])
def test_a_parquet_file(table, tmp_path, monkeypatch, library):
    columns = {"a": [1.0, None, 3.0] * 5, "b": [True, False, None] * 5, "c": ["u", "v", None] * 5, "y": list(range(15))}
    path = tmp_path / "table.parquet"
    pl.DataFrame(columns).write_parquet(path)
    if library is pd:
        pytest.importorskip("pyarrow", reason="pandas reads Parquet files with pyarrow")
        monkeypatch.setitem(sys.modules, "polars", None)
    found = _table.read(path, "y")
    assert found.names == ["a", "b", "c=u", "c=v"]
    assert found.x[:3].tolist() == [[1, 1, 1, 0], [2, 0, 0, 1], [3, 0.5, 0, 0]]


def test_parquet_without_a_reader(tmp_path, monkeypatch):
    path = tmp_path / "table.parquet"
    pl.DataFrame({"a": [1.0]}).write_parquet(path)
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    done = khot(path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "khot[parquet]" in done.stderr


def test_an_npz_file(tmp_path):
    generator = np.random.default_rng(0)
    images, y = generator.random((20, 3, 4)), np.arange(20) % 2
    np.savez(tmp_path / "images.npz", X=images, y=y, other=y * 2.0)
    found = _table.read(tmp_path / "images.npz", None)
    assert (found.target, found.image) == ("y", None)  # `other` is a feature, so they are not an image
    assert len(found.names) == 13
    found = _table.read(tmp_path / "images.npz", "y", ["other"])
    assert (found.image, found.names[5]) == ((3, 4), "pixel_1_1")
    np.savez(tmp_path / "plain.npz", data=images[:, 0], names=["a", "b", "c", "d"])
    assert _table.read(tmp_path / "plain.npz", None).names == ["a", "b", "c", "d"]


def test_an_index_and_booleans(tmp_path):
    frame = pd.DataFrame({"a": np.arange(12.0), "b": [True, False] * 6, "y": np.arange(12)})
    frame.to_csv(tmp_path / "a.csv")
    found = _table.read(tmp_path / "a.csv", "y")
    assert found.names == ["a", "b"]
    assert found.x[:2, 1].tolist() == [1, 0]
    assert "row numbers" in found.notes[0]


@pytest.mark.usefixtures("quick")
def test_odd_files_come_through(tmp_path):
    """One feature, and a name that is not UTF-8."""
    path = tmp_path / os.fsdecode(b"bad\xff.csv")
    path.write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    done = khot(path, "--target", "y", "-k", 1, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "RFE" not in done.stdout


def test_rows_without_a_target_are_left_out(table):
    gone = table.read_text().count(",yes\n")
    found = _table.read(rewritten(table, ",yes\n", ",\n"), "label")
    assert len(found.x) == 60 - gone
    assert found.notes[0] == f"{gone} rows without a target were left out."


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
        (text("a.csv", b"a,b\n\xff\xfe,1\n"), "cannot be read as .csv"),
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
        (text("a.csv", "a;b\n" + "1;1,5\n2;2,5\n" * 20, "-k", "1"), "decimal commas"),
        (text("a.csv", "a=x,a,b\n" + "1,x,1\n2,y,2\n" * 20, "-k", "1"), "would be a feature a=x"),
        (text("a.csv", "a,b\n" + "1,x\n" * 20 + "1,y\n", "--target", "b", "-k", "1"), "got 1 of 'y'"),
        (text("a.csv", "a,b\n" + "1,x\n" * 20, "--target", "b", "-k", "1"), "at least 2 classes; got 1, 'x'"),
        (text("a.csv", "a,b\n" + "".join(f"w{i},1\n" for i in range(30)), "-k", "1"), "too many different strings"),
        (text("a.csv", "a,b,c\n" + ROWS, "--task", "regression", "-k", "1"), "--task regression needs --target"),
        (
            text("a.csv", "a,b\n" + "1,x\n2,y\n" * 20, "--target", "b", "--task", "regression", "-k", "1"),
            "holds strings",
        ),
        (text("a.csv", "a,b,c\n" + ROWS, "-k", "1", "--seed", "-1"), "0 ≤ seed"),
        (text("a.parquet", "not parquet"), "cannot be read as .parquet"),
        (broken_npz, "cannot be read as .npz"),
        (pickled_npz, "cannot be read as .npz"),
        (two_arrays, "must hold features X"),
        (lambda t: ["--target", "y"], "--target and --drop need a FILE"),
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


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_json_is_one_object(table, tmp_path):
    done = khot(table, "--target", "label", "-k", 2, "--json", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"selected", "scores", "task", "k", "seed", "report", "complete", "notes"}
    assert found["complete"]
    assert len(found["notes"]) == 2
    assert [f["rank"] for f in found["selected"]] == [1, 2]
    assert set(found["selected"][0]) == {"name", "rank", "inclusion_probability"}
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


@pytest.mark.usefixtures("quick")
def test_the_digits_in_a_terminal():
    done = khot("-k", 5)
    assert done.exit_code == 0, done.output
    assert "5 of 64 features" in done.stdout
    assert done.stdout.count("██") == 5
    assert "pixel_" in done.stdout
    assert "RFE" in done.stdout
    assert "khot's choice" in done.stdout or "ahead of khot's" in done.stdout


@pytest.mark.usefixtures("quick")
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
    code = "import sys; sys.modules['sklearn'] = None; sys.argv = ['khot', 'select']\nfrom khot.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "khot[sklearn]" in done.stderr, done.stderr.count("\n")) == (2, True, 1)


# The comparison ------------------------------------------------------------------------------------------------------


def test_methods_choose_without_the_rows_that_are_scored(monkeypatch):
    """A choice made on all rows finds noise that fits them: on pure noise, scores are those of chance."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((60, 300)), np.arange(60) % 2
    monkeypatch.setattr(_compare, "methods", lambda *_: {"SelectKBest": [_compare.SelectKBest(k=5)]})
    ((_, score),) = _compare.compare(x, y, "classification", 5, 0)
    assert 0.25 < score.mean < 0.75
    leaked = _compare.SelectKBest(k=5).fit_transform(x, y)  # a negative control
    monkeypatch.setattr(_compare, "methods", lambda *_: {"all": ["passthrough"]})
    ((_, score),) = _compare.compare(leaked, y, "classification", 5, 0)
    assert score.mean > 0.75


def test_the_units_of_the_target_do_not_matter():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((80, 12))
    y = x[:, 10] + x[:, 11]
    found = [dict(_compare.compare(x, y * s, "regression", 2, 0))["L1"] for s in (1.0, 1e-3)]
    assert found[0].mean > 0.9
    assert found[1].mean == pytest.approx(found[0].mean, abs=1e-6)


def test_an_unaffordable_method_is_left_out():
    assert "RFE" in _compare.methods("classification", 5, (100, 50), 0)
    assert "RFE" not in _compare.methods("classification", 1, (100, 1), 0)
    assert "RFE" not in _compare.methods("classification", 5, (10_000, 1000), 0)


def verdict(task="classification", **folds):
    from khot.jobs._select_report import verdict

    result = _select.Selection(_table.digits(), task, 5, 0, "linear")
    result.scores = {
        name: _compare.Score(float(np.mean(each)), float(np.std(each)), tuple(each)) for name, each in folds.items()
    }
    return verdict(result)


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
    assert verdict(khot=wide, RFE=wide) == "khot's choice and RFE's score the same."
    assert verdict(RFE=wide) == "The comparison was cut short."
    assert verdict(khot=wide, random=wide + step) == "It is no better than random features."
    assert verdict(khot=wide + step, random=wide) == ""
    assert "no score" in verdict(khot=wide * np.nan, RFE=wide)
    assert verdict(khot=wide, RFE=wide * np.nan) == ""
    assert verdict("regression", khot=-wide - step, RFE=-wide).endswith("No choice predicts the target at all.")


# The report ----------------------------------------------------------------------------------------------------------


def test_everything_from_outside_is_escaped():
    assert _html.tag("p", "<script>", class_='a"b') == '<p class="a&quot;b">&lt;script&gt;</p>'
    assert "&lt;b&gt;" in _html.page("<b>", "x")
    assert "<b>" not in _html.page("<b>", "x").replace("<body>", "")
    assert "&lt;i&gt;" in _charts.bars([_charts.Bar("<i>", 0.5)], description="d")


def test_charts_of_odd_data():
    both = _charts.bars(
        [_charts.Bar("a", -0.2), _charts.Bar("b", -0.1), _charts.Bar("c", float("nan"))], description="d"
    )
    assert both.count('width="0.0"') == 3  # no bar below 0, and none of full width
    for points in ([], [(1.0, 2.0)], [(1.0, float("nan")), (2.0, 1.0)], [(0.0, 3.0), (1.0, 3.0)]):
        assert "<svg" in _charts.lines({"a": points}, x_label="x", y_label="y", description="d")
        assert "<svg" in _charts.lines({"a": points}, x_label="x", y_label="y", log_y=True, description="d")
    assert "nan" not in _charts.bars([_charts.Bar("a", 0.0)], description="d")
    assert _charts.bars([_charts.Bar("a", -1.0)], description="d").count("<rect") == 1


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--virtual-time-budget=2000"),
)


@pytest.mark.skipif(BROWSER is None and not os.environ.get("KHOT_BROWSER"), reason="no Chromium on this machine")
@pytest.mark.usefixtures("quick")
def test_the_report_in_a_browser(table, tmp_path):
    """Its content as a browser sees it, hostile names included, on a phone's width; and no request leaves."""
    assert BROWSER is not None, "KHOT_BROWSER is set, and there is no Chromium"
    hostile = "<script>document.title='owned'</script><img src=https://example.com/x.png>"
    rewritten(table, "alpha", f'"{hostile}"')
    report = tmp_path / "report.html"
    assert khot(table, "--target", "label", "-k", 2, "--report", report).exit_code == 0
    profile, log = f"--user-data-dir={tmp_path / 'profile'}", tmp_path / "net.json"
    options = [BROWSER, *FLAGS, profile, f"--log-net-log={log}", "--window-size=390,800"]
    done = subprocess.run([*options, "--dump-dom", report.as_uri()], capture_output=True, text=True, check=True)
    assert "What was chosen" in done.stdout
    assert "Against other choices" in done.stdout
    assert done.stdout.count("<svg") == 4
    assert "&lt;script&gt;document" in done.stdout
    assert "<title>owned" not in done.stdout
    assert "<img" not in done.stdout
    assert "example.com" not in log.read_text()
    check = tmp_path / "width.html"
    check.write_text(
        report.read_text()
        .replace("default-src 'none'", "script-src 'unsafe-inline'")
        .replace(
            "</html>",
            "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></html>",
        )
    )
    done = subprocess.run([*options, "--dump-dom", check.as_uri()], capture_output=True, text=True, check=True)
    wide, screen = map(int, done.stdout.split("<title>")[1].split("</title>")[0].split(" of "))
    assert wide <= screen  # nothing hangs over the side


def test_the_report_is_whole_and_alone(table, tmp_path, monkeypatch):
    monkeypatch.setitem(KHotSelector.__init__.__kwdefaults__, "max_steps", 20)
    monkeypatch.setattr(sys, "argv", ["khot", "select", "my table.csv", "-k", "2"])
    report = tmp_path / "report.html"
    khot(table, "--target", "label", "-k", 2, "--report", report)
    page = report.read_text()
    assert page.endswith("</html>\n")
    assert "http://" not in page
    assert "https://" not in page
    assert "khot select &#x27;my table.csv&#x27; -k 2" in page
    assert "replaced by the median" in page
    assert "torch 2" in page


# Interruptions -------------------------------------------------------------------------------------------------------


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


def test_bad_tables_are_value_errors(tmp_path):
    with pytest.raises(TableError, match="is missing"):
        _table.read(tmp_path / "a.csv", None)
