"""Beams: the variance of estimates from sampled beams, training through soft beams, and speed beside transformers.

`variance`: a character model of a play; the next word after a prompt; estimates of three means over all words from k
sequences, beside independent samples and stochastic beams with Gumbel noise (Kool et al. 2019).
`learning`: a tagger whose scores see no later observation, taught Viterbi paths of a hidden Markov model.
`speed`: the same random model and number of beams in `generate`, with transformers' own search and with khot's.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

import khot
from benchmarks import common
from khot.search import Beams, beam_search, embed, expectation, hard, sampled, soft

TEXT = common.ROOT / "examples" / "shakespeare.txt"
FUNCTIONS = ("log p/length", "overlap", "−log p")


# ── variance ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Characters(nn.Module):
    """A recurrent model of characters."""

    def __init__(self, size: int, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(size, width), nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, size)

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """A step of a search; the state is (rows, width)."""
        hidden, state = self.cell(self.embedding(tokens)[:, None], state[None])
        return self.out(hidden[:, 0]).log_softmax(-1), state[0]


def trained(text: Tensor, size: int, steps: int) -> Characters:
    """Train a model to predict the next character; Adam, windows of 64."""
    torch.manual_seed(0)
    model = Characters(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        at = torch.randint(len(text) - 65, (32, 1)) + torch.arange(65)
        hidden, _ = model.cell(model.embedding(text[at[:, :-1]]))
        loss = nn.functional.cross_entropy(model.out(hidden).flatten(0, 1), text[at[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def values(beams: Beams, reference: Tensor, size: int) -> Tensor:
    """f of each sequence, (rows, k, 3): log p/length, overlap with a reference word, −log p."""
    tokens, lengths = beams.tokens, beams.lengths.clamp(min=1)
    shares = []
    for n in (1, 2):  # the share of characters, and of pairs of them, that the reference has too
        pairs = tokens.unfold(-1, n, 1)
        found = torch.where((pairs >= 0).all(-1), (pairs.clamp(min=0) * size ** torch.arange(n)).sum(-1), -1)
        there, count = (reference.unfold(0, n, 1) * size ** torch.arange(n)).sum(-1).unique(return_counts=True)
        both = torch.minimum((found[..., None] == there).sum(-2), count).sum(-1)
        shares.append(both / (lengths - n + 1).clamp(min=1))
    log_probs = beams.log_probs.clamp(min=-1e6)
    return torch.stack((log_probs / lengths, torch.stack(shares).mean(0), -log_probs), -1).double()


def independent(
    model: Characters, state: Tensor, k: int, length: int, end: int, start: Tensor, draw: Generator
) -> Beams:
    """k independent samples for each row, as beams with the weights 1/k."""
    rows = len(start)
    tokens, state = start.repeat_interleave(k), state.repeat_interleave(k, 0)
    log_probs, is_open, found = torch.zeros(rows * k), torch.ones(rows * k, dtype=torch.bool), []
    for _ in range(length):
        scores, state = model.step(tokens.clamp(min=0), state)
        new = torch.multinomial(scores.exp(), 1, generator=draw)
        log_probs = log_probs + torch.where(is_open, scores.gather(1, new)[:, 0], 0.0)
        tokens = torch.where(is_open, new[:, 0], -1)
        found.append(tokens)
        is_open = is_open & (tokens != end)
    every = torch.stack(found, -1).view(rows, k, length)
    log_probs = log_probs.view(rows, k)
    return Beams(every, log_probs, log_probs, (every >= 0).sum(-1), every, (log_probs + math.log(k)).double())


def gumbel(model: Characters, state: Tensor, k: int, length: int, end: int, start: Tensor, draw: Generator) -> Beams:
    """Stochastic beams of Kool, van Hoof and Welling (2019), with P(G > κ) as inclusion probabilities.

    κ is the largest perturbed log-probability after the k that are kept, for which the beam is one wider.
    """
    rows, wide = len(start), k + 1
    log_p = torch.zeros(rows, 1, dtype=torch.float64)
    g = -(-torch.rand(rows, 1, generator=draw, dtype=torch.float64).log()).log()
    last, found = start[:, None], torch.zeros(rows, 1, 0, dtype=torch.int64)
    is_open = torch.ones(rows, 1, dtype=torch.bool)
    for _ in range(length):
        scores, state = model.step(last.clamp(min=0).flatten(), state)
        scores = scores.double().view(rows, -1, scores.shape[-1])
        only = torch.where(torch.arange(scores.shape[-1]) == 0, 0.0, -torch.inf).double()
        phi = log_p[..., None] + torch.where(is_open[..., None], scores, only)
        noise = -torch.rand(phi.shape, generator=draw, dtype=torch.float64).clamp(min=1e-300).log()
        noisy = phi - noise.log()
        top = noisy.max(-1, keepdim=True).values
        # Gumbel noise given that its maximum is the value of the parent
        v = g[..., None] - noisy + torch.log1p(-(noisy - top).exp())
        new = g[..., None] - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
        new = torch.where(phi > -torch.inf, new, -torch.inf).flatten(1)
        g, index = new.topk(min(wide, new.shape[-1]))
        parent, token = index // scores.shape[-1], index % scores.shape[-1]
        log_p = phi.flatten(1).gather(1, index)
        was_open = is_open.gather(1, parent)
        last = torch.where(was_open & (g > -torch.inf), token, -1)
        is_open = was_open & (last != end)
        past = found.gather(1, parent[..., None].expand(-1, -1, found.shape[-1]))
        found = torch.cat((past, last[..., None]), -1)
        state = state[(parent + torch.arange(rows)[:, None] * (len(state) // rows)).flatten()]
    kappa = g[:, k:] if g.shape[1] > k else torch.full((rows, 1), -torch.inf, dtype=torch.float64)
    log_p, found = log_p[:, :k], found[:, :k]
    log_q = (-torch.expm1(-(log_p - kappa).exp())).log()
    return Beams(found, log_p, log_p, (found >= 0).sum(-1), found, log_q)


def drawn(
    model: Characters, state: Tensor, k: int, length: int, end: int, start: Tensor, draw: Generator, **options: Any
) -> Beams:
    """Sampled beams of khot."""
    select = partial(sampled, **options)
    return beam_search(model.step, state, k, start=start, length=length, end=end, select=select, generator=draw)


PAIRS = "khot, σ_k, conditional Poisson"
METHODS: dict[str, tuple[Callable[..., Beams], bool]] = {
    "independent samples": (independent, False),
    "Gumbel beams": (gumbel, False),
    "Gumbel beams, normalized": (gumbel, True),
    "khot": (drawn, False),
    "khot, random order": (partial(drawn, design=khot.designs.Pivotal), False),
    "khot, σ_k": (partial(drawn, relaxation=khot.sigmoid_topk), False),
    "khot, σ_k, normalized": (partial(drawn, relaxation=khot.sigmoid_topk), True),
    PAIRS: (partial(drawn, design=khot.designs.ConditionalPoisson, relaxation=khot.sigmoid_topk), False),
}
"""How sequences are found, and whether the estimate is divided by the sum of the weights."""


def variance_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the mean squared error of each method at each k, over many draws of the same prompts."""
    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(c) for c in text])
    model = trained(codes[:100_000], len(letters), 20 if quick else 500)
    draws, length, places = (20, 4, 2) if quick else (100, 8, 6)
    counts = (2, 4) if quick else (2, 4, 8, 16, 32, 64)
    draw, end = Generator().manual_seed(1), letters.index(" ")
    words = [i for i in range(100_000, len(text) - 30) if text[i] == " " and text[i + 1 : i + 4].isalpha()]
    prompts = [words[i] for i in torch.randperm(len(words), generator=draw)[:places].tolist()]
    errors: dict[tuple[str, int], list[Tensor]] = {}
    told: dict[int, list[Tensor]] = {}
    for at in prompts:
        _, state = model.cell(model.embedding(codes[None, at - 60 : at]))
        state, start = state[0].expand(draws, -1), codes[at].expand(draws)
        reference = codes[at + 1 : text.index(" ", at + 1) + 1][:length]
        found = {}
        for name, (search, is_normal) in METHODS.items():
            for k in counts:
                if name == PAIRS and k > 4:  # it solves for its parameters: slow, and the variance is that of σ_k
                    continue
                beams = search(model, state, k, length, end, start, draw)
                found[name, k] = expectation(beams, values(beams, reference, len(letters)), normalize=is_normal)
        truth = found["khot", counts[-1]].mean.mean(0)
        for key, estimate in found.items():
            errors.setdefault(key, []).append((estimate.mean - truth).square().mean(0))
            if estimate.variance is not None:
                told.setdefault(key[1], []).append(estimate.variance.mean(0) / estimate.mean.var(0))
    for (name, k), each in errors.items():
        base = torch.stack(errors["independent samples", k])
        ratio = (torch.stack(each) / base).log().mean(0).exp()  # geometric mean over prompts
        told_here = torch.stack(told[k]).mean(0).tolist() if name == PAIRS else [math.nan] * 3
        for f, value, mse, share in zip(
            FUNCTIONS, ratio.tolist(), torch.stack(each).mean(0).tolist(), told_here, strict=True
        ):
            yield {"study": "variance", "method": name, "k": k, "f": f, "ratio": value, "mse": mse, "told": share}


