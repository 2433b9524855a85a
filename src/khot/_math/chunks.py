"""Samples of one row that is read twice, chunk by chunk: the same bits as `pivotal.draw` and `systematic.draw` give.

The first reading calls `look` with each chunk, (m) float64 in [0, 1]; `begin` follows, with the sum of the row; the
second reading calls `draw`. All chunks but the last have one length, a power of two. One number a chunk is kept.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import noise, pivotal, systematic


class Pivotal:
    """The pivotal tree in the given order: a chunk is a subtree, whose root is a leaf of the tree above all chunks."""

    def __init__(self, n: int, chunk: int, seed: Tensor) -> None:
        self.coins = pivotal.Coins(seed, 1, 1, n, False)
        self.height = min(chunk.bit_length(), len(self.coins.starts)) - 1
        widths = [1 << (self.height - 1 - level) for level in range(self.height)]
        places = [start + torch.arange(width) for start, width in zip(self.coins.starts, widths, strict=False)]
        self.places = torch.cat((torch.empty(0, dtype=torch.int64), *places))  # of the coins of the first chunk
        self.steps = torch.tensor(widths, dtype=torch.int64).repeat_interleave(torch.tensor(widths, dtype=torch.int64))
        self.residuals: list[float] = []
        self.done = 0

    def look(self, p: Tensor) -> None:
        """Keep the residual of a chunk's root."""
        self.residuals.append(float(pivotal.plan(self._padded(p))[1]))

    def begin(self, k: float) -> None:
        """Decide what becomes of the survivor of each chunk."""
        crown = torch.arange(self.coins.starts[self.height], self.coins.starts[-1])
        root = torch.tensor(0.5) if k == round(k) else 1 - self.coins.last()[0]
        self.values = pivotal.sample(torch.tensor(self.residuals, dtype=torch.float64), root, self.coins.at(crown)[0])

    def draw(self, p: Tensor) -> Tensor:
        """Return which items of the next chunk are drawn, (m) bool."""
        uniforms = self.coins.at(self.places + self.done * self.steps)[0]
        root = torch.where(self.values[self.done], -torch.inf, torch.inf)
        self.done += 1
        return pivotal.sample(self._padded(p), root, uniforms)[: len(p)]

    def _padded(self, p: Tensor) -> Tensor:
        """Return a chunk in which leaves that do not exist are never drawn."""
        return pad(p, (0, (1 << self.height) - len(p)))


class Systematic:
    """One uniform for the row, and running sums that go on from chunk to chunk."""

    def __init__(self, n: int, chunk: int, seed: Tensor) -> None:
        self.shift, self.sum = systematic.places(n), 0
        self.one = 1 << self.shift
        self.running = noise.row_keys(seed, 1, 1, False) & (self.one - 1)
        self.measured = torch.zeros(3, dtype=torch.int64)

    def look(self, p: Tensor) -> None:
        """Add a chunk to the sums."""
        w, measures = self._rounded(p)
        self.sum += int(w.sum())
        self.measured += measures.sum(-1)

    def begin(self, k: float) -> None:
        """Decide how the difference of the sums and k is spread over all items."""
        lack = round(k * self.one) - self.sum
        self.which = 0 if abs(lack) <= int(self.measured[0]) else 1 if lack > 0 else 2
        self.total, self.lack = self.measured[self.which, None], torch.tensor([lack])
        self.measure, self.given, self.passed = torch.zeros(3, 1, dtype=torch.int64)

    def draw(self, p: Tensor) -> Tensor:
        """Return which items of the next chunk are drawn, (m) bool."""
        w, measures = self._rounded(p)
        measure = self.measure + measures[self.which].cumsum(-1)
        share = systematic.share(measure, self.total, self.lack)
        running = self.running + (w + share.diff(prepend=self.given)).cumsum(-1)
        passed = running >> self.shift
        drawn = passed.diff(prepend=self.passed) > 0
        self.measure, self.given, self.running, self.passed = (t[-1:] for t in (measure, share, running, passed))
        return drawn

    def _rounded(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return a chunk in integers, and what the difference may be in proportion to, (3, m)."""
        w, spread = systematic.units(p, self.one)
        return w, torch.stack((spread, *(systematic.room(w, torch.tensor(sign), self.one) for sign in (1, -1))))
