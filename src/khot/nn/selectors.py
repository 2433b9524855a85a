"""Selectors: functions of scores and a count to weights in [0, 1] along the last dim. A layer takes one as an argument.

A selector of your own is a function with the signature of `Selector`. If it gives the k largest scores the weight 1 and
the others 0, with no gradient, it may say so by an attribute `is_hard = True`: layers then look at k candidates alone.
Another attribute, `candidates`, says among how many times k scores it is worth choosing where there are far more.
"""

from functools import partial
from typing import Protocol

from torch import Generator, Tensor

from .. import _check
from .._shape import Group
from ..designs import Pivotal, sample_khot
from ..relaxations import hard_topk, sigmoid_topk
from ..relaxations import straight_through as straight

__all__ = ["Selector", "drawn", "hard", "sampled", "soft", "straight_through"]

Number = float | Tensor


def __dir__() -> list[str]:
    return __all__


class Selector(Protocol):
    """Choose among scores: the signature that layers call, and that the functions here have.

    Args:
        scores: (…, n).
        k: how many to choose along the last dim; a number, or a tensor (…).
        temperature: of what is soft, larger is softer.
        generator: of what is random; torch's own if None.

    Layers whose rows are divided over processes also pass `group=`, as for `khot.sigmoid_topk`.
    """

    def __call__(
        self, scores: Tensor, k: Number, /, *, temperature: Number, generator: Generator | None = None
    ) -> Tensor: ...


def hard(
    scores: Tensor,
    k: Number,
    *,
    temperature: Number = 1.0,
    generator: Generator | None = None,
    group: Group = None,
) -> Tensor:
    """Give the k largest the weight 1, with no gradient, by `khot.hard_topk`; k is rounded.

    Examples:
        >>> khot.nn.selectors.hard(torch.tensor([0.3, 0.9, 0.1]), 1)
        tensor([0., 1., 0.])
    """
    _check.floating("scores", scores)
    if not isinstance(k, Tensor):
        _check.number("k", k)
    return hard_topk(scores, k.detach().round() if isinstance(k, Tensor) else round(k), group=group)


vars(hard)["is_hard"] = True


def straight_through(
    scores: Tensor,
    k: Number,
    *,
    temperature: Number = 1.0,
    generator: Generator | None = None,
    group: Group = None,
) -> Tensor:
    """Return the value of `hard` with the gradient of `soft`, to the scores and to k.

    Examples:
        >>> x = torch.tensor([0.3, 0.9, 0.1], requires_grad=True)
        >>> khot.nn.selectors.straight_through(x, 1)
        tensor([0., 1., 0.], grad_fn=<AddBackward0>)
    """
    _check.floating("scores", scores)
    soft = sigmoid_topk(scores, k, temperature=temperature, group=group)
    return straight(hard(scores, k, group=group), soft)


vars(straight_through)["candidates"] = 2.0  # the rest would have a gradient alone


def soft(
    scores: Tensor,
    k: Number,
    *,
    temperature: Number = 1.0,
    generator: Generator | None = None,
    group: Group = None,
) -> Tensor:
    """Return `khot.sigmoid_topk`; lower the temperature in training, since layers select hard in evaluation.

    Examples:
        >>> khot.nn.selectors.soft(torch.tensor([0.3, 0.9, 0.1]), 1)
        tensor([0.3006, 0.4392, 0.2603])
    """
    _check.floating("scores", scores)
    return sigmoid_topk(scores, k, temperature=temperature, group=group)


def drawn(
    scores: Tensor,
    k: Number,
    *,
    temperature: Number = 1.0,
    generator: Generator | None = None,
    group: Group = None,
) -> Tensor:
    """Draw as `sampled` does, with no gradient: for losses that use the probability of what was drawn.

    Examples:
        >>> khot.nn.selectors.drawn(torch.tensor([0.3, 0.9, 0.1]), 1, generator=torch.Generator().manual_seed(1))
        tensor([0., 1., 0.])
    """
    _check.floating("scores", scores)
    return sampled(scores.detach(), k, temperature=temperature, generator=generator, group=group)


def sampled(
    scores: Tensor,
    k: Number,
    *,
    temperature: Number = 1.0,
    generator: Generator | None = None,
    group: Group = None,
) -> Tensor:
    """Draw k at random by `khot.sample_khot`, with the inclusion probabilities and the gradient of `soft`.

    Examples:
        >>> khot.nn.selectors.sampled(torch.tensor([0.3, 0.9, 0.1]), 1, generator=torch.Generator().manual_seed(1))
        tensor([0., 1., 0.])
    """
    _check.floating("scores", scores)
    if group is None:
        return sample_khot(scores, k, temperature=temperature, generator=generator)
    how = {"design": partial(Pivotal, order="given"), "group": group}
    return sample_khot(scores, k, temperature=temperature, generator=generator, **how)
