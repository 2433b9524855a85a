"""Estimate a mean over all words that a language model can write, from k of them.

Sampled beams are k different words with known inclusion probabilities. So Σ p·f/Q has no bias for any f, as a mean over
independent samples has none, but no word is drawn twice. The model counts which character follows the last two.
It takes a few seconds.
"""

from pathlib import Path

import torch
from torch import Tensor

import khot

text = Path("examples/shakespeare.txt").read_text(encoding="utf-8").lower()
letters = sorted(set(text))
code = torch.tensor([letters.index(c) for c in text])
V, k, repeats, length = len(letters), 128, 100, 8
space = letters.index(" ")
counts = torch.full((V, V, V), 1e-3)
counts.index_put_((code[:-2], code[1:-1], code[2:]), torch.ones(len(code) - 2), accumulate=True)
log_probs = (counts / counts.sum(-1, keepdim=True)).log()  # (before the last, last, next)


def step(tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (rows, V) of the next character, and the state: the last one, (rows)."""
    return log_probs[before, tokens], tokens


def vowels(tokens: Tensor) -> Tensor:
    """Count the vowels of each word."""
    return torch.isin(tokens, torch.tensor([letters.index(c) for c in "aeiou"])).sum(-1).double()


before, start = torch.full((repeats,), space), torch.full((repeats,), letters.index("w"))  # words with w-
draw = torch.Generator().manual_seed(0)
options = {"start": start, "length": length, "end": space, "generator": draw}
beams = khot.search.beam_search(step, before, k, select=khot.search.sampled, **options)
words = {"".join(letters[c] for c in word if c >= 0) for word in beams.tokens[0].tolist()}
estimates = {"sampled beams": khot.search.expectation(beams, vowels(beams.tokens)).mean}  # (repeats)

single = {**options, "start": start.repeat(k)}  # one beam for each row: independent samples
alone = khot.search.beam_search(step, before.repeat(k), 1, select=khot.search.sampled, **single)
estimates["independent samples"] = vowels(alone.tokens).view(k, repeats).mean(0)

best = khot.search.beam_search(step, before, k, select=khot.search.hard, **options)
share = best.log_probs[0].exp()
estimates["the k likeliest words"] = ((share / share.sum()) * vowels(best.tokens[0])).sum().expand(repeats)

many = {**options, "start": start[:1]}
wide = khot.search.beam_search(step, before[:1], 20_000, select=khot.search.sampled, **many)
truth = khot.search.expectation(wide, vowels(wide.tokens)).mean.item()
print(f"{len(words)} different words")
print(f"vowels of a word with w-, mean over all words: {truth:.3f}")
print(f"from k = {k}              mean of {repeats}    error of one")
for name, each in estimates.items():
    print(f"{name:23s}{each.mean():13.3f}{(each - truth).square().mean().sqrt():16.3f}")
