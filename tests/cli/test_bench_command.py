"""`khot bench`: the table, files, and errors."""

import csv
import io
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from khot import bench
from khot.bench import BASELINE, CONTENDERS, Contender, Result
from khot.cli._app import app

pytestmark = pytest.mark.slow
OURS = [name for name, contender in CONTENDERS.items() if contender.kind == "khot"]


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_command_prints_a_table_and_names_the_skipped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    done = run("--shape", "4x64", "--k", "10%", "--budget", "0.001", "--op", "torch.topk", "--op", "normal_topk")
    assert done.exit_code == 0
    assert "4×64, k = 6, float32; 1 thread, process CPU time" in done.stdout
    for name in (BASELINE, "torch.topk", "normal_topk", "forward + backward", "memory", "|Σ−k|"):
        assert name in done.stdout
    assert "laplace_topk" not in done.stdout
    done = run("--shape", "4x64", "--k", "2.5", "--budget", "0.001", "--op", "hard_topk")
    assert "hard_topk: skipped: needs an integer k; got 2.5" in done.stdout


def test_command_writes_json_alone_and_csv(tmp_path):
    file = tmp_path / "out.csv"
    arguments = (
        "--shape",
        "2x3x8",
        "--k",
        "2",
        "--budget",
        "0.001",
        "--op",
        "laplace_topk",
        "--json",
        "--csv",
        str(file),
    )
    done = run(*arguments, "--dtype", "float64")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [BASELINE, "laplace_topk"]
    assert {(row["shape"], row["k"], row["dtype"]) for row in rows} == {("2x3x8", 2, "float64")}
    assert [row["name"] for row in csv.DictReader(io.StringIO(file.read_text()))] == [BASELINE, "laplace_topk"]


@pytest.mark.parametrize("width", [80, 110, 140])
def test_the_ratio_is_never_cut(monkeypatch, width):
    """At 80 columns `1.00`, `1.98` and `138` were all printed as `1…`."""
    monkeypatch.setenv("COLUMNS", str(width))
    done = run("--shape", "64x1024", "--budget", "0.001")
    assert done.exit_code == 0
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= width
    assert ("memory" in done.stdout) == (width >= 130)
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(re.findall(r"│ +\d+\.\d\d", rows[0])) >= 2
    names = [row.split()[0].strip("│") for row in rows]
    last = [name for name in names if not name.startswith("torch.") and name not in OURS]
    assert names == [*(n for n in names if n in OURS), *(n for n in names if n.startswith("torch.")), *last]
    assert re.fullmatch(
        r"σ_k costs [\d.e+]+× torch.softmax at this shape \([\d.e+]+× with the backward pass\).", said(done)
    )


def said(done):
    """The last sentence, on one line."""
    return " ".join(done.stdout[done.stdout.index("σ_k costs") :].split())


def test_there_is_no_conclusion_without_softmax():
    assert "costs" not in run("--shape", "4x8", "--k", "2", "--budget", "0.001", "--op", "torch.topk").stdout


def test_command_lists_the_contenders():
    done = run("--list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in CONTENDERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "4096y64"), "--shape must be positive integers joined by x, such as 4096x64; got '4096y64'."),
        (("--shape", "0x64"), "--shape must be positive integers joined by x, such as 4096x64; got '0x64'."),
        (
            ("--op", "eagr"),
            "--op must be a known contender; got 'eagr': did you mean eager?",
        ),
        (("--op", "qqq"), "--op must be a known contender; got 'qqq': khot bench --list names them all."),
        (("--shape", "4x8", "--k", "9"), "--k must satisfy 0 ≤ k ≤ 8 (the last size of --shape); got 9."),
        (("--k", "120%"), "--k must satisfy 0 ≤ k ≤ 64 (the last size of --shape); got 120%."),
        (("--k=-5%",), "--k must satisfy 0 ≤ k ≤ 64 (the last size of --shape); got -5%."),
        (("--k", "some"), "--k must be a number such as 8 or 2.5, or a share such as 10%; got 'some'."),
        (("--dtype", "int8"), "--dtype must be one of float16, bfloat16, float32, float64; got 'int8'."),
        (("--device", "gpu"), "--device must be cpu, cuda or cuda:N; got 'gpu'."),
        (("--threads", "0"), "--threads must be ≥ 1; got 0."),
        (("--budget", "0"), "--budget must be > 0 seconds; got 0."),
        (
            ("--csv", f"{__file__}/out.csv"),
            f"{__file__} cannot be made: {__file__} is not a directory.",
        ),
    ],
)
def test_bad_arguments_get_one_line(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr == f"khot bench: {message}\n"
    assert done.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said():
    done = run("--device", "cuda")
    assert done.exit_code == 2
    assert "torch.cuda.is_available() is False" in done.stderr


def test_scores_beyond_memory_are_said():
    done = run("--shape", "100000000x100000000", "--op", "laplace_topk")
    assert done.exit_code == 2
    assert done.stderr.startswith("khot bench: --shape must fit into memory; got 100000000x100000000: ")
    assert done.stderr.count("\n") == 1


def test_interrupted_command_prints_what_it_has(monkeypatch, tmp_path):
    def interrupted(contenders, settings, on_progress):
        results = [Result(name=BASELINE, contender=CONTENDERS[BASELINE], skipped="interrupted before it was measured")]
        return bench.Report(settings=settings, results=results, interrupted=True)

    monkeypatch.setattr("khot.bench.measure", interrupted)
    file = tmp_path / "out.csv"
    done = run("--csv", str(file))
    assert done.exit_code == 130
    assert "interrupted, partial" in done.stdout
    assert "interrupted before it was measured" in file.read_text()


MINE = {"mine": Contender(fn=lambda x, k: k * x.softmax(-1), what="k times softmax")}
NOT_MINE = {"mine": torch.sigmoid}


def test_contenders_of_your_own():
    arguments = ("--also", f"{__name__}:MINE", "--op", "mine", "--shape", "4x8", "--k", "2", "--budget", "0.001")
    done = run(*arguments, "--json")
    assert [row["name"] for row in json.loads(done.stdout)] == [BASELINE, "mine"]
    assert "k times softmax" in run("--also", f"{__name__}:MINE", "--list").stdout
    for wrong in (f"{__name__}:NOT_MINE", f"{__name__}:NOTHING", "no_such_module:X", "no_colon", ":"):
        done = run("--also", wrong)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert "--also must" in done.stderr
