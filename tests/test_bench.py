"""The harness and its command: structure and verdicts, never times."""

import csv
import io
import json
import math

import pytest
import torch
import typer
from typer.testing import CliRunner

import khot
from khot import bench
from khot.bench import BASELINE, COLUMNS, CONTENDERS, RIVALS, Result, Rival, Settings, measure
from khot.bench._memory import peak_memory
from khot.bench.rivals import Limit
from khot.cli._bench import bench as bench_command

TINY = {"shape": (3, 16), "k": 4, "budget": 1e-3}
OURS = {BASELINE: CONTENDERS[BASELINE]}

app = typer.Typer()
app.command()(bench_command)


def by_name(report):
    return {result.name: result for result in report.results}


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_contender_is_measured_or_skipped_with_a_reason():
    report = measure(CONTENDERS, Settings(**TINY))
    assert [r.name for r in report.results] == list(CONTENDERS)
    assert not report.interrupted
    for r in report.results:
        if r.skipped:
            assert r.forward is None
            assert "not installed" in r.skipped
            continue
        assert r.forward.p20 <= r.forward.median <= r.forward.p80
        assert r.forward.median > 0
        assert r.forward.samples >= 1
        assert (r.both is None) == (r.name in ("hard_topk", "eager"))
        assert r.allocated > 0
        assert r.nans == 0
        assert (r.sum_error is None) == (r.rival.kind == "reference")


def test_the_budget_buys_samples():
    few, many = (by_name(measure(OURS, Settings(shape=(3, 16), k=4, budget=b)))[BASELINE] for b in (1e-9, 0.2))
    assert few.forward.samples == few.both.samples == 1
    assert many.forward.samples > 1


def test_forward_alone():
    result = by_name(measure(OURS, Settings(**TINY, backward=False)))[BASELINE]
    assert result.forward is not None
    assert result.both is None


def test_broken_promises_are_flagged():
    broken = {
        "nan": Rival(fn=lambda x, k: x * math.nan, what="all NaN"),
        "sum": Rival(fn=lambda x, k: x.sigmoid(), what="claims to sum to k"),
        "range": Rival(fn=lambda x, k: 2 * khot.hard_topk(x, k / 2) + 0 * x, what="sums to k, with twos"),
        "free": Rival(fn=lambda x, k: x.sigmoid(), what="claims nothing", sums_to_k=False),
        "yardstick": Rival(fn=lambda x, k: 5 * x, what="no k-hot", kind="reference"),
    }
    results = by_name(measure(OURS | broken, Settings(**TINY)))
    assert results["nan"].flags == ("NaN", "does not sum to k")
    assert results["nan"].nans == 48
    assert results["sum"].flags == ("does not sum to k",)
    assert results["range"].flags == ("leaves [0, 1]",)
    assert results["range"].out_of_range == 3 * 2
    assert results["free"].flags == results["yardstick"].flags == results[BASELINE].flags == ()
    assert results["free"].sum_error > 0.1


def fails(x, k):
    raise RuntimeError("first line\nsecond line")


def fails_backward(x, k):
    return fails(x, k) if x.requires_grad else x.sigmoid()


def test_failures_and_limits_are_reasons():
    contenders = OURS | {
        "raises": Rival(fn=fails, what=""),
        "backward": Rival(fn=fails_backward, what="", sums_to_k=False),
        "constant": Rival(fn=lambda x, k: torch.full_like(x, 0.25), what=""),
        "large": Rival(fn=fails, what="", limits=(Limit("n", 8, "n steps"),)),
        "missing": Rival(fn=None, what="", package="nowhere"),
    }
    results = by_name(measure(contenders, Settings(**TINY)))
    assert results["raises"].skipped == "RuntimeError: first line"
    assert results["backward"].note == "no backward: RuntimeError: first line"
    assert results["backward"].forward is not None
    assert results["constant"].note == "no gradient"
    assert results["large"].skipped == "n = 16 > 8: n steps"
    assert results["missing"].skipped == "nowhere is not installed (pip install nowhere)"


