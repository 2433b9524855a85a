"""Selectors: scores and a count to weights in [0, 1] along the last dim. A layer takes one as an argument."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..designs import sample_khot
from ..relaxations import hard_topk, sigmoid_topk
from ..relaxations import straight_through as straight


class Selector(Protocol):
    """What a layer calls; a function of one's own will do."""

    def __call__(
        self,
        scores: Tensor,
        k: float | Tensor,
        /,
        *,
        temperature: float | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor: ...


def hard(
    scores: Tensor,
    k: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`khot.hard_topk`: the k greatest, with no gradient; k is rounded.

    Examples:
        >>> khot.nn.selectors.hard(torch.tensor([0.3, 0.9, 0.1]), 1)
        tensor([0., 1., 0.])
    """
    return hard_topk(scores, k.detach().round() if isinstance(k, Tensor) else round(k))


def straight_through(
    scores: Tensor,
    k: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The value of `hard` with the gradient of `soft`, to the scores and to k.

    Examples:
        >>> x = torch.tensor([0.3, 0.9, 0.1], requires_grad=True)
        >>> khot.nn.selectors.straight_through(x, 1)
        tensor([0., 1., 0.], grad_fn=<AddBackward0>)
    """
    return straight(hard(scores, k), sigmoid_topk(scores, k, temperature=temperature))


def soft(
    scores: Tensor,
    k: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`khot.sigmoid_topk`; lower the temperature while training, since layers select hard when they are evaluated.

    Examples:
        >>> khot.nn.selectors.soft(torch.tensor([0.3, 0.9, 0.1]), 1)
        tensor([0.3006, 0.4392, 0.2603])
    """
    return sigmoid_topk(scores, k, temperature=temperature)


def sampled(
    scores: Tensor,
    k: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`khot.sample_khot`: k drawn at random with the inclusion probabilities and the gradient of `soft`.

    Examples:
        >>> khot.nn.selectors.sampled(torch.tensor([0.3, 0.9, 0.1]), 1, generator=torch.Generator().manual_seed(1))
        tensor([0., 1., 0.])
    """
    return sample_khot(scores, k, temperature=temperature, generator=generator)
