"""`khot sae`: reading activations, training in a folder, interruptions, bad input."""

import json
import signal
import struct
import sys
import zlib
from pathlib import Path

import kill_sae
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from khot.cli._app import app
from khot.jobs import _activations
from khot.jobs._activations import check, open_activations
from khot.jobs._sae import RECIPES, Trainer, Training
from khot.jobs._sae_run import run
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig

TOKENS, D = 400, 16
CONFIG = SparseAutoencoderConfig(d_in=D, latents=64, k=3)
SHORT = Training(steps=12, batch_size=100)


def matrix(seed=0):
    return np.random.default_rng(seed).standard_normal((TOKENS, D), dtype=np.float32)


@pytest.fixture
def acts(tmp_path):
    np.savez(tmp_path / "acts.npz", acts=matrix())
    return tmp_path / "acts.npz"


def files(folder):
    return sorted(p.name for p in Path(folder).iterdir())


def sae(*arguments):
    return CliRunner().invoke(app, ["sae", *map(str, arguments)])


class TestReading:
    def test_every_form(self, tmp_path):
        x = matrix()
        np.save(tmp_path / "c.npy", x)
        np.save(tmp_path / "f.npy", np.asfortranarray(x))
        np.save(tmp_path / "half.npy", x.astype(np.float16))
        np.save(tmp_path / "big.npy", x.astype(">f8"))
        np.savez(tmp_path / "stored.npz", x=x)
        np.savez_compressed(tmp_path / "packed.npz", x=x)
        save_file({"x": torch.from_numpy(x)}, tmp_path / "x.safetensors")
        save_file({"x": torch.from_numpy(x).bfloat16()}, tmp_path / "bf16.safetensors")
        for path in tmp_path.iterdir():
            data = open_activations(path)
            assert (data.tokens, data.d) == x.shape, path
            expected = torch.from_numpy(x)
            if path.stem in ("half", "bf16"):
                expected = expected.to(torch.float16 if path.stem == "half" else torch.bfloat16).float()
            index = np.array([3, 77, 399])
            assert torch.equal(data.rows(index), expected[index]), path
            assert torch.equal(torch.cat([part for _, part in data.parts()]), expected), path

    def test_a_file_larger_than_memory_is_mapped(self, tmp_path):
        """A sparse file of 2 TB: only what is asked for is read."""
        path, tokens = tmp_path / "huge.safetensors", 2**37 // D
        header = json.dumps({"x": {"dtype": "F32", "shape": [tokens, D], "data_offsets": [0, 4 * tokens * D]}}).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + 4 * tokens * D)
        data = open_activations(path)
        assert data.tokens == tokens
        assert torch.equal(data.rows(np.array([0, tokens - 1])), torch.zeros(2, D))

    def test_several_arrays_are_told_apart(self, tmp_path):
        np.savez(tmp_path / "two.npz", a=matrix(0), b=matrix(1))
        with pytest.raises(ValueError, match=r"must have one array, or name one with --array; got a, b"):
            open_activations(tmp_path / "two.npz")
        assert torch.equal(open_activations(tmp_path / "two.npz", "b").rows(slice(None)), torch.from_numpy(matrix(1)))
        with pytest.raises(ValueError, match=r"must have an array 'c'; got a, b"):
            open_activations(tmp_path / "two.npz", "c")

    def test_where_nan_is_said(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_activations, "ROWS", 64)
        x = matrix()
        x[[5, 70, 390], 3] = np.nan
        x[70, 4] = np.inf
        np.save(tmp_path / "x.npy", x)
        with pytest.raises(ValueError, match=r"4 NaN or infinite values in 3 rows: 5, 70, 390$"):
            check(open_activations(tmp_path / "x.npy"))
        x[100:120] = np.nan
        np.save(tmp_path / "x.npy", x)
        with pytest.raises(ValueError, match=r"in 23 rows: 5, 70, 100, 101, 102, …$"):
            check(open_activations(tmp_path / "x.npy"))

    def test_values_beyond_float32_are_not_called_infinite(self, tmp_path):
        x = matrix().astype(np.float64)
        x[[5, 70], 3] = 1e39, -1e300
        np.save(tmp_path / "x.npy", x)
        with pytest.raises(ValueError, match=r"got 2 values that exceed float32's 3.4e38 in 2 rows: 5, 70$"):
            check(open_activations(tmp_path / "x.npy"))
        x[70, 4] = np.nan
        np.save(tmp_path / "x.npy", x)
        with pytest.raises(ValueError, match=r"got 1 NaN or infinite values and 2 values that exceed"):
            check(open_activations(tmp_path / "x.npy"))

    def test_the_checksum_is_that_of_every_value_in_any_form(self, tmp_path, monkeypatch):
        x = matrix()
        np.save(tmp_path / "c.npy", x)
        np.save(tmp_path / "f.npy", np.asfortranarray(x))
        np.save(tmp_path / "big.npy", x.astype(">f8"))
        np.savez_compressed(tmp_path / "packed.npz", x=x)
        for path in tmp_path.iterdir():
            assert open_activations(path).crc == zlib.crc32(x.tobytes()), path
        monkeypatch.setattr(_activations, "ROWS", 64)
        assert check(open_activations(tmp_path / "c.npy")) == zlib.crc32(x.tobytes())

    def test_a_npy_file_has_no_names(self, tmp_path):
        np.save(tmp_path / "x.npy", matrix())
        with pytest.raises(ValueError, match=r"x.npy must be opened without --array, .* got 'zz'"):
            open_activations(tmp_path / "x.npy", "zz")


