"""Which router in a language model? A small transformer of characters with experts, the same compute for every router.

Two layers of 64, 8 experts of 64 → 128 → 64 in each, k = 1 and k = 2: each router sees the same batches of the same
text, for as many steps. The loss is that of the last tenth of the text, which no router was trained on. Nothing is
tuned: all have temperature 1, a weight of the balance of 0.01 (a rate of the bias of 0.001), and one learning rate.
Every run is appended to results/moe_text.csv as it ends, and a second start continues. Writes docs/tables/moe-text.md.
An hour, one thread.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks import common
from benchmarks.common import mean_and_error
from benchmarks.moe_problems import EXPERTS, ROUTERS, Contender, share_after
from khot.bench import markdown_table
from khot.nn import MoE, Router
from khot.nn import routing as r

TEXT = common.ROOT / "examples" / "shakespeare.txt"
DIM, HIDDEN, HEADS, LAYERS, CONTEXT, BATCH, RATE = 64, 128, 4, 2, 64, 16, 3e-3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    seeds: tuple[int, ...]
    steps: int


FULL = Plan(seeds=(0, 1, 2), steps=500)
QUICK = Plan(seeds=(0,), steps=5)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run; the fields are the columns of the CSV."""

    k: int
    router: str
    seed: int
    steps: int
    loss: float
    """Nats for each character of the held-out text."""
    violation: float
    """MaxVio, the mean over layers."""
    dead: int
    """Experts without a token, in all layers."""
    active: float
    """Experts a token."""


def by_position(logits: Tensor, k: int) -> r.Routing:
    """Expert choice among the tokens at the same place of all sequences: no token sees a later one.

    `khot.nn.routing.expert_choice` chooses among all tokens of a call, so that later tokens decide about earlier ones.
    """
    n = logits.shape[-1]
    probs = logits.softmax(-1)
    places = probs.unflatten(0, (-1, CONTEXT))  # (sequences, places, n)
    best = places.detach().topk(-(-k * len(places) // n), 0).indices
    taken = torch.zeros_like(places, dtype=torch.bool).scatter_(0, best, True).flatten(0, 1)
    order = torch.where(taken, probs.detach(), -1.0).topk(int(taken.sum(-1).max()), -1).indices
    is_taken = taken.gather(-1, order)
    return r.Routing(logits, probs.gather(-1, order) * is_taken, torch.where(is_taken, order, n), probs)


CONTENDERS = {name: each for name, each in ROUTERS.items() if name != "expert_choice"} | {
    "expert_choice, by position": Contender(lambda k: by_position),
    "sigma_topk, bias": Contender(lambda k: partial(r.sigma_topk, normalize=k > 1), biased=True),
}
NOT_CAUSAL = tuple(name for name in CONTENDERS if name.startswith("balanced"))


class Block(nn.Module):
    """Causal attention, then a mixture of experts."""

    def __init__(self, contender: Contender | None, k: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        if contender is None:
            self.experts = _expert(k)
        else:
            experts, share = [_expert(1) for _ in range(EXPERTS)], 0.0 if contender.late else None
            router = Router(DIM, EXPERTS, k, route=contender.route(k), biased=contender.biased, share=share)
            self.experts = MoE(router, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, r.Routing | None]:
        """(sequences, places, dim) → the same, and the routing."""
        parts = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).movedim((2, 3), (0, 2))
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.movedim(1, 2).flatten(2))
        found = self.experts(self.between(x))
        return (x + found, None) if isinstance(found, Tensor) else (x + found.output, found.routing)


def _expert(k: int) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, k * HIDDEN), nn.GELU(), nn.Linear(k * HIDDEN, DIM))


class Characters(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, vocabulary: int, contender: Contender | None, k: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block(contender, k) for _ in range(LAYERS))
        self.last, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, vocabulary)

    def forward(self, x: Tensor) -> tuple[Tensor, list[r.Routing]]:
        """Characters (sequences, places) → scores of the next ones, and the routings of the layers."""
        hidden, routings = self.tokens(x) + self.places.weight, []
        for block in self.blocks:
            hidden, routing = block(hidden)
            routings.append(routing)
        return self.head(self.last(hidden)), [each for each in routings if each is not None]


