"""Implicit maximum likelihood: two perturbed top-k, with and without a step along the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _check, _torch
from ..designs import Design
from ..relaxations import hard_topk


class AdaptiveStep:
    """A step for `imle` that adapts: λ = α‖θ‖/‖∇f‖, with α raised until a gradient is not all zeros.

    Args:
        start: α at first.
        rate: by how much α moves at each backward pass.
        target: how many entries of a row's gradient should differ from zero, on average.
        decay: of the moving average of that number.

    Examples:
        >>> AdaptiveStep().strength
        1.0

    Reference: Minervini, Franceschi and Niepert, "Adaptive perturbation-based gradient estimation" (2023).
    """

    def __init__(self, start: float = 1.0, *, rate: float = 1e-3, target: float = 1.0, decay: float = 0.9) -> None:
        self.strength = start
        self._rate, self._target, self._decay = rate, target, decay
        self._changed = target

    def step(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Return λ, a 0-dimensional tensor; scores of ±inf, which no step moves, do not count."""
        size, norm = (torch.where(t.isfinite(), t, 0.0).norm() for t in (theta, slope))
        size, norm = (torch.where(t > 0, t, 1.0) for t in (size, norm))
        return self.strength * size / norm

    def update(self, gradient: Tensor) -> None:
        """Adapt α to a gradient, (…, n)."""
        changed = float((gradient != 0).sum(-1, dtype=torch.float64).mean())
        self._changed = self._decay * self._changed + (1 - self._decay) * changed
        self.strength = max(self.strength + (self._rate if self._changed < self._target else -self._rate), self._rate)


def imle(
    design: Design,
    sample_shape: Sequence[int] = (),
    *,
    step: float | AdaptiveStep = 10.0,
    terms: int = 10,
    noise_temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the k-hot top-k of perturbed scores, with its change as scores move by −λ∇f as gradient (I-MLE).

    `ĝ = [top-k(θ + ε) − top-k(θ − λ∇f + ε)]/λ`, with one sum-of-gamma noise ε; k of them are about a Gumbel variable.

    Args:
        design: whose `logits` θ and k are taken; its law is not: samples are those of perturb-and-MAP.
        sample_shape: of independent samples.
        step: λ > 0, or an `AdaptiveStep` to be kept between calls.
        terms: of the sum of gamma variables.
        noise_temperature: the scale of the noise.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        k-hot, (*sample_shape, *batch, n).

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> y = imle(khot.designs.PlackettLuce(logits=x, k=2), generator=seed)
        >>> y
        tensor([1., 1., 0., 0.], grad_fn=<_ImleBackward>)
        >>> torch.autograd.grad(y[0], x)
        (tensor([ 0.1000,  0.0000,  0.0000, -0.1000]),)

    Reference: Niepert, Minervini and Franceschi, "Implicit MLE" (2021).
    """
    if not isinstance(step, AdaptiveStep):
        _check.positive("step", step)
    _check.positive("noise_temperature", noise_temperature)
    _check.at_least("terms", terms, 1)
    theta = design.logits
    k = torch.as_tensor(design.k, dtype=torch.float64, device=theta.device)
    shape = torch.Size(sample_shape) + theta.shape
    scale = noise_temperature * sum_of_gamma(shape, k, terms, theta, generator)
    result: Tensor = _Imle.apply(theta.expand(shape), scale, k, step)
    return result


def sum_of_gamma(shape: torch.Size, k: Tensor, terms: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw (Σ_{i ≤ terms} Gamma(1/k, k/i) − log terms)/k: k of them sum to about a Gumbel variable; `shape`."""
    size = k.clamp(min=1)[..., None, None].to(like.device)
    place = torch.arange(1, terms + 1, dtype=torch.float64, device=like.device)
    gamma = _torch.standard_gamma((1 / size).expand(*shape, terms).contiguous(), generator)
    return (((gamma * size / place).sum(-1) - math.log(terms)) / size[..., 0]).to(like.dtype)


class _Imle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, noise: Tensor, k: Tensor, step: float | AdaptiveStep) -> Tensor:
        chosen = hard_topk(theta + noise, k.expand(theta.shape[:-1]))
        ctx.save_for_backward(theta, noise, k, chosen)
        ctx.step = step
        return chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        theta, noise, k, chosen = ctx.saved_tensors
        step = ctx.step.step(theta, slope) if isinstance(ctx.step, AdaptiveStep) else ctx.step
        moved = hard_topk(theta - step * slope + noise, k.expand(theta.shape[:-1]))
        gradient = (chosen - moved) / step
        if isinstance(ctx.step, AdaptiveStep):
            ctx.step.update(gradient)
        return gradient, None, None, None
