"""Expectations over all sequences, from the k that were drawn."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check
from ._steps import Beams


class Expectation(NamedTuple):
    """Hold an estimate of E[f] and how far to trust it."""

    mean: Tensor
    """(batch, …), the estimate."""
    variance: Tensor | None
    """(batch, …), an estimate of the variance of `mean`; None for one search without joint inclusion probabilities."""


def expectation(beams: Beams, values: Tensor, *, normalize: bool = False, searches: int = 1) -> Expectation:
    """Estimate the mean of f over all sequences of the model from sampled beams, without bias.

    `Σ_y p(y) f(y)/Q(y)` over the k beams, Q the product of the inclusion probabilities along the path (Horvitz and
    Thompson). The gradient in the parameters of p and f is without bias, too: Q is a constant.

    Args:
        beams: from `beam_search` with `select=khot.search.sampled`.
        values: f of each beam, (batch, k, …). What is in an empty slot does not matter.
        normalize: divide by the sum of all p/Q, for a relaxation that is not `proportional`: with that, the sum is 1 on
            every draw, with others on average. This has a bias of the order of the variance.
        searches: R ≥ 1, how many rows that follow each other are independent searches for the same thing, as with
            `start.repeat_interleave(R)`. The result has batch/R rows.

    Returns:
        The mean, over the searches if there are several, and its variance. With R ≥ 2 searches of any design,
        `Σ_r (mean_r − mean)²/(R(R − 1))`, which is never negative and without bias. With one, the design must be
        `ConditionalPoisson`, which has pairs: without bias if any two sequences can be drawn together, as with
        `relaxation=khot.sigmoid_topk` and k ≥ 2, else too small; it may be negative. With `normalize`, both hold by
        linearization.

    Examples:
        >>> from functools import partial
        >>> step = lambda tokens, state: (torch.tensor([0.5, 0.3, 0.2]).log().expand(len(tokens), 3), state)
        >>> search = partial(khot.search.beam_search, select=khot.search.sampled)
        >>> beams = search(step, None, 9, start=torch.tensor([0]), length=2)
        >>> expectation(beams, (beams.tokens == 0).sum(-1).float()).mean  # k holds all nine: no error
        tensor([1.0000], dtype=torch.float64)
        >>> beams = search(step, None, 3, start=torch.zeros(500, dtype=torch.int64), length=2)
        >>> estimate = expectation(beams, (beams.tokens == 0).sum(-1).float(), searches=500)
        >>> bool((estimate.mean - 1).abs() < 4 * estimate.variance.sqrt())
        True
    """
    _check.instance("beams", beams, Beams)
    _check.instance("values", values, Tensor)
    if beams.log_inclusion_probs is None:
        raise ValueError("`beams` must have inclusion probabilities; search with `select=khot.search.sampled`.")
    shape = beams.log_probs.shape
    if values.shape[:2] != shape:
        raise ValueError(f"`values` must have the shape (batch, k, …) = {(*shape, '…')}; got {tuple(values.shape)}.")
    is_drawn = beams.log_probs > -torch.inf
    log_q = beams.log_inclusion_probs.detach()
    weights = torch.where(is_drawn, (beams.log_probs.to(torch.float64) - log_q).exp(), 0.0)
    f = torch.where(_as(is_drawn, values), values.to(torch.float64), 0.0)
    _check.at_least("searches", searches, 1)
    if len(f) % searches:
        raise ValueError(f"`searches` must divide the rows of the batch, {len(f)}; got {searches}.")
    w, x = (t.unflatten(0, (len(f) // searches, searches)) for t in (weights, f))
    mean = (_as(w, x) * x).sum(2).mean(1)
    if normalize:
        total = _as(w.sum(2).mean(1), mean)
        mean = mean / total
        f = (f - mean.repeat_interleave(searches, 0).unsqueeze(1)) / total.repeat_interleave(searches, 0).unsqueeze(1)
    if searches == 1:
        return Expectation(mean, _variance(beams, weights.detach(), f.detach()))
    each = (_as(weights, f) * f).sum(1).detach().unflatten(0, (len(mean), searches))
    return Expectation(mean, each.var(1) / searches)


def _variance(beams: Beams, weights: Tensor, f: Tensor) -> Tensor | None:
    """Return (Σ w f)² − Σ_yz p(y) p(z) f(y) f(z)/Q(y, z): the square of the estimate less an estimate of the square."""
    log_q, log_pairs = beams.log_inclusion_probs, beams.log_joint_probs
    if log_q is None or log_pairs is None:
        return None
    ratio = (log_q[:, :, None] + log_q[:, None, :] - log_pairs).nan_to_num(posinf=-torch.inf).exp()
    matrix = weights[:, :, None] * weights[:, None, :] * (1 - ratio)
    variance: Tensor = torch.einsum("bij,bi...,bj...->b...", matrix, f, f)
    return torch.full_like(variance, torch.nan) if weights.shape[1] < 2 else variance


def _as(t: Tensor, other: Any) -> Tensor:
    """Return t with trailing dims of 1, so that it broadcasts with a tensor of more dims."""
    return t.view(*t.shape, *(1,) * (other.ndim - t.ndim))
