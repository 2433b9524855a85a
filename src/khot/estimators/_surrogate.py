"""Surrogate samples: what the forward pass uses is (nearly) k-hot, and it has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _check, ops
from .._math import noise, successive
from ..designs import ConditionalPoisson, Design
from ..relaxations import hard_topk, sigmoid_topk, straight_through


def straight_through_sample(
    design: Design,
    sample_shape: Sequence[int] = (),
    *,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a k-hot sample with the gradient of its mean: for affine objectives exact and without variance.

    `x + π − sg(π)`, so `ĝ = Jᵀ∇f(x)`, J = ∂π/∂θ.

    Args:
        design: whose `mean` π is differentiable.
        sample_shape: of independent samples.
        antithetic: draw pairs of opposite samples (`Pivotal`, `Systematic`).
        generator: where the randomness comes from; torch's own if None.

    Returns:
        k-hot, (*sample_shape, *batch, n).

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> straight_through_sample(khot.designs.Pivotal(logits=x, k=2), generator=seed)
        tensor([1., 1., 0., 0.], grad_fn=<AddBackward0>)
    """
    options = {"antithetic": True} if antithetic else {}
    hard = design.sample(sample_shape, generator=generator, **options)
    return straight_through(hard, design.mean.expand(hard.shape))


def simple(
    design: ConditionalPoisson, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw as SIMPLE: straight-through with the exact sample and the exact marginals of conditional Poisson.

    `ĝ = C∇f(x)`, C = Cov(x) = ∂π/∂θ; linear in n, where the published dynamic programme is O(nk).

    Args:
        design: a `ConditionalPoisson`.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        k-hot, (*sample_shape, *batch, n).

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> simple(khot.designs.ConditionalPoisson(logits=x, k=2), generator=seed)
        tensor([1., 1., 0., 0.], grad_fn=<AddBackward0>)

    Reference: Ahmed, Zeng, Niepert and Van den Broeck, "SIMPLE" (2023).
    """
    _check.instance("design", design, ConditionalPoisson)
    return straight_through_sample(design, sample_shape, generator=generator)


def relaxed(
    design: Design,
    sample_shape: Sequence[int] = (),
    *,
    temperature: float | Tensor = 1.0,
    hard: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a relaxed sample by noise injection, `σ_k((θ + Gumbel noise)/T)`: low variance, biased.

    Args:
        design: whose `logits` θ and k are taken; its law is not.
        temperature: T > 0, a number or a tensor that broadcasts with the batch.
        hard: k-hot forward, this backward.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        In [0, 1], summing to k, (*sample_shape, *batch, n).

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> design = khot.designs.PlackettLuce(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> relaxed(design, temperature=0.5, generator=seed)
        tensor([1.0000, 0.7486, 0.2046, 0.0467])
    """
    noisy = _perturbed(design, sample_shape, generator)
    soft = sigmoid_topk(noisy, design.k, temperature=temperature)
    return straight_through(hard_topk(noisy, design.k), soft) if hard else soft


def xie_ermon(
    design: Design,
    sample_shape: Sequence[int] = (),
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the relaxed sample of Xie and Ermon, k successive softmaxes of `(θ + Gumbel noise)/T`; for comparison.

    Args:
        design: whose `logits` θ and k, one for all rows, are taken; its law is not.
        temperature: T > 0.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        ≥ 0, summing to k, entries may exceed 1; (*sample_shape, *batch, n). Items with θ = +inf are 1, with −inf 0.
        O(nk).

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> design = khot.designs.PlackettLuce(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> xie_ermon(design, temperature=0.5, generator=seed)
        tensor([1.0000, 0.9067, 0.0783, 0.0149])

    Reference: Xie and Ermon, "Reparameterizable subset sampling via continuous relaxations" (2019).
    """
    _check.positive("temperature", temperature)
    sizes = torch.as_tensor(design.k).unique()
    if len(sizes) != 1 or sizes[0] != sizes[0].round():
        raise NotImplementedError(f"All rows must have the same integer k for `xie_ermon`; got {sizes.tolist()}.")
    return successive.softmaxes(_perturbed(design, sample_shape, generator), int(sizes[0]), temperature)


def stochastic_times_smooth(
    design: Design, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a k-hot sample times its smooth inclusion probability: a gate, `x·π`, with the gradient of the factor π.

    The k-hot form of Bengio's second estimator. It changes the objective, to E[f(x·π)], and its gradient sees the
    drawn items alone.

    Args:
        design: whose `mean` π is differentiable.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        k entries above 0, (*sample_shape, *batch, n).

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> stochastic_times_smooth(khot.designs.Pivotal(logits=x, k=2), generator=seed)
        tensor([0.8176, 0.6225, 0.0000, 0.0000], grad_fn=<MulBackward0>)

    Reference: Bengio, Léonard and Courville, "Estimating or propagating gradients through stochastic neurons" (2013).
    """
    return design.sample(sample_shape, generator=generator) * design.mean


def _perturbed(design: Design, sample_shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    theta = design.logits
    return theta + noise.gumbel(torch.Size(sample_shape) + theta.shape, theta, generator, ops.uniform)
