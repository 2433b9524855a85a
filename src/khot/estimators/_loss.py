"""Loss estimators: the score function, which needs no derivative of the objective, and those that use both."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from .. import _check
from .._torch import version, was_changed
from ..designs import ConditionalPoisson, Design
from ._mean import differentiable_mean

Objective = Callable[[Tensor], Tensor]
"""k-hot samples (…, n) to losses (…), one for each sample and row of the batch."""


def takes_objective(estimator: Callable[..., Tensor]) -> bool:
    """Tell, by a parameter `fn`, whether an estimator is `(design, fn, …)` → a loss, or gives surrogate samples."""
    return "fn" in inspect.signature(estimator).parameters


def score_function(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 1,
    baseline: float | Tensor = 0.0,
    coordinate_baseline: Tensor | None = None,
    antithetic: bool = False,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate ∇E[f(x)] by the score function (REINFORCE): unbiased, for any f, black boxes included.

    `ĝ = (f(x) − b) ∇log p(x)`, averaged over samples. Reference: Williams (1992); for subsets, Wijk et al., "SFESS"
    (2024).

    Args:
        design: whose samples x, (*batch, n), have a `log_prob`.
        fn: (…, n) → (…), a loss for each sample.
        num_samples: how many samples.
        baseline: b, which must not depend on the samples: a number or a tensor that broadcasts to (*batch).
        coordinate_baseline: one for each coordinate of the parameter instead, which broadcasts to (*batch, n): see
            `minimum_variance_baseline`.
        antithetic: draw pairs of opposite samples (`Pivotal`, `Systematic`).
        per_row: return the losses of the rows, (*batch), to be weighted or masked, instead of their mean.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        The mean of the losses, over samples and batch (or over samples alone), whose gradient in the design's parameter
        is the estimate; what else `fn` depends on gets its ordinary gradient.

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = score_function(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0785,  0.0785, -0.0785, -0.0785])
    """
    x = _draw(design, num_samples, generator, antithetic)
    losses = evaluate(fn, x)
    if coordinate_baseline is not None:
        check_baseline("coordinate_baseline", coordinate_baseline, design.batch_shape + design.event_shape)
        weight = losses.detach()[..., None] - coordinate_baseline
        return with_gradient(losses, (weight * _score_vectors(design, x) * design.parameter).sum(-1), per_row)
    check_baseline("baseline", baseline, design.batch_shape)
    return with_gradient(losses, (losses.detach() - baseline) * design.log_prob(x), per_row)


def over_samples(fn: Objective, *, batch_dims: int = 1) -> Objective:
    """Make an objective of one batch, (*batch, n) → (*batch), into one of many samples, (…, *batch, n) → (…, *batch).

    It calls `fn` for one sample of the whole batch at a time: for models that take exactly one batch dimension, or
    whose rows belong to rows of data.

    Args:
        fn: (*batch, n) → (*batch).
        batch_dims: how many dims the batch has.

    Examples:
        >>> data = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # a row for each row of the batch
        >>> over_samples(lambda s: (s * data).sum(-1))(torch.ones(5, 2, 3)).shape
        torch.Size([5, 2])
    """
    _check.at_least("batch_dims", batch_dims, 0)

    def each(x: Tensor) -> Tensor:
        if x.ndim <= batch_dims + 1:
            return fn(x)
        return torch.stack([each(part) for part in x])

    return each


