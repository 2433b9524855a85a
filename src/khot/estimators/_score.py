"""Score-function estimators: no derivative of the objective is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from ..designs import ConditionalPoisson, Design
from ._draw import Objective, draw, evaluate, others, with_gradient


def score_function(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 1,
    baseline: float | Tensor = 0.0,
    coordinate_baseline: Tensor | None = None,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The score-function estimator (REINFORCE) of ∇E[f(x)]: unbiased, for any f, black boxes included.

    `ĝ = (f(x) − b) ∇log p(x)`, averaged over samples.

    Args:
        design: whose samples x, (*batch, n), have a `log_prob`.
        fn: (…, n) → (…), a loss for each sample.
        num_samples: how many samples.
        baseline: b, which must not depend on the samples: a number or a tensor that broadcasts to (*batch).
        coordinate_baseline: one for each coordinate of the parameter instead, which broadcasts to (*batch, n): see
            `minimum_variance_baseline`.
        antithetic: draw pairs of opposite samples (`Pivotal`, `Systematic`).
        generator: where the randomness comes from; torch's own if None.

    Returns:
        The mean of the losses, over samples and batch, whose gradient in the design's parameter is the estimate; what
        else `fn` depends on gets its ordinary gradient.

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = score_function(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0785,  0.0785, -0.0785, -0.0785])

    Reference: Williams (1992); for subsets, Wijk et al., "SFESS" (2024).
    """
    x = draw(design, num_samples, generator, antithetic)
    losses = evaluate(fn, x)
    if coordinate_baseline is not None:
        _check.baseline("coordinate_baseline", coordinate_baseline, design.batch_shape + design.event_shape)
        weight = losses.detach()[..., None] - coordinate_baseline
        return with_gradient(losses, (weight * scores(design, x) * design.parameter).sum(-1))
    _check.baseline("baseline", baseline, design.batch_shape)
    return with_gradient(losses, (losses.detach() - baseline) * design.log_prob(x))


def rloo(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 2,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The leave-one-out estimator of ∇E[f(x)]: unbiased, for any f, with the other samples as the baseline.

    `ĝ = (1/N) Σ_j (f(x_j) − mean of the other f) ∇log p(x_j)`.

    Args:
        design: whose samples x, (*batch, n), have a `log_prob`.
        fn: (…, n) → (…), a loss for each sample.
        num_samples: N ≥ 2.
        antithetic: draw pairs of opposite samples (`Pivotal`, `Systematic`); the baseline then leaves out the pair, and
            N ≥ 4.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        As `score_function`.

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> x = torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = rloo(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about (1, 1, −1, −1)/12
        tensor([ 0.0784,  0.0781, -0.0761, -0.0805])

    Reference: Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!" (2019).
    """
    _check.at_least("num_samples", num_samples, 4 if antithetic else 2)
    x = draw(design, num_samples, generator, antithetic)
    losses = evaluate(fn, x)
    fixed = losses.detach()
    return with_gradient(losses, (fixed - others(fixed, antithetic)) * design.log_prob(x))


def minimum_variance_baseline(design: Design, samples: Tensor, losses: Tensor) -> Tensor:
    """The baseline of least variance for each coordinate of the parameter, from samples that are not used again.

    `b_i = E[s_i² f]/E[s_i²]`, with s = ∇log p.

    Args:
        design: of the samples.
        samples: (S, *batch, n).
        losses: (S, *batch).

    Returns:
        (*batch, n), for `score_function`'s `coordinate_baseline`; keep a moving average of it in training.

    Examples:
        >>> seed = torch.Generator().manual_seed(0)
        >>> design = khot.designs.ConditionalPoisson(logits=torch.zeros(4), k=2)
        >>> x = design.sample((1000,), generator=seed)
        >>> minimum_variance_baseline(design, x, x[..., 0] + 1)
        tensor([1.5010, 1.5010, 1.5010, 1.5010])

    Reference: Bengio, Léonard and Courville, "Estimating or propagating gradients through stochastic neurons" (2013).
    """
    square = scores(design, samples).square()
    total = square.sum(0)
    return (square * losses.detach()[..., None]).sum(0) / torch.where(total > 0, total, 1.0)


def scores(design: Design, x: Tensor) -> Tensor:
    """∇log p(x) in the design's own parameter, for each sample; (S, *batch, n)."""
    if isinstance(design, ConditionalPoisson) and not design._is_probs:
        return x - design.mean.detach()
    made = design._detached()
    log_prob = made.log_prob(x)
    rows = [torch.autograd.grad(each.sum(), made.parameter, retain_graph=True)[0] for each in log_prob]
    return torch.stack(rows)
