"""Contenders from other people's packages, taken as they are; present only where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from ._rival import Rival


def _entmax15(package: Any, x: Tensor, k: float) -> Tensor:
    y: Tensor = package.entmax15(x, dim=-1)
    return y


def _budget_bisect(package: Any, x: Tensor, k: float) -> Tensor:
    y: Tensor = package.budget_bisect(x, budget=k, dim=-1)
    return y


def _soft_rank(package: Any, x: Tensor, k: float) -> Tensor:
    ranks: Tensor = package.soft_rank(x.reshape(-1, x.shape[-1]))  # it takes two dimensions only
    return ranks.reshape(x.shape)


def _bound(package: str, call: Callable[[Any, Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor] | None:
    """The call with its package, or None where that cannot be imported."""
    try:
        module = import_module(package)
    except ImportError:
        return None
    return lambda x, k: call(module, x, k)


INSTALLED: dict[str, Rival] = {
    "entmax.entmax15": Rival(
        fn=_bound("entmax", _entmax15),
        what="1.5-entmax, sparse, sums to 1",
        kind="reference",
        package="entmax",
    ),
    "entmax.budget_bisect": Rival(
        fn=_bound("entmax", _budget_bisect),
        what="Euclidean projection, sparse, by bisection",
        package="entmax",
    ),
    "torchsort.soft_rank": Rival(
        fn=_bound("torchsort", _soft_rank),
        what="soft ranks by isotonic regression",
        kind="reference",
        package="torchsort",
    ),
}