class TestRuns:
    @pytest.mark.parametrize("tokens", [1, 40])
    def test_data_without_variance_are_refused(self, tmp_path, tokens):
        np.save(tmp_path / "x.npy", np.tile(matrix()[:1], (tokens, 1)))
        with pytest.raises(ValueError, match=rf"at least two different rows; got one \(tokens: {tokens}\)"):
            run(open_activations(tmp_path / "x.npy"), CONFIG, SHORT, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_data_with_one_other_value_are_another_run(self, acts, tmp_path):
        run(open_activations(acts), CONFIG, SHORT, tmp_path / "out", on_step=_stop_at(7))
        x = matrix()
        x[123, 4] += 1
        np.savez(acts, acts=x)
        with pytest.raises(FileExistsError, match="holds a run with crc"):
            run(open_activations(acts), CONFIG, SHORT, tmp_path / "out", resume=True)

    @pytest.mark.parametrize("selector", RECIPES)
    @pytest.mark.parametrize("kind", ["topk", "batch", "feature"])
    def test_an_interrupted_run_goes_on_to_the_same_bits(self, acts, tmp_path, kind, selector):
        data = open_activations(acts)
        config = SparseAutoencoderConfig(d_in=D, latents=64, k=3, kind=kind, dead_after=100)
        training = Training(steps=12, batch_size=100, selector=selector)
        whole = run(data, config, training, tmp_path / "whole")

        def stop(point, steps):
            if point.step == 7:
                raise KeyboardInterrupt

        part = run(data, config, training, tmp_path / "part", on_step=stop)
        assert not part.is_complete
        assert part.metrics["steps"] == 7
        assert set(files(tmp_path / "part")) >= {"cfg.json", "checkpoint.safetensors", "metrics.json"}
        rest = run(data, config, training, tmp_path / "part", resume=True)
        assert rest.is_complete
        assert rest.curve == whole.curve
        assert len(whole.curve) == 12
        kill_sae.compare(tmp_path / "whole", tmp_path / "part")
        assert "checkpoint.safetensors" not in files(tmp_path / "part")

    def test_a_state_without_the_optimiser_is_found(self, acts, tmp_path, monkeypatch):
        """A negative control for the test above: with Adam's moments lost, weights differ."""
        data = open_activations(acts)
        run(data, CONFIG, SHORT, tmp_path / "whole")
        run(data, CONFIG, SHORT, tmp_path / "part", on_step=_stop_at(7))
        restore = Trainer.restore
        monkeypatch.setattr(
            Trainer,
            "restore",
            lambda self, step, tensors: restore(
                self, step, {name: t for name, t in tensors.items() if not name.startswith("adam")}
            ),
        )
        run(data, CONFIG, SHORT, tmp_path / "part", resume=True)
        with pytest.raises(AssertionError, match="sae_weights"):
            kill_sae.compare(tmp_path / "whole", tmp_path / "part")

    def test_two_kills(self, tmp_path):
        def finish(words):
            assert CliRunner().invoke(app, words).exit_code == 0

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the processes that are killed
        kill_sae.attack(tmp_path, 2, 0, 200, finish)
        torch.set_num_threads(threads)

    def test_each_epoch_reads_each_row_once_and_never_the_held_out(self, acts):
        trainer = Trainer(open_activations(acts), CONFIG, Training(steps=8, batch_size=125))
        x, seen = torch.from_numpy(matrix()), []
        for trainer.step in range(3):
            seen += [int((x == row).all(1).nonzero()) for row in trainer._batch()]
        assert len(set(seen)) == len(seen) == 375
        assert not {row for row in seen if row % 16 == 15}

    def test_weights_do_not_begin_with_the_held_out(self, acts):
        before = Trainer(open_activations(acts), CONFIG, SHORT).sae.state_dict()
        x = matrix()
        x[15::16] *= 100
        np.savez(acts, acts=x)
        after = Trainer(open_activations(acts), CONFIG, SHORT).sae.state_dict()
        assert not [name for name, t in after.items() if not torch.equal(t, before[name])]

    def test_seeds_differ_and_agree(self, acts, tmp_path):
        data = open_activations(acts)
        results = [
            run(data, CONFIG, Training(steps=5, seed=seed), tmp_path / str(i)) for i, seed in enumerate((0, 0, 1))
        ]
        assert results[0].curve == results[1].curve != results[2].curve

    def test_a_small_problem_is_learned(self, tmp_path):
        """Sparse sums of 24 directions in 16 dimensions."""
        generator = torch.Generator().manual_seed(0)
        directions = torch.nn.functional.normalize(torch.randn(24, D, generator=generator))
        code = (torch.rand(4000, 24, generator=generator) < 0.08) * (1 + torch.rand(4000, 24, generator=generator))
        np.save(tmp_path / "x.npy", (code @ directions).numpy())
        config = SparseAutoencoderConfig(d_in=D, latents=48, k=4)
        training = Training(steps=400, batch_size=256, lr=1e-2)
        result = run(open_activations(tmp_path / "x.npy"), config, training, tmp_path / "out")
        assert result.metrics["held_out"]["fvu"] < 0.1
        loaded = SparseAutoencoder.load(tmp_path / "out")
        assert (directions @ loaded.W_dec.detach().t()).max(1).values.mean() > 0.95


def _stop_at(step):
    def stop(point, steps):
        if point.step == step:
            raise KeyboardInterrupt

    return stop


class TestCommand:
    def test_what_it_writes(self, acts, tmp_path):
        out = tmp_path / "deep" / "out"
        done = sae(acts, "--k", 3, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out, "--json")
        assert done.exit_code == 0, done.output
        assert files(out) == ["cfg.json", "metrics.json", "report.html", "sae_weights.safetensors"]
        metrics = json.loads(done.stdout)
        assert metrics == json.loads((out / "metrics.json").read_text())
        assert metrics["complete"] is True
        assert 0 < metrics["fvu"] < 2
        assert metrics["l0"] <= 3
        assert {"alive", "explained_variance", "cosine", "relative_reconstruction_bias", "density_histogram"} < set(
            metrics
        )
        model = SparseAutoencoder.load(out)
        x = torch.from_numpy(matrix())
        assert float(model(x).fvu.detach()) == pytest.approx(metrics["fvu"], rel=1e-4)

    def test_resume_without_a_checkpoint_starts_afresh_and_again_is_done(self, acts, tmp_path):
        arguments = (acts, "--k", 3, "--latents", 64, "--steps", 5, "--out", tmp_path / "out", "--resume")
        assert sae(*arguments).exit_code == 0
        before = (tmp_path / "out" / "sae_weights.safetensors").read_bytes()
        again = sae(*arguments)
        assert again.exit_code == 0, again.output
        assert "fraction of variance unexplained" in again.stdout
        assert (tmp_path / "out" / "sae_weights.safetensors").read_bytes() == before

    def test_ctrl_c_stops_between_steps_keeps_a_checkpoint_and_writes_the_results(self, acts, tmp_path, monkeypatch):
        def interrupt(point):
            if point.step == 5:
                signal.raise_signal(signal.SIGINT)
            return ""

        monkeypatch.setattr("khot.cli._sae._label", interrupt)
        out = tmp_path / "out"
        arguments = (acts, "--k", 3, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out)
        done = sae(*arguments)
        assert done.exit_code == 130, done.output
        assert done.stderr == "khot sae: interrupted; --resume goes on from here.\n"
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

    def test_the_report_is_one_file_that_asks_for_nothing_and_escapes(self, acts, tmp_path):
        named = acts.rename(tmp_path / "<script>.npz")
        out = tmp_path / "out"
        assert sae(named, "--k", 3, "--latents", 64, "--steps", 3, "--out", out).exit_code == 0
        text = (out / "report.html").read_text(encoding="utf-8")
        assert text.startswith("<!doctype html>")
        assert "&lt;script&gt;.npz" in text
        assert not [word for word in ("<script", "http://", "https://", "src=", "url(") if word in text]
        for heading in ("How good it is", "What is active", "How it went", "To do it again"):
            assert heading in text

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--k", 65, "--latents", 64], "`k` must satisfy 0 < k ≤ 64 (the number of latents); got 65."),
            (["--k", 0], "`k` must be > 0"),
            (["--k", "inf"], "`k` must be > 0 and finite; got inf."),
            (["--k", "nan"], "`k` must be > 0 and finite; got nan."),
            (["--array", "zz"], "must have an array 'zz'; got acts."),
            (["--kind", "mutual"], "`kind` must be one of 'topk', 'batch', 'feature'; got 'mutual'."),
            (["--selector", "nosuch"], "`selector` must be one of 'hard', 'straight-through', 'soft', 'sampled'"),
            (["--steps", 0], "`steps` must be ≥ 1; got 0."),
            (["--lr", 0], "`lr` must be > 0"),
            (["--lr", 1e39], "`lr` must be ≤ 1e+30; got 1e+39."),
            (["--seed", -1], "`seed` must be ≥ 0"),
            (["--checkpoint-every", 0], "--checkpoint-every must be ≥ 1; got 0."),
            (["--kind", "feature", "--batch-size", 2], "Feature Choice needs at least latents/k = 128 tokens"),
        ],
    )
    def test_bad_options(self, acts, tmp_path, arguments, says):
        _fails(sae(acts, "--out", tmp_path / "out", *arguments), says)
        assert not (tmp_path / "out").exists()

    def test_bad_activations(self, tmp_path):
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
            ("cut.npy", (tmp_path / "nan.npy").read_bytes()[:-5], "must be a whole .npy file; got: it ends before"),
            ("foreign.npy", b"hello", "must be a whole .npy file"),
            ("foreign.npz", b"hello", "must be a whole .npz file; got: File is not a zip file"),
            ("foreign.safetensors", b"hello world, and more of it", "got: its header is longer than the file"),
            ("text.csv", b"1,2", "must be a .npy, .npz or .safetensors file; got '.csv'"),
        ):
            (tmp_path / name).write_bytes(data)
            _fails(sae(tmp_path / name, "--out", tmp_path / "out"), says)
        save_file({"x": torch.zeros(4, 3)}, tmp_path / "cut.safetensors")
        whole = (tmp_path / "cut.safetensors").read_bytes()
        (tmp_path / "cut.safetensors").write_bytes(whole[:-4])
        _fails(sae(tmp_path / "cut.safetensors", "--out", tmp_path / "out"), "it ends before its data do")
        _fails(sae(tmp_path / "nosuch.npy", "--out", tmp_path / "out"), "there is none")
        assert not (tmp_path / "out").exists()

    def test_a_folder_that_cannot_be_made(self, acts):
        before = acts.read_bytes()
        _fails(sae(acts, "--k", 3, "--latents", 64, "--out", acts / "out"), "out cannot be made: Not a directory.")
        assert acts.read_bytes() == before

    def test_a_report_that_cannot_be_written_is_said_before_training(self, acts, tmp_path, monkeypatch):
        monkeypatch.setattr(Trainer, "advance", None)
        (tmp_path / "out" / "report.html").mkdir(parents=True)
        done = sae(acts, "--k", 3, "--latents", 64, "--out", tmp_path / "out")
        _fails(done, "report.html must be a file; got a directory.")
        assert files(tmp_path / "out") == ["report.html"]

    def test_a_run_that_diverges_fails_and_keeps_its_checkpoint(self, acts, tmp_path, monkeypatch):
        out, advance = tmp_path / "out", Trainer.advance
        arguments = (acts, "--k", 3, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out)
        _fails(sae(*arguments, "--lr", 1e30), "the loss must stay finite; it did not after 1 steps: lower --lr, now")
        assert not files(out)
        np.save(tmp_path / "large.npy", 1e30 * matrix())
        done = sae(tmp_path / "large.npy", *arguments[1:])
        _fails(done, "it did not after 0 steps: divide the activations, which are too large.")
        assert not files(out)
        run(open_activations(acts), CONFIG, SHORT, out, on_step=_stop_at(5))
        before = {name: (out / name).read_bytes() for name in files(out)}

        def spoil(self):
            point = advance(self)
            with torch.no_grad():
                self.sae.b_enc[0] = torch.nan
            return point

        monkeypatch.setattr(Trainer, "advance", spoil)
        for every in (1, 100):
            done = sae(*arguments, "--resume", "--checkpoint-every", every)
            _fails(done, "it did not after 6 steps: lower --lr, now 0.001.")
            assert before == {name: (out / name).read_bytes() for name in files(out)}

    def test_one_row_held_out_has_no_variance_and_json_no_nan(self, tmp_path):
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

    def test_another_run_is_not_overwritten(self, acts, tmp_path):
        out = tmp_path / "out"
        run(open_activations(acts), CONFIG, SHORT, out, on_step=_stop_at(6))
        arguments = (acts, "--latents", 64, "--steps", 12, "--batch-size", 100, "--out", out)
        before = {name: (out / name).read_bytes() for name in files(out)}
        _fails(sae(*arguments, "--k", 3), "holds this run already: continue it with --resume, or choose another --out")
        _fails(sae(*arguments, "--k", 4, "--resume"), "holds a run with k 3, not 4: choose another --out")
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
        _fails(
            sae(*arguments, "--k", 3, "--resume"), "must be a checkpoint of `khot sae`; got another safetensors file"
        )
        (out / "checkpoint.safetensors").write_bytes(whole)
        assert before == {name: (out / name).read_bytes() for name in files(out)}
        SparseAutoencoder(CONFIG).save(tmp_path / "foreign")
        _fails(sae(*arguments[:-1], tmp_path / "foreign", "--k", 3, "--resume"), "is not of `khot sae`")
        assert sae(*arguments, "--k", 3, "--resume").exit_code == 0

    def test_missing_safetensors_is_named(self, acts, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        _fails(sae(acts, "--k", 3, "--latents", 64, "--steps", 1, "--out", tmp_path / "out"), "pip install 'khot[sae]'")


def _fails(done, says):
    assert done.exit_code == 2, done.output
    assert says in done.stderr, done.stderr
    assert done.stderr.startswith("khot sae: ")
    assert done.stderr.count("\n") == 1
