"""Loss estimators that never evaluate a subset twice: different subsets, drawn without replacement."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from .. import _check, ops
from .._math import drawn_sets, noise
from ..designs import Design, Pivotal, inclusion_probs
from ._loss import Objective, check_baseline, evaluate, with_gradient


def distinct_subsets(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 8,
    baseline: float | Tensor = 0.0,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate ∇E[f(x)] from different subsets, each weighted by p/π: unbiased, for any f; exact if all are drawn.

    Of all subsets s, `num_samples` are drawn without replacement, with the inclusion probabilities π = min(1, c·p(s)),
    and `ĝ = Σ_{drawn} p/π (f − b) ∇log p`: Horvitz and Thompson's estimate of a sum over all subsets. No subset is
    evaluated twice, and the likely ones are evaluated for sure. The number of subsets
    must be small (100,000), as they are enumerated. Reference: Kool, van Hoof and Welling, "Estimating gradients for
    discrete random variables by sampling without replacement" (2020), whose unordered-set estimator draws otherwise.

    Args:
        design: of one k, whose subsets have a `log_prob`.
        fn, baseline, per_row, generator: as for `score_function`, and so is what it returns.
        num_samples: how many subsets, ≥ 1; all of them, if there are fewer.

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = distinct_subsets(design, lambda s: s[..., 0] * s[..., 1], num_samples=6, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # all six subsets: (1, 1, −1, −1)/12
        tensor([ 0.0833,  0.0833, -0.0833, -0.0833])
    """
    _check.at_least("num_samples", num_samples, 1)
    subsets = _subsets(design)
    count = (subsets.chance > 0).sum(-1).clamp(max=num_samples)
    probs = inclusion_probs(subsets.chance, count)
    index = Pivotal(probs, count, validate_args=False).sample_indices(generator=generator)  # (rows, ≤ num_samples)
    at, is_drawn = index.clamp(min=0), index >= 0
    share = torch.where(is_drawn, subsets.chance.gather(-1, at) / probs.gather(-1, at), 0.0)
    check_baseline("baseline", baseline, design.batch_shape)
    return _weighted(design, fn, subsets, at, share, lambda _: baseline, per_row)


def unordered_set(
    design: Design,
    fn: Objective,
    *,
    num_samples: int = 8,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate ∇E[f(x)] from a set of different subsets with its own baseline: unbiased, for any f; exact if all drawn.

    Of all subsets s, a set S of `num_samples` is drawn one by one ∝ p, without replacement (Gumbel top-k), and
    `ĝ = Σ_S ∇p(s) R(S, s) [f(s) − Σ_S p(s') R(S, s, s') f(s')]`. R(S, s) = P(S | s is drawn first)/P(S), and
    R(S, s, s') is the same for s' if there were no s. With k = 1 it is an expectation over one of n items.
    The number of subsets must be small (100,000), as they are enumerated. Reference: Kool, van Hoof and Welling,
    "Estimating gradients for discrete random variables by sampling without replacement" (2020).

    Args:
        design, fn, per_row, generator: as for `distinct_subsets`, and so is what it returns.
        num_samples: how many subsets, ≥ 2; all of them, if there are fewer.

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.ConditionalPoisson(logits=x, k=2)
        >>> loss = unordered_set(design, lambda s: s[..., 0] * s[..., 1], num_samples=6, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # all six subsets: (1, 1, −1, −1)/12
        tensor([ 0.0833,  0.0833, -0.0833, -0.0833])
    """
    _check.at_least("num_samples", num_samples, 2)
    subsets = _subsets(design)
    chance, scores = subsets.chance, subsets.chance.log()
    noisy = scores + noise.gumbel(scores.shape, scores, generator, ops.uniform)
    at = noisy.topk(min(num_samples, chance.shape[-1])).indices
    drawn, is_rest = chance.gather(-1, at), torch.ones_like(chance, dtype=torch.bool).scatter_(-1, at, False)
    one, two = drawn_sets.ratios(drawn.log(), torch.where(is_rest, chance, 0.0).sum(-1))

    def baseline(losses: Tensor) -> Tensor:
        rows = losses.to(chance.dtype).reshape(len(at.mT), -1).mT  # (rows, m)
        return (two @ (drawn * rows)[..., None])[..., 0].mT.reshape(losses.shape).to(losses.dtype)

    return _weighted(design, fn, subsets, at, drawn * one, baseline, per_row)


class _Subsets(NamedTuple):
    """All subsets of a design, (m, *batch, n), their log-probabilities (m, *batch), and probabilities (rows, m)."""

    x: Tensor
    log_p: Tensor
    chance: Tensor


def _subsets(design: Design) -> _Subsets:
    _check.instance("design", design, Design)
    x = design.enumerate_support()
    log_p = design.log_prob(x)
    return _Subsets(x, log_p, log_p.detach().to(torch.float64).exp().reshape(len(x), -1).mT.contiguous())


def _weighted(
    design: Design,
    fn: Objective,
    subsets: _Subsets,
    at: Tensor,
    share: Tensor,
    baseline: Callable[[Tensor], float | Tensor],
    per_row: bool,
) -> Tensor:
    """Return Σ share·f, with the gradient Σ share (f − b) ∇log p, over subsets at (rows, m)."""
    batch = (at.shape[-1], *design.batch_shape)
    places, part = at.mT.reshape(batch), share.mT.reshape(batch).to(subsets.log_p.dtype)
    losses = evaluate(fn, subsets.x.gather(0, places[..., None].expand(*batch, subsets.x.shape[-1])))
    weight = part * (losses.detach() - baseline(losses.detach()))
    score = torch.where(part > 0, subsets.log_p.gather(0, places), 0.0)
    return with_gradient(len(losses) * part * losses, len(losses) * weight * score, per_row)  # which takes means
