"""Denoise an image with a dictionary learned from the noisy image, beside other methods: table and picture.

Part of an image of scikit-learn, gray values in [0, 1], noise σ = 25/255. The methods: `khot.sklearn.KSVD` as in
examples/denoise_image.py; scikit-learn's dictionary on the same patches, coded by its OMP to the same tolerance; and,
if scikit-image is installed, total variation and non-local means. Writes results/denoising.csv,
docs/tables/denoising.md and docs/img/denoising.png; some minutes.
"""

from __future__ import annotations

import sys
import time
import warnings
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_images
from sklearn.decomposition import MiniBatchDictionaryLearning
from sklearn.linear_model import orthogonal_mp_gram
from threadpoolctl import threadpool_limits

from benchmarks import common
from examples.denoise_image import SIDE, SIGMA, denoise, psnr
from khot.bench import markdown_table
from khot.sklearn import KSVD

ATOMS, TOLERANCE = 256, 1.15 * SIGMA * SIDE


class Row(NamedTuple):
    """One method."""

    method: str
    decibels: float
    seconds: float


class Rival(MiniBatchDictionaryLearning):
    """scikit-learn's dictionary, with a code that stops at the tolerance."""

    def transform(self, patches: np.ndarray) -> np.ndarray:
        """Code by OMP until the residual is within the noise."""
        atoms = self.components_ / np.maximum(np.linalg.norm(self.components_, axis=1, keepdims=True), 1e-12)
        self.components_ = atoms
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of atoms that depend on each other
            code = orthogonal_mp_gram(
                atoms @ atoms.T, atoms @ patches.T, tol=TOLERANCE**2, norms_squared=np.square(patches).sum(1)
            )
        return code.T

    def inverse_transform(self, code: np.ndarray) -> np.ndarray:
        """Return the patches of a code."""
        return code @ self.components_


def measure(truth: np.ndarray, noisy: np.ndarray, learn_from: int) -> tuple[list[Row], np.ndarray, np.ndarray]:
    """Return the rows, khot's image and its atoms."""
    ours = KSVD(ATOMS, n_nonzero_coefs=16, tolerance=TOLERANCE, max_iter=15, random_state=0)
    theirs = Rival(ATOMS, alpha=TOLERANCE / 4, max_iter=5, batch_size=256, random_state=0)
    todo: dict[str, Any] = {
        "khot `KSVD`": lambda: denoise(noisy, ours, learn_from),
        "scikit-learn `MiniBatchDictionaryLearning`, OMP": lambda: denoise(noisy, theirs, learn_from),
    }
    if find_spec("skimage"):
        from skimage.restoration import denoise_nl_means, denoise_tv_chambolle

        todo["scikit-image, total variation"] = lambda: max(
            (denoise_tv_chambolle(noisy, weight=weight) for weight in (0.05, 0.08, 0.1, 0.13)),
            key=lambda image: psnr(image, truth),
        )
        todo["scikit-image, non-local means"] = lambda: max(
            (
                denoise_nl_means(noisy, patch_size=5, patch_distance=9, h=h * SIGMA, sigma=SIGMA, fast_mode=True)
                for h in (0.4, 0.6, 0.8, 1.0)
            ),
            key=lambda image: psnr(image, truth),
        )
    rows, images = [Row("noisy", psnr(noisy, truth), 0.0)], {}
    for name, call in todo.items():
        start = time.process_time()
        images[name] = call()
        rows.append(Row(name, psnr(images[name], truth), time.process_time() - start))
    return rows, images["khot `KSVD`"], ours.components_


def table(rows: list[Row], size: int) -> str:
    """Decibels, and seconds."""
    lines = [[row.method, f"{row.decibels:.2f}", f"{row.seconds:.2g}" if row.seconds else ""] for row in rows]
    return (
        "<!-- Written by benchmarks/denoising.py; do not edit. -->\n\n"
        + markdown_table(["", "PSNR, dB", "seconds"], lines)
        + f"\n\n{size}×{size} pixels, noise σ = 25/255. Both dictionaries have {ATOMS} atoms of 8×8 pixels, learned "
        "from the same patches of the noisy image, and the same tolerance. The parameter of total variation (weight) "
        "and of non-local means (h) is the best of four, chosen by the true image; their seconds are for all four. One "
        "thread.\n"
    )


def draw(noisy: np.ndarray, clean: np.ndarray, atoms: np.ndarray, rows: list[Row]) -> Figure:
    """Noisy, denoised, and the atoms."""
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    most = 14
    order = np.argsort(-np.abs(np.diff(atoms.reshape(-1, SIDE, SIDE), axis=2)).sum((1, 2)))[::-1][: most * most]
    sheet = np.ones((most * (SIDE + 1) + 1, most * (SIDE + 1) + 1))
    for place, j in enumerate(order):
        top, left = (1 + (SIDE + 1) * i for i in divmod(place, most))
        atom = atoms[j].reshape(SIDE, SIDE)
        sheet[top : top + SIDE, left : left + SIDE] = (atom - atom.min()) / max(np.ptp(atom), 1e-12)
    titles = (
        f"noisy, {rows[0].decibels:.1f} dB",
        f"denoised, {rows[1].decibels:.1f} dB",
        f"{len(order)} of the {len(atoms)} atoms, smooth ones first",
    )
    for axes, image, title in zip(figure.subplots(1, 3), (noisy, clean, sheet), titles, strict=True):
        axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=title, xticks=[], yticks=[])
    return figure


def main() -> int:
    args = common.parser(__doc__, "40×40 pixels").parse_args()
    torch.set_num_threads(1)
    size, learn_from = (40, 500) if args.quick else (256, 20_000)
    truth = load_sample_images().images[0][100 : 100 + size, 150 : 150 + size].mean(-1) / 255
    noisy = truth + SIGMA * np.random.default_rng(0).standard_normal(truth.shape)
    with threadpool_limits(1):
        rows, clean, atoms = measure(truth, noisy, learn_from)
    places = common.places(args)
    common.write(places.results / "denoising.csv", common.to_csv(rows, digits=5))
    common.write_table(places.tables / "denoising.md", table(rows, size))
    common.save(draw(noisy, clean, atoms, rows), places.images / "denoising.png")
    common.show(args, rows, table(rows, size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
