"""Which way to drop tokens? A small transformer that must find four tokens of 32, and digits as 16 patches.

Each token passes a small network of its own, then three blocks; before each block tokens are dropped, so that what is
not chosen at first is lost. All methods have the same network, optimiser and steps, train with dropped tokens masked
(`khot.nn.tokens.weighted_attention`), and are told the mean share of tokens that the blocks may see. σ_k and the
straight-through estimator score tokens by a learned linear map; DTop-K (our re-implementation, rivals/tokens.py) and
attention scores by what the class token attends to. Writes results/tokens.csv, docs/tables/tokens.md and
docs/img/tokens.svg; a quarter of an hour on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.rivals.tokens import dtopk
from benchmarks.style import BLUE, GOLD, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, styled
from khot import hard_topk, straight_through
from khot.bench import markdown_table
from khot.nn import TokenBudget, TokenPruner
from khot.nn.tokens import weighted_attention

WIDTH, HEADS, STAGES = 32, 2, 3
RATE, COUNT_RATE, BATCH = 3e-3, 3e-2, 64


class Row(NamedTuple):
    """One training; the fields are the columns of the CSV."""

    problem: str
    method: str
    share: float
    seed: int
    accuracy: float
    kept: float
    counts: str
    off: float
    seconds: float


class Data(NamedTuple):
    """Tokens (rows, n, d) and classes (rows,) to learn from and to test on."""

    train: Tensor
    train_y: Tensor
    test: Tensor
    test_y: Tensor
    classes: int


def find(seed: int) -> Data:
    """Return the problem of the relevant tokens: four of 32 have two marks of equal sign, and their symbols count.

    A token is (mark, mark, symbol of 8, noise); the class is the symbol that most of the four share, and no score that
    is linear in a token tells relevant ones from others.
    """
    random = torch.Generator().manual_seed(1000 + seed)
    rows, n, relevant, symbols = 6000, 32, 4, 8
    y = torch.randint(symbols, (rows,), generator=random)
    symbol = torch.randint(symbols, (rows, n), generator=random)
    place = torch.rand(rows, n, generator=random).argsort(-1)
    is_relevant = place < relevant
    symbol = torch.where(place < 3, y[:, None], symbol)  # three of the four
    sign = 2.0 * torch.randint(2, (rows, n), generator=random) - 1
    marks = torch.stack([sign, torch.where(is_relevant, sign, -sign)], -1)
    x = torch.cat([marks, nn.functional.one_hot(symbol, symbols), torch.zeros(rows, n, 2)], -1)
    x = x + 0.2 * torch.randn(x.shape, generator=random)
    return Data(x[:4000], y[:4000], x[4000:], y[4000:], symbols)


def digits(seed: int) -> Data:
    """Return scikit-learn's digits as 16 patches of 2 × 2; a quarter is tested on."""
    x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
    x = (x.float() / 16).view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = len(x) * 3 // 4
    return Data(x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]], 10)


class Problem(NamedTuple):
    """What to learn, and how much of it to do."""

    data: Callable[[int], Data]
    steps: int
    shares: tuple[float, ...]
    methods: tuple[str, ...]
    seeds: range = range(5)

    def quick(self) -> Problem:
        """Return little of it."""
        return self._replace(steps=5, shares=(0.25,), seeds=range(1))


DIGITS, WARM = "digits, 16 patches", "σ_k, learned counts, T = 2"
USUAL = ("all tokens", "σ_k, learned counts", "hard-STE", "DTop-K", "attention score", "random")
PROBLEMS = {
    "find 4 of 32": Problem(find, 600, (0.25, 0.125), USUAL),
    DIGITS: Problem(digits, 400, (0.5, 0.25, 0.125), (*USUAL, "σ_k, equal counts")),
}


