"""Boosts: how sharply Successive Halving tells the two of a pair apart."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import _check

__all__ = ["Boost", "double_exp", "linear"]

Boost = Callable[[Tensor, Tensor], Tensor]
"""A function of two scores (a, b), elementwise, to the logit of the weight of a."""
_LARGEST = 80.0  # e^80 is still a float32, and σ(80) is 1


def __dir__() -> list[str]:
    return __all__


def double_exp(base: float = 20.0) -> Boost:
    """Return the boost of the released code: `base^a − base^b`.

    Args:
        base: > 1. For scores in [0, 1]; larger ones saturate, and their weights get no gradient.

    Examples:
        >>> double_exp(20)(torch.tensor(0.75), torch.tensor(0.5)).sigmoid()
        tensor(0.9932)
    """
    _check.above("base", base, 1)
    rate = math.log(base)

    def boost(a: Tensor, b: Tensor) -> Tensor:
        # base^a·(1 − base^{b − a}), each factor within the range of a float
        return (rate * a).clamp(max=_LARGEST).exp() * -torch.expm1((rate * (b - a)).clamp(max=_LARGEST))

    return boost


def linear(scale: float) -> Boost:
    """Return the boost of the paper's text: `C·(a − b)`.

    Args:
        scale: C > 0.

    Examples:
        >>> linear(10)(torch.tensor(0.75), torch.tensor(0.5)).sigmoid()
        tensor(0.9241)
    """
    _check.above("scale", scale, 0)
    return lambda a, b: scale * (a - b)
