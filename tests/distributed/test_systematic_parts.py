"""The integers of systematic sampling, for a row in parts: the same as for the whole row, without any process."""

import itertools

import torch

from khot._math import systematic
from khot.distributed import _samples


class Others:
    """Stands for the processes of a group: what each would give is known."""

    def __init__(self, rank, total, sums):
        self.rank, self.total, self.sums = rank, total, sums

    def sum(self, value):
        return self.total

    def gather(self, value):
        assert torch.equal(value, self.sums[self.rank])
        return self.sums


def test_parts_have_the_integers_of_the_whole_row():
    rng = torch.Generator().manual_seed(0)
    for trial in range(100):
        n = int(torch.randint(1, 60, (), generator=rng))
        p = torch.rand(2, n, dtype=torch.float64, generator=rng)
        if trial % 3 == 0:  # many items are certain: what is lacking goes where there is room
            p = torch.where(torch.rand(2, n, generator=rng) > 0.9, 0.5, (p > 0.5).double())
        k = (p.sum(-1) + 0.8 * (torch.rand(2, generator=rng) - 0.5)).clamp(0, n)
        one = 1 << systematic.places(n)
        edges = [0, *sorted(torch.randint(0, n + 1, (2,), generator=rng).tolist()), n]  # parts may be empty
        parts = [p[:, a:b] for a, b in itertools.pairwise(edges)]
        units = [systematic.units(part, one) for part in parts]
        total = sum(w.sum(-1) for w, _ in units)
        lack = ((k * one).round().to(torch.int64) - total)[..., None]
        own = [torch.stack((spread, systematic.room(w, lack, one))) for w, spread in units]
        sums = torch.stack([each.sum(-1, keepdim=True) for each in own])
        found = [
            _samples._quantised(part, k, one, edges[rank] == 0, Others(rank, total, sums))
            for rank, part in enumerate(parts)
        ]
        assert torch.equal(torch.cat(found, -1), systematic.quantised(p, k)), trial
