"""`torchrun -m khot sae`: one model, one voice, and files that are whole after Ctrl-C and after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from khot.nn import SparseAutoencoderConfig
from khot.sae import Training, open_activations, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
LIMIT = 100  # seconds of wall-clock time for each start
K, LATENTS, BATCH = 3, 64, 128


@pytest.fixture
def acts(tmp_path):
    rng = np.random.default_rng(0)
    code = np.maximum(rng.standard_normal((2000, 32)) - 1.2, 0)
    np.save(tmp_path / "acts.npy", (code @ rng.standard_normal((32, 12))).astype(np.float32))
    return tmp_path / "acts.npy"


def start(acts, *options, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m", "khot"]
    command += ["sae", acts, "--latents", LATENTS, "--batch-size", BATCH, "--out", acts.parent / "out", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), text=True, env=environment, **pipes)


def end(process):
    """What it printed; a process that hangs is killed, and fails the test."""
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def wait_for(path):
    begun = time.monotonic()
    while not path.exists():
        assert time.monotonic() - begun < LIMIT, f"{path} did not come"
        time.sleep(0.02)


def test_it_trains_the_model_of_one_process_and_prints_once(acts):
    out, error = end(run := start(acts, "-k", K, "--steps", 50))
    assert run.returncode == 0, error
    assert out.count("The model is in") == 1
    config = SparseAutoencoderConfig(d_in=12, latents=LATENTS, k=K)
    train(open_activations(acts), config, Training(steps=50, batch_size=BATCH), acts.parent / "one")
    one, many = (load_file(acts.parent / name / "sae_weights.safetensors") for name in ("one", "out"))
    assert max(float((one[name] - many[name]).abs().max()) for name in one) <= 1e-5
    assert sorted(p.name for p in (acts.parent / "out").iterdir()) == [
        "cfg.json",
        "metrics.json",
        "report.html",
        "sae_weights.safetensors",
    ]


def test_bad_input_is_one_line(acts):
    _, error = end(run := start(acts, "-k", 0))
    assert run.returncode != 0
    assert error.count("khot sae: ") == 1
    assert not (acts.parent / "out").exists()


def test_ctrl_c_leaves_results_and_a_run_that_resumes_on_one_process(acts):
    run = start(acts, "-k", K, "--steps", 400, "--checkpoint-every", 1)
    wait_for(acts.parent / "out" / "checkpoint.safetensors")
    run.send_signal(signal.SIGINT)
    _, error = end(run)
    assert run.returncode != 0
    assert error.count("interrupted; --resume continues from here") == 1
    found = json.loads((acts.parent / "out" / "metrics.json").read_text())
    assert not found["complete"]
    config = SparseAutoencoderConfig(d_in=12, latents=LATENTS, k=K)
    training = Training(steps=400, batch_size=BATCH)
    resumed = train(open_activations(acts), config, training, acts.parent / "out", resume=True)
    assert resumed.is_complete
    assert resumed.metrics["fvu"] < found["fvu"]


def test_a_killed_rank_ends_all_and_leaves_the_checkpoint(acts):
    run = start(acts, "-k", K, "--steps", 100_000, "--checkpoint-every", 1)
    wait_for(acts.parent / "out" / "checkpoint.safetensors")
    workers = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ranks = {Path(f"/proc/{pid}/environ").read_bytes().split(b"\0RANK=")[1][:1]: int(pid) for pid in workers}
    os.kill(ranks[b"1"], signal.SIGKILL)
    end(run)
    assert run.returncode != 0
    assert all(t.isfinite().all() for t in load_file(acts.parent / "out" / "checkpoint.safetensors").values())
