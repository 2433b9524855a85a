"""Thirty-four tables for a contest of selectors: bundled with scikit-learn, with noise beside them, and generated.

Columns that matter come first here; the contest shuffles them. Sets in `DEVELOPED` were looked at (with other seeds)
while `KHotSelector` was made, the others were not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from sklearn import datasets


class Table(NamedTuple):
    """A table, and how many columns to choose."""

    x: np.ndarray
    y: np.ndarray
    k: int
    true: int = 0
    """How many of the first columns matter; 0 if that is not known."""

    @property
    def is_class(self) -> bool:
        """Whether y holds classes."""
        return self.y.dtype.kind in "iub"


Make = Callable[[np.random.Generator], Table]


def real(load: Callable[..., tuple[np.ndarray, np.ndarray]], k: int, noise: int = 0) -> Make:
    """A bundled set, with columns beside it that are permuted copies of its own."""

    def make(rng: np.random.Generator) -> Table:
        x, y = load(return_X_y=True)
        copies = [rng.permuted(x[:, [rng.integers(x.shape[1])]], axis=0) for _ in range(noise)]
        return Table(np.hstack([x, *copies]), y, k)

    return make


def normal(rng: np.random.Generator, rows: int, n: int, r: float = 0.0) -> np.ndarray:
    """Normal columns; the correlation of neighbours is r."""
    x = rng.standard_normal((rows, n))
    for j in range(1, n if r else 0):
        x[:, j] = r * x[:, j - 1] + (1 - r * r) ** 0.5 * x[:, j]
    return x


def linear(rows: int, n: int, true: int, *, r: float = 0.0, noise: float = 1.0, is_class: bool = False) -> Make:
    """Coefficients of ±1 to ±2 at places that are spread over the columns."""

    def make(rng: np.random.Generator) -> Table:
        x = normal(rng, rows, n, r)
        places = rng.permutation(n)
        x = x[:, places] if r else x
        value = x[:, :true] @ (rng.choice([-1, 1], true) * rng.uniform(1, 2, true))
        value += noise * (rng.logistic(size=rows) if is_class else rng.standard_normal(rows))
        return Table(x, (value > 0).astype(int) if is_class else value, true, true)

    return make


def formula(
    rows: int, n: int, true: int, of: Callable[[np.ndarray], np.ndarray], *, noise: float = 0.0, k: int | None = None
) -> Make:
    """Normal columns; a class for a boolean formula, with a share of labels turned, or a number."""

    def make(rng: np.random.Generator) -> Table:
        x = rng.standard_normal((rows, n))
        y = of(x)
        y = (y ^ (rng.random(rows) < noise)).astype(int) if y.dtype == bool else y + noise * rng.standard_normal(rows)
        return Table(x, y, k or true, true)

    return make


def categories(rows: int, n: int, true: int, levels: int, *, is_class: bool) -> Make:
    """Numbers that name categories, each with an effect of its own, in no order."""

    def make(rng: np.random.Generator) -> Table:
        x = rng.integers(0, levels, (rows, n)).astype(float)
        effects = rng.standard_normal((true, levels))
        value = sum(effects[j][x[:, j].astype(int)] for j in range(true)) + 0.5 * rng.standard_normal(rows)
        return Table(x, (value > 0).astype(int) if is_class else value, true, true)

    return make


def scikit(make_set: Callable[..., tuple[np.ndarray, np.ndarray]], k: int, true: int, **options: object) -> Make:
    """One of scikit-learn's generators."""

    def make(rng: np.random.Generator) -> Table:
        x, y = make_set(random_state=int(rng.integers(2**31)), **options)
        return Table(x, y, k, true)

    return make


def beside_noise(make_set: Callable[..., tuple[np.ndarray, np.ndarray]], rows: int, noise: int) -> Make:
    """One of Friedman's sets of four columns, with columns of noise."""

    def make(rng: np.random.Generator) -> Table:
        x, y = make_set(rows, random_state=int(rng.integers(2**31)))
        x = np.hstack([x, rng.uniform(size=(rows, noise)) * np.abs(x).max()])
        return Table(x, y / y.std() + 0.2 * rng.standard_normal(rows), 4, 4)

    return make


def twins(rng: np.random.Generator) -> Table:
    """Each column that matters has four noisy twins."""
    x = rng.standard_normal((400, 6))
    copies = [x + 0.3 * rng.standard_normal(x.shape) for _ in range(4)]
    y = x @ np.array([2, -1.5, 1, 1, -1, 0.7]) + rng.standard_normal(400)
    return Table(np.hstack([x, *copies, rng.standard_normal((400, 30))]), y, 6, 6)


def heavy(rng: np.random.Generator) -> Table:
    """Columns with heavy tails, and noise with outliers."""
    x = rng.standard_t(2, (500, 60))
    y = np.tanh(x[:, 0]) * 2 + np.sign(x[:, 1]) + np.tanh(x[:, 2] * x[:, 3]) + 0.3 * rng.standard_t(2, 500)
    return Table(x, y, 4, 4)


def rare(rng: np.random.Generator) -> Table:
    """A class of one row in twenty."""
    x = rng.standard_normal((1500, 40))
    value = x[:, :4] @ np.array([1.5, -1.5, 1, 1]) + rng.logistic(size=1500)
    return Table(x, (value > np.quantile(value, 0.95)).astype(int), 4, 4)


