"""benchmarks/estimators.py: the published figures, row by row, and the command around them."""

import csv
import json
import sys

import pytest

from benchmarks.estimators import ENTRANTS, OBJECTIVES, main, study

pytestmark = pytest.mark.slow

PUBLISHED = {  # bias / variance / error on the paper's objective, over its ten seeds
    "simple": (0.037, 0.012, 0.247),
    "imle": (0.46, 0.031, 0.58),
    "xie_ermon": (0.083, 0.031, 0.27),
    "score": (0.0, 0.131, 1.0),
    "rloo_32": (0.0, 0.002, 0.09),
    "taylor": (0.0, 0.041, 0.196),
}
KEYS = {"estimator", "objective", "bias", "variance", "error", "rel_bias", "rel_variance", "evaluations", "error_se"}


@pytest.mark.slow
def test_published_figures_are_replicated():
    for row in study(tuple(PUBLISHED), ("paper",), draws=2000):
        got = (row.bias, row.variance, row.error)
        assert all(abs(a - b) < 0.01 for a, b in zip(got, PUBLISHED[row.estimator], strict=True)), row


def test_unbiased_estimators_have_no_bias_in_the_study():
    exact = ("reinmax", "taylor", "score", "score_baseline", "score_per_coordinate")
    for row in study(exact, ("quadratic", "mlp"), seeds=(1234,)):
        if (row.estimator, row.objective) != ("reinmax", "mlp"):
            assert row.rel_bias < 1e-10, row
        else:
            assert row.rel_bias > 0.01, row


def test_baselines_lower_the_variance():
    rows = {row.estimator: row for row in study(("score", "score_baseline", "score_per_coordinate"), ("mlp",))}
    assert rows["score_per_coordinate"].rel_variance < rows["score_baseline"].rel_variance < rows["score"].rel_variance


def test_an_interruption_keeps_what_there_is():
    def stop(label: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    rows = study(("simple", "score", "taylor"), ("paper",), seeds=(1234,), on_progress=stop)
    assert [row.estimator for row in rows] == ["simple", "score"]


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["estimators.py", *map(str, arguments)])
        return main(), capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_command(command, tmp_path):
    files = {name: tmp_path / f"study.{name}" for name in ("csv", "md", "png")}
    names = ("--quick", "--estimator", "simple", "--estimator", "taylor")
    paths = ("--csv", files["csv"], "--markdown", files["md"], "--plot", files["png"])
    code, printed = command(*names, "--json", *paths)
    assert code == 0
    rows = json.loads(printed)
    assert [(row["estimator"], row["objective"]) for row in rows] == [
        (e, o) for o in OBJECTIVES for e in ("simple", "taylor")
    ]
    assert all(set(row) == KEYS for row in rows)
    assert len(list(csv.DictReader(files["csv"].read_text().splitlines()))) == 6
    assert "`taylor`" in files["md"].read_text()
    assert files["png"].read_bytes()[:4] == b"\x89PNG"


def test_a_part_of_the_study_goes_to_its_own_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed = command("--quick", "--estimator", "simple", "--objective", "paper")
    assert code == 0
    assert "`simple`" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"estimators.csv", "study-estimators.md", "study-estimators.svg", "study-estimators-dark.svg"}


def test_all_estimators_of_the_protocol_are_there():
    assert set(ENTRANTS) >= {
        *("straight_through", "simple", "imle", "xie_ermon", "relaxed", "score", "score_baseline"),
        *("score_per_coordinate", "rloo_2", "rloo_8", "rloo_32", "taylor", "reinmax"),
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--estimator", "nosuch"], "--estimator: invalid choice: 'nosuch' (choose from 'straight_through'"),
        (["--objective", "nosuch"], "--objective: invalid choice: 'nosuch'"),
        (["--draws", "1"], "--draws must be ≥ 2"),
        (["--plot", "x.foo"], "--plot must end in .svg"),
    ],
)
def test_bad_options(command, capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        command(*arguments)
    assert says in capsys.readouterr().err
