"""`khot sae`: what it writes, its errors, its report, and Ctrl-C."""

import json
import signal
import sys

import kill_sae
import numpy as np
import pytest
import torch
from sae_runs import CONFIG, SHORT, TOKENS, D, files, matrix, stop_at
from safetensors.torch import save_file
from typer.testing import CliRunner

import khot_cli
from khot.cli._app import app
from khot.jobs._browser import SCRIPT
from khot.nn import SparseAutoencoder
from khot.sae import Trainer, _run, open_activations, train

pytestmark = pytest.mark.slow


@pytest.fixture
def acts(tmp_path):
    np.savez(tmp_path / "acts.npz", acts=matrix())
    return tmp_path / "acts.npz"


def sae(*arguments):
    return CliRunner().invoke(app, ["sae", *map(str, arguments)])


def test_what_it_writes(acts, tmp_path):
    out = tmp_path / "deep" / "out"
    done = sae(acts, "--k", 3, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert files(out) == ["cfg.json", "metrics.json", "report.html", "sae_weights.safetensors"]
    metrics = json.loads(done.stdout)
    assert metrics == json.loads((out / "metrics.json").read_text())
    assert metrics["complete"] is True
    assert 0 < metrics["fvu"] < 2
    assert metrics["l0"] <= 3
    assert {"alive", "explained_variance", "cosine", "relative_reconstruction_bias", "density_histogram"} < set(metrics)
    model = SparseAutoencoder.load(out)
    x = torch.from_numpy(matrix())
    assert float(model(x).fvu.detach()) == pytest.approx(metrics["fvu"], rel=1e-4)


def test_a_sweep_and_a_run_do_not_share_a_folder(acts, tmp_path):
    """The report of the second replaced that of the first."""
    how = ("--latents", 64, "--steps", 2, "--resume", "--out")
    assert sae(acts, "--k", "2,3", *how, tmp_path / "sweep").exit_code == 0
    assert "holds a sweep: choose another folder" in sae(acts, "--k", 2, *how, tmp_path / "sweep").stderr
    assert sae(acts, "--k", "2,3,4", *how, tmp_path / "sweep").exit_code == 0
    assert sae(acts, "--k", 2, *how, tmp_path / "one").exit_code == 0
    assert "holds one run: choose another folder" in sae(acts, "--k", "2,3", *how, tmp_path / "one").stderr
    assert sae(acts, "--k", 2, *how, tmp_path / "one").exit_code == 0


def test_resume_without_a_checkpoint_starts_afresh_and_again_is_done(acts, tmp_path):
    arguments = (acts, "--k", 3, "--latents", 64, "--steps", 5, "--out", tmp_path / "out", "--resume")
    assert sae(*arguments).exit_code == 0
    before = (tmp_path / "out" / "sae_weights.safetensors").read_bytes()
    again = sae(*arguments)
    assert again.exit_code == 0, again.output
    assert "fraction of variance unexplained" in again.stdout
    assert (tmp_path / "out" / "sae_weights.safetensors").read_bytes() == before


def test_ctrl_c_stops_between_steps_keeps_a_checkpoint_and_writes_the_results(acts, tmp_path, monkeypatch):
    def interrupt(point):
        if point.step == 5:
            signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr("khot.cli._sae._label", interrupt)
    out = tmp_path / "out"
    arguments = (acts, "--k", 3, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out)
    done = sae(*arguments)
    assert done.exit_code == 130, done.output
    assert done.stderr == "khot sae: interrupted; --resume continues from here.\n"
    assert files(out) == [
        *("cfg.json", "checkpoint.safetensors", "metrics.json", "report.html", "sae_weights.safetensors"),
    ]
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["steps"], metrics["complete"]) == (5, False)
    assert "Cut short" in (out / "report.html").read_text()
    monkeypatch.undo()
    assert sae(*arguments, "--resume").exit_code == 0
    assert sae(*arguments[:-1], tmp_path / "whole").exit_code == 0
    kill_sae.compare(tmp_path / "whole", out)


def test_the_report_is_one_file_that_asks_for_nothing_and_escapes(acts, tmp_path):
    named = acts.rename(tmp_path / "<script>.npz")
    out = tmp_path / "out"
    assert sae(named, "--k", 3, "--latents", 64, "--steps", 3, "--out", out).exit_code == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "&lt;script&gt;.npz" in text
    text = text.replace(f"<script>{SCRIPT}</script>", "").replace('<script type="application/json" id="features">', "")
    assert not [word for word in ("<script", "http://", "https://", "src=", "url(h") if word in text]
    for heading in ("The latents", "How good it is", "What is active", "How it went", "To do it again"):
        assert heading in text


