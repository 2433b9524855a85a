"""A variational autoencoder of digits whose latent code is a k-subset, n = 32, k = 8, trained by each estimator.

The images are the 1797 digits of scikit-learn, 8 × 8, black or white. An encoder gives θ, a decoder the Bernoulli
probabilities of pixels from a k-hot x; the prior is uniform over k-subsets. Minimise the negative evidence lower bound,

`E_x[−log p(image | x)] + KL(q_θ ‖ uniform)`,

where q_θ is conditional Poisson, whose divergence is exact. Estimators that draw otherwise are trained with the same
divergence: that of conditional Poisson is the least there is with the inclusion probabilities of `Pivotal`, and stands
in for relaxed samples, which have none. Held-out images are coded by hard samples of conditional Poisson for all but
`relaxed` and `xie_ermon`, which get the law they relax, Plackett–Luce; both are bounds in truth.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import kl_divergence
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.learners import Make, Objective, poisson
from benchmarks.learning import Effort, Measures, Problem, Row, Study
from benchmarks.learning_report import main
from khot.designs import PlackettLuce

N, K = 32, 8
HIDDEN = 128
BATCH = 16
DRAWS = 8
"""Samples for each held-out image."""
DRAWS_OF_LAW = 2
"""Of which so many for the divergence of Plackett–Luce, which has no formula."""


@dataclass(frozen=True, kw_only=True)
class VaeRow(Row):
    """In nats for each held-out image, means."""

    test: float
    """The negative evidence lower bound."""
    reconstruction: float
    """−log p(image | x)"""
    divergence: float
    """KL(q ‖ uniform)"""


class Digits(NamedTuple):
    """Images, 0 or 1, (…, 64)."""

    train: Tensor
    choose: Tensor
    """What settings are chosen by."""
    test: Tensor


@cache
def digits() -> Digits:
    """1197, 200 and 400 images in a fixed random order; pixels are 1 from half of full ink on."""
    from sklearn.datasets import load_digits

    ink = torch.from_numpy(load_digits().data)  # 0 … 16
    images = (ink >= 8).to(torch.float32)
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    return Digits(*images.split((1197, 200, 400)))


def _start(seed: int) -> list[Tensor]:
    """Weights and biases of encoder and decoder, as torch's `Linear` does."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((64, HIDDEN), (HIDDEN, N), (N, HIDDEN), (HIDDEN, 64))
    return [
        (2 * torch.rand(rows, out, generator=generator) - 1) / math.sqrt(inside)
        for inside, out in shapes
        for rows in (inside, 1)
    ]


def _network(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    first, bias, second, shift = parameters
    return torch.relu(x @ first + bias) @ second + shift


def _encode(images: Tensor, parameters: list[Tensor]) -> Tensor:
    return _network(images, parameters[:4])


def _decoding_loss(images: Tensor, parameters: list[Tensor]) -> Objective:
    """−log p(image | x), (…, m, images, n) → (…, m, images)."""

    def fn(x: Tensor) -> Tensor:
        logits = _network(x, parameters[4:])
        return binary_cross_entropy_with_logits(logits, images.expand(logits.shape), reduction="none").sum(-1)

    return fn


def divergence(theta: Tensor) -> Tensor:
    """KL of conditional Poisson against the uniform law, (…, n) → (…)."""
    result: Tensor = kl_divergence(poisson(theta, K), poisson(torch.zeros(N), K))
    return result


def bound(images: Tensor, parameters: list[Tensor], make: Make) -> tuple[Tensor, Tensor]:
    """Reconstruction and divergence of images (images, 64) with m models, (m) each."""
    images = images.expand(len(parameters[0]), -1, -1)
    theta = _encode(images, parameters)
    fn, generator = _decoding_loss(images, parameters), torch.Generator().manual_seed(0)
    design = make(theta, K)
    if not isinstance(design, PlackettLuce):
        x = poisson(theta, K).sample((DRAWS,), generator=generator)
        return fn(x).mean((0, -1)), divergence(theta).mean(-1)
    x = design.sample((DRAWS,), generator=generator)
    law = design.log_prob(x[:DRAWS_OF_LAW]) + math.log(math.comb(N, K))
    return fn(x).mean((0, -1)), law.mean((0, -1))


def problem(seeds: Sequence[int]) -> Problem:
    """Networks for each seed; they see the same images in the same order with every estimator."""
    images = digits()
    start = [torch.stack(each) for each in zip(*map(_start, seeds), strict=True)]
    generator = torch.Generator().manual_seed(0)

    def step(parameters: list[Tensor]) -> tuple[Tensor, Objective, Tensor]:
        batch = images.train[torch.randint(len(images.train), (len(seeds), BATCH), generator=generator)]
        theta = _encode(batch, parameters)
        return theta, _decoding_loss(batch, parameters), divergence(theta)

    def measure(parameters: list[Tensor], make: Make) -> Measures:
        loss, law = bound(images.test, parameters, make)
        return {"test": loss + law, "reconstruction": loss, "divergence": law}

    def choose(parameters: list[Tensor], make: Make) -> Tensor:
        loss, law = bound(images.choose, parameters, make)
        return loss + law

    return Problem(K, start, step, measure, choose)


STUDY = Study(
    name="vae",
    row=VaeRow,
    problem=problem,
    full=Effort(seeds=(0, 1, 2, 3, 4), steps=1000, points=10, rates=(0.003, 0.01), tuning_seeds=1, tuning_steps=500),
    quick=Effort(seeds=(0, 1), steps=150, points=3, rates=(0.01,), tuning_seeds=0, tuning_steps=0),
    panels={"test": "negative bound, nats", "reconstruction": "reconstruction, nats", "divergence": "KL, nats"},
    ranked="negative bound",
    columns={"reconstruction": ("reconstruction", ".2f"), "KL": ("divergence", ".2f")},
    tuned="the best by 200 images of neither set, on another seed, after half as many steps",
    notes="Nats for each of 400 held-out images; less is better. All are coded by samples of conditional Poisson but "
    "`relaxed` and `xie_ermon`, which get Plackett–Luce, the law that they relax.",
)


if __name__ == "__main__":
    sys.exit(main(STUDY, __doc__))