def run_one(text: Tensor, name: str, k: int, seed: int, steps: int, first: int | None = None) -> Row:
    """Train and test one model, if wished on the first characters alone."""
    training, held = text[: -(len(text) // 10)][:first], text[-(len(text) // 10) :]
    torch.manual_seed(seed)
    contender = CONTENDERS.get(name)
    model = Characters(int(text.max()) + 1, contender, k)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if contender is not None and contender.late:
            for block in model.blocks:
                block.experts.router.share.fill_(share_after(step * BATCH * CONTEXT / len(training)))
        starts = torch.randint(len(training) - CONTEXT, (BATCH,), generator=generator)
        window = training[starts[:, None] + torch.arange(CONTEXT + 1)]
        scores, routings = model(window[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        for block, routing in zip(model.blocks, routings, strict=False):
            if contender.biased:
                r.update_bias(block.experts.router.bias, routing, rate=0.001)
            if contender.cure:
                loss = loss + 0.01 * contender.cure(routing)
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return Row(k=k, router=name, seed=seed, steps=steps, **test(model, held))


@torch.no_grad()
def test(model: Characters, held: Tensor) -> dict[str, float]:
    """Loss and load on all of the held-out text, in batches as in training."""
    model.eval()
    count = (len(held) - 1) // CONTEXT // BATCH * BATCH
    x, y = (held[i : i + count * CONTEXT].view(-1, BATCH, CONTEXT) for i in (0, 1))
    losses, loads = [], []
    for inputs, targets in zip(x, y, strict=True):
        scores, routings = model(inputs)
        losses.append(float(cross_entropy(scores.flatten(0, 1), targets.flatten())))
        if routings:
            loads.append(torch.stack([r.load(each) for each in routings]))
    if not loads:
        return {"loss": fmean(losses), "violation": 0.0, "dead": 0, "active": 0.0}
    load = torch.stack(loads).sum(0).double()  # (layers, experts)
    return {
        "loss": fmean(losses),
        "violation": float((load.amax(-1) / load.mean(-1) - 1).mean()),
        "dead": int((load == 0).sum()),
        "active": float(load.sum()) / (LAYERS * count * CONTEXT),
    }


def run(
    text: Tensor, plan: Plan, known: Sequence[Row], first: int | None = None, only: Sequence[str] = ()
) -> Iterator[Row]:
    """Seed by seed, so that all routers have as many runs, but for those that are known."""
    done = {(row.k, row.seed, row.router) for row in known}
    for seed, k in product(plan.seeds, (2, 1)):
        for name in ("dense", *(name for name, each in CONTENDERS.items() if each.least <= k)):
            if (k, seed, name) not in done and (not only or name in only):
                yield run_one(text, name, k, seed, plan.steps, first)


def encode(text: str) -> Tensor:
    """Characters as numbers."""
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def table(rows: Sequence[Row], characters: int) -> str:
    """One for each k, the least loss first."""
    parts = ["<!-- Written by benchmarks/moe_text.py; do not edit. -->"]
    for k in sorted({row.k for row in rows}):
        of: dict[str, list[Row]] = {}
        for row in rows:
            if row.k == k:
                of.setdefault(row.router, []).append(row)
        order = sorted(of, key=lambda name: fmean(row.loss for row in of[name]))
        best = next(name for name in order if name != "dense" and fmean(row.active for row in of[name]) <= k + 0.01)
        heading = ["", "loss", "minus the first's", "MaxVio", "dead experts", "experts a token", "seeds"]
        lines = [_line(name, of[name], of[best]) for name in order]
        parts += [f"**Text, k = {k} of {EXPERTS}**", markdown_table(heading, lines)]
    steps = max(row.steps for row in rows)
    parts.append(
        f"Nats for each held-out character; {steps} steps of {BATCH} × {CONTEXT} characters, of a text of "
        f"{characters}. “dense” is one expert of {HIDDEN}·k hidden units, the arithmetic of k experts. Differences are "
        "paired by seed, ± a standard error, to the first router of k experts a token; one of more has more compute. "
        "† looks at all tokens of a batch for the prices of its experts, so it is not causal."
    )
    return "\n\n".join(parts) + "\n"


def _line(name: str, rows: Sequence[Row], first: Sequence[Row]) -> list[str]:
    mean, error = mean_and_error([row.loss for row in rows])
    theirs = {row.seed: row.loss for row in first}
    gaps = [row.loss - theirs[row.seed] for row in rows if row.seed in theirs]
    gap = "–" if rows is first else "{:.3f} ± {:.3f}".format(*mean_and_error(gaps))
    if name == "dense":
        return [name, f"{mean:.3f} ± {error:.3f}", gap, "–", "–", "–", str(len(rows))]
    means = (fmean(getattr(row, m) for row in rows) for m in ("violation", "dead", "active"))
    mark = " †" if name in NOT_CAUSAL else ""
    return [f"`{name}`{mark}", f"{mean:.3f} ± {error:.3f}", gap, *(f"{value:.2f}" for value in means), str(len(rows))]


def from_csv(text: str) -> list[Row]:
    """The rows again."""
    kinds = {"str": str, "int": int, "float": float}
    types = {f.name: kinds[str(f.type)] for f in fields(Row)}
    return [Row(**{k: types[k](v) for k, v in line.items()}) for line in csv.DictReader(io.StringIO(text))]


def main() -> int:
    parser = common.parser(__doc__, "one seed, 5 steps, nothing tuned: under a minute")
    parser.add_argument("text", type=Path, nargs="?", default=TEXT, help="any text; default: examples/shakespeare.txt")
    parser.add_argument("--redraw", action="store_true", help="only the table, from the CSV there is")
    parser.add_argument("--first", type=int, metavar="N", help="train on the first N characters alone; to out/")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROUTER", help="these routers alone; to out/")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="these seeds instead; to out/")
    args = parser.parse_args()
    is_partial = args.first is not None or bool(args.only or args.seeds)
    places = common.places(args, is_partial)
    torch.set_num_threads(1)
    path, names = places.results / "moe_text.csv", [field.name for field in fields(Row)]
    text = encode(args.text.read_text(encoding="utf-8"))
    rows = from_csv(path.read_text(encoding="utf-8")) if path.exists() and not (args.quick or is_partial) else []
    plan = QUICK if args.quick else FULL
    plan = replace(plan, seeds=tuple(args.seeds)) if args.seeds else plan
    for row in () if args.redraw else run(text, plan, tuple(rows), args.first, args.only):
        rows.append(row)
        common.write(path, common.to_csv(rows, names, digits=6))
        print(f"k = {row.k}, {row.router}, seed {row.seed}: {row.loss:.3f}", file=sys.stderr, flush=True)
    common.write_table(places.tables / "moe-text.md", table(rows, len(text)))
    common.show(args, rows, table(rows, len(text)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
