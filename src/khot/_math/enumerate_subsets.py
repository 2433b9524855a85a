"""All k-subsets of n items."""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor


def count(n: int, k: float) -> int:
    """How many subsets of size k there are; of size ⌊k⌋ and ⌈k⌉ if it is fractional."""
    return sum(math.comb(n, size) for size in sizes(k))


def sizes(k: float) -> list[int]:
    """⌊k⌋ and ⌈k⌉, once if they are the same."""
    return sorted({math.floor(k), math.ceil(k)})


def k_hot(n: int, k: float, device: torch.device) -> Tensor:
    """The subsets as k-hot rows, in lexical order; (count, n) float64."""
    rows = []
    for size in sizes(k):
        chosen = torch.tensor(list(combinations(range(n), size)), dtype=torch.int64).view(math.comb(n, size), size)
        rows.append(torch.zeros(len(chosen), n, dtype=torch.float64).scatter_(1, chosen, 1.0))
    return torch.cat(rows).to(device)
