"""Training in a folder: resuming, epochs, seeds, and that it learns."""

import signal
import sys

import kill_sae
import numpy as np
import pytest
import torch
from sae_runs import CONFIG, SHORT, D, files, matrix, stop_at
from typer.testing import CliRunner

from khot.cli._app import app
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import RECIPES, Activations, Pairs, Trainer, Training, open_activations, train

pytestmark = pytest.mark.slow


@pytest.fixture
def acts(tmp_path):
    np.savez(tmp_path / "acts.npz", acts=matrix())
    return tmp_path / "acts.npz"


@pytest.mark.parametrize("tokens", [1, 40])
def test_data_without_variance_are_refused(tmp_path, tokens):
    np.save(tmp_path / "x.npy", np.tile(matrix()[:1], (tokens, 1)))
    with pytest.raises(ValueError, match=rf"at least two different rows; got one \(tokens: {tokens}\)"):
        train(open_activations(tmp_path / "x.npy"), CONFIG, SHORT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_with_one_other_value_are_another_run(acts, tmp_path):
    train(open_activations(acts), CONFIG, SHORT, tmp_path / "out", on_step=stop_at(7))
    x = matrix()
    x[123, 4] += 1
    np.savez(acts, acts=x)
    with pytest.raises(FileExistsError, match="holds a run with crc"):
        train(open_activations(acts), CONFIG, SHORT, tmp_path / "out", resume=True)


@pytest.mark.parametrize("selector", RECIPES)
@pytest.mark.parametrize("kind", ["topk", "batch", "feature"])
def test_an_interrupted_run_goes_on_to_the_same_bits(acts, tmp_path, kind, selector):
    data = open_activations(acts)
    config = SparseAutoencoderConfig(d_in=D, latents=64, k=3, kind=kind, dead_after=100)
    training = Training(steps=12, batch_size=100, selector=selector)
    whole = train(data, config, training, tmp_path / "whole")

    part = train(data, config, training, tmp_path / "part", on_step=stop_at(7))
    assert not part.is_complete
    assert part.metrics["steps"] == 7
    assert set(files(tmp_path / "part")) >= {"cfg.json", "checkpoint.safetensors", "metrics.json"}
    rest = train(data, config, training, tmp_path / "part", resume=True)
    assert rest.is_complete
    assert rest.curve == whole.curve
    assert len(whole.curve) == 12
    kill_sae.compare(tmp_path / "whole", tmp_path / "part")
    assert "checkpoint.safetensors" not in files(tmp_path / "part")


def test_a_state_without_the_optimiser_is_found(acts, tmp_path, monkeypatch):
    """A negative control for the test above: with Adam's moments lost, weights differ."""
    data = open_activations(acts)
    train(data, CONFIG, SHORT, tmp_path / "whole")
    train(data, CONFIG, SHORT, tmp_path / "part", on_step=stop_at(7))
    restore = Trainer.restore
    monkeypatch.setattr(
        Trainer,
        "restore",
        lambda self, step, tensors: restore(
            self, step, {name: t for name, t in tensors.items() if not name.startswith("adam")}
        ),
    )
    train(data, CONFIG, SHORT, tmp_path / "part", resume=True)
    with pytest.raises(AssertionError, match="sae_weights"):
        kill_sae.compare(tmp_path / "whole", tmp_path / "part")


@pytest.mark.slow
@pytest.mark.long
def test_two_kills(tmp_path):
    def finish(words):
        assert CliRunner().invoke(app, words).exit_code == 0

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes that are killed
    kill_sae.attack(tmp_path, 2, 0, 200, finish)
    torch.set_num_threads(threads)


def test_each_epoch_reads_each_row_once_and_never_the_held_out(acts):
    trainer = Trainer(open_activations(acts), CONFIG, Training(steps=8, batch_size=125))
    x, seen = torch.from_numpy(matrix()), []
    for trainer.step in range(3):
        seen += [int((x == row).all(1).nonzero()) for row in trainer._batch()]
    assert len(set(seen)) == len(seen) == 375
    assert not {row for row in seen if row % 16 == 15}


def test_weights_do_not_begin_with_the_held_out(acts):
    before = Trainer(open_activations(acts), CONFIG, SHORT).sae.state_dict()
    x = matrix()
    x[15::16] *= 100
    np.savez(acts, acts=x)
    after = Trainer(open_activations(acts), CONFIG, SHORT).sae.state_dict()
    assert not [name for name, t in after.items() if not torch.equal(t, before[name])]


def test_seeds_differ_and_agree(acts, tmp_path):
    data = open_activations(acts)
    results = [train(data, CONFIG, Training(steps=5, seed=seed), tmp_path / str(i)) for i, seed in enumerate((0, 0, 1))]
    assert results[0].curve == results[1].curve != results[2].curve


@pytest.mark.slow
def test_a_small_problem_is_learned(tmp_path):
    """Sparse sums of 24 directions in 16 dimensions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(24, D, generator=generator))
    code = (torch.rand(4000, 24, generator=generator) < 0.08) * (1 + torch.rand(4000, 24, generator=generator))
    np.save(tmp_path / "x.npy", (code @ directions).numpy())
    config = SparseAutoencoderConfig(d_in=D, latents=48, k=4)
    training = Training(steps=400, batch_size=256, lr=1e-2)
    result = train(open_activations(tmp_path / "x.npy"), config, training, tmp_path / "out")
    assert result.metrics["held_out"]["fvu"] < 0.1
    loaded = SparseAutoencoder.load(tmp_path / "out")
    assert (directions @ loaded.W_dec.detach().t()).max(1).values.mean() > 0.95


def test_a_second_ctrl_c_leaves_the_last_checkpoint_and_no_half_step(acts, tmp_path, monkeypatch):
    """It used to save the state in the middle of a step, from which a resumed run went elsewhere."""
    data, out, advance = open_activations(acts), tmp_path / "out", Trainer.advance

    def impatient(self):
        point = advance(self)
        if self.step == 7:
            self.step -= 1  # in the middle of the step: weights have moved, the count has not
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return point

    monkeypatch.setattr(Trainer, "advance", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(data, CONFIG, SHORT, out, checkpoint_every=5)
    assert files(out) == ["checkpoint.safetensors"]
    monkeypatch.undo()
    train(data, CONFIG, SHORT, out, resume=True)
    train(data, CONFIG, SHORT, tmp_path / "whole")
    kill_sae.compare(tmp_path / "whole", out)


def test_the_missing_extra_is_named_before_the_long_work(acts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setattr(Trainer, "advance", None)
    with pytest.raises(ModuleNotFoundError, match=r"safetensors is missing: run pip install '\.\[sae\]'"):
        train(open_activations(acts), CONFIG, SHORT, tmp_path / "out")


def test_data_too_small_for_the_loss_are_refused(tmp_path):
    """Their variance is 0 in float32, so the loss was 0, and weights that had not been trained were written."""
    for size, says in ((1e-30, r"`x` must differ by 1\.1e-19 or more"), (1e-42, "multiply it")):
        with pytest.raises(ValueError, match=says):
            train(Activations(matrix() * np.float32(size)), CONFIG, SHORT, tmp_path / "out")
        config = SparseAutoencoderConfig(d_in=D, d_out=D, latents=64, k=3)
        data = Pairs(Activations(matrix()), Activations(matrix(1) * np.float32(size)))
        with pytest.raises(ValueError, match="`target` must differ by"):
            train(data, config, SHORT, tmp_path / "out")
    assert files(tmp_path / "out") == []


@pytest.mark.parametrize("size", [1e-15, 1e-9, 1e12])
def test_metrics_do_not_depend_on_the_size_of_the_data(tmp_path, size):
    """The cosine of vectors shorter than 1e-8 came out near 0."""
    ours, theirs = (
        train(Activations((matrix() * scale).astype(np.float32)), CONFIG, SHORT, tmp_path / f"{scale}").metrics
        for scale in (1.0, size)
    )
    for name in ("fvu", "l0", "cosine", "relative_reconstruction_bias"):
        assert theirs[name] == pytest.approx(ours[name], rel=0.05), name


def test_what_is_no_source_or_config_is_named(tmp_path):
    data = Activations(matrix())
    for of in (torch.from_numpy(matrix()), matrix()):
        with pytest.raises(TypeError, match=r"`khot\.sae\.Activations` takes a numpy array"):
            train(of, CONFIG, SHORT, tmp_path / "out")
    with pytest.raises(TypeError, match="`config` must be a SparseAutoencoderConfig; got dict"):
        train(data, {"d_in": D}, SHORT, tmp_path / "out")
    with pytest.raises(TypeError, match="`training` must be a Training; got dict"):
        train(data, CONFIG, {"steps": 3}, tmp_path / "out")


def test_a_checkpoint_of_another_form_is_an_error_of_one_line(tmp_path):
    """Of an older version, for example: it was a RuntimeError of torch, a KeyError, or an IndexError."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    data, path = Activations(matrix()), tmp_path / "checkpoint.safetensors"
    train(data, CONFIG, SHORT, tmp_path, on_step=stop_at(7))
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    for name in ("model.W_enc", "adam.0.exp_avg", "curve"):
        without = {of: t for of, t in tensors.items() if of != name}
        for changed in (without, {**without, name: tensors[name][:2, :2].contiguous()}):
            save_file(changed, path, about)
            with pytest.raises(ValueError, match="must be a checkpoint of this run; got: `tensors` must have"):
                train(data, CONFIG, SHORT, tmp_path, resume=True)
    for step, says in (("-3", "`step` must be from 0 to 12; got -3"), ("50", "got 50"), ("x", "another safetensors")):
        save_file(tensors, path, {**about, "step": step})
        with pytest.raises(ValueError, match=says):
            train(data, CONFIG, SHORT, tmp_path, resume=True)
    save_file(tensors, path, {**about, "run": "[1]"})
    with pytest.raises(ValueError, match="another safetensors"):
        train(data, CONFIG, SHORT, tmp_path, resume=True)
    save_file(tensors, path, about)
    assert train(data, CONFIG, SHORT, tmp_path, resume=True).is_complete


@pytest.mark.parametrize("text", ['{"run": [], "complete": true}', '{"run": {}, "complete": true}'])
def test_metrics_of_another_form_are_no_run(text, tmp_path):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(FileExistsError, match="not of `khot sae`"):
        train(Activations(matrix()), CONFIG, SHORT, tmp_path, resume=True)