def test_tokens_and_an_unembedding_reach_the_report(acts, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(TOKENS).reshape(-1, 40) % 3)
    (tmp_path / "words.txt").write_text("zebra\nlion\n</script>\n")
    np.save(tmp_path / "unembedding.npy", matrix()[:3])
    named = ("--tokens", tmp_path / "ids.npy", "--vocabulary", tmp_path / "words.txt")
    size = ("--k", 3, "--latents", 64, "--steps", 3)
    done = sae(acts, *size, *named, "--unembedding", tmp_path / "unembedding.npy", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    data = json.loads(text.split('id="features">')[1].split("</script>")[0])
    assert set(data["words"]) == {" zebra", " lion", " </script>"}
    assert all(len(latent[10]) == len(latent[11]) == 3 for latent in data["latents"])
    wrong = sae(acts, *size, "--tokens", tmp_path / "words.txt", "--out", tmp_path / "other")
    assert wrong.exit_code == 2
    assert "a token for each of the 400 rows; got 3" in " ".join(wrong.stderr.split())
    unnamed = sae(acts, *size, "--unembedding", tmp_path / "unembedding.npy", "--out", tmp_path / "other")
    assert unnamed.exit_code == 2
    assert "needs --tokens" in unnamed.stderr
    assert not (tmp_path / "other").exists()


def test_a_vocabulary_without_numbers_to_name_is_an_error(acts, tmp_path):
    """It was ignored."""
    (tmp_path / "words.txt").write_text("zebra\n" * TOKENS)
    size = ("--k", 3, "--latents", 64, "--steps", 3, "--vocabulary", tmp_path / "words.txt", "--out", tmp_path / "out")
    for tokens in ((), ("--tokens", tmp_path / "words.txt")):
        wrong = sae(acts, *size, *tokens)
        assert wrong.exit_code == 2
        assert "needs --tokens, a .npy file of numbers, whose texts it has" in " ".join(wrong.stderr.split())
    assert not (tmp_path / "out").exists()


def test_the_unembedding_of_a_transcoder_has_the_columns_of_its_targets(acts, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(TOKENS) % 3)
    (tmp_path / "words.txt").write_text("zebra\nlion\ngnu\n")
    np.save(tmp_path / "after.npy", matrix()[:, :5])
    named = (
        "--tokens",
        tmp_path / "ids.npy",
        "--vocabulary",
        tmp_path / "words.txt",
        "--target",
        tmp_path / "after.npy",
    )
    how = ("--k", "2,3", "--latents", 64, "--steps", 3, *named, "--unembedding", tmp_path / "unembedding.npy")
    np.save(tmp_path / "unembedding.npy", matrix()[:3])
    wrong = sae(acts, *how, "--out", tmp_path / "out")
    assert wrong.exit_code == 2
    assert "must have the shape (3, 5)" in " ".join(wrong.stderr.split())
    np.save(tmp_path / "unembedding.npy", matrix()[:3, :5])
    done = sae(acts, *how, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert " gnu" in (tmp_path / "out" / "k3" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--k", 65, "--latents", 64], "`k` must satisfy 0 < k ≤ 64 (the number of latents); got 65."),
        (["--k", 0], "`k` must be > 0"),
        (["--prefixes", "8,16.5"], "--prefixes must be integers, since they count latents; got 16.5"),
        (["--k", "inf"], "`k` must be > 0 and finite; got inf."),
        (["--k", "nan"], "`k` must be > 0 and finite; got nan."),
        (["--array", "zz"], "must have an array 'zz'; got acts."),
        (["--target-array", "acts"], "--target-array needs --target, the file of targets; got 'acts' alone."),
        (["--kind", "mutual"], "`kind` must be one of 'topk', 'batch', 'feature', 'jumprelu'; got 'mutual'."),
        (["--selector", "nosuch"], "`selector` must be one of 'hard', 'straight-through', 'soft', 'sampled'"),
        (["--steps", 0], "`steps` must be ≥ 1; got 0."),
        (["--lr", 0], "`lr` must be > 0"),
        (["--lr", 1e39], "`lr` must be ≤ 1e+30; got 1e+39."),
        (["--seed", -1], "`seed` must be ≥ 0"),
        (["--checkpoint-every", 0], "`checkpoint_every` must be ≥ 1; got 0."),
        (["--kind", "feature", "--batch-size", 2], "Feature Choice needs at least latents/k = 128 tokens"),
    ],
)
def test_bad_options(acts, tmp_path, arguments, says):
    _fails(sae(acts, "--out", tmp_path / "out", *arguments), says)
    assert not (tmp_path / "out").exists()


def test_bad_activations(tmp_path):
    bad = {
        "cube.npy": (np.zeros((2, 3, 4), np.float32), "must be a matrix (tokens, d); got the shape (2, 3, 4)"),
        "whole.npy": (np.zeros((2, 3), np.int64), "must hold floats of at most 64 bits; got int64"),
        "empty.npy": (np.zeros((0, 3), np.float32), "must hold at least one token; got the shape (0, 3)"),
        "nan.npy": (
            np.full((9, 3), np.nan, np.float32),
            "got 27 NaN or infinite values in 9 rows: 0, 1, 2, 3, 4, …",
        ),
        "same.npy": (np.ones((9, 3), np.float32), "must have at least two different rows; got one (tokens: 9)."),
        "one.npy": (np.ones((1, 3), np.float32), "must have at least two different rows; got one (tokens: 1)."),
    }
    for name, (array, says) in bad.items():
        np.save(tmp_path / name, array)
        _fails(sae(tmp_path / name, "--k", 1, "--latents", 4, "--out", tmp_path / "out"), says)
    for name, data, says in (
        ("cut.npy", (tmp_path / "nan.npy").read_bytes()[:-5], "must be a complete .npy file; got: it ends before"),
        ("foreign.npy", b"hello", "must be a complete .npy file"),
        ("foreign.npz", b"hello", "must be a complete .npz file; got: File is not a zip file"),
        ("foreign.safetensors", b"hello world, and more of it", "got: its header is longer than the file"),
        ("text.csv", b"1,2", "must be a .npy, .npz or .safetensors file; got '.csv'"),
    ):
        (tmp_path / name).write_bytes(data)
        _fails(sae(tmp_path / name, "--out", tmp_path / "out"), says)
    save_file({"x": torch.zeros(4, 3)}, tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-4])
    _fails(sae(tmp_path / "cut.safetensors", "--out", tmp_path / "out"), "it ends before its data do")
    _fails(sae(tmp_path / "nosuch.npy", "--out", tmp_path / "out"), "nosuch.npy is missing.")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(acts):
    before = acts.read_bytes()
    _fails(sae(acts, "--k", 3, "--latents", 64, "--out", acts / "out"), "acts.npz is not a directory.")
    assert acts.read_bytes() == before