def variance_table(rows: list[dict[str, Any]]) -> str:
    """A table for each function: mean squared errors as shares of that of independent samples."""
    counts = sorted({row["k"] for row in rows})
    lines = []
    for f in FUNCTIONS:
        lines += [
            f"**f = {f}**",
            "",
            "| | " + " | ".join(f"k = {k}" for k in counts) + " |",
            "|---|" + "---|" * len(counts),
        ]
        for name in METHODS:
            cells = {row["k"]: row["ratio"] for row in rows if row["method"] == name and row["f"] == f}
            shown = [f"{cells[k]:.3g}" if k in cells else "" for k in counts]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
        lines.append("")
    shares = [(row["k"], row["f"], row["told"]) for row in rows if not math.isnan(row["told"])]
    told = "; ".join(f"k = {k}, {f}: {share:.2f}" for k, f, share in shares)
    return "\n".join([*lines, f"Mean of the estimated variance over the measured one, {PAIRS}: {told}.", ""])


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────
TAGS, LENGTH, BEAMS = 8, 8, 3


class Markov:
    """A hidden Markov model: observations, and their Viterbi paths."""

    def __init__(self, seed: int) -> None:
        draw = Generator().manual_seed(seed)
        self.first, self.next, self.seen = (
            (scale * torch.randn(shape, generator=draw)).log_softmax(-1)
            for scale, shape in ((0.5, (TAGS,)), (2.0, (TAGS, TAGS)), (1.2, (TAGS, TAGS)))
        )
        self.draw = draw

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Observations and best paths, (rows, length)."""
        tag = torch.multinomial(self.first.exp().expand(rows, -1), 1, generator=self.draw)[:, 0]
        seen = []
        for _ in range(LENGTH):
            seen.append(torch.multinomial(self.seen[tag].exp(), 1, generator=self.draw)[:, 0])
            tag = torch.multinomial(self.next[tag].exp(), 1, generator=self.draw)[:, 0]
        x = torch.stack(seen, 1)
        score, back = self.first + self.seen[:, x[:, 0]].T, []
        for t in range(1, LENGTH):
            score, best = (score[..., None] + self.next).max(1)
            score = score + self.seen[:, x[:, t]].T
            back.append(best)
        path = [score.argmax(-1)]
        for best in reversed(back):
            path.append(best.gather(1, path[-1][:, None])[:, 0])
        return x, torch.stack(path[::-1], 1)

    def log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        """log p of observations and paths, (rows)."""
        return self.first[y[:, 0]] + self.next[y[:, :-1], y[:, 1:]].sum(-1) + self.seen[y, x].sum(-1)


class Tagger(nn.Module):
    """A tagger that goes from left to right, and sees the present observation and the tags so far."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tag, self.seen = nn.Parameter(torch.randn(TAGS + 1, width) / 4), nn.Parameter(torch.randn(TAGS, width) / 4)
        self.inner, self.out = nn.Linear(width, width), nn.Linear(width, TAGS)

    def step(self, tokens: Tensor, state: Any, is_normal: bool = False) -> tuple[Tensor, Any]:
        """A step of a search; the state is what it remembers (rows, width), and the observations (rows, t, TAGS)."""
        memory, ahead = state
        tags = self.tag[:TAGS] if tokens.is_floating_point() else self.tag  # the last one is the start
        memory = torch.tanh(embed(tokens, tags) + ahead[:, 0] @ self.seen + self.inner(memory))
        scores = self.out(memory)
        return scores.log_softmax(-1) if is_normal else scores, (memory, ahead[:, 1:])

    def begin(self, x: Tensor) -> Any:
        """The first state."""
        return torch.zeros(len(x), self.inner.in_features), nn.functional.one_hot(x, TAGS).float()

    def search(self, x: Tensor, select: Any, k: int, is_normal: bool) -> Beams:
        """Search for the tags of observations (rows, length)."""
        step, start = partial(self.step, is_normal=is_normal), torch.full((len(x),), TAGS)
        return beam_search(step, self.begin(x), k, start=start, length=LENGTH, select=select)


