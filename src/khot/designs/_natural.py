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
        theta, k = ctx.saved_tensors
        return torch.where(theta.isfinite(), g[..., None] * marginals(theta, k), 0.0), None

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
    def forward(p: Tensor, k: Tensor, theta: Tensor) -> Tensor:
        return theta.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])  # the output, which autograd tracks

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        result: Tensor = _CovarianceSolve.apply(*ctx.saved_tensors, g)
        return result, None, None


class _CovarianceSolve(torch.autograd.Function):
    """v = Cov(θ)⁺ g. Of a cotangent u, with w = Cov⁺ u: w for g, and −∇_θ (w·Cov(θ) v) for θ, v and w held fixed."""

    @staticmethod
    def forward(theta: Tensor, k: Tensor, g: Tensor) -> Tensor:
        return natural.covariance_solve(subsets.counts(natural.tilt(theta, k)[0], k), g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, Tensor]:
        theta, k, v = ctx.saved_tensors
        w = natural.covariance_solve(subsets.counts(natural.tilt(theta, k)[0], k), u)
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            product = (w * natural.covariance_product(leaf, k, v)).sum()
            (slope,) = torch.autograd.grad(product, leaf)
        return -slope, None, w
