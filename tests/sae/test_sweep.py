"""Sweeps: several configs into subfolders, interrupted and resumed, and what precision and device do."""

import json

import numpy as np
import pytest
import torch
from sae_runs import CONFIG, SHORT, D, files, matrix
from typer.testing import CliRunner

from khot.cli._app import app
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Activations, Trainer, Training, sweep

pytestmark = pytest.mark.slow


def configs(*counts):
    return {f"k{k}": SparseAutoencoderConfig(d_in=D, latents=64, k=k) for k in counts}


def test_a_sweep_is_interrupted_and_resumed_without_loss(tmp_path):
    data, seen = Activations(matrix()), []
    whole = sweep(data, configs(2, 4, 8), SHORT, tmp_path / "whole", on_run=lambda name, run: seen.append(name))
    assert seen == list(whole) == ["k2", "k4", "k8"]
    fvu = [run.metrics["fvu"] for run in whole.values()]
    assert fvu == sorted(fvu, reverse=True)
    part = sweep(data, configs(2, 4, 8), SHORT, tmp_path / "part", on_step=lambda p, n: p.step == 7 and p.l0 > 3)
    assert [run.is_complete for run in part.values()] == [True, False]
    rest = sweep(data, configs(2, 4, 8), SHORT, tmp_path / "part", resume=True)
    for name in whole:
        both = [(tmp_path / of / name / "sae_weights.safetensors").read_bytes() for of in ("whole", "part")]
        assert both[0] == both[1]
        assert rest[name].curve == whole[name].curve


def test_the_command_writes_the_frontier(tmp_path):
    np.savez(tmp_path / "acts.npz", acts=matrix())
    words = ["sae", tmp_path / "acts.npz", "-k", "2,4", "--latents", 64, "--steps", 12, "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)
    assert list(metrics) == ["k2", "k4"]
    assert files(tmp_path / "out") == ["k2", "k4", "report.html"]
    assert files(tmp_path / "out" / "k2") == ["cfg.json", "metrics.json", "report.html", "sae_weights.safetensors"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The frontier" in page
    assert '<a href="k2/report.html">k2</a>' in page
    assert f"{metrics['k4']['fvu']:.4g}" in page
    again = CliRunner().invoke(app, [*map(str, words), "--resume"])
    assert again.exit_code == 0, again.output
    assert "k4" in again.stdout


@pytest.mark.parametrize(
    ("k", "says"), [("2,x", "must be numbers with commas"), (",", "at least one"), ("2,2", "once")]
)
def test_bad_counts(k, says, tmp_path):
    np.save(tmp_path / "x.npy", matrix())
    done = CliRunner().invoke(app, ["sae", str(tmp_path / "x.npy"), "-k", k, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert says in done.output + done.stderr


def test_the_command_trains_variants(tmp_path):
    x = matrix()
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "y.npz", y=np.maximum(x[:, :5], 0))
    common = ["sae", str(tmp_path / "x.npz"), "-k", "3", "--latents", "64", "--steps", "12"]
    for more in (["--target", str(tmp_path / "y.npz")], ["--kind", "jumprelu"], ["--prefixes", "8,16"]):
        out = tmp_path / more[0].strip("-")
        done = CliRunner().invoke(app, [*common, *more, "--out", str(out)])
        assert done.exit_code == 0, done.output
        SparseAutoencoder.load(out)
    assert SparseAutoencoder.load(tmp_path / "target").config.d_out == 5
    assert SparseAutoencoder.load(tmp_path / "prefixes").config.prefixes == (8, 16)


def test_bfloat16_computes_products_alone(tmp_path):
    data = Activations(matrix())
    wide, half = (
        Trainer(data, CONFIG, Training(steps=20, batch_size=100, precision=p)) for p in ("float32", "bfloat16")
    )
    for _ in range(20):
        points = [trainer.advance() for trainer in (wide, half)]
    assert half.sae.W_enc.dtype == torch.float32
    assert points[0].fvu != points[1].fvu
    assert points[1].fvu == pytest.approx(points[0].fvu, rel=0.03)


def test_a_device_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"`device` must be one that torch has here; got 'nowhere'"):
        Training(device="nowhere")
    with pytest.raises(ValueError, match=r"`precision` must be one of 'float32', 'bfloat16'"):
        Training(precision="float16")