def test_a_report_that_cannot_be_written_is_said_before_training(acts, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "advance", None)
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    done = sae(acts, "--k", 3, "--latents", 64, "--out", tmp_path / "out")
    _fails(done, "report.html must be a file; got a directory.")
    assert files(tmp_path / "out") == ["report.html"]


def test_a_run_that_diverges_fails_and_keeps_its_checkpoint(acts, tmp_path, monkeypatch):
    out, advance = tmp_path / "out", Trainer.advance
    arguments = (acts, "--k", 3, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out)
    _fails(sae(*arguments, "--lr", 1e30), "the loss must stay finite; it did not after 1 steps: lower `lr`, now")
    assert not files(out)
    np.save(tmp_path / "large.npy", 1e30 * matrix())
    done = sae(tmp_path / "large.npy", *arguments[1:])
    _fails(done, "it did not after 0 steps: divide the activations, which are too large.")
    assert not files(out)
    train(open_activations(acts), CONFIG, SHORT, out, on_step=stop_at(5))
    before = {name: (out / name).read_bytes() for name in files(out)}

    def spoil(self):
        point = advance(self)
        with torch.no_grad():
            self.sae.b_enc[0] = torch.nan
        return point

    monkeypatch.setattr(Trainer, "advance", spoil)
    for every in (1, 100):
        done = sae(*arguments, "--resume", "--checkpoint-every", every)
        _fails(done, "it did not after 6 steps: lower `lr`, now 0.001.")
        assert before == {name: (out / name).read_bytes() for name in files(out)}


