"""Sparse autoencoders on data whose dictionary is known: three axes × four selectors, and two baselines.

256 directions in 64 dimensions, active by Zipf's law, four on average, with exponential sizes and noise 0.01; 512
latents, k = 4. Writes results/sae.csv, docs/tables/sae.md and docs/img/sae-*.svg; 25 minutes, one thread. Ctrl-C ends
early, and writes what there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import common
from benchmarks.sae_report import Row, read, table, write_figures, write_rows
from khot.nn import SparseAutoencoderConfig, SparseAutoencoderMetrics, SparseAutoencoderOutput, SparseCode
from khot.sae import RECIPES, Activations, Trainer, Training

DIRECTIONS, D, ACTIVE, NOISE = 256, 64, 4.0, 0.01
LATENTS, K = 512, 4
KINDS = ("topk", "batch", "feature")
COSTS = (0.1, 0.3, 0.6, 1.0, 2.0)
"""Of the L1 baseline; the one whose L0 is nearest to k on another seed is taken."""


@dataclass(frozen=True)
class Effort:
    """How much to do."""

    seeds: int = 5
    steps: int = 1000
    batch_size: int = 512
    lr: float = 3e-3
    tokens: int = 2**17
    tests: int = 2**15
    counts: tuple[int, ...] = (2, 4, 8, 16)
    """k for the picture of loss against L0."""


QUICK = Effort(seeds=2, steps=30, batch_size=256, tokens=2**12, tests=2**11, counts=(2, 4))


class World(NamedTuple):
    """The truth, and samples of it."""

    directions: Tensor
    train: Tensor
    test: Tensor


def world(seed: int, s: Effort) -> World:
    """The truth of a seed."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(DIRECTIONS, D, generator=generator))
    rate = zipf_rates()

    def sample(count: int) -> Tensor:
        parts = []
        for size in [2**12] * (count // 2**12) + [count % 2**12]:
            is_on = torch.rand(size, DIRECTIONS, generator=generator) < rate
            sizes = torch.empty(size, DIRECTIONS).exponential_(generator=generator)
            parts.append((is_on * sizes) @ directions + NOISE * torch.randn(size, D, generator=generator))
        return torch.cat(parts)

    return World(directions, sample(s.tokens), sample(s.tests))


def zipf_rates() -> Tensor:
    """Probabilities c/r, cut at 1, that sum to `ACTIVE`."""
    inverse = 1 / torch.arange(1, DIRECTIONS + 1)
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle * inverse).clamp(max=1).sum() < ACTIVE else (low, middle)
    return (low * inverse).clamp(max=1)


