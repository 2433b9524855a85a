"""A search space small enough to train every member, and seven ways to search it.

Digits, 8×8 pixels, 8 channels: three choices of five operations, 125 networks. `--train` trains all of them, three
seeds each, to results/architectures.csv; three minutes. Then each way to search runs ten times, without and with a
budget of a quarter of the largest cost, and is told the rank of what it found: results/architecture_search.csv. All
searches apply equally many operations to batches: a network of all branches costs five times a plain one. DARTS,
DARTS-PT and RARTS are our re-implementations (rivals/darts.py). Writes docs/tables/architectures.md and
docs/img/architectures.svg; ten minutes on one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.rivals import darts
from benchmarks.sparsity_problems import Data, split
from benchmarks.style import BLUE, FAINT, GREEN, GREY, ORANGE, PINK, panels, styled
from khot.bench import markdown_table
from khot.nn import Choice, Schedule, perturbation_scores, selectors
from khot.nn.sparsity import Sparsifier, choices

CHANNELS = 8
PLACES = (64, 16, 4)  # pixels at each of the three choices
OPERATIONS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "skip": (nn.Identity, 0),
    "pool": (lambda: nn.AvgPool2d(3, 1, 1), 9),
    "conv 1×1": (lambda: _conv(1, 1), 2 * CHANNELS + 1),
    "depthwise 3×3": (lambda: _conv(3, CHANNELS), 2 * 9 + 1),
    "conv 3×3": (lambda: _conv(3, 1), 2 * 9 * CHANNELS + 1),
}
"""What makes each, and its floating-point operations for one entry of the output."""
COSTS = [[places * CHANNELS * each + 1 for _, each in OPERATIONS.values()] for places in PLACES]  # 1: never free
GENOMES = list(product(range(len(OPERATIONS)), repeat=len(PLACES)))
BUDGET = 0.25
Genome = tuple[int, ...]


class Plan(NamedTuple):
    """How much to do."""

    seeds: tuple[int, ...] = (0, 1, 2)
    runs: tuple[int, ...] = tuple(range(10, 20))
    steps: int = 300  # of training a network of the table
    spent: int = 3000  # times that an operation of each choice is applied to a batch, in a search
    genomes: tuple[Genome, ...] = tuple(GENOMES)
    rows: int = 1257


QUICK = Plan(seeds=(0,), runs=(10,), steps=4, spent=40, genomes=tuple(GENOMES[::25]), rows=100)
BATCH, RATE, SCORE_RATE = 64, 0.01, 0.03


def _conv(size: int, groups: int) -> nn.Module:
    conv = nn.Conv2d(CHANNELS, CHANNELS, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(CHANNELS), nn.ReLU())


def network(middle: Sequence[nn.Module]) -> nn.Module:
    """Return the network around three modules."""
    first, second, third = middle
    stem = nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU())
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * CHANNELS, 10))
    return nn.Sequential(stem, first, nn.MaxPool2d(2), second, nn.MaxPool2d(2), third, head)


def plain(genome: Genome) -> nn.Module:
    makers = [make for make, _ in OPERATIONS.values()]
    return network([makers[i]() for i in genome])


def mixed(**options: Any) -> tuple[nn.Module, list[Choice]]:
    """Return the network with all operations at every place, and its choices."""
    found = [Choice([make() for make, _ in OPERATIONS.values()], costs=costs, **options) for costs in COSTS]
    return network(found), found


def cost(genome: Genome) -> int:
    return sum(costs[i] for costs, i in zip(COSTS, genome, strict=True))


LIMIT = BUDGET * max(cost(genome) for genome in GENOMES)


@lru_cache(maxsize=2)
def data(rows: int) -> Data:
    """Return one split for all: searches see its training rows only."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16 - 0.5, dtype=torch.float32).view(-1, 1, 8, 8)
    return split(images, torch.tensor(y), 0, rows, 540)


class Batches:
    """Random batches of training rows, which the searches and the table draw alike."""

    def __init__(self, known: Data, seed: int, share: slice = slice(None)) -> None:
        self.x, self.y = known.train[share], known.train_y[share]
        self.generator = torch.Generator().manual_seed(seed)

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        rows = torch.randint(len(self.x), (BATCH,), generator=self.generator)
        return cross_entropy(model(self.x[rows]), self.y[rows])


def fit(model: nn.Module, known: Data, steps: int, seed: int) -> nn.Module:
    """Train a plain network: Adam, and a rate that falls linearly to 0."""
    batches = Batches(known, seed)
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for _ in range(steps):
        optimiser.zero_grad()
        batches.loss(model).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


