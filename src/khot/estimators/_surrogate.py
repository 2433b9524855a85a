"""Surrogate samples: what the forward pass uses is (nearly) k-hot, and it has a gradient."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd.function import once_differentiable

from .. import _check, _torch, ops
from .._math import noise, select
from ..designs import ConditionalPoisson, Design
from ..relaxations import hard_topk, sigmoid_topk, straight_through
from ._mean import differentiable_mean


def straight_through_sample(
    design: Design, sample_shape: Sequence[int] = (), *, antithetic: bool = False, generator: Generator | None = None
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
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> straight_through_sample(khot.designs.Pivotal(logits=x, k=2), generator=torch.Generator().manual_seed(0))
        tensor([1., 1., 0., 0.], grad_fn=<AddBackward0>)
    """
    _check.instance("design", design, Design)
    hard = design.sample(sample_shape, generator=generator, antithetic=antithetic)
    return straight_through(hard, differentiable_mean(design).expand(hard.shape))


def simple(
    design: ConditionalPoisson, sample_shape: Sequence[int] = (), *, generator: Generator | None = None
) -> Tensor:
    """Draw as SIMPLE: straight-through with the exact sample and the exact marginals of conditional Poisson.

    `ĝ = C∇f(x)`, C = Cov(x) = ∂π/∂θ; linear in n, where the published dynamic programme is O(nk). Reference: Ahmed,
    Zeng, Niepert and Van den Broeck, "SIMPLE" (2023).

    Args:
        design: a `ConditionalPoisson`.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        k-hot, (*sample_shape, *batch, n).

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> simple(khot.designs.ConditionalPoisson(logits=x, k=2), generator=torch.Generator().manual_seed(0))
        tensor([1., 1., 0., 0.], grad_fn=<AddBackward0>)
    """
    _check.instance("design", design, ConditionalPoisson)
    return straight_through_sample(design, sample_shape, generator=generator)