class Block(nn.Module):
    """A pre-norm block whose keys have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values, (3, batch, heads, n, ·)."""
        return self.mix(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def looked_at(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return how much the class token attends to each token, (batch, n), with a light attention of its own."""
        q, k, v = self.project(x)
        return weighted_attention(q[:, :, :1], k, v, weights)[1][:, :, 0].mean(1)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Map tokens (batch, n, d), keys with weights (batch, n)."""
        x = x + self.out(weighted_attention(*self.project(x), weights)[0].transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Encoder(nn.Module):
    """A small ViT: a network for each token, a class token, positions, three blocks, a chooser before each."""

    def __init__(self, data: Data, chooser: nn.Module | None) -> None:
        super().__init__()
        n, d = data.train.shape[1:]
        self.embed = nn.Sequential(nn.Linear(d, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, data.classes)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, n + 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))
        self.chooser = chooser

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the tokens that each block sees, (batch, n)."""
        h = torch.cat([self.start.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        weights, seen = h.new_ones(h.shape[:2]), []
        for stage, block in enumerate(self.blocks):
            if self.chooser is not None:
                looked_at = block.looked_at(h, weights) if self.chooser.attends else None
                weights = weights * self.chooser(stage, h, looked_at, weights.detach() > 0.5)
            seen.append(weights.detach()[:, 1:])
            h = block(h, weights)
        return self.head(h[:, 0]), seen


class Chooser(nn.Module):
    """What the methods share: how many tokens each stage keeps if nothing is learned, and a linear score."""

    attends = False
    temperature = 1.0  # of σ_k

    def __init__(self, n: int, share: float) -> None:
        super().__init__()
        self.n, self.share = n, share
        self.special = torch.arange(n + 1) == 0
        self.scores = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)) for _ in range(STAGES))
        self.budget = TokenBudget(STAGES, share, least=1 / n)
        self.pruner = TokenPruner(temperature=self.temperature)

    def counts(self) -> Tensor:
        """Return how many tokens each stage keeps, (stages,): as many in each."""
        return torch.full((STAGES,), float(round(self.share * self.n)))

    def penalty(self) -> Tensor | float:
        """Return what is added to the loss."""
        return 0.0

    def linear(self, stage: int, h: Tensor) -> Tensor:
        """Return learned scores, (batch, n)."""
        return self.scores[stage](h).squeeze(-1)

    def hard(self, stage: int, scores: Tensor, mask: Tensor) -> Tensor:
        """Return 1 for the largest scores and the class token."""
        scores = scores.detach().masked_fill(self.special, torch.inf).masked_fill(~mask, -torch.inf)
        return hard_topk(scores, torch.minimum(self.counts()[stage] + 1, mask.sum(-1)))


class Equal(Chooser):
    """σ_k with equal counts; hard forward."""

    def forward(self, stage: int, h: Tensor, attention: Tensor | None, mask: Tensor) -> Tensor:
        """Return the weights of tokens, (batch, n)."""
        k = self.counts()[stage].expand(len(h)) + 1  # and the class token
        return self.pruner(h, scores=self.linear(stage, h), k=k, mask=mask, special=self.special).weights


class Sigma(Equal):
    """σ_k with learned counts; hard forward."""

    def counts(self) -> Tensor:
        """Return how many tokens each stage keeps, (stages,), learned."""
        return self.budget(self.n)


class WarmSigma(Sigma):
    """σ_k with learned counts and a softer gradient."""

    temperature = 2.0


class HardSTE(Chooser):
    """Hard top-k with the gradient of a sigmoid of each score."""

    def forward(self, stage: int, h: Tensor, attention: Tensor | None, mask: Tensor) -> Tensor:
        """Return the weights of tokens, (batch, n)."""
        scores = self.linear(stage, h)
        return straight_through(self.hard(stage, scores, mask), scores.sigmoid() * mask)


class DTopK(Chooser):
    """DTop-K: a learned ratio in each stage, and a penalty that keeps their mean near the share."""

    attends = True

    def __init__(self, n: int, share: float) -> None:
        super().__init__(n, share)
        self.ratio = nn.Parameter(torch.full((STAGES,), share).logit())

    def kept(self) -> Tensor:
        """Return the share of all tokens that each stage keeps; a dropped token does not come back."""
        return self.ratio.sigmoid().cummin(0).values

    def penalty(self) -> Tensor:
        """Return the penalty of a mean share other than the one asked for."""
        return 100 * (self.kept().mean() - self.share).square()

    def forward(self, stage: int, h: Tensor, attention: Tensor | None, mask: Tensor) -> Tensor:
        """Return the weights of tokens, (batch, n)."""
        kept = self.kept()  # a stage drops of what the last one left
        ratio = 1 - kept[stage] / (kept[stage - 1] if stage else 1.0)
        chosen = dtopk(attention[:, 1:], ratio.expand(len(h)), mask[:, 1:])
        return torch.cat([torch.ones_like(chosen[:, :1]), chosen], 1)


class AttentionScore(Chooser):
    """The tokens that the class token attends to most."""

    attends = True

    def forward(self, stage: int, h: Tensor, attention: Tensor | None, mask: Tensor) -> Tensor:
        """Return the weights of tokens, (batch, n)."""
        return self.hard(stage, attention, mask)


class Random(Chooser):
    """Any tokens, others for each row and call."""

    def forward(self, stage: int, h: Tensor, attention: Tensor | None, mask: Tensor) -> Tensor:
        """Return the weights of tokens, (batch, n)."""
        return self.hard(stage, torch.rand(h.shape[:2]), mask)


METHODS: dict[str, type[Chooser] | None] = {
    "all tokens": None,
    "σ_k, learned counts": Sigma,
    "σ_k, equal counts": Equal,
    "hard-STE": HardSTE,
    "DTop-K": DTopK,
    "attention score": AttentionScore,
    "random": Random,
    WARM: WarmSigma,
}
COLOURS = dict(zip(METHODS, (GREY, BLUE, SKY, GREEN, ORANGE, PINK, YELLOW, GOLD), strict=True))


def train(problem: str, method: str, share: float, seed: int, steps: int) -> tuple[Encoder, Row]:
    data, kind = PROBLEMS[problem].data(seed), METHODS[method]
    torch.manual_seed(seed)
    n = data.train.shape[1]
    model = Encoder(data, None if kind is None else kind(n, share))
    slow = [p for name, p in model.named_parameters() if not name.endswith(("budget.logits", "ratio"))]
    fast = [p for name, p in model.named_parameters() if name.endswith(("budget.logits", "ratio"))]
    groups = [{"params": slow, "lr": RATE}] + ([{"params": fast, "lr": COUNT_RATE}] if fast else [])
    optimiser = torch.optim.Adam(groups)
    start = time.process_time()
    for _ in range(steps):
        rows = torch.randint(len(data.train), (BATCH,))
        loss = cross_entropy(model(data.train[rows])[0], data.train_y[rows])
        loss = loss + (model.chooser.penalty() if model.chooser is not None else 0.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        logits, seen = model(data.test)
    accuracy = float((logits.argmax(-1) == data.test_y).float().mean())
    each = torch.stack([s.sum(-1) for s in seen])  # (stages, rows)
    total = STAGES * (n if kind is None else share * n)
    counts = "/".join(f"{c:.4g}" for c in each.mean(1).tolist())
    off = float((each.sum(0) - round(total)).abs().max())
    kept = float(each.mean()) / n
    return model, Row(problem, method, share if kind else 1.0, seed, accuracy, kept, counts, off, seconds)


def asked(problems: dict[str, Problem]) -> Iterator[tuple[str, str, float, int, int]]:
    """Yield the arguments of each training."""
    for name, problem in problems.items():
        for seed, method in product(problem.seeds, [m for m in METHODS if m in problem.methods]):
            for share in problem.shares if METHODS[method] else (1.0,):
                yield name, method, share, seed, problem.steps


def run(problems: dict[str, Problem], done: list[Row]) -> Iterator[Row]:
    """Yield a row for each training that is not done."""
    known = {(row.problem, row.method, row.share, row.seed) for row in done}
    for each in asked(problems):
        if each[:4] not in known:
            yield train(*each)[1]


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file, if it is there."""
    return [Row(**vars(row)) for row in common.read_rows(path)] if path.exists() else []


def report(rows: list[Row]) -> str:
    """Return a table for each problem: accuracy by method and share, and what was kept."""
    parts = []
    for problem in dict.fromkeys(row.problem for row in rows):
        mine = [row for row in rows if row.problem == problem]
        shares = sorted({row.share for row in mine if row.method != "all tokens"}, reverse=True)
        table = []
        for method in [name for name in METHODS if any(row.method == name for row in mine)]:
            cells = []
            for share in shares:
                found = [
                    r for r in mine if r.method == method and r.share == (1.0 if method == "all tokens" else share)
                ]
                mean, error = common.mean_and_error([100 * row.accuracy for row in found])
                kept = common.mean_and_error([100 * row.kept for row in found])[0]
                cells.append(f"{mean:.1f} ± {error:.1f} ({kept:.1f} %)")
            off = max(row.off for row in mine if row.method == method)
            table.append([method, *cells, f"{off:.0f}"])
        heads = [f"{problem}", *(f"{100 * share:g} % of tokens" for share in shares), "tokens off the total"]
        parts.append(markdown_table(heads, table))
    return "\n\n".join(parts) + "\n"


@cache
def example(steps: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return test digits, their predictions and what each block saw, of a training with a learned budget."""
    data = digits(0)
    model, _ = train(DIGITS, "σ_k, learned counts", 0.25, 0, steps)
    with torch.no_grad():
        logits, seen = model(data.test[:6])
    return data.test[:6], logits.argmax(-1), seen


@styled
def figure(rows: list[Row], steps: int) -> Figure:
    """Return accuracy against tokens kept, and below it what the blocks see of six digits."""
    picture = Figure(figsize=(10, 8.6), layout="constrained")
    top, bottom = picture.subfigures(2, 1, height_ratios=(1, 1.05))
    problems = [name for name in PROBLEMS if any(r.problem == name for r in rows)]
    for axis, problem in zip(top.subplots(1, len(problems), squeeze=False)[0], problems, strict=True):
        for method, colour in COLOURS.items():
            points = {}
            for row in rows:
                if (row.problem, row.method) == (problem, method):
                    points.setdefault(row.share, []).append(row)
            x = [100 * common.mean_and_error([r.kept for r in found])[0] for found in points.values()]
            y = [common.mean_and_error([100 * r.accuracy for r in found]) for found in points.values()]
            mean, error = [m for m, _ in y], [e for _, e in y]
            if method == "all tokens" and mean:
                axis.axhline(mean[0], color=colour, linestyle="--", label=method)
            elif mean:
                axis.errorbar(x, mean, error, color=colour, marker="o", label=method, capsize=3)
        axis.set(title=problem, xlabel="tokens that a block sees, the mean of three, %", ylabel="accuracy, %")
        axis.grid(True)
    axis.legend(loc="lower right")
    images, predicted, seen = example(steps)
    grid = bottom.subplots(4, 6)
    for column, image in enumerate(images):
        pixels = image.view(4, 4, 2, 2).transpose(1, 2).reshape(8, 8)
        for line in range(4):
            axis = grid[line, column]
            mask = torch.ones(16) if line == 0 else seen[line - 1][column]
            shown = mask.view(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1)
            axis.pcolormesh(((pixels + 0.08) * (0.15 + 0.85 * shown)).flip(0).numpy(), cmap="Blues", vmin=0, vmax=1.1)
            axis.set(xticks=[], yticks=[])
            if column == 0:
                axis.set_ylabel(f"block {line}" if line else "input", rotation=0, ha="right", va="center")
        grid[0, column].set_title(f"read as {int(predicted[column])}")
    return picture


def main() -> int:
    parser = common.parser(__doc__, "one seed, five steps, one share")
    parser.add_argument("--problem", choices=list(PROBLEMS), help="default: all; then only the CSV is written")
    parser.add_argument("--resume", action="store_true", help="go on after the rows of the CSV, such as after Ctrl-C")
    args = parser.parse_args()
    at = common.places(args)
    torch.set_num_threads(1)
    chosen = {name: problem for name, problem in PROBLEMS.items() if args.problem in (None, name)}
    if args.quick:
        chosen = {name: problem.quick() for name, problem in chosen.items()}
    rows = read(at.results / "tokens.csv") if args.resume else []
    is_interrupted = common.collect(run(chosen, list(rows)), rows, len(list(asked(chosen))))
    if rows:
        common.write(at.results / "tokens.csv", common.to_csv(rows, digits=6))
        rows = read(at.results / "tokens.csv")
    is_whole = rows and not is_interrupted and not args.problem
    if is_whole:
        common.write_table(at.tables / "tokens.md", report(rows))
        common.write_picture(at.images / "tokens.svg", figure(rows, chosen[DIGITS].steps))
    common.show(args, rows, report(rows) if is_whole else "")
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
