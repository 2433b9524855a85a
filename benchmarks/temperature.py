"""Which temperature? One small problem for each use of soft top-k, at constant and at annealed temperatures.

Temperatures are given in the unit of each problem: the standard deviation of a row of scores (of a standardised row it
is 1; of a free one it is measured before training), the scale of the noise for samples, and 1 for scores that start at
zero. Whatever is trained, what is measured is the hard choice, unless the row says "used soft". Larger is better.
Writes results/temperature.csv, and the tables and the picture of docs/start/temperature.md.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import layer_norm, mse_loss

import khot
from benchmarks import common
from benchmarks.style import BLUE, GREEN, ORANGE, PINK, panels, styled
from khot.nn import KHotGate, geometric, routing

CONSTANT = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ANNEALED = ((3.0, 0.3), (3.0, 0.03), (1.0, 0.1))
SETTINGS = (*((t, t) for t in CONSTANT), *ANNEALED)
"""Pairs of the first and the last temperature; the way between is geometric and takes 4/5 of the steps."""
SHAPES = ((8, 2), (64, 8), (1024, 32))
WRITTEN = "<!-- Written by benchmarks/temperature.py; do not edit. -->\n\n"
QUICK = ((0.1, 0.1), (1.0, 1.0), (3.0, 0.3))


class Row(NamedTuple):
    """One training."""

    use: str
    start: float
    end: float
    seed: int
    score: float


class Trained(NamedTuple):
    """What a problem gives to the training loop."""

    parameters: list[nn.Parameter]
    loss: Callable[[float, float], Tensor]
    """The loss of a new batch at a temperature and at a fraction of the way."""
    scores: Callable[[float], dict[str, float]]
    """What is measured, at the last temperature: a score for each name, larger is better."""


class Problem(NamedTuple):
    """A use, the name of the setting that it is in, and how it is trained."""

    make: Callable[[torch.Generator], Trained]
    rate: float
    steps: int


def network(*sizes: int) -> nn.Sequential:
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def unit(scores: Tensor, is_standardised: bool) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return what is done to scores, and the unit of the temperature."""
    if is_standardised:
        return (lambda s: layer_norm(s, s.shape[-1:])), 1.0
    return (lambda s: s), float(scores.std(-1).mean())


def variance_explained(guess: Tensor, truth: Tensor) -> float:
    return float(100 * (1 - (guess - truth).square().mean() / truth.var()))


def overlap(scores: Tensor, truth: Tensor, k: int) -> float:
    return float(100 * (khot.hard_topk(scores, k) * truth).sum() / truth.sum())


# ── the uses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def loss_on_top_k(generator: torch.Generator, is_standardised: bool) -> Trained:
    """Learn to rank: the 5 relevant of 50 items shall be on top, by `recall_at_k_loss`."""
    n, k, d = 50, 5, 8
    truth, net = network(d, 16, 1), network(d, 32, 1)

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        items = torch.randn(rows, n, d, generator=generator)
        with torch.no_grad():
            relevance = truth(3 * items)[..., 0]
        relevance = relevance + 0.3 * relevance.std() * torch.randn(rows, n, generator=generator)
        return items, khot.hard_topk(relevance, k)

    test, relevant = draw(500)
    with torch.no_grad():
        treat, scale = unit(net(test)[..., 0], is_standardised)

    def loss(temperature: float, fraction: float) -> Tensor:
        items, target = draw(32)
        return khot.recall_at_k_loss(treat(net(items)[..., 0]), target, k, temperature=scale * temperature).mean()

    return Trained(list(net.parameters()), loss, lambda _: {"": overlap(net(test)[..., 0], relevant, k)})