def iterative(log_probs: Tensor, log_weights: Tensor, k: int, *, alpha: float, generator: Any = None) -> Any:
    """Goyal et al.'s slots: a softmax around the i-th largest score."""
    return khot.search.Choice(
        None, weights=khot.iterative_topk(log_probs[..., None], log_probs, k, alpha=alpha).weights
    )


vars(iterative)["is_soft"] = True


def forced_loss(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """Teacher forcing: the negative log-likelihood of the right tags, each after the right ones."""
    state, last, total = model.begin(x), torch.full((len(x),), TAGS), torch.zeros(())
    for t in range(LENGTH):
        scores, state = model.step(last, state, is_normal=True)
        last = y[:, t]
        total = total + nn.functional.cross_entropy(scores, last) / LENGTH
    return total


def search_loss(model: Tagger, x: Tensor, y: Tensor, select: Any, is_normal: bool) -> Tensor:
    """The negative log-likelihood of the right tags under the best soft beam."""
    found = model.search(x, select, BEAMS, is_normal).soft_tokens
    assert found is not None
    return -(found[:, 0].gather(-1, y[..., None]) + 1e-3).log().mean()


LEARNERS: dict[str, tuple[str, bool]] = {
    "teacher forcing": ("", True),
    "soft beams, σ_k": ("soft", False),
    "soft beams, σ_k, log-softmax scores": ("soft", True),
    "soft beams, Goyal et al.": ("iterative", False),
}
"""How it is trained after a common first half, and whether its scores are log-probabilities of tags."""


def learning_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Train each learner on each seed; test with hard beams."""
    seeds, first, second = (1, 5, 3) if quick else (5, 400, 400)
    for seed in range(seeds):
        for name, (how, is_normal) in LEARNERS.items():
            torch.manual_seed(seed)
            data, model = Markov(seed), Tagger()
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
            began = time.process_time()
            for i in range(first + second):
                x, y = data.batch(64)
                share = max(i - first, 0) / second
                if i < first or not how:
                    loss = forced_loss(model, x, y)
                else:
                    # the best of six schedules on another seed: T from 1 to 0.1, and α from 1 to 10
                    ladder, goyal = partial(soft, temperature=0.1**share), partial(iterative, alpha=10**share)
                    select = ladder if how == "soft" else goyal
                    loss = search_loss(model, x, y, select, is_normal)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            spent = time.process_time() - began
            x, y = data.batch(200 if quick else 4000)
            with torch.no_grad():
                for k in (1, BEAMS, 16):
                    found = model.search(x, hard, k, is_normal).tokens[:, 0]
                    gap = (data.log_prob(x, y) - data.log_prob(x, found)).mean().item()
                    wrong = (found != y).float().mean().item()
                    yield {"study": "learning", "method": name, "seed": seed, "k": k, "wrong": wrong, "gap": gap,
                           "seconds": spent}  # fmt: skip


def learning_table(rows: list[dict[str, Any]]) -> str:
    """Token errors and gaps to the best path, mean ± standard error over seeds."""
    lines = ["| trained by | wrong tags, k = 1 | k = 3 | k = 16 | gap to the best path, k = 3 (nats) | seconds |"]
    lines.append("|---|---|---|---|---|---|")
    for name in LEARNERS:
        mine = [row for row in rows if row["method"] == name]
        cells = []
        for k, column, scale in ((1, "wrong", 100), (BEAMS, "wrong", 100), (16, "wrong", 100), (BEAMS, "gap", 1)):
            mean, error = common.mean_and_error([scale * row[column] for row in mine if row["k"] == k])
            cells.append(f"{mean:.1f} ± {error:.1f} %" if scale == 100 else f"{mean:.2f} ± {error:.2f}")
        cells.append(f"{statistics.fmean(row['seconds'] for row in mine):.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


# ── speed ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def speed_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Time `generate` with both searches, in turns."""
    import transformers

    import khot.hf

    torch.manual_seed(0)
    shape = {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    special = {"num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **special)).eval()
    for rows, prompt, k in ((1, 16, 4),) if quick else ((1, 16, 4), (1, 16, 16), (8, 16, 4), (1, 256, 8)):
        ids = torch.randint(3, 8192, (rows, prompt), generator=Generator().manual_seed(1))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "num_beams": k, "do_sample": False}
        given |= {"max_new_tokens": 2 if quick else 24}
        searches = {"transformers": {}, "khot, hard": {"custom_generate": khot.hf.beam_search}}
        searches["khot, sampled"] = {"custom_generate": khot.hf.beam_search, "select": sampled}
        times: dict[str, list[float]] = {name: [] for name in searches}
        for turn in range(2 if quick else 8):
            for name, options in searches.items():
                began = time.process_time()
                model.generate(**given, **options)
                if turn:  # the first call is for warming up
                    times[name].append(time.process_time() - began)
        for name, spent in times.items():
            row = {"study": "speed", "method": name, "rows": rows, "prompt": prompt, "k": k, "seconds": min(spent)}
            yield row | {"ratio": min(spent) / min(times["transformers"])}


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Seconds of each search, and their ratio to transformers' own."""
    lines = ["| prompts × tokens, k | transformers | khot, hard | khot, sampled |", "|---|---|---|---|"]
    for case in dict.fromkeys((row["rows"], row["prompt"], row["k"]) for row in rows):
        mine = {row["method"]: row for row in rows if (row["rows"], row["prompt"], row["k"]) == case}
        cells = [f"{mine[name]['seconds']:.2f} s ({mine[name]['ratio']:.2f})" for name in mine]
        lines.append(f"| {case[0]} × {case[1]}, k = {case[2]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


STUDIES = {
    "variance": (variance_rows, variance_table),
    "learning": (learning_rows, learning_table),
    "speed": (speed_rows, speed_table),
}


def main() -> int:
    parser = common.parser(__doc__, "a few draws, steps and tokens")
    parser.add_argument("--study", action="append", choices=list(STUDIES), help="repeat for more; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    places, every, texts = common.places(args), [], []
    for name in args.study or STUDIES:
        measure, table = STUDIES[name]
        rows: list[dict[str, Any]] = []
        if common.collect(measure(args.quick), rows):
            return 130
        common.write(places.results / f"beams-{name}.csv", common.to_csv(rows, digits=6))
        common.write_table(places.tables / f"beams-{name}.md", table(rows))
        every, texts = every + rows, [*texts, table(rows)]
    common.show(args, every, "\n".join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
