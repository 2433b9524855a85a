"""Kill `khot sae` at random moments, resume it, and compare: `python tests/kill_sae.py [kills] [seed]`.

Each kill is SIGKILL, at a random moment after a checkpoint; then the run is resumed. In the end its weights, metrics
and curve must be those of a run that nobody interrupted, bit for bit. tests/sae/test_train.py does it twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

OPTIONS = ["--k", "4", "--latents", "256", "--batch-size", "256", "--checkpoint-every", "5", "--selector", "sampled"]


def arguments(folder: Path, out: str, steps: int) -> list[str]:
    """Of a run in folder/out."""
    return ["sae", str(folder / "acts.npy"), "--out", str(folder / out), "--resume", "--steps", str(steps), *OPTIONS]


def call(words: list[str]) -> subprocess.Popen[bytes]:
    """A process of its own, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "khot", *words], stdout=subprocess.DEVNULL, env=environment)


def finish(words: list[str]) -> None:
    """Let it run to its end."""
    with call(words) as process:
        if process.wait():
            raise AssertionError(f"it ended with {process.returncode}")


def attack(folder: Path, kills: int, seed: int, steps: int, finish: Callable[[list[str]], None] = finish) -> None:
    """Kill a run `kills` times while it trains, then let it finish, and compare it with one that was left alone."""
    moments = random.Random(seed)
    np.save(folder / "acts.npy", np.random.default_rng(seed).standard_normal((2000, 32), dtype=np.float32))
    checkpoint = folder / "killed" / "checkpoint.safetensors"
    for _ in range(kills):
        before = _written(checkpoint)
        with call(arguments(folder, "killed", steps)) as process:
            while process.poll() is None and _written(checkpoint) == before:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
        if process.returncode != -signal.SIGKILL:
            raise AssertionError(f"it was not killed while it trained, but ended with {process.returncode}")
    for out in ("killed", "whole"):
        finish(arguments(folder, out, steps))
    compare(folder / "whole", folder / "killed")


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def compare(whole: Path, killed: Path) -> None:
    """Raise unless both folders hold the same weights, config and curve."""
    for name in ("sae_weights.safetensors", "cfg.json"):
        if (whole / name).read_bytes() != (killed / name).read_bytes():
            raise AssertionError(f"{name} differs")
    if json.loads((whole / "metrics.json").read_text()) != json.loads((killed / "metrics.json").read_text()):
        raise AssertionError("metrics.json differs")


def main(kills: int = 20, seed: int = 0) -> None:
    """Runs of four kills each."""
    for done in range(0, kills, 4):
        with tempfile.TemporaryDirectory() as folder:
            attack(Path(folder), min(4, kills - done), seed + done, 200)
        print(f"{min(kills, done + 4)} kills: the same bits", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
