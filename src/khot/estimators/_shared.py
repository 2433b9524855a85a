"""What estimators share: their two kinds, samples, baselines, and a value with another's gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _check
from ..designs import Design

Objective = Callable[[Tensor], Tensor]
"""k-hot samples (…, n) to losses (…), one for each sample and row of the batch."""


def takes_objective(estimator: Callable[..., Tensor]) -> bool:
    """Tell whether an estimator is `(design, fn, …)` → a loss, rather than `(design, sample_shape, …)` → samples.

    A parameter named `fn` decides.
    """
    return "fn" in inspect.signature(estimator).parameters


def draw(design: Design, num_samples: int, generator: torch.Generator | None, antithetic: bool) -> Tensor:
    """Draw (num_samples, *batch, n)."""
    _check.at_least("num_samples", num_samples, 1)
    if not antithetic:
        return design.sample((num_samples,), generator=generator)
    return design.sample((num_samples,), generator=generator, antithetic=True)


def evaluate(fn: Objective, x: Tensor) -> Tensor:
    """Return the losses of samples (…, n); raise unless there is one for each sample and row."""
    losses: Any = fn(x)
    if not isinstance(losses, Tensor) or losses.shape != x.shape[:-1]:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"`fn` must give one loss for each sample, the shape {tuple(x.shape[:-1])} for samples of shape "
            f"{tuple(x.shape)}; got {got}."
        )
    return losses


def evaluate_with_gradient(fn: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, in the graph of what else `fn` depends on, and their gradient in x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        losses = evaluate(fn, leaf)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf, retain_graph=True)
    return losses, gradient


def others(values: Tensor, antithetic: bool) -> Tensor:
    """Return the mean over the other samples (dim 0), or over the other antithetic pairs; 0 if there are none."""
    group = 2 if antithetic else 1
    sums = values.unflatten(0, (-1, group)).sum(1)
    if len(sums) == 1:
        return torch.zeros_like(values)
    rest = (sums.sum(0) - sums) / (group * (len(sums) - 1))
    result: Tensor = rest.repeat_interleave(group, 0)
    return result


def check_baseline(name: str, value: Any, shape: torch.Size) -> None:
    """Raise unless `value` is a number or a tensor that broadcasts to the shape."""
    if isinstance(value, Tensor):
        _check.broadcasts(name, value, tuple(shape), "the design's shape")
    else:
        _check.number(name, value)


def with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """Return the mean of `value`, with the gradient of the mean of `surrogate` added to its own."""
    extra = surrogate.mean()
    return value.mean() + (extra - extra.detach())