def counts(rng: np.random.Generator) -> Table:
    """Counts, most of them 0, like words in a text; three classes."""
    y = rng.integers(0, 3, 500)
    rate = np.full((500, 300), 0.15)
    for j in range(12):
        rate[y == j % 3, j] = 0.9
    return Table(rng.poisson(rate).astype(float), y, 12, 12)


def latent(rng: np.random.Generator) -> Table:
    """Five factors behind sixty columns; the target depends on two factors, in a curve."""
    factors = rng.standard_normal((400, 5))
    x = factors @ rng.standard_normal((5, 60)) + 0.5 * rng.standard_normal((400, 60))
    return Table(x, np.sin(2 * factors[:, 0]) + factors[:, 1] ** 2 / 2 + 0.2 * rng.standard_normal(400), 6)


def spirals(rng: np.random.Generator) -> Table:
    """Two spirals in two columns, and the same turned by noise in two more."""
    t, y = rng.uniform(1, 3, 800) * np.pi, rng.integers(0, 2, 800)
    x = np.column_stack([t * np.cos(t + np.pi * y), t * np.sin(t + np.pi * y)]) + 0.3 * rng.standard_normal((800, 2))
    return Table(np.hstack([x, x + 3 * rng.standard_normal((800, 2)), rng.standard_normal((800, 20))]), y, 2, 2)


def switch(x: np.ndarray) -> np.ndarray:
    """A column says which of two others counts."""
    return np.where(x[:, 0] > 0, 2 * x[:, 1], -2 * x[:, 2]) + x[:, 3]


SETS: dict[str, Make] = {
    "iris, 20 noise": real(datasets.load_iris, 2, 20),
    "wine": real(datasets.load_wine, 4),
    "wine, 60 noise": real(datasets.load_wine, 5, 60),
    "breast cancer": real(datasets.load_breast_cancer, 5),
    "breast cancer, 100 noise": real(datasets.load_breast_cancer, 5, 100),
    "diabetes": real(datasets.load_diabetes, 4),
    "diabetes, 60 noise": real(datasets.load_diabetes, 5, 60),
    "digits, k = 10": real(datasets.load_digits, 10),
    "digits, k = 20": real(datasets.load_digits, 20),
    "linear 300 × 100": linear(300, 100, 8, noise=2.0),
    "linear 300 × 200, r = 0.8": linear(300, 200, 8, r=0.8, noise=2.0),
    "linear 150 × 5000": linear(150, 5000, 6, noise=1.0),
    "logistic 400 × 100": linear(400, 100, 6, is_class=True),
    "logistic 200 × 1000": linear(200, 1000, 5, is_class=True, noise=0.5),
    "logistic, r = 0.9": linear(400, 60, 6, r=0.9, is_class=True),
    "weak effects": linear(500, 50, 15, noise=8.0),
    "Friedman 1": scikit(datasets.make_friedman1, 5, 5, n_samples=400, n_features=50, noise=1.0),
    "Friedman 2": beside_noise(datasets.make_friedman2, 400, 30),
    "Friedman 3": beside_noise(datasets.make_friedman3, 400, 30),
    "XOR": formula(600, 30, 2, lambda x: x[:, 0] * x[:, 1] > 0, noise=0.05),
    "parity of three": formula(1000, 20, 3, lambda x: x[:, 0] * x[:, 1] * x[:, 2] > 0, noise=0.02),
    "orange skin": formula(800, 30, 4, lambda x: (x[:, :4] ** 2).sum(1) > 3.4, noise=0.05),
    "sines": formula(600, 40, 4, lambda x: np.sin(2 * x[:, :4]).sum(1), noise=0.5),
    "products": formula(500, 40, 4, lambda x: x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3], noise=0.3),
    "steps": formula(500, 60, 5, lambda x: (x[:, :5] > 0.5).sum(1) * 1.0, noise=0.5),
    "largest of four": formula(500, 40, 4, lambda x: x[:, :4].max(1), noise=0.3),
    "switch": formula(600, 40, 4, switch, noise=0.5),
    "categories": categories(600, 30, 4, 8, is_class=False),
    "categories, classes": categories(800, 30, 4, 6, is_class=True),
    "make_classification": scikit(
        datasets.make_classification,
        5,
        0,
        n_samples=500,
        n_features=100,
        n_informative=5,
        n_redundant=15,
        shuffle=False,
    ),
    "ten clusters": scikit(
        datasets.make_classification,
        6,
        6,
        n_samples=800,
        n_features=60,
        n_informative=6,
        n_redundant=0,
        n_classes=5,
        n_clusters_per_class=2,
        shuffle=False,
    ),
    "twins": twins,
    "heavy tails": heavy,
    "rare class": rare,
    "counts": counts,
    "latent factors": latent,
    "spirals": spirals,
}
DEVELOPED = (
    "iris, 20 noise",
    "wine, 60 noise",
    "breast cancer",
    "diabetes",
    "digits, k = 20",
    "logistic, r = 0.9",
    "Friedman 3",
    "categories, classes",
    "wine",
    "diabetes, 60 noise",
    "digits, k = 10",
    "linear 300 × 200, r = 0.8",
    "linear 150 × 5000",
    "logistic 200 × 1000",
    "weak effects",
    "Friedman 1",
    "XOR",
    "parity of three",
    "sines",
    "categories",
    "make_classification",
    "twins",
    "heavy tails",
    "spirals",
)