def interrupts(x, k):
    raise KeyboardInterrupt


def test_interrupt_while_warming_up_keeps_who_came_before():
    contenders = OURS | {"interrupts": Rival(fn=interrupts, what=""), "last": RIVALS["ncpss"]}
    report = measure(contenders, Settings(**TINY))
    ours, *others = report.results
    assert report.interrupted
    assert ours.forward.samples == ours.both.samples == 1
    assert ours.note == "from the warm-up, not interleaved"
    assert {r.skipped for r in others} == {"interrupted before it was measured"}


def test_a_failure_in_the_rounds_is_a_reason():
    def fails_later(label, done, total):
        if label == "measuring fickle":
            calls.clear()

    calls = [None]
    fickle = Rival(fn=lambda x, k: khot.sigmoid_topk(x, k) if calls else fails(x, k), what="")
    report = measure(OURS | {"fickle": fickle}, Settings(**TINY), fails_later)
    assert by_name(report)["fickle"].skipped == "failed while measured: RuntimeError: first line"
    assert by_name(report)[BASELINE].forward is not None


def test_interrupt_in_the_rounds_keeps_results():
    def press_after_two_rounds(label, done, total):
        if label.startswith("measuring") and done == 4:
            raise KeyboardInterrupt

    report = measure(
        OURS | {"ncpss": RIVALS["ncpss"]}, Settings(shape=(3, 16), k=4, budget=10.0), press_after_two_rounds
    )
    assert report.interrupted
    assert [r.forward.samples for r in report.results] == [2, 2]
    assert "interrupted" in bench.to_markdown(report)


def test_compile_failures_and_long_loops_are_reasons(monkeypatch):
    def compiler(fn):
        return fails if fn is RIVALS["ncpss"].fn else fn

    monkeypatch.setattr(torch, "compile", compiler)
    names = (BASELINE, "ncpss", "soft", "lapsum")
    results = by_name(measure({n: CONTENDERS[n] for n in names}, Settings(**TINY, compile=True)))
    assert results["ncpss"].skipped == "RuntimeError: first line"
    assert results["soft"].skipped == "torch.compile would unroll 200 > 64 steps"
    assert results["lapsum"].forward is not None


def test_the_clock_and_the_threads():
    threads = torch.get_num_threads()
    seen = []
    watcher = Rival(fn=lambda x, k: seen.append(torch.get_num_threads()) or x.sigmoid(), what="", kind="reference")
    report = measure({"watcher": watcher}, Settings(**TINY, threads=2))
    assert set(seen) == {2}
    assert torch.get_num_threads() == threads
    assert report.settings.clock == "wall time"
    assert Settings(**TINY).clock == "process CPU time"


def test_progress_is_reported():
    seen = []
    measure(OURS, Settings(**TINY), lambda label, done, total: seen.append((label, done, total)))
    assert seen[0] == (f"warming up {BASELINE}", 0, 1)
    assert seen[-1][0] == f"measuring {BASELINE}"
    assert all(done < total for _, done, total in seen)


def test_peak_memory():
    x = torch.randn(2**19)
    allocated, resident = peak_memory(lambda: torch.sigmoid(torch.sigmoid(x)), x)
    assert allocated == pytest.approx(2, abs=0.01)
    assert resident is None or resident == pytest.approx(2, abs=0.5)
    assert peak_memory(lambda: torch.sigmoid(x[:10]), x[:10])[1] is None


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def report():
    contenders = OURS | {
        "torch.sigmoid": RIVALS["torch.sigmoid"],
        "nan": Rival(fn=lambda x, k: x * math.nan, what='a "quoted", comma'),
        "missing": Rival(fn=None, what="", package="nowhere"),
    }
    return measure(contenders, Settings(**TINY))


