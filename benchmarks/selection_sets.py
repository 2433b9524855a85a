"""What features are selected from: sets whose answer is known, and real ones.

The L2X sets follow the paper (Chen, Song, Wainwright and Jordan, "Learning to explain", 2018): P(y = 1 | x) ∝ exp f(x)
against P(y = 0 | x) ∝ 1, so that f is the logit of y; x is normal with ten columns. The authors' code has another f for
the additive set, and both are here. The paper's −100 sin 2x₁ is so steep that x₂, x₃ and x₄ matter in two rows of a
hundred; the code's −100 sin 0.2x₁ leaves them twelve. Labels are drawn; the authors train on the probabilities
themselves, of 10⁶ rows.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, make_classification

MNIST_FILES = {"images": ("train-images-idx3-ubyte", 16), "labels": ("train-labels-idx1-ubyte", 8)}


class Known(NamedTuple):
    """A classification with the features that y depends on."""

    x: np.ndarray
    """(rows, n)"""
    y: np.ndarray
    """(rows), 0 or 1"""
    truth: np.ndarray
    """(n), or (rows, n) where it differs between rows; bool"""

    @property
    def k(self) -> int:
        """How many features matter."""
        return int(self.truth.sum(-1).max())

    def in_order(self, order: np.ndarray) -> Known:
        """With the columns in another order, so that no method gains by a liking for the first ones."""
        return Known(self.x[:, order], self.y, self.truth[..., order])


def orange(x: np.ndarray) -> np.ndarray:
    """Σ x² − 4 of four columns."""
    return (x**2).sum(1) - 4


def additive(x: np.ndarray) -> np.ndarray:
    """The paper's: −100 sin 2x₁ + 2|x₂| + x₃ + e^(−x₄)."""
    return -100 * np.sin(2 * x[:, 0]) + 2 * np.abs(x[:, 1]) + x[:, 2] + np.exp(-x[:, 3])


def additive_of_code(x: np.ndarray) -> np.ndarray:
    """The one of the authors' code: −100 sin 0.2x₁ + |x₂| + x₃ + e^(−x₄) − 2.4."""
    return -100 * np.sin(0.2 * x[:, 0]) + np.abs(x[:, 1]) + x[:, 2] + np.exp(-x[:, 3]) - 2.4


def _l2x(logit: Callable[[np.ndarray], np.ndarray], k: int) -> Callable[[int, int], Known]:
    def make(seed: int, rows: int) -> Known:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((rows, 10))
        return Known(x, _labels(logit(x[:, :k]), rng), np.arange(10) < k)

    return make


def switch(seed: int, rows: int) -> Known:
    """x₁₀ is about 3 or −3, and says which four matter: x₁ to x₄ as in orange skin, or x₅ to x₈ as in additive."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 10))
    is_orange = rng.random(rows) < 0.5
    x[:, 9] += np.where(is_orange, 3, -3)
    column = np.arange(10)
    truth = np.where(is_orange[:, None], column < 4, (column >= 4) & (column < 8)) | (column == 9)
    return Known(x, _labels(np.where(is_orange, orange(x[:, :4]), additive(x[:, 4:8])), rng), truth)


def xor_in_noise(seed: int, rows: int) -> Known:
    """y = [x₁x₂ > 0], and 18 columns of noise."""
    x = np.random.default_rng(seed).standard_normal((rows, 20))
    return Known(x, (x[:, 0] * x[:, 1] > 0).astype(int), np.arange(20) < 2)


def blobs(seed: int, rows: int) -> Known:
    """scikit-learn's `make_classification`: 5 informative columns and 95 of noise."""
    x, y = make_classification(rows, n_features=100, n_informative=5, n_redundant=0, shuffle=False, random_state=seed)
    return Known(x, y, np.arange(100) < 5)


def _labels(logit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.logistic(size=len(logit)) < logit).astype(int)


KNOWN: dict[str, tuple[Callable[[int, int], Known], int]] = {
    "XOR": (_l2x(lambda x: x[:, 0] * x[:, 1], 2), 10_000),
    "orange skin": (_l2x(orange, 4), 10_000),
    "additive": (_l2x(additive, 4), 10_000),
    "additive, code's": (_l2x(additive_of_code, 4), 10_000),
    "switch": (switch, 10_000),
    "XOR, 18 noise": (xor_in_noise, 3_000),
    "make_classification": (blobs, 2_000),
}
"""Makers, `(seed, rows)`, and the number of rows."""

REAL: dict[str, tuple[Callable[[], tuple[np.ndarray, np.ndarray]], tuple[int, ...]]] = {
    "digits": (lambda: load_digits(return_X_y=True), (10, 20)),
    "breast cancer": (lambda: load_breast_cancer(return_X_y=True), (5,)),
}
"""Loaders, and the numbers of features to select."""


def mnist(directory: Path, rows: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """The first rows of the training images, from the raw idx files, gzipped or not."""
    parts = []
    for name, header in MNIST_FILES.values():
        path = directory / name
        data = path.read_bytes() if path.exists() else gzip.decompress((directory / f"{name}.gz").read_bytes())
        parts.append(np.frombuffer(data, np.uint8, offset=header))
    images, labels = parts
    return images.reshape(len(labels), -1)[:rows].astype(np.float64), labels[:rows].astype(int)
