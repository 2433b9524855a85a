"""What estimators share: samples, per-sample baselines, and a value with another's gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _check
from ..designs import Design

Objective = Callable[[Tensor], Tensor]
"""k-hot samples (…, n) to losses (…), one for each sample and row of the batch."""


def draw(design: Design, num_samples: int, generator: torch.Generator | None, antithetic: bool) -> Tensor:
    """(num_samples, *batch, n)."""
    _check.at_least("num_samples", num_samples, 1)
    if not antithetic:
        return design.sample((num_samples,), generator=generator)
    return design.sample((num_samples,), generator=generator, antithetic=True)


def evaluate(fn: Objective, x: Tensor) -> Tensor:
    """The losses, checked to be one for each sample and row."""
    losses = fn(x)
    _check.losses(losses, x)
    return losses


def evaluate_with_gradient(fn: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, in the graph of what else `fn` depends on, and their gradient in x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        losses = evaluate(fn, leaf)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf, retain_graph=True)
    return losses, gradient


def others(values: Tensor, antithetic: bool) -> Tensor:
    """The mean over the other samples (dim 0), or 0 if there is none; with antithetic pairs, over the other pairs."""
    group = 2 if antithetic else 1
    sums = values.unflatten(0, (-1, group)).sum(1)
    if len(sums) == 1:
        return torch.zeros_like(values)
    rest = (sums.sum(0) - sums) / (group * (len(sums) - 1))
    result: Tensor = rest.repeat_interleave(group, 0)
    return result


def with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """The mean of `value` with its own gradient and that of the mean of `surrogate` added."""
    extra = surrogate.mean()
    return value.mean() + (extra - extra.detach())
