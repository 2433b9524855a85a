"""Statistical top-k and Spark layers: how many entries are kept, how fast, and what a language model loses.

    python -m benchmarks.spark [TEXT]

Three parts, each with a CSV in results/ and a table in docs/tables/. `spark-counts`: entries kept of 8 %, by
distribution. `spark-model`: character models of two layers whose FFNs have different gates, three seeds, on a text
(default: examples/shakespeare.txt). `spark-speed`: the operator beside torch.topk and torch.sigmoid, and a decoding
step of SparkFFN and SparkAttention beside dense layers, one thread, interleaved, medians. `--part NAME` runs one of
them. About ten minutes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention, silu

import khot
from benchmarks import common
from khot.bench import markdown_table
from khot.nn import SparkAttention, SparkCache, SparkFFN

SHARE = 0.08
WIDTH, HEADS, LENGTH, BATCH, NEURONS = 64, 2, 64, 16, 384
TEXT = common.ROOT / "examples" / "shakespeare.txt"


class Plan(NamedTuple):
    """How much to do."""

    rows: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 300
    sizes: tuple[int, ...] = (10**3, 10**4, 10**5, 10**6)
    layers: int = 8
    rounds: int = 41
    width: int = 1024
    keys: int = 16384


QUICK = Plan(rows=20, seeds=(0,), steps=3, sizes=(1000,), layers=2, rounds=3, width=64, keys=256)


# ── how many entries are kept ────────────────────────────────────────────────────────────────────────────────────────
class Count(NamedTuple):
    """Entries kept of rows of one distribution."""

    law: str
    n: int
    k: int
    mean: float
    sd: float
    newton_mean: float
    newton_sd: float
    exact_low: int
    exact_high: int


def newton(x: Tensor, k: int) -> Tensor:
    """Return statistical top-k with two Newton corrections of θ on the count, by the normal density at θ."""
    theta, mean = khot.statistical_threshold(x, k).unsqueeze(-1), x.mean(-1, keepdim=True)
    deviation = (x - mean).square().mean(-1, keepdim=True).sqrt()
    for _ in range(2):
        density = torch.exp(-((theta - mean) / deviation).square() / 2) / (deviation * math.sqrt(2 * math.pi))
        theta = theta + ((x > theta).sum(-1, keepdim=True) - k) / (x.shape[-1] * density)
    return (x - theta).relu()


def drawn(law: str, rows: int, n: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, n, generator=random)
    if law == "normal":
        return normal
    if law == "Laplace":
        return normal.sign() * -torch.rand(rows, n, generator=random).clamp(min=1e-12).log()
    if law == "uniform":
        return torch.rand(rows, n, generator=random)
    return normal / (torch.randn(3, rows, n, generator=random).square().mean(0)).sqrt()  # Student's t, 3 degrees


def counts(plan: Plan) -> Iterator[Count]:
    for law, n in (
        ("normal", 2048),
        ("normal", 16384),
        *((law, 2048) for law in ("uniform", "Laplace", "Student t(3)")),
    ):
        k = round(SHARE * n)
        kept, corrected, exact = [], [], []
        for part in drawn(law, max(plan.rows // (n // 2048), 2), n).split(200):
            kept.append((khot.statistical_topk(part, k) > 0).sum(-1))
            corrected.append((newton(part, k) > 0).sum(-1))
            exact.append((khot.statistical_topk(part, k, exact=True) > 0).sum(-1))
        spread = [float(f(torch.cat(found).double())) for found in (kept, corrected) for f in (torch.mean, torch.std)]
        sure = torch.cat(exact)
        yield Count(law, n, k, *spread, int(sure.min()), int(sure.max()))


def counts_table(rows: list[Any]) -> str:
    lines = [
        [
            row.law,
            str(row.n),
            str(row.k),
            f"{row.mean:.1f} ± {row.sd:.1f}",
            f"{100 * row.mean / row.n:.1f} %",
            f"{row.newton_mean:.1f} ± {row.newton_sd:.1f}",
            sure(row),
        ]
        for row in rows
    ]
    heading = ["scores", "n", "k", "kept (± sd)", "share", "two Newton steps", "with `exact`"]
    return markdown_table(heading, lines) + "\n"


def sure(row: Any) -> str:
    return f"{row.exact_low}" if row.exact_low == row.exact_high else f"{row.exact_low} to {row.exact_high}"


# ── character models ─────────────────────────────────────────────────────────────────────────────────────────────────
class Loss(NamedTuple):
    """One training of a character model."""

    gate: str
    seed: int
    parameters: int
    loss: float
    density_1: float
    density_2: float
    seconds: float


def sigma(x: Tensor, k: int) -> Tensor:
    """GELU of the k largest, straight through σ_k."""
    soft = khot.sigmoid_topk(x, k, temperature=0.5)
    return gelu(x) * khot.straight_through(khot.hard_topk(x, k), soft)


GATES: dict[str, Callable[[Tensor, int], Tensor] | None] = {
    "GELU, dense": lambda x, k: gelu(x),
    "ReLU": lambda x, k: x.relu(),
    "ReLU²": lambda x, k: x.relu().square(),
    "exact top-k": lambda x, k: gelu(khot.statistical_topk(x, k, exact=True)),
    "statistical top-k": lambda x, k: gelu(khot.statistical_topk(x, k)),
    "σ_k": sigma,
    "Spark FFN": None,
}


class Gated(nn.Module):
    """A gated FFN with one of the gates."""

    def __init__(self, gate: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.gate, self.k = gate, round(SHARE * NEURONS)
        self.inside, self.out = nn.Linear(WIDTH, 2 * NEURONS, bias=False), nn.Linear(NEURONS, WIDTH, bias=False)

    def active(self, x: Tensor) -> Tensor:
        """Return which neurons are not 0."""
        return self.gate(self.inside(x)[..., :NEURONS], self.k) != 0

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, d) to (…, d)."""
        scores, up = self.inside(x).chunk(2, -1)
        return self.out(self.gate(scores, self.k) * up)


