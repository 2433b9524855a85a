"""Activations and settings for the tests of `khot.sae`."""

from pathlib import Path

import numpy as np

from khot.nn import SparseAutoencoderConfig
from khot.sae import Training

TOKENS, D = 400, 16
CONFIG = SparseAutoencoderConfig(d_in=D, latents=64, k=3)
SHORT = Training(steps=12, batch_size=100)


def matrix(seed=0):
    """Normal activations, (TOKENS, D)."""
    return np.random.default_rng(seed).standard_normal((TOKENS, D), dtype=np.float32)


def files(folder):
    """The names of the files in a folder, if there is one."""
    return sorted(p.name for p in Path(folder).iterdir()) if Path(folder).exists() else []


def stop_at(step):
    """An `on_step` that stops there."""
    return lambda point, steps: point.step == step