def rloo(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 2,
    antithetic: bool = False,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate ∇E[f(x)] by leaving one out: unbiased, for any f, with the other samples as the baseline.

    `ĝ = (1/N) Σ_j (f(x_j) − mean of the other f) ∇log p(x_j)`. Reference: Kool, van Hoof and Welling, "Buy 4 REINFORCE
    samples, get a baseline for free!" (2019).

    Args:
        design, fn, per_row, generator: as for `score_function`, and so is what it returns.
        num_samples: N ≥ 2.
        antithetic: draw pairs of opposite samples; the baseline then leaves out the pair, and N ≥ 4.

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = rloo(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0784,  0.0781, -0.0761, -0.0805])
    """
    _check.at_least("num_samples", num_samples, 4 if antithetic else 2)
    x = _draw(design, num_samples, generator, antithetic)
    losses = evaluate(fn, x)
    fixed = losses.detach()
    return with_gradient(losses, (fixed - others(fixed, antithetic)) * design.log_prob(x), per_row)


def minimum_variance_baseline(design: Design, samples: Tensor, losses: Tensor) -> Tensor:
    """Return the baseline of least variance for each coordinate of the parameter, from samples not used again.

    `b_i = E[s_i² f]/E[s_i²]`, with s = ∇log p. Reference: Bengio, Léonard and Courville, "Estimating or propagating
    gradients through stochastic neurons" (2013).

    Args:
        design: of the samples.
        samples: (S, *batch, n).
        losses: (S, *batch).

    Returns:
        (*batch, n), for `score_function`'s `coordinate_baseline`; keep a moving average of it in training.

    Examples:
        >>> design = khot.designs.ConditionalPoisson(logits=torch.zeros(4), k=2)
        >>> x = design.sample((1000,), generator=torch.Generator().manual_seed(0))
        >>> minimum_variance_baseline(design, x, x[..., 0] + 1)
        tensor([1.5010, 1.5010, 1.5010, 1.5010])
    """
    square = _score_vectors(design, samples).square()
    total = square.sum(0)
    return (square * losses.detach()[..., None]).sum(0) / torch.where(total > 0, total, 1.0)


def _score_vectors(design: Design, x: Tensor) -> Tensor:
    """Return ∇log p(x) in the design's own parameter, for each sample; (S, *batch, n)."""
    if isinstance(design, ConditionalPoisson) and design.parameter is design.logits:
        return x - design.mean.detach()
    own = design.with_parameter(design.parameter.detach().requires_grad_())
    log_prob = own.log_prob(x)
    return torch.stack([torch.autograd.grad(each.sum(), own.parameter, retain_graph=True)[0] for each in log_prob])


def taylor_control_variate(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 1,
    baseline: float | Tensor | None = None,
    antithetic: bool = False,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate by the score function what a first-order expansion about π leaves (MuProp for k-hot): unbiased.

    `ĝ = [f(x) − f(π) − ∇f(π)·(x − π) − b] ∇log p(x) + Jᵀ∇f(π)`, J = ∂π/∂θ. Reference: Gu, Levine, Sutskever and Mnih,
    "MuProp" (2016).

    Args:
        design: whose `mean` π is differentiable and whose samples have a `log_prob`.
        fn: (…, n) → (…), differentiable, and defined at π too.
        num_samples: how many samples; one evaluation more is made at π.
        baseline: b, close to the mean of the residual in brackets: a number or a tensor that broadcasts to (*batch);
            None takes the mean over the other samples, and 0 if there is one only.
        antithetic, per_row, generator: as for `score_function`, and so is what it returns.

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = taylor_control_variate(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0842,  0.0839, -0.0819, -0.0862])
    """
    x = _draw(design, num_samples, generator, antithetic)
    losses = evaluate(fn, x)
    mean = differentiable_mean(design)
    centre, slope = evaluate_with_gradient(fn, mean)
    residual = (losses - centre - (slope * (x - mean)).sum(-1)).detach()
    weight = residual - _baseline(baseline, residual, antithetic, design)
    return with_gradient(losses, weight * design.log_prob(x) + (slope * mean).sum(-1), per_row)


def reinmax(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 1,
    baseline: float | Tensor | None = None,
    antithetic: bool = False,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate by second-order straight-through (Heun's rule, ReinMax for k-hot): exact on average for quadratic f.

    `ĝ = ½ Jᵀ∇f(x) + ½ [∇f(x)·(x − π) − b] ∇log p(x)`. For other f it is biased, at times more than straight-through.
    Reference: Liu, Dong, Liu, Yu and Gao, "Bridging discrete and backpropagation" (2023), for one-hot.

    Args:
        design, fn, num_samples, baseline, antithetic, per_row, generator: as for `taylor_control_variate`, and so is
            what it returns; but `fn` is evaluated at samples alone, and b is close to the mean of ∇f(x)·(x − π).

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = reinmax(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0816,  0.0810, -0.0791, -0.0835])
    """
    x = _draw(design, num_samples, generator, antithetic)
    mean = differentiable_mean(design)
    losses, slope = evaluate_with_gradient(fn, x)
    along = (slope * (x - mean)).sum(-1).detach()
    weight = along - _baseline(baseline, along, antithetic, design)
    return with_gradient(losses, ((slope * mean).sum(-1) + weight * design.log_prob(x)) / 2, per_row)


