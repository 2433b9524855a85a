"""The harness and its command: structure and verdicts, never times."""

import csv
import io
import json
import math
import subprocess
import sys

import pytest
import torch

import khot
from khot import bench
from khot.bench import BASELINE, COLUMNS, CONTENDERS, Contender, Limit, Settings, measure

pytestmark = pytest.mark.slow

TINY = {"shape": (3, 16), "k": 4, "budget": 1e-3}
OURS = {BASELINE: CONTENDERS[BASELINE]}


def by_name(report):
    return {result.name: result for result in report.results}


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
        assert (r.sum_error is None) == (r.contender.kind == "reference")


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
        "nan": Contender(fn=lambda x, k: x * math.nan, what="all NaN"),
        "sum": Contender(fn=lambda x, k: x.sigmoid(), what="claims to sum to k"),
        "range": Contender(fn=lambda x, k: 2 * khot.hard_topk(x, k / 2) + 0 * x, what="sums to k, with twos"),
        "free": Contender(fn=lambda x, k: x.sigmoid(), what="claims nothing", sums_to_k=False),
        "yardstick": Contender(fn=lambda x, k: 5 * x, what="no k-hot", kind="reference"),
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
        "raises": Contender(fn=fails, what=""),
        "backward": Contender(fn=fails_backward, what="", sums_to_k=False),
        "constant": Contender(fn=lambda x, k: torch.full_like(x, 0.25), what=""),
        "large": Contender(fn=fails, what="", limits=(Limit("n", 8, "n steps"),)),
        "missing": Contender(fn=None, what="", package="nowhere"),
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
    contenders = OURS | {"interrupts": Contender(fn=interrupts, what=""), "last": CONTENDERS["laplace_topk"]}
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
    fickle = Contender(fn=lambda x, k: khot.sigmoid_topk(x, k) if calls else fails(x, k), what="")
    report = measure(OURS | {"fickle": fickle}, Settings(**TINY), fails_later)
    assert by_name(report)["fickle"].skipped == "failed while measured: RuntimeError: first line"
    assert by_name(report)[BASELINE].forward is not None


def test_interrupt_in_the_rounds_keeps_results():
    def press_after_two_rounds(label, done, total):
        if label.startswith("measuring") and done == 4:
            raise KeyboardInterrupt

    report = measure(
        OURS | {"laplace_topk": CONTENDERS["laplace_topk"]},
        Settings(shape=(3, 16), k=4, budget=10.0),
        press_after_two_rounds,
    )
    assert report.interrupted
    assert [r.forward.samples for r in report.results] == [2, 2]
    assert "interrupted" in bench.to_markdown(report)


def test_compile_failures_and_long_loops_are_reasons(monkeypatch):
    def compiler(fn):
        return fails if fn is CONTENDERS["laplace_topk"].fn else fn

    monkeypatch.setattr(torch, "compile", compiler)
    long = Contender(fn=CONTENDERS["euclidean_topk"].fn, what="", python_steps=lambda n, k: 200)
    contenders = OURS | {name: CONTENDERS[name] for name in ("laplace_topk", "euclidean_topk")} | {"long": long}
    results = by_name(measure(contenders, Settings(**TINY, compile=True)))
    assert results["laplace_topk"].skipped == "RuntimeError: first line"
    assert results["long"].skipped == "torch.compile would unroll 200 > 64 steps"
    assert results["euclidean_topk"].forward is not None


def test_the_clock_and_the_threads():
    threads = torch.get_num_threads()
    seen = []
    watcher = Contender(fn=lambda x, k: seen.append(torch.get_num_threads()) or x.sigmoid(), what="", kind="reference")
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
    """In a process of its own: a heap that other tests have grown may keep what is freed, and then nothing grows."""
    code = "import torch; from khot.bench import peak_memory; x = torch.randn(2**22)\n"
    code += (
        "print(*peak_memory(lambda: torch.sigmoid(torch.sigmoid(x)), x), peak_memory(lambda: x[:10] + 1, x[:10])[1])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(said[0]) == pytest.approx(2, abs=0.01)
    assert said[1] == "None" or float(said[1]) == pytest.approx(2, abs=0.2)
    assert said[2] == "None"


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def report():
    contenders = OURS | {
        "torch.sigmoid": CONTENDERS["torch.sigmoid"],
        "nan": Contender(fn=lambda x, k: x * math.nan, what='a "quoted", comma'),
        "missing": Contender(fn=None, what="", package="nowhere"),
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
    report = measure({"torch.sigmoid": CONTENDERS["torch.sigmoid"]}, Settings(**TINY))
    assert bench.records(report)[0]["forward_ratio"] is None
    assert "| – |" in bench.to_markdown(report)