def test_one_row_held_out_has_no_variance_and_json_no_nan(tmp_path):
    np.save(tmp_path / "x.npy", matrix()[:20])
    done = sae(tmp_path / "x.npy", "--k", 3, "--latents", 64, "--steps", 3, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "metrics.json").read_text()
    for metrics in (json.loads(found, parse_constant=pytest.fail) for found in (done.stdout, text)):
        assert metrics["held_out"]["fvu"] is metrics["held_out"]["explained_variance"] is None
        assert metrics["held_out"]["cosine"] > 0
    report = (tmp_path / "out" / "report.html").read_text()
    assert "20 tokens, 3 steps of 19." in report
    assert "of the variance of the tokens;" in report
    again = sae(tmp_path / "x.npy", "--k", 3, "--latents", 64, "--steps", 3, "--out", tmp_path / "out", "--resume")
    assert "–" in again.stdout


def test_measured_rows_without_variance_have_a_report(tmp_path, monkeypatch):
    """The report formatted an unknown number: a TypeError after the training."""
    monkeypatch.setattr(_run, "MOST", 100)
    x = np.zeros((TOKENS, D), np.float32)
    x[1] = 1
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "out"
    done = sae(tmp_path / "x.npy", "--k", 3, "--latents", 64, "--steps", 3, "--batch-size", 100, "--out", out)
    assert done.exit_code == 0, done.output
    assert "explain an unknown part of the variance" in (out / "report.html").read_text()


def test_another_run_is_not_overwritten(acts, tmp_path):
    out = tmp_path / "out"
    train(open_activations(acts), CONFIG, SHORT, out, on_step=stop_at(6))
    arguments = (acts, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out)
    before = {name: (out / name).read_bytes() for name in files(out)}
    _fails(sae(*arguments, "--k", 3), "holds this run already: resume it, or choose another folder")
    _fails(sae(*arguments, "--k", 4, "--resume"), "holds a run with k 3, not 4: choose another folder")
    np.savez(acts, acts=matrix(9))
    _fails(sae(*arguments, "--k", 3, "--resume"), "holds a run with crc")
    np.savez(acts, acts=matrix())
    whole = before["checkpoint.safetensors"]
    for broken, says in (
        (whole[:-9], "must be a whole safetensors file"),
        (b"hello", "must be a whole safetensors"),
    ):
        (out / "checkpoint.safetensors").write_bytes(broken)
        _fails(sae(*arguments, "--k", 3, "--resume"), says)
    save_file({"x": torch.zeros(4, 3)}, out / "checkpoint.safetensors")
    _fails(sae(*arguments, "--k", 3, "--resume"), "must be a checkpoint of `khot sae`; got another safetensors file")
    (out / "checkpoint.safetensors").write_bytes(whole)
    assert before == {name: (out / name).read_bytes() for name in files(out)}
    SparseAutoencoder(CONFIG).save(tmp_path / "foreign")
    _fails(sae(*arguments[:-1], tmp_path / "foreign", "--k", 3, "--resume"), "is not of `khot sae`")
    assert sae(*arguments, "--k", 3, "--resume").exit_code == 0


def test_missing_safetensors_is_named(acts, tmp_path, monkeypatch):
    """It used to train for minutes first, and failed at the first checkpoint."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr(Trainer, "advance", None)
    _fails(sae(acts, "--k", 3, "--latents", 64, "--steps", 1, "--out", tmp_path / "out"), "pip install '.[sae]'")
    assert not (tmp_path / "out").exists()


def _fails(done, says):
    assert done.exit_code == 2, done.output
    assert says in done.stderr, done.stderr
    assert done.stderr.startswith("khot sae: ")
    assert done.stderr.count("\n") == 1


def test_half_of_what_torchrun_sets_is_an_error(acts, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _fails(sae(acts, "--k", 3, "--latents", 64, "--out", tmp_path / "out"), "environment variable RANK expected")
    assert not (tmp_path / "out").exists()


def test_other_commands_under_torchrun_say_that_they_run_on_one_process(monkeypatch, capsys):
    """Each process would do all of it, into the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["khot", "select", "table.csv"])
        with pytest.raises(SystemExit) as end:
            khot_cli.main()
        assert end.value.code == 2
        assert capsys.readouterr().err.count("it runs on one process; torchrun started 2") == said
