"""Remove the noise from an image with a dictionary learned from the noisy image itself.

Every 8×8 patch is coded with as few atoms as bring it within the noise; what is left out is noise. Overlapping patches
are averaged. Writes both images to denoised.png. `--size` says how large a part of the photograph is taken.
"""

import argparse

import numpy as np
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.datasets import load_sample_images

from khot.sklearn import KSVD

SIDE, SIGMA = 8, 25 / 255


def denoise(noisy: np.ndarray, model: KSVD, learn_from: int = 20_000) -> np.ndarray:
    """Learn the atoms from some patches, code all of them, and average what they say about each pixel."""
    patches = sliding_window_view(noisy, (SIDE, SIDE)).reshape(-1, SIDE * SIDE)
    mean = patches.mean(1, keepdims=True)
    chosen = np.random.default_rng(0).permutation(len(patches))[:learn_from]
    model.fit((patches - mean)[chosen])
    clean = (model.inverse_transform(model.transform(patches - mean)) + mean).reshape(-1, SIDE, SIDE)
    total, count = np.zeros_like(noisy), np.zeros_like(noisy)
    height, width = (length - SIDE + 1 for length in noisy.shape)
    for i in range(SIDE):
        for j in range(SIDE):
            total[i : i + height, j : j + width] += clean[:, i, j].reshape(height, width)
            count[i : i + height, j : j + width] += 1
    return total / count


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    """Return the ratio of signal and noise in decibels, for values in [0, 1]."""
    return float(-10 * np.log10(np.square(image - truth).mean()))


def main() -> None:
    """Denoise part of an image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="of the part, in pixels")
    size = parser.parse_args().size
    truth = load_sample_images().images[0][100 : 100 + size, 150 : 150 + size].mean(-1) / 255
    noisy = truth + SIGMA * np.random.default_rng(0).standard_normal(truth.shape)
    model = KSVD(256, n_nonzero_coefs=16, tolerance=1.15 * SIGMA * SIDE, max_iter=15, random_state=0)
    clean = denoise(noisy, model)
    print(f"PSNR: noisy {psnr(noisy, truth):.2f} dB, denoised {psnr(clean, truth):.2f} dB")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axes, image, title in zip(figure.subplots(1, 2), (noisy, clean), ("noisy", "denoised"), strict=True):
        axes.imshow(image, cmap="gray", vmin=0, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig("denoised.png")


if __name__ == "__main__":
    main()