def _draw(design: Design, num_samples: int, generator: Generator | None, antithetic: bool) -> Tensor:
    """Draw (num_samples, *batch, n)."""
    _check.instance("design", design, Design)
    _check.at_least("num_samples", num_samples, 1)
    return design.sample((num_samples,), generator=generator, antithetic=antithetic)


def evaluate(fn: Objective, x: Tensor) -> Tensor:
    """Return the losses of samples (…, n); raise unless there is one for each sample and row."""
    _check.function("fn", fn)
    before = None if x.is_inference() else version(x)
    losses: Any = fn(x)
    if before is not None and was_changed(x, before):
        raise ValueError("`fn` must not change its samples in place; it did. Use `x.clone()`.")
    if not isinstance(losses, Tensor) or losses.shape != x.shape[:-1]:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        wanted = f"the shape {tuple(x.shape[:-1])} for samples of shape {tuple(x.shape)}"
        raise ValueError(f"`fn` must give one loss for each sample, {wanted}; got {got}.")
    return losses if losses.is_floating_point() else losses.to(x.dtype)  # counts and hits are losses, too


def evaluate_with_gradient(fn: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, in the graph of what else `fn` depends on, and their gradient in x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        losses = evaluate(fn, leaf)
        total = losses.sum()
        (gradient,) = (
            torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True) if total.requires_grad else (None,)
        )
    if gradient is None:
        raise ValueError("`fn` must be differentiable in its samples; it is not. `rloo` takes any `fn`.")
    return losses, gradient


def others(values: Tensor, antithetic: bool) -> Tensor:
    """Return the mean over the other samples (dim 0), or over the other antithetic pairs; 0 if there are none."""
    group = 2 if antithetic else 1
    sums = values.unflatten(0, (-1, group)).sum(1)
    if len(sums) == 1:
        return torch.zeros_like(values)
    rest: Tensor = (sums.sum(0) - sums) / (group * (len(sums) - 1))
    return rest.repeat_interleave(group, 0)


def check_baseline(name: str, value: Any, shape: torch.Size) -> None:
    """Raise unless `value` is a number or a tensor that broadcasts to the shape."""
    if isinstance(value, Tensor):
        _check.broadcasts(name, value, tuple(shape), "the design's shape")
    else:
        _check.number(name, value)


def with_gradient(value: Tensor, surrogate: Tensor, per_row: bool) -> Tensor:
    """Return the mean of `value` (S, *batch), or that over samples, with the gradient of `surrogate`'s mean added."""
    value, extra = (t.mean(0) if per_row else t.mean() for t in (value, surrogate))
    return value + (extra - extra.detach())


def _baseline(baseline: float | Tensor | None, values: Tensor, antithetic: bool, design: Design) -> float | Tensor:
    """Return the baseline given, or the mean over the other samples."""
    if baseline is None:
        return others(values, antithetic)
    check_baseline("baseline", baseline, design.batch_shape)
    return baseline
