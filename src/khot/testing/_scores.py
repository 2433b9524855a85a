"""Score vectors of many kinds, on which operators are tested and measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor


def _empty(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.float64)


_KINDS: dict[str, Callable[[int, Generator], Tensor]] = {
    "normal": lambda n, rng: _empty(n).normal_(generator=rng),
    "uniform": lambda n, rng: _empty(n).uniform_(generator=rng),
    "cauchy": lambda n, rng: _empty(n).cauchy_(generator=rng),
    "constant": lambda n, rng: _empty(n).fill_(0.7),
    "ties": lambda n, rng: torch.randint(4, (n,), generator=rng).double(),
    "bimodal": lambda n, rng: _empty(n).normal_(generator=rng) + 20.0 * torch.randint(2, (n,), generator=rng) - 10.0,
    "offset": lambda n, rng: _empty(n).normal_(mean=1000.0, generator=rng),
    "sorted": lambda n, rng: _empty(n).normal_(generator=rng).sort().values,
    "exponential": lambda n, rng: _empty(n).exponential_(generator=rng),
    "outlier": lambda n, rng: _empty(n).normal_(generator=rng).index_fill_(0, torch.tensor([n // 3]), 1e4),
}
SCORE_KINDS = tuple(_KINDS)
"""The names that `score_vector` knows."""


def score_vector(kind: str, n: int, *, seed: int = 0) -> Tensor:
    """Return n float64 scores of a named kind, one of `SCORE_KINDS`; the same at every call.

    >>> score_vector("constant", 3)
    tensor([0.7000, 0.7000, 0.7000], dtype=torch.float64)
    """
    if kind not in _KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(SCORE_KINDS)}; got {kind!r}.")
    return _KINDS[kind](n, torch.Generator().manual_seed(seed))
