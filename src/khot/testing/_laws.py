"""What checks are made of: scores to try, comparisons, and laws."""

from collections.abc import Callable
from functools import partial
from inspect import isfunction
from typing import Any

import torch
from torch import Generator, Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_EMPTY = partial(torch.empty, dtype=torch.float64)
_KINDS: dict[str, Callable[[int, Generator], Tensor]] = {
    "normal": lambda n, rng: _EMPTY(n).normal_(generator=rng),
    "uniform": lambda n, rng: _EMPTY(n).uniform_(generator=rng),
    "cauchy": lambda n, rng: _EMPTY(n).cauchy_(generator=rng),
    "constant": lambda n, rng: _EMPTY(n).fill_(0.7),
    "ties": lambda n, rng: torch.randint(4, (n,), generator=rng).double(),
    "bimodal": lambda n, rng: _EMPTY(n).normal_(generator=rng) + 20.0 * torch.randint(2, (n,), generator=rng) - 10.0,
    "offset": lambda n, rng: _EMPTY(n).normal_(mean=1000.0, generator=rng),
    "sorted": lambda n, rng: _EMPTY(n).normal_(generator=rng).sort().values,
    "exponential": lambda n, rng: _EMPTY(n).exponential_(generator=rng),
    "outlier": lambda n, rng: _EMPTY(n).normal_(generator=rng).index_fill_(0, torch.tensor([n // 3]), 1e4),
}
SCORE_KINDS = tuple(_KINDS)
"""The names that `score_vector` knows."""


def score_vector(kind: str, n: int, *, seed: int = 0) -> Tensor:
    """Return n float64 scores of a named kind, the same at every call.

    Args:
        kind: one of `SCORE_KINDS`.
        n: how many.
        seed: of the scores; another one gives others.

    Examples:
        >>> score_vector("constant", 3)
        tensor([0.7000, 0.7000, 0.7000], dtype=torch.float64)
    """
    if kind not in _KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(SCORE_KINDS)}; got {kind!r}.")
    return _KINDS[kind](n, Generator().manual_seed(seed))


def scores(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return normal scores, the same at every call."""
    return torch.randn(shape, dtype=torch.float64, generator=Generator().manual_seed(seed)).to(dtype)


def must(holds: bool | Tensor, otherwise: str) -> None:
    """Raise AssertionError with that text unless something holds, or all of it."""
    if not bool(torch.as_tensor(holds).all()):
        raise AssertionError(otherwise)


def close(actual: Tensor, expected: Tensor | float, what: str, tolerance: float | None = None) -> None:
    """Raise, with the largest difference, unless `actual` is `expected` within the dtype's tolerance."""
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device).expand(actual.shape)
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    errors = torch.where(same, 0.0, (actual - expected).abs().nan_to_num(torch.inf))
    error = errors.max().item() if errors.numel() else 0.0
    must(error <= tolerance, f"{what}: off by {error:.3g}, allowed {tolerance:.3g}")


def laws(kind: type) -> list[Callable[[Any], None]]:
    """Return the laws of a class: its public methods, which raise if the subject breaks them."""
    return [law for name, law in vars(kind).items() if isfunction(law) and not name.startswith("_")]


def broken_laws(subject: object) -> str:
    """Return a list of the laws that the subject breaks, a line each, or "" if there are none."""
    broken = []
    for law in laws(type(subject)):
        try:
            law(subject)
        except Exception as error:  # a law is broken by a wrong number and by a crash alike
            said = next(iter(str(error).splitlines()), "failed without a message")
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            broken.append(f"\n- {law.__name__.replace('_', ' ')}: {kind}{said}")
    return "".join(broken)
