"""Small models for beam search, whose next token depends on all tokens before, and all of their sequences."""

from itertools import product

import torch


class Prefixes:
    """A model with a distribution of its own after every prefix; the state is the number of the prefix."""

    def __init__(self, size, length, seed=0, sharpness=1.0, dtype=torch.float64):
        self.size, self.length = size, length
        rows = sum(size**t for t in range(length + 1))
        draw = torch.Generator().manual_seed(seed)
        self.table = (sharpness * torch.randn(rows, size, generator=draw, dtype=dtype)).log_softmax(-1)

    def step(self, tokens, state):
        """The state is None at first; the start token does not matter."""
        place = torch.zeros_like(tokens) if state is None else state["prefix"] * self.size + tokens + 1
        return self.table[place], {"prefix": place}

    def log_prob(self, tokens):
        """log p of one sequence, by walking along it."""
        place, total = 0, 0.0
        for token in tokens:
            total = total + self.table[place, token]
            place = place * self.size + token + 1
        return total

    def sequences(self, end=None):
        """All sequences, cut after the end token."""
        found = {}
        for tokens in product(range(self.size), repeat=self.length):
            cut = tokens[: tokens.index(end) + 1] if end is not None and end in tokens else tokens
            found[cut] = self.log_prob(cut)
        return found


def listed(tokens):
    """Token rows (k, length) as tuples without their filling."""
    return [tuple(row[row >= 0].tolist()) for row in tokens]