def test_records(report):
    rows = bench.records(report)
    assert all(tuple(row) == tuple(COLUMNS) for row in rows)
    ours, sigmoid, nan, missing = rows
    assert ours["forward_ratio"] == ours["both_ratio"] == 1
    assert sigmoid["forward_ratio"] == pytest.approx(sigmoid["forward_ms"] / ours["forward_ms"])
    assert sigmoid["sum_error"] is None
    assert nan["flags"] == "NaN; does not sum to k"
    assert missing["forward_ms"] is None
    assert missing["skipped"]


def test_csv_round_trip(report):
    rows = bench.records(report)
    back = list(csv.DictReader(io.StringIO(bench.to_csv(rows))))
    assert back == [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]


def test_json_round_trip(report):
    rows = bench.records(report)
    back = json.loads(bench.to_json(rows), parse_constant=pytest.fail)
    assert back[2].pop("sum_error") == "nan"
    assert math.isnan(rows[2].pop("sum_error"))
    assert back == rows


def test_markdown(report):
    text = bench.to_markdown(report)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "Skipped: `missing` (nowhere is not installed" in text


def test_a_report_without_the_baseline_has_no_ratios():
    report = measure({"torch.sigmoid": RIVALS["torch.sigmoid"]}, Settings(**TINY))
    assert bench.records(report)[0]["forward_ratio"] is None
    assert "| – |" in bench.to_markdown(report)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_command_prints_a_table_and_names_the_skipped():
    done = run("--shape", "4x64", "--k", "10%", "--budget", "0.001", "--op", "torch.topk", "--op", "goyal")
    assert done.exit_code == 0
    assert "4×64, k = 6, float32; 1 thread, process CPU time" in done.stdout
    for name in (BASELINE, "torch.topk", "goyal", "forward + backward", "memory", "|Σ−k|"):
        assert name in done.stdout
    assert "lapsum" not in done.stdout
    done = run("--shape", "4x64", "--k", "2.5", "--budget", "0.001", "--op", "lml")
    assert "lml: skipped: needs a whole k; got 2.5" in done.stdout


def test_command_writes_json_alone_and_csv(tmp_path):
    file = tmp_path / "out.csv"
    arguments = ("--shape", "2x3x8", "--k", "2", "--budget", "0.001", "--op", "ncpss", "--json", "--csv", str(file))
    done = run(*arguments, "--dtype", "float64")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [BASELINE, "ncpss"]
    assert {(row["shape"], row["k"], row["dtype"]) for row in rows} == {("2x3x8", 2, "float64")}
    assert [row["name"] for row in csv.DictReader(io.StringIO(file.read_text()))] == [BASELINE, "ncpss"]


def test_command_lists_the_contenders():
    done = run("--list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in CONTENDERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "4096y64"), "--shape must be positive whole numbers joined by x, such as 4096x64; got '4096y64'."),
        (("--shape", "0x64"), "--shape must be positive whole numbers joined by x, such as 4096x64; got '0x64'."),
        (("--op", "lapsun"), "--op must be a known contender; got 'lapsun': did you mean lapsum?"),
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
            ("--csv", "no/such/folder/out.csv"),
            "--csv must name a file in an existing folder; got no/such/folder/out.csv.",
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
    done = run("--shape", "100000000x100000000", "--op", "ncpss")
    assert done.exit_code == 2
    assert done.stderr.startswith("khot bench: --shape must fit into memory; got 100000000x100000000: ")
    assert done.stderr.count("\n") == 1


def test_interrupted_command_prints_what_it_has(monkeypatch, tmp_path):
    def interrupted(contenders, settings, on_progress):
        results = [Result(name=BASELINE, rival=CONTENDERS[BASELINE], skipped="interrupted before it was measured")]
        return bench.Report(settings=settings, results=results, interrupted=True)

    monkeypatch.setattr("khot.cli._bench.measure", interrupted)
    file = tmp_path / "out.csv"
    done = run("--csv", str(file))
    assert done.exit_code == 130
    assert "interrupted, partial" in done.stdout
    assert "interrupted before it was measured" in file.read_text()