def straight_through(generator: torch.Generator, is_standardised: bool) -> Trained:
    """Choose 4 of 20 tokens, hard, so that their sum is right; the choice itself is never shown."""
    n, k, d = 20, 4, 8
    truth_net, net = network(d, 16, 1), network(d, 32, 1)

    def draw(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.randn(rows, n, d, generator=generator)
        with torch.no_grad():
            chosen = khot.hard_topk(truth_net(3 * tokens)[..., 0], k)
        return tokens, chosen, (chosen[..., None] * tokens).sum(-2)

    test, truth, _ = draw(1000)
    with torch.no_grad():
        treat, scale = unit(net(test)[..., 0], is_standardised)

    def loss(temperature: float, fraction: float) -> Tensor:
        tokens, _, target = draw(64)
        scores = treat(net(tokens)[..., 0])
        soft = khot.sigmoid_topk(scores, k, temperature=scale * temperature)
        mask = khot.straight_through(khot.hard_topk(scores, k), soft)
        return mse_loss((mask[..., None] * tokens).sum(-2), target)

    return Trained(list(net.parameters()), loss, lambda _: {"": overlap(net(test)[..., 0], truth, k)})


def gate(generator: torch.Generator, is_sampled: bool) -> Trained:
    """Find the 4 of 60 features that a target needs: two of them matter only together. Samples shrink from 60 to 4."""
    n, k = 60, 4
    places = torch.randperm(n, generator=generator)[:k]
    net = network(n, 32, 1)
    layer = KHotGate(n, k) if is_sampled else KHotGate(n, k, design=None)

    def loss(temperature: float, fraction: float) -> Tensor:
        x = torch.randn(128, n, generator=generator)
        a, b, c, d = x[:, places].unbind(-1)
        layer.temperature.fill_(temperature)
        layer.budget.fill_(round(geometric(n, k, fraction)) if is_sampled else k)
        return mse_loss(net(layer(x, generator=generator))[:, 0], a * b + c + 0.7 * d)

    truth = torch.zeros(n).index_fill(0, places, 1.0)

    def scores(_: float) -> dict[str, float]:
        return {"": overlap(layer.scores, truth, k)}

    return Trained([*net.parameters(), *layer.parameters()], loss, scores)


def router(generator: torch.Generator, is_standardised: bool) -> Trained:
    """Eight linear experts, two for each token, on a target with eight regions, each with its own linear function."""
    n, k, d = 8, 2, 4
    centres = nn.functional.normalize(torch.randn(n, d, generator=generator), dim=-1)
    slopes = torch.randn(n, d, generator=generator)
    gate, experts = nn.Linear(d, n), nn.Linear(d, n)  # an expert is a linear function to one number

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, d, generator=generator)
        return x, (slopes[(x @ centres.mT).argmax(-1)] * x).sum(-1)

    test, truth = draw(4000)
    with torch.no_grad():
        treat, scale = unit(gate(test), is_standardised)

    def predict(x: Tensor, temperature: float) -> Tensor:
        route = routing.sigma_topk(treat(gate(x)), k, temperature=scale * temperature, normalize=True)
        return (route.weights * experts(x).gather(-1, route.indices)).sum(-1)

    def loss(temperature: float, fraction: float) -> Tensor:
        x, y = draw(256)
        return mse_loss(predict(x, temperature), y)

    def scores(temperature: float) -> dict[str, float]:
        return {"": variance_explained(predict(test, temperature), truth)}

    return Trained([*gate.parameters(), *experts.parameters()], loss, scores)


def sample(generator: torch.Generator, draw: Callable[..., Tensor]) -> Trained:
    """Choose 8 of 60 columns whose sum comes nearest to a target, by samples of columns, eight each step."""
    n, k, d = 60, 8, 20
    columns = torch.randn(n, d, generator=generator)
    target = columns[torch.randperm(n, generator=generator)[:k]].sum(0) + 0.5 * torch.randn(d, generator=generator)
    theta = nn.Parameter(torch.zeros(n))

    def error(mask: Tensor) -> Tensor:
        return (mask @ columns - target).square().sum(-1) / target.square().sum()

    def loss(temperature: float, fraction: float) -> Tensor:
        return error(draw(theta.expand(8, n), k, temperature=temperature, generator=generator)).mean()

    return Trained([theta], loss, lambda _: {"": 100 - 100 * float(error(khot.hard_topk(theta, k)))})


