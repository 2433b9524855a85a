"""A search space small enough to train every member, and seven ways to search it.

Digits, 8×8 pixels, 8 channels: three choices of five operations, 125 networks. `--train` trains all of them, three
seeds each, to results/architectures.csv; three minutes. Then each way to search runs ten times, without and with a
budget of a quarter of the largest cost; results/architecture_search.csv has the rank of what it found. All searches
apply equally many operations to batches: a network of all branches costs five times a plain one. With the budget, each
has one knob of three values, the best on two other runs. Rivals add the expected cost to the loss and take the best
affordable combination of their scores. DARTS, DARTS-PT and RARTS are our re-implementations (rivals/darts.py). Writes
docs/tables/architectures.md and docs/img/architectures.svg; ten minutes on one thread.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_type_hints

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.rivals import darts
from benchmarks.sparsity_problems import Data, split
from benchmarks.style import BLUE, FAINT, GOLD, GREEN, GREY, ORANGE, PINK, SKY, panels, styled
from khot.bench import markdown_table
from khot.nn import Choice, Schedule, selectors
from khot.nn.schedules import between, linear
from khot.nn.sparsity import Sparsifier, choices, drawn, sampled, soft

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
    spent: int = 1500  # times that an operation of each choice is applied to a batch, in a search
    genomes: tuple[Genome, ...] = tuple(GENOMES)
    rows: int = 1257


QUICK = Plan(seeds=(0,), runs=(10,), steps=4, spent=40, genomes=tuple(GENOMES[::25]), rows=100)
BATCH, RATE, SCORE_RATE = 64, 0.01, 0.03
WARM = 0.3  # of the steps, in which all operations are drawn alike and θ does not learn


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
        """Return the loss on a new batch."""
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


def by_darts(how: Callable[..., list[Tensor]]) -> Callable[..., Genome]:
    """Return a search by one of `rivals.darts`: with a budget, the best affordable combination of scores."""

    def search(known: Data, seed: int, spent: int, limit: float, knob: float) -> Genome:
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
            charge=knob,
            **more,
        )
        return best_affordable(scores, limit)

    return search


def at_random(known: Data, seed: int, spent: int, limit: float, knob: float) -> Genome:
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


def by_choice(selector: selectors.Selector, rule: Any, branches: int) -> Callable[..., Genome]:
    """Return a search with `khot.nn.Choice`: weights and θ together, on all rows, with a falling temperature.

    With a budget the Sparsifier sets the masks by `rule`. The knob says from which share of the steps on it falls.
    """

    def search(known: Data, seed: int, spent: int, limit: float, knob: float) -> Genome:
        steps = spent // branches
        model, found = mixed(selector=selector)
        generator = torch.Generator().manual_seed(seed)
        for choice in found:
            choice.generator = generator
        weights, scores = darts.split_parameters(model)
        movers: list[Any] = [Schedule(choice, "temperature", 1.0, 0.1, steps=steps) for choice in found]
        if limit < float("inf"):
            falls = between(linear, knob, 0.8)
            heat = {"temperature": (1.0, 0.1), "density_schedule": falls, "generator": generator}
            movers = [Sparsifier(model, limit, steps=steps, units=choices, mask=rule, **heat)]
        batches = Batches(known, seed)
        optimiser = torch.optim.Adam([{"params": weights, "lr": RATE}, {"params": scores, "lr": SCORE_RATE}])
        for _ in range(steps):
            optimiser.zero_grad()
            batches.loss(model).backward()
            optimiser.step()
            for mover in movers:
                mover.step()
        model.eval()
        return tuple(int(choice.mask().argmax()) for choice in found)

    return search


def by_log_prob(known: Data, seed: int, spent: int, limit: float, knob: float) -> Genome:
    """Draw networks: weights learn from the loss, and θ by the score function, after a start.

    The baseline is a running mean of the loss. With a budget the Sparsifier draws, within it on average; the budget
    begins to fall when θ begins to learn.
    """
    model, found = mixed(selector=selectors.drawn)
    generator = torch.Generator().manual_seed(seed)
    for choice in found:
        choice.generator = generator
    weights, scores = darts.split_parameters(model)
    sparsifier = None
    if limit < float("inf"):
        how = {"mask": drawn, "temperature": (1.0, 1.0), "freeze": 1.0, "generator": generator}
        falls = between(linear, knob, 0.8)
        sparsifier = Sparsifier(model, limit, steps=spent, units=choices, density_schedule=falls, **how)
    batches = Batches(known, seed)
    optimiser = torch.optim.Adam([{"params": weights, "lr": RATE}, {"params": scores, "lr": SCORE_RATE}])
    mean = 0.0
    for step in range(spent):
        optimiser.zero_grad()
        loss = batches.loss(model)
        value = float(loss.detach())
        mean = mean or value
        if step >= WARM * spent:
            loss = loss + (value / mean - 1) * sum(choice.log_prob() for choice in found)
        loss.backward()
        mean = 0.95 * mean + 0.05 * value
        optimiser.step()
        if sparsifier is not None:
            sparsifier.step()
    model.eval()
    return tuple(int(choice.mask().argmax()) for choice in found)


SEARCHES: dict[str, Callable[..., Genome]] = {
    "random search": at_random,
    "DARTS": by_darts(darts.darts),
    "DARTS-PT": by_darts(darts.darts_pt),
    "RARTS": by_darts(darts.rarts),
    "Choice, σ_k": by_choice(selectors.soft, soft, len(OPERATIONS)),
    "Choice, sampled": by_choice(selectors.sampled, sampled, 1),
    "Choice, drawn": by_log_prob,
}


class Row(NamedTuple):
    """One search; the fields are the columns of the CSV."""

    search: str
    budget: str
    run: int
    found: str
    cost: int
    rank: int
    accuracy: float
    best: float


def means(members: Sequence[Member]) -> dict[str, float]:
    """Return the mean accuracy of each network over its seeds."""
    found: dict[str, list[float]] = {}
    for member in members:
        found.setdefault(member.genome, []).append(member.accuracy)
    return {genome: fmean(values) for genome, values in found.items()}


def judged(search: str, run: int, genome: Genome, limit: float, table: dict[str, float]) -> Row:
    """Return the rank of a network among those within the budget; 1 is the best."""
    affordable = {name_of(g): table[name_of(g)] for g in GENOMES if cost(g) <= limit and name_of(g) in table}
    mine = table[name_of(genome)]
    rank = 1 + sum(value > mine for value in affordable.values())
    text = "none" if limit == float("inf") else f"{BUDGET:.0%}"
    return Row(search, text, run, name_of(genome), cost(genome), rank, mine, max(affordable.values()))


def search_all(plan: Plan, table: dict[str, float]) -> Iterator[Row]:
    """Run every search, without and with the budget; the knob for the budget is the best of three on two other runs."""
    known = data(plan.rows)

    def one(name: str, run: int, limit: float, knob: float) -> Row:
        torch.manual_seed(run)
        return judged(name, run, SEARCHES[name](known, run, plan.spent, limit, knob), limit, table)

    for limit, name in product((float("inf"), LIMIT), SEARCHES):
        knobs = KNOBS.get(name, (0.0,)) if limit < float("inf") else (0.0,)
        knob = knobs[0]
        if len(knobs) > 1 and len(plan.runs) > 1:
            total = {k: sum(one(name, run, limit, k).accuracy for run in (100, 101)) for k in knobs}
            knob = max(total, key=total.__getitem__)
        for run in plan.runs:
            yield one(name, run, limit, knob)


CHARGES, BEGINS = (0.0, 1e-5, 1e-4), (0.0, 0.3, 0.6)
KNOBS = {name: CHARGES if "DARTS" in name or name == "RARTS" else BEGINS for name in list(SEARCHES)[1:]}
KNOBS["Choice, drawn"] = (WARM,)
"""With a budget: the weight of the expected cost in the loss, or when the budget begins to fall."""


def report(members: Sequence[Member], rows: Sequence[Row]) -> str:
    """Return the mean rank of what each search found, and what it costs in accuracy."""
    parts = ["<!-- Written by benchmarks/architectures.py; do not edit. -->"]
    table = means(members)
    for budget in dict.fromkeys(row.budget for row in rows):
        limit = float("inf") if budget == "none" else LIMIT
        count = sum(cost(g) <= limit and name_of(g) in table for g in GENOMES)
        lines = []
        for name in SEARCHES:
            mine = [row for row in rows if (row.search, row.budget) == (name, budget)]
            if mine:
                rank, error = common.mean_and_error([float(row.rank) for row in mine])
                short, short_error = common.mean_and_error([100 * (row.best - row.accuracy) for row in mine])
                spent = fmean(row.cost for row in mine) / max(map(cost, GENOMES))
                text = f"{short:.2f} ± {short_error:.2f}"
                lines.append([name, f"{rank:.1f} ± {error:.1f}", text, f"{spent:.0%}"])
        title = "Without a budget" if budget == "none" else f"At most {budget} of the largest cost"
        heading = ["", f"rank of {count}", "points below the best", "cost of what is found"]
        parts += [f"**{title}**:", markdown_table(heading, lines)]
    return "\n\n".join(parts) + "\n"


COLOURS = {
    "random search": GREY,
    "DARTS": ORANGE,
    "DARTS-PT": PINK,
    "RARTS": GREEN,
    "Choice, σ_k": BLUE,
    "Choice, sampled": SKY,
    "Choice, drawn": GOLD,
}


@styled
def figure(members: Sequence[Member], rows: Sequence[Row]) -> Figure:
    """Return the space, accuracy against cost, and what the searches found in it."""
    table = means(members)
    picture, grid = panels(1, 2, 5.0, sharey=True)
    costs = {name_of(g): cost(g) / 1000 for g in GENOMES}
    for axes, budget in zip(grid[0], ("none", f"{BUDGET:.0%}"), strict=True):
        axes.scatter([costs[g] for g in table], [100 * a for a in table.values()], s=16, color=FAINT, linewidths=0)
        for i, (name, colour) in enumerate(COLOURS.items()):
            found = [row for row in rows if (row.search, row.budget) == (name, budget)]
            counts = {row.found: sum(other.found == row.found for other in found) for row in found}
            axes.scatter(
                [costs[g] * 1.02**i for g in counts],
                [100 * table.get(g, 0.0) for g in counts],
                s=[26 * n for n in counts.values()],
                facecolors="none",
                edgecolors=colour,
                linewidths=1.6,
                label=name,
            )
        if budget != "none":
            axes.axvline(LIMIT / 1000, color=FAINT, linewidth=1)
        title = "without a budget" if budget == "none" else f"at most {budget} of the largest cost"
        axes.set(xscale="symlog", xlabel="thousand operations for an image", title=title)
        axes.set_xlim(-0.2, 120)
        axes.grid(True)
    worst = sorted(table.values())[len(table) // 3]
    grid[0, 0].set_ylim(100 * worst - 0.5, 100 * max(table.values()) + 0.5)
    grid[0, 0].set_ylabel("test accuracy, % (mean of the seeds)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    legend = picture.legend(handles, labels, loc="outside lower center", ncols=3)
    for handle in legend.legend_handles:
        handle.set_sizes([60])
    return picture


def read(path: Path, kind: type[Any]) -> list[Any]:
    """Return the rows of a CSV file: `Member`s or `Row`s."""
    kinds = get_type_hints(kind)
    with path.open(encoding="utf-8") as file:
        return [kind(**{key: kinds[key](value) for key, value in row.items()}) for row in csv.DictReader(file)]


def results(folder: Path) -> tuple[list[Member], list[Row]]:
    """Return the networks and the searches that a folder holds."""
    return read(folder / "architectures.csv", Member), read(folder / "architecture_search.csv", Row)


def main() -> int:
    parser: argparse.ArgumentParser = common.parser(__doc__, "five networks, one short search of each kind")
    parser.add_argument("--train", action="store_true", help="train all members again; three minutes")
    parser.add_argument("--redraw", action="store_true", help="only the table and the picture, from the rows there are")
    args = parser.parse_args()
    plan, at = QUICK if args.quick else Plan(), common.places(args)
    torch.set_num_threads(1)
    all_members, searches = at.results / "architectures.csv", at.results / "architecture_search.csv"
    if not args.redraw and (args.train or args.quick or not all_members.exists()):
        found: list[Any] = []
        if common.collect(train_all(plan), found, len(plan.genomes) * len(plan.seeds)):
            return 130  # a part of the space has no ranks
        common.write(all_members, common.to_csv(found, digits=6))
    members, rows = read(all_members, Member), []
    is_interrupted = False
    if not args.redraw:
        table = {name_of(genome): 0.0 for genome in GENOMES} if args.quick else {}
        is_interrupted = common.collect(search_all(plan, table | means(members)), rows)
        if not rows:
            return 130
        common.write(searches, common.to_csv(rows, digits=6))
    rows = read(searches, Row)
    common.write_table(at.tables / "architectures.md", report(members, rows))
    common.write_picture(at.images / "architectures.svg", figure(members, rows))
    common.show(args, rows, report(members, rows))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
