"""Estimators that use the objective's derivative and the score: unbiased, or of second order."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from ..designs import Design
from ._draw import Objective, draw, evaluate, evaluate_with_gradient, others, with_gradient


def taylor_control_variate(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 1,
    baseline: float | Tensor | None = None,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The score-function estimator of what a first-order expansion about π leaves (MuProp for k-hot): unbiased.

    `ĝ = [f(x) − f(π) − ∇f(π)·(x − π) − b] ∇log p(x) + Jᵀ∇f(π)`, J = ∂π/∂θ.

    Args:
        design: whose `mean` π is differentiable and whose samples have a `log_prob`.
        fn: (…, n) → (…), differentiable, and defined at π too.
        num_samples: how many samples; one evaluation more is made at π.
        baseline: b, close to the mean of the residual in brackets: a number or a tensor that broadcasts to (*batch);
            None takes the mean over the other samples, and 0 if there is one only.
        antithetic: draw pairs of opposite samples (`Pivotal`, `Systematic`).
        generator: where the randomness comes from; torch's own if None.

    Returns:
        As `score_function`.

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = taylor_control_variate(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0842,  0.0839, -0.0819, -0.0862])

    Reference: Gu, Levine, Sutskever and Mnih, "MuProp" (2016).
    """
    x = draw(design, num_samples, generator, antithetic)
    mean = design.mean
    losses = evaluate(fn, x)
    centre, slope = evaluate_with_gradient(fn, mean)
    residual = (losses - centre - (slope * (x - mean)).sum(-1)).detach()
    weight = residual - _baseline(baseline, residual, antithetic, design)
    return with_gradient(losses, weight * design.log_prob(x) + (slope * mean).sum(-1))


def reinmax(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 1,
    baseline: float | Tensor | None = None,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Second-order straight-through (Heun's rule, ReinMax for k-hot): exact in expectation for quadratic f.

    `ĝ = ½ Jᵀ∇f(x) + ½ [∇f(x)·(x − π) − b] ∇log p(x)`.

    For other f it is biased, at times more than straight-through.

    Args:
        design, fn, num_samples, baseline, antithetic, generator: as for `taylor_control_variate`; `fn` is evaluated at
            samples alone, and b is close to the mean of ∇f(x)·(x − π).

    Returns:
        As `score_function`.

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = reinmax(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0816,  0.0810, -0.0791, -0.0835])

    Reference: Liu, Dong, Liu, Yu and Gao, "Bridging discrete and backpropagation" (2023), for one-hot.
    """
    x = draw(design, num_samples, generator, antithetic)
    mean = design.mean
    losses, slope = evaluate_with_gradient(fn, x)
    along = (slope * (x - mean)).sum(-1).detach()
    weight = along - _baseline(baseline, along, antithetic, design)
    return with_gradient(losses, ((slope * mean).sum(-1) + weight * design.log_prob(x)) / 2)


def _baseline(baseline: float | Tensor | None, values: Tensor, antithetic: bool, design: Design) -> float | Tensor:
    if baseline is None:
        return others(values, antithetic)
    _check.baseline("baseline", baseline, design.batch_shape)
    return baseline