class Member(NamedTuple):
    """One trained network of the space."""

    genome: str
    seed: int
    cost: int
    accuracy: float


def name_of(genome: Genome) -> str:
    return "".join(map(str, genome))


def train_all(plan: Plan) -> Iterator[Member]:
    """Train every network of the plan, with every seed."""
    known = data(plan.rows)
    for genome in plan.genomes:
        for seed in plan.seeds:
            torch.manual_seed(seed)
            model = fit(plain(genome), known, plan.steps, seed)
            yield Member(name_of(genome), seed, cost(genome), accuracy(model, known.test, known.test_y))


# ── searches ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def best_affordable(scores: Sequence[Tensor], limit: float) -> Genome:
    """Return the operations with the largest total score within a budget, by looking at all 125."""
    affordable = [genome for genome in GENOMES if cost(genome) <= limit]
    return max(affordable, key=lambda genome: sum(float(s[i]) for s, i in zip(scores, genome, strict=True)))


CHARGES = (0.0, 1e-5, 1e-4)
"""Weights of the expected cost, for the rivals that cannot hold a budget: the best one on other runs is used."""


def by_darts(how: Callable[..., list[Tensor]]) -> Callable[..., Genome]:
    """Return a search by one of `rivals.darts`: with a budget, the best affordable combination of scores."""

    def search(known: Data, seed: int, spent: int, limit: float, charge: float) -> Genome:
        model, _ = mixed()
        half = len(known.train) // 2
        first, second = Batches(known, seed, slice(half)), Batches(known, seed + 1, slice(half, None))
        more = {}
        if how is darts.darts_pt:
            more["evaluate"] = lambda model: accuracy(model, second.x, second.y)
        scores = how(
            model,
            (first.loss, second.loss),
            spent=spent,
            rate=RATE,
            score_rate=SCORE_RATE,
            charge=charge if limit < float("inf") else 0.0,
            **more,
        )
        return best_affordable(scores, limit)

    return search


def at_random(known: Data, seed: int, spent: int, limit: float, charge: float) -> Genome:
    """Train affordable networks on two thirds of the rows, and return the most accurate on the others."""
    generator = torch.Generator().manual_seed(seed)
    affordable = [genome for genome in GENOMES if cost(genome) <= limit]
    order = torch.randperm(len(affordable), generator=generator).tolist()
    cut = 2 * len(known.train) // 3
    part = known._replace(train=known.train[:cut], train_y=known.train_y[:cut])
    steps = min(spent, Plan().steps)

    def score(genome: Genome) -> float:
        return accuracy(fit(plain(genome), part, steps, seed), known.train[cut:], known.train_y[cut:])

    return max((affordable[i] for i in order[: spent // steps]), key=score)


def by_choice(selector: selectors.Selector, branches: int) -> Callable[..., Genome]:
    """Return a search with `khot.nn.Choice`: weights and θ together, on all rows, with a falling temperature."""

    def search(known: Data, seed: int, spent: int, limit: float, charge: float) -> Genome:
        steps = spent // branches
        model, found = mixed(selector=selector)
        generator = torch.Generator().manual_seed(seed)
        for choice in found:
            choice.generator = generator
        weights, scores = darts.split_parameters(model)
        sparsifier = None
        if limit < float("inf"):
            sparsifier = Sparsifier(model, limit, steps=steps, units=choices)
        batches = Batches(known, seed)
        optimiser = torch.optim.Adam([{"params": weights, "lr": RATE}, {"params": scores, "lr": SCORE_RATE}])
        schedules = [Schedule(choice, "temperature", 1.0, 0.1, steps=steps) for choice in found]
        for _ in range(steps):
            optimiser.zero_grad()
            batches.loss(model).backward()
            optimiser.step()
            for schedule in (*schedules, *filter(None, [sparsifier])):
                schedule.step()
        model.eval()
        return tuple(int(choice.mask().argmax()) for choice in found)

    return search


SEARCHES: dict[str, Callable[..., Genome]] = {
    "random search": at_random,
    "DARTS": by_darts(darts.darts),
    "DARTS-PT": by_darts(darts.darts_pt),
    "RARTS": by_darts(darts.rarts),
    "Choice, σ_k": by_choice(selectors.soft, len(OPERATIONS)),
    "Choice, sampled": by_choice(selectors.sampled, 1),
}
