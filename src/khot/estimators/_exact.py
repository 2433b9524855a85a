"""Estimators without chance: their samples are prescribed, one row of a batch for each outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..designs import Design
from ._draw import Objective


def takes_objective(estimator: Callable[..., Tensor]) -> bool:
    """Whether it is `(design, fn, …)` → a loss, rather than `(design, …)` → samples."""
    return "fn" in inspect.signature(estimator).parameters


def prescribe(design: Design, samples: Tensor) -> Any:
    """The design with its samples (N, *batch, n) prescribed; `was_used` tells whether they were asked for."""

    def sample(self: Any, sample_shape: Sequence[int] = (), **options: Any) -> Tensor:
        self.was_used = True
        return samples.view(*sample_shape, *samples.shape[1:])

    kind = type(design)
    made: Any = object.__new__(type(kind.__name__, (kind,), {"sample": sample}))
    made.__dict__.update(design.__dict__)
    made.was_used = False
    return made


def estimates(
    estimator: Callable[..., Tensor],
    design: Design,
    fn: Objective,
    num_samples: int,
    parameter: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """One estimate for each row of the batch, in the `parameter` (rows, n) that the design was made from; (rows, n)."""
    if takes_objective(estimator):
        value = estimator(design, fn, num_samples=num_samples, generator=generator) * len(parameter)  # it is a mean
    else:
        shape = (num_samples,) if num_samples > 1 else ()
        value = fn(estimator(design, shape, generator=generator)).sum()
    gradient: Tensor = torch.autograd.grad(value, parameter)[0]
    return gradient if takes_objective(estimator) else gradient / num_samples


def exact_gradient(design: Design, fn: Objective, parameter: Tensor) -> Tensor:
    """∇E[f(x)] over all subsets, in the parameter that the design was made from."""
    x = design.enumerate_support()
    (gradient,) = torch.autograd.grad((design.log_prob(x).exp() * fn(x)).sum(), parameter)
    return gradient