def attention(generator: torch.Generator, is_standardised: bool) -> Trained:
    """Read the mean value of the 3 of 32 keys that match a query best."""
    n, k, d = 32, 3, 8
    match = torch.randn(d, d, generator=generator) / d**0.5
    query, key = nn.Linear(d, d), nn.Linear(d, d)

    def draw(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, keys = torch.randn(rows, d, generator=generator), torch.randn(rows, n, d, generator=generator)
        values = torch.randn(rows, n, generator=generator)
        chosen = khot.hard_topk((keys @ match @ q[..., None])[..., 0], k)
        return q, keys, values, (chosen * values).sum(-1) / k

    def attend(q: Tensor, keys: Tensor) -> Tensor:
        return (key(keys) @ query(q)[..., None])[..., 0] / d**0.5

    test_q, test_keys, test_values, truth = draw(2000)
    with torch.no_grad():
        treat, scale = unit(attend(test_q, test_keys), is_standardised)

    def read(q: Tensor, keys: Tensor, values: Tensor, temperature: float) -> Tensor:
        weights = khot.sigmoid_topk(treat(attend(q, keys)), k, temperature=scale * temperature) / k
        return (weights * values).sum(-1)

    def loss(temperature: float, fraction: float) -> Tensor:
        q, keys, values, target = draw(128)
        return mse_loss(read(q, keys, values, temperature), target)

    def scores(temperature: float) -> dict[str, float]:
        soft = read(test_q, test_keys, test_values, temperature)
        hard = (khot.hard_topk(attend(test_q, test_keys), k) * test_values).sum(-1) / k
        return {
            ", used soft": variance_explained(soft, truth),
            ", used hard": variance_explained(hard, truth),
        }

    return Trained([*query.parameters(), *key.parameters()], loss, scores)


def each_scale(use: str, make: Callable[..., Trained], rate: float, steps: int) -> dict[str, Problem]:
    kinds = {"standardised": True, "free": False}
    return {f"{use}, {kind}": Problem(partial(make, is_standardised=v), rate, steps) for kind, v in kinds.items()}


PROBLEMS: dict[str, Problem] = {
    **each_scale("loss", loss_on_top_k, 0.003, 300),
    **each_scale("straight-through", straight_through, 0.003, 500),
    "gate, sampled": Problem(partial(gate, is_sampled=True), 0.01, 400),
    "gate, soft": Problem(partial(gate, is_sampled=False), 0.01, 400),
    **each_scale("router", router, 0.03, 500),
    "sample_khot": Problem(partial(sample, draw=khot.sample_khot), 0.05, 500),
    "sample_relaxed_khot": Problem(partial(sample, draw=khot.sample_relaxed_khot), 0.05, 500),
    "sample_relaxed_khot, hard": Problem(partial(sample, draw=partial(khot.sample_relaxed_khot, hard=True)), 0.05, 500),
    **each_scale("attention", attention, 0.01, 500),
}


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(problem: Problem, start: float, end: float, seed: int, steps: int) -> dict[str, float]:
    """Train once, with Adam, and measure."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        trained = problem.make(torch.Generator().manual_seed(seed))
        adam = torch.optim.Adam(trained.parameters, lr=problem.rate)
        for step in range(steps):
            fraction = min(1.0, step / (0.8 * steps))
            loss = trained.loss(geometric(start, end, fraction), fraction)
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            return trained.scores(end)


def run(seeds: int, settings: Sequence[tuple[float, float]], share: float) -> Iterator[Row]:
    for use, problem in PROBLEMS.items():
        for seed in range(seeds):
            for start, end in settings:
                measured = train(problem, start, end, seed, max(5, round(share * problem.steps)))
                for name, score in measured.items():
                    yield Row(use + name, start, end, seed, score)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def label(setting: tuple[float, float]) -> str:
    return f"{setting[0]:g}" if setting[0] == setting[1] else f"{setting[0]:g} → {setting[1]:g}"


def table(rows: Sequence[Row]) -> str:
    """Uses × settings: means and standard errors over seeds, in bold what cannot be told from the best."""
    settings = list(dict.fromkeys((row.start, row.end) for row in rows))
    lines = [["use", *map(label, settings)]]
    for use in dict.fromkeys(row.use for row in rows):
        scores = {s: _scores(rows, use, s) for s in settings}
        good = near_best(scores)
        cells = []
        for setting in settings:
            mean, error = common.mean_and_error(scores[setting])
            mark = "**" if setting in good else ""
            cells.append(f"{mark}{mean:.1f}{mark} ± {error:.1f}")
        lines.append([use, *cells])
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return f"{WRITTEN}{head}\n| :--- |{' ---: |' * len(settings)}\n" + "\n".join(body) + "\n"


def near_best(scores: dict[tuple[float, float], list[float]]) -> list[tuple[float, float]]:
    """Return the settings whose mean is within two standard errors of the best one's, compared seed by seed."""
    best = max(scores, key=lambda s: sum(scores[s]))
    result = []
    for setting, values in scores.items():
        mean, error = common.mean_and_error([b - v for b, v in zip(scores[best], values, strict=True)])
        if setting == best or mean <= 2 * error:
            result.append(setting)
    return result


def _scores(rows: Sequence[Row], use: str, setting: tuple[float, float]) -> list[float]:
    return [row.score for row in rows if row.use == use and (row.start, row.end) == setting]


def hardness(rows: int = 2000) -> str:
    """Return how hard σ_k is at a temperature, for normal scores and without training."""
    lines = ["| T / std | " + " | ".join(f"n = {n}, k = {k}" for n, k in SHAPES) + " |", "| ---: " * 4 + "|"]
    for temperature in CONSTANT:
        cells = []
        for n, k in SHAPES:
            x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
            y = khot.sigmoid_topk(x, k, temperature=temperature)
            share = (y * khot.hard_topk(x, k)).sum(-1).mean() / k
            between = ((y > 0.05) & (y < 0.95)).sum(-1).float().mean()
            cells.append(f"{100 * share:.0f} %, {between:.1f}")
        lines.append(f"| {temperature:g} | " + " | ".join(cells) + " |")
    return WRITTEN + "\n".join(lines) + "\n"


@styled
def figure(rows: Sequence[Row]) -> Figure:
    """How hard σ_k is at a temperature, and what a constant temperature loses against the best one, by use."""
    picture, ((left, *others),) = panels(1, 3, 4.4)
    sweep = torch.logspace(-2, 1, 61)
    for (n, k), color in zip(SHAPES, (BLUE, ORANGE, GREEN), strict=True):
        x = torch.randn(500, 1, n, generator=torch.Generator().manual_seed(0))
        y = khot.sigmoid_topk(x.expand(-1, len(sweep), -1), k, temperature=sweep)
        left.plot(sweep, 100 * (y * khot.hard_topk(x, k)).sum(-1).mean(0) / k, color=color, label=f"n = {n}, k = {k}")
    left.set(title="how hard is the choice?", ylabel="% held by the k best entries", ylim=(0, 102))
    left.legend(loc="lower left", handlelength=1.2)
    uses = {
        "loss": BLUE,
        "straight-through": ORANGE,
        "router": GREEN,
        "attention": PINK,
    }
    for axes, kind in zip(others, ("free", "standardised"), strict=True):
        for use, color in uses.items():
            name = f"{use}, {kind}" + (", used soft" if use == "attention" else "")
            means = [common.mean_and_error(_scores(rows, name, (t, t)))[0] for t in CONSTANT]
            axes.plot(CONSTANT, [mean - max(means) for mean in means], "o-", color=color, label=use, markersize=4)
        axes.set(title=f"{kind} scores", ylim=(-42, 2), yticks=(-40, -30, -20, -10, 0))
        axes.grid(True, axis="y")
    others[0].set_ylabel("points lost against the best T")
    others[0].legend(loc="lower center")
    for axes in (left, *others):
        axes.set(xscale="log", xlabel="T / standard deviation")
        axes.set_xticks((0.01, 0.1, 1, 10), ("0.01", "0.1", "1", "10"))
    return picture


def read(path: Path = common.COMMITTED.results / "temperature.csv") -> list[Row]:
    """Return the committed rows."""
    with path.open(encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return [Row(use, float(start), float(end), int(seed), float(score)) for use, start, end, seed, score in rows]


def main() -> int:
    parser = common.parser(__doc__, "two seeds, three settings, a fiftieth of the steps")
    parser.add_argument("--redraw", action="store_true", help="write the tables and the picture of the committed rows")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="trainings of each (8)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, settings, share = (2, QUICK, 0.02) if args.quick else (args.seeds, SETTINGS, 1.0)
    rows: list[Row] = read() if args.redraw else []
    is_interrupted = not args.redraw and common.collect(run(seeds, settings, share), rows)
    places = common.places(args, is_partial=is_interrupted)
    common.write(places.results / "temperature.csv", common.to_csv(rows, digits=6))
    text = table(rows)
    common.write_table(places.tables / "temperature.md", text)
    common.write_table(places.tables / "temperature-hardness.md", hardness())
    if set(CONSTANT) <= {start for start, _ in settings}:
        common.write_picture(places.images / "temperature-uses.svg", figure(rows))
    common.show(args, rows, text)
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