def ffn(gate: str) -> nn.Module:
    fn = GATES[gate]
    if fn is not None:
        return Gated(fn)
    wide = NEURONS * 3 // 2  # as many parameters
    return SparkFFN(WIDTH, wide, round(SHARE * wide))


class Language(nn.Module):
    """A causal character model of two blocks."""

    def __init__(self, symbols: int, gate: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(symbols, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.ffns = nn.ModuleList(ffn(gate) for _ in range(2))
        self.head = nn.Linear(WIDTH, symbols, bias=False)

    def forward(self, ids: Tensor, densities: list[float] | None = None) -> Tensor:
        """Return logits; append the share of active neurons of each layer."""
        x = self.embed(ids) + self.places.weight
        for i in range(2):
            q, k, v = self.mixes[i](self.norms[2 * i](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.outs[i](scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            h = self.norms[2 * i + 1](x)
            if densities is not None:
                densities.append(float(self.ffns[i].active(h).float().mean()))
            x = x + self.ffns[i](h)
        return self.head(self.norms[4](x))


def learn(ids: Tensor, symbols: int, gate: str, seed: int, steps: int) -> Loss:
    torch.manual_seed(seed)
    model = Language(symbols, gate)
    cut = len(ids) * 9 // 10
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=max(steps, 2))
    window, start = torch.arange(LENGTH + 1), time.process_time()
    for _ in range(steps):
        batch = ids[torch.randint(cut - LENGTH - 1, (BATCH, 1)) + window]
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        falling.step()
    seconds = time.process_time() - start
    held = ids[cut : cut + (len(ids) - cut - 1) // LENGTH * LENGTH].view(-1, LENGTH)[:256]
    following = ids[cut + 1 : cut + 1 + held.numel()].view(-1, LENGTH)
    densities: list[float] = []
    with torch.no_grad():
        loss = cross_entropy(model(held, densities).flatten(0, 1), following.flatten())
    size = sum(p.numel() for p in model.ffns.parameters())
    return Loss(gate, seed, size, float(loss), *densities, seconds)


def models(plan: Plan, text: Path) -> Iterator[Loss]:
    characters = text.read_text(encoding="utf-8")
    alphabet = sorted(set(characters))
    ids = torch.tensor([alphabet.index(c) for c in characters])
    for gate in GATES:
        for seed in plan.seeds:
            yield learn(ids, len(alphabet), gate, seed, plan.steps)


def models_table(rows: list[Any]) -> str:
    lines = []
    for gate in dict.fromkeys(row.gate for row in rows):
        mine = [row for row in rows if row.gate == gate]
        loss = "{:.3f} ± {:.3f}".format(*common.mean_and_error([row.loss for row in mine]))
        dense = [common.mean_and_error([getattr(row, f"density_{i}") for row in mine])[0] for i in (1, 2)]
        lines.append([gate, loss, *(f"{100 * d:.1f} %" for d in dense), str(mine[0].parameters)])
    return markdown_table(["gate", "loss, nats", "active, layer 1", "layer 2", "FFN parameters"], lines) + "\n"


# ── speed ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Time(NamedTuple):
    """The median time of a call, and its ratio to the reference of its group."""

    group: str
    case: str
    microseconds: float
    ratio: float
    reference: str


def timed(group: str, calls: dict[str, Callable[[int], Any]], rounds: int) -> Iterator[Time]:
    """Yield the medians of calls made in turn; the first is the reference. A call is given the number of the round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            times[name].append(time.perf_counter() - start)
    medians = {name: 1e6 * median(found[2:]) for name, found in times.items()}
    reference = next(iter(calls))
    for name, value in medians.items():
        yield Time(group, name, value, medians[reference] / value, reference)


def gated(weights: list[tuple[Tensor, Tensor, Tensor]], x: Tensor, i: int) -> Tensor:
    gate, up, down = weights[i % len(weights)]
    return linear(silu(linear(x, gate)) * linear(x, up), down)


@torch.inference_mode()
def speeds(plan: Plan) -> Iterator[Time]:
    torch.manual_seed(0)
    for n in plan.sizes:
        x, k = torch.randn(n), round(SHARE * n)
        calls = {
            "torch.topk": lambda i, x=x, k=k: x.topk(k),
            "torch.sigmoid": lambda i, x=x: x.sigmoid(),
            "statistical_topk": lambda i, x=x, k=k: khot.statistical_topk(x, k),
            "statistical_topk, two Newton steps in torch": lambda i, x=x, k=k: newton(x, k),
            "statistical_topk, exact": lambda i, x=x, k=k: khot.statistical_topk(x, k, exact=True),
            "hard_topk": lambda i, x=x, k=k: khot.hard_topk(x, k),
        }
        yield from timed(f"operator, n = {n}", calls, plan.rounds)
    d = plan.width
    dense, wide = 4 * d, 6 * d  # as many parameters: 3·d·4d = 2·d·6d
    layers = [SparkFFN(d, wide, round(SHARE * wide), few=64) for _ in range(plan.layers)]
    plain = [SparkFFN(d, wide, round(SHARE * wide), few=0) for _ in range(1)]
    weights = [
        (torch.randn(dense, d) / d**0.5, torch.randn(dense, d) / d**0.5, torch.randn(d, dense) / dense**0.5)
        for _ in range(plan.layers)
    ]
    for tokens in (1, 2, 4, 8, 16):
        x = torch.randn(tokens, d)
        calls = {
            f"gated FFN, {dense} neurons": partial(gated, weights, x),
            f"SparkFFN, {wide} neurons, sparse": lambda i, x=x: layers[i % len(layers)](x),
        }
        if tokens == 1:
            calls[f"gated FFN, {dense} neurons, one layer again and again"] = lambda i, x=x: gated(weights, x, 0)
            calls[f"SparkFFN, {wide} neurons, one layer again and again"] = lambda i, x=x: layers[0](x)
        else:
            calls[f"SparkFFN, {wide} neurons, dense, one layer"] = lambda i, x=x: plain[0](x)
        yield from timed(f"FFN, width {d}, {tokens} token{'s' if tokens > 1 else ''}", calls, plan.rounds)
    heads, width = 8, d // 8
    attention, cache = SparkAttention(d, heads, 256, is_causal=True), SparkCache()
    first, second, v = torch.randn(1, heads, plan.keys, 2 * width).split([width // 2, width // 2, width], -1)
    cache.append(first, second, v)
    x, key, value = torch.randn(1, 1, d), *(torch.randn(1, heads, plan.keys, width) for _ in range(2))

    def step(i: int) -> Tensor:
        return attention(x, cache=cache)

    def usual(i: int) -> Tensor:
        q, *_ = (p(x) for p in (attention.query, attention.key, attention.value))
        y = scaled_dot_product_attention(q.view(1, heads, 1, width), key, value)
        return attention.out(y.view(1, 1, d))

    name = f"attention step, {plan.keys} keys, {heads} heads"
    yield from timed(name, {"projections and SDPA": usual, "SparkAttention, k = 256": step}, plan.rounds)


def speeds_table(rows: list[Any]) -> str:
    parts = []
    operator = [row for row in rows if row.group.startswith("operator")]
    sizes = list(dict.fromkeys(row.group for row in operator))
    cases = list(dict.fromkeys(row.case for row in operator))
    at = {(row.group, row.case): row.microseconds for row in operator}
    lines = [[case, *(f"{at[size, case]:.3g}" for size in sizes)] for case in cases]
    parts.append(markdown_table(["µs", *(size.removeprefix("operator, ") for size in sizes)], lines))
    others = [row for row in rows if not row.group.startswith("operator")]
    lines = [[row.group, row.case, f"{row.microseconds:.0f}", f"{row.ratio:.2f} ×"] for row in others]
    parts.append(markdown_table(["step", "layer", "µs", "speed"], lines))
    return "\n\n".join(parts) + "\n"


PARTS: dict[str, tuple[Callable[..., Iterator[Any]], Callable[[list[Any]], str]]] = {
    "spark-counts": (lambda plan, text: counts(plan), counts_table),
    "spark-model": (models, models_table),
    "spark-speed": (lambda plan, text: speeds(plan), speeds_table),
}


def main() -> int:
    parser: argparse.ArgumentParser = common.parser(__doc__, "few rows, one seed, three steps, small layers")
    parser.add_argument("text", nargs="?", type=Path, default=TEXT, help="any text file")
    parser.add_argument("--part", choices=list(PARTS), help="default: all")
    args = parser.parse_args()
    plan, at = QUICK if args.quick else Plan(), common.places(args)
    torch.set_num_threads(1)
    everything: list[Any] = []
    tables: list[str] = []
    for name in [args.part] if args.part else PARTS:
        make, table = PARTS[name]
        rows: list[Any] = []
        is_interrupted = common.collect(make(plan, args.text), rows)
        if is_interrupted:  # a part is written whole or not at all
            return 130
        common.write(at.results / f"{name}.csv", common.to_csv(rows, digits=6))
        rows = common.read_rows(at.results / f"{name}.csv")
        common.write_table(at.tables / f"{name}.md", table(rows))
        everything += [vars(row) for row in rows]
        tables.append(table(rows))
    common.show(args, everything, "\n".join(tables))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