def sparse(truth: World, name: str, kind: str, selector: str, seed: int, s: Effort, **config: Any) -> Iterator[Row]:
    """Train one of ours; its result, and its curve."""
    config = {"d_in": D, "latents": LATENTS, "k": K, "kind": kind, **config}
    training = Training(selector=selector, steps=s.steps, batch_size=s.batch_size, lr=s.lr, seed=seed)
    trainer = Trainer(Activations(truth.train.numpy()), SparseAutoencoderConfig(**config), training)
    while trainer.step < s.steps:
        trainer.advance()
    yield result(name, seed, config["k"], truth, trainer.sae.eval(), trainer.sae.W_dec)
    for point in trainer.curve[:: max(1, len(trainer.curve) // 50)]:
        yield Row("curve", name, seed, config["k"], point.step, {"fvu": point.fvu, "dead": point.dead / LATENTS})


def result(name: str, seed: int, k: float, truth: World, model: Any, rows: Tensor) -> Row:
    """The figures on the test tokens, and the histogram of densities."""
    metrics = SparseAutoencoderMetrics()
    for part in truth.test.split(4096):
        metrics.update(model, part)
    got = metrics.result()
    cosines = truth.directions @ torch.nn.functional.normalize(rows.detach()).t()
    figures = {"fvu": got["fvu"], "dead": 1 - got["alive"], "mmcs": float(cosines.amax(1).mean()), "l0": got["l0"]}
    return Row("result", name, seed, k, 0, figures, tuple(got["density_histogram"]["latents"]))


class Relu(torch.nn.Module):
    """The baseline without a selection: ReLU, and a cost for the size of the code."""

    def __init__(self, truth: World, generator: torch.Generator) -> None:
        super().__init__()
        rows = torch.nn.functional.normalize(torch.randn(LATENTS, D, generator=generator))
        self.W_enc, self.W_dec = torch.nn.Parameter(rows.t().clone()), torch.nn.Parameter(rows)
        self.b_enc, self.b_dec = torch.nn.Parameter(torch.zeros(LATENTS)), torch.nn.Parameter(truth.train.mean(0))

    def code(self, x: Tensor) -> Tensor:
        """(tokens, latents)."""
        return ((x - self.b_dec) @ self.W_enc + self.b_enc).relu()

    def forward(self, x: Tensor) -> SparseAutoencoderOutput:
        """As ours; without losses."""
        z = self.code(x)
        tokens, latents = z.nonzero(as_tuple=True)
        code = SparseCode(z[tokens, latents], tokens, latents, tuple(z.shape))
        return SparseAutoencoderOutput(z @ self.W_dec + self.b_dec, code, *[z.new_zeros(())] * 4)


def relu(truth: World, seed: int, s: Effort, cost: float) -> Row:
    """Train the ReLU + L1 baseline as the others are trained."""
    generator = torch.Generator().manual_seed(10_000 + seed)  # not the truth's: its weights would be the truth
    model = Relu(truth, generator)
    adam = torch.optim.Adam(model.parameters(), lr=s.lr)
    variance = (truth.train - truth.train.mean(0)).square().sum(1).mean()
    for step in range(s.steps):
        x = truth.train[torch.randint(len(truth.train), (s.batch_size,), generator=generator)]
        z = model.code(x)
        error = (x - z @ model.W_dec - model.b_dec).square().sum(1).mean() / variance
        adam.param_groups[0]["lr"] = s.lr * min(1.0, (step + 1) / 100, (1 - step / s.steps) / 0.2)
        adam.zero_grad()
        (error + cost * z.sum(1).mean() / variance.sqrt()).backward()
        adam.step()
        with torch.no_grad():
            model.W_dec /= model.W_dec.norm(dim=1, keepdim=True)
    return result(f"ReLU + L1, cost {cost:g}", seed, K, truth, model, model.W_dec)


def pca(truth: World, seed: int) -> Row:
    """As many principal components as there are active latents."""
    mean = truth.train.mean(0)
    _, _, rows = torch.linalg.svd(truth.train - mean, full_matrices=False)
    rest = truth.test - mean
    fvu = float((rest - rest @ rows[:K].t() @ rows[:K]).square().sum() / rest.square().sum())
    cosines = (truth.directions @ rows[:K].t()).abs().amax(1).mean()
    return Row("result", "PCA", seed, K, 0, {"fvu": fvu, "dead": 0.0, "mmcs": float(cosines), "l0": float(K)})


def rows(s: Effort) -> Iterator[Row]:
    """All of it, the seeds in turn."""
    tuning = world(1000, s)
    tuned = [relu(tuning, 1000, s, cost) for cost in COSTS]
    cost = COSTS[int(np.argmin([abs(np.log(max(row.figures["l0"], 1e-9) / K)) for row in tuned]))]
    for seed in range(s.seeds):
        truth = world(seed, s)
        for kind in KINDS:
            for selector in RECIPES:
                yield from sparse(truth, f"{kind}, {selector}", kind, selector, seed, s)
        yield from sparse(truth, "feature, hard, Zipf", "feature", "hard", seed, s, zipf=1.0, underused=0.5)
        yield relu(truth, seed, s, cost)._replace(name="ReLU + L1")
        yield pca(truth, seed)
    truth = world(0, s)
    for k in s.counts:
        for kind in KINDS:
            for row in sparse(truth, f"{kind}, straight-through", kind, "straight-through", 0, s, k=k):
                if row.what == "result":
                    yield row._replace(what="sweep")
    for row in tuned:
        yield row._replace(what="sweep", name="ReLU + L1")


def main() -> int:
    parser = common.parser(__doc__, "little of everything: a minute")
    parser.add_argument("--redraw", action="store_true", help="only the table and the figures, from the CSV there is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    places, is_interrupted = common.places(args), False
    results = places.results / "sae.csv"
    if not args.redraw:
        done: list[Row] = []
        is_interrupted = common.collect(rows(QUICK if args.quick else Effort()), done)
        if not done:
            return 130
        common.write(results, write_rows(done))
    found = read(results.read_text(encoding="utf-8"))
    common.write_table(places.tables / "sae.md", table(found))
    write_figures(found, places.images)
    common.show(args, found, table(found))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