def relaxed(
    design: Design,
    sample_shape: Sequence[int] = (),
    *,
    temperature: float | Tensor = 1.0,
    hard: bool = False,
    generator: Generator | None = None,
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
        >>> design = khot.designs.PlackettLuce(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> relaxed(design, temperature=0.5, generator=torch.Generator().manual_seed(0))
        tensor([1.0000, 0.7486, 0.2046, 0.0467])
    """
    _check.instance("design", design, Design)
    if hard:
        _check_integer(torch.as_tensor(design.k), "relaxed(…, hard=True)")
    noisy = _perturbed(design, sample_shape, generator)
    soft = sigmoid_topk(noisy, design.k, temperature=temperature)
    return straight_through(hard_topk(noisy, design.k), soft) if hard else soft


def xie_ermon(
    design: Design, sample_shape: Sequence[int] = (), *, temperature: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Draw the relaxed sample of Xie and Ermon, k successive softmaxes of `(θ + Gumbel noise)/T`; for comparison.

    O(nk). Reference: Xie and Ermon, "Reparameterizable subset sampling via continuous relaxations" (2019).

    Args:
        design: whose `logits` θ and k, one for all rows, are taken; its law is not.
        temperature: T > 0.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        ≥ 0, summing to k, entries may exceed 1; (*sample_shape, *batch, n). Items with θ = +inf are 1, with −inf 0.

    Examples:
        >>> design = khot.designs.PlackettLuce(logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> xie_ermon(design, temperature=0.5, generator=torch.Generator().manual_seed(0))
        tensor([1.0000, 0.9067, 0.0783, 0.0149])
    """
    _check.instance("design", design, Design)
    _one_number("temperature", temperature)
    _check_integer(sizes := torch.as_tensor(design.k).unique(), "xie_ermon")
    if len(sizes) != 1:
        raise NotImplementedError(f"All rows must have the same integer k for `xie_ermon`; got {sizes.tolist()}.")
    return select.softmaxes(_perturbed(design, sample_shape, generator), int(sizes[0]), temperature)


def stochastic_times_smooth(
    design: Design, sample_shape: Sequence[int] = (), *, generator: Generator | None = None
) -> Tensor:
    """Draw a k-hot sample times its smooth inclusion probability: a gate, `x·π`, with the gradient of the factor π.

    It changes the objective, to E[f(x·π)], and its gradient sees the drawn items alone. Reference: Bengio, Léonard and
    Courville, "Estimating or propagating gradients through stochastic neurons" (2013), whose second estimator it is.

    Args:
        design: whose `mean` π is differentiable.
        sample_shape, generator: as for `straight_through_sample`.

    Returns:
        k entries above 0, (*sample_shape, *batch, n).

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> stochastic_times_smooth(khot.designs.Pivotal(logits=x, k=2), generator=torch.Generator().manual_seed(0))
        tensor([0.8176, 0.6225, 0.0000, 0.0000], grad_fn=<MulBackward0>)
    """
    _check.instance("design", design, Design)
    return design.sample(sample_shape, generator=generator) * differentiable_mean(design)


def _one_number(name: str, value: Any) -> None:
    """Raise unless `value` is one number > 0, or a tensor with one."""
    _check.positive(name, value)
    if isinstance(value, Tensor):
        _check.broadcasts(name, value, (), "one number")


def _check_integer(k: Tensor, what: str) -> None:
    """Raise, if values can be read, unless every k is an integer."""
    if _torch.has_values(k) and not (k == k.round()).all():
        got = f"got {k[k != k.round()].flatten()[0].item():g}. `straight_through_sample` takes fractions."
        raise ValueError(f"`k` must be an integer for `{what}`; {got}")


def _perturbed(design: Design, sample_shape: Sequence[int], generator: Generator | None) -> Tensor:
    theta = design.logits
    return theta + noise.gumbel(_check.sample_shape(sample_shape) + theta.shape, theta, generator, ops.uniform)


class AdaptiveStep:
    """Adapt the step of `imle`: λ = α‖θ‖/‖∇f‖, with α raised until a gradient is not all zeros.

    Reference: Minervini, Franceschi and Niepert, "Adaptive perturbation-based gradient estimation" (2023).

    Args:
        start: α at first.
        rate: by how much α moves at each backward pass.
        target: how many entries of a row's gradient should differ from zero, on average.
        decay: of the moving average of that number.

    Examples:
        >>> AdaptiveStep().strength
        1.0
    """

    def __init__(self, start: float = 1.0, *, rate: float = 1e-3, target: float = 1.0, decay: float = 0.9) -> None:
        self.strength, self._changed = start, target
        self._rate, self._target, self._decay = rate, target, decay

    def step(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Return λ, a 0-dimensional tensor; scores of ±inf, which no step moves, do not count."""
        norms = (torch.where(t.isfinite(), t, 0.0).norm() for t in (theta, slope))
        size, norm = (torch.where(t > 0, t, 1.0) for t in norms)
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
    generator: Generator | None = None,
) -> Tensor:
    """Draw the k-hot top-k of perturbed scores, with its change as scores move by −λ∇f as gradient (I-MLE).

    `ĝ = [top-k(θ + ε) − top-k(θ − λ∇f + ε)]/λ`, with one sum-of-gamma noise ε; k of them are about a Gumbel variable.
    Reference: Niepert, Minervini and Franceschi, "Implicit MLE" (2021).

    Args:
        design: whose `logits` θ and k are taken; its law is not: samples are those of perturb-and-MAP.
        sample_shape, generator: as for `straight_through_sample`.
        step: λ > 0, or an `AdaptiveStep` to be kept between calls.
        terms: of the sum of gamma variables.
        noise_temperature: the scale of the noise.

    Returns:
        k-hot, (*sample_shape, *batch, n).

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> y = imle(khot.designs.PlackettLuce(logits=x, k=2), generator=torch.Generator().manual_seed(0))
        >>> y.detach(), *torch.autograd.grad(y[0], x)
        (tensor([1., 1., 0., 0.]), tensor([ 0.1000,  0.0000,  0.0000, -0.1000]))
    """
    _check.instance("design", design, Design)
    if not isinstance(step, AdaptiveStep):
        _check.positive("step", step)
    _one_number("noise_temperature", noise_temperature)
    _check.at_least("terms", terms, 1)
    theta = design.logits
    k = torch.as_tensor(design.k, dtype=torch.float64, device=theta.device)
    _check_integer(k, "imle")
    shape = _check.sample_shape(sample_shape) + theta.shape
    perturbation = noise_temperature * sum_of_gamma(shape, k, terms, theta, generator)
    return _Imle.apply(theta.expand(shape), perturbation, k, step)  # type: ignore[no-any-return]


def sum_of_gamma(shape: torch.Size, k: Tensor, terms: int, like: Tensor, generator: Generator | None) -> Tensor:
    """Draw (Σ_{i ≤ terms} Gamma(1/k, k/i) − log terms)/k: k of them sum to about a Gumbel variable; `shape`."""
    _check.generator(generator)
    size = k.clamp(min=1)[..., None, None]
    place = torch.arange(1, terms + 1, dtype=torch.float64, device=like.device)
    gamma = _torch.standard_gamma((1 / size).expand(*shape, terms).contiguous(), generator)
    return (((gamma * size / place).sum(-1) - math.log(terms)) / size[..., 0]).to(like.dtype)


class _Imle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, noise: Tensor, k: Tensor, step: float | AdaptiveStep) -> Tensor:
        k = k.expand(theta.shape[:-1])
        chosen = hard_topk(theta + noise, k)
        ctx.save_for_backward(theta, noise, k, chosen)
        ctx.step = step
        return chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        theta, noise, k, chosen = ctx.saved_tensors
        step = ctx.step.step(theta, slope) if isinstance(ctx.step, AdaptiveStep) else ctx.step
        gradient = (chosen - hard_topk(theta - step * slope + noise, k)) / step
        if isinstance(ctx.step, AdaptiveStep):
            ctx.step.update(gradient)
        return gradient, None, None, None
