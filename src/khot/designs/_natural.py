"""Derivatives of the law p(x) ∝ exp(θ·x) of k-subsets, in linear time: ∇ log e_k = π, ∇π = Cov, ∇_π θ = Cov⁺."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._math import natural, subsets


def log_normaliser(theta: Tensor, k: Tensor) -> Tensor:
    """log e_k(e^θ); θ (…, n) float64 → (…)."""
    result: Tensor = _LogNormaliser.apply(theta, k)
    return result


def marginals(theta: Tensor, k: Tensor) -> Tensor:
    """P(x_i = 1); θ (…, n) float64 → (…, n)."""
    result: Tensor = _Marginals.apply(theta, k)
    return result


def natural_parameters(p: Tensor, k: Tensor, theta: Tensor) -> Tensor:
    """θ whose marginals are p, found before, as a function of p; (…, n) float64."""
    result: Tensor = _Solved.apply(p, k, theta)
    return result


class _LogNormaliser(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(theta: Tensor, k: Tensor) -> Tensor:
        return natural.log_normaliser(theta, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[..., None] * marginals(*ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return (tangent * marginals(*ctx.saved_tensors)).sum(-1)


class _Marginals(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(theta: Tensor, k: Tensor) -> Tensor:
        return natural.marginals(theta, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        theta, k = ctx.saved_tensors
        return natural.covariance_product(theta, k, g), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        theta, k = ctx.saved_tensors
        return natural.covariance_product(theta, k, tangent)


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, k: Tensor, theta: Tensor) -> Tensor:
        ctx.save_for_backward(theta, k)
        return theta.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        theta, k = ctx.saved_tensors
        return natural.covariance_solve(subsets.counts(natural.tilt(theta, k)[0], k), g), None, None
