"""Expectations over all sequences, from the k that were drawn."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check
from ._beams import Beams


class Expectation(NamedTuple):
    """An estimate of E[f] and how far to trust it."""

    mean: Tensor
    """(batch, …), the estimate."""
    variance: Tensor | None
    """(batch, …), an estimate of the variance of `mean`; None if the joint inclusion probabilities are not known."""


def expectation(beams: Beams, values: Tensor, *, normalize: bool = False) -> Expectation:
    """Estimate the mean of f over all sequences of the model from sampled beams, without bias.

    `Σ_y p(y) f(y)/Q(y)` over the k beams, Q the product of the inclusion probabilities along the path (Horvitz and
    Thompson). The gradient in the parameters of p and f is without bias, too: Q is a constant.

    Args:
        beams: from `beam_search` with `select=khot.search.sampled`.
        values: f of each beam, (batch, k, …). What is in an empty slot does not matter.
        normalize: divide by the sum of all p/Q, for a relaxation that is not `proportional`: with that, the sum is 1 on
            every draw, with others on average. This has a bias of the order of the variance.

    Returns:
        The mean, and a variance if the design is `ConditionalPoisson`, which has pairs: without bias if any two
        sequences can be drawn together, as with `relaxation=khot.sigmoid_topk` and k ≥ 2 (for `normalize`, by
        linearization); else too small. It may be negative.

    Examples:
        >>> from functools import partial
        >>> step = lambda tokens, state: (torch.tensor([0.5, 0.3, 0.2]).log().expand(len(tokens), 3), state)
        >>> search = partial(khot.search.beam_search, select=khot.search.sampled)
        >>> beams = search(step, None, 9, start=torch.tensor([0]), length=2)
        >>> expectation(beams, (beams.tokens == 0).sum(-1).float()).mean  # k holds all nine: no error
        tensor([1.0000], dtype=torch.float64)
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
    mean = (_as(weights, f) * f).sum(1)
    if normalize:
        total = _as(weights.sum(1), mean)
        mean = mean / total
        f = (f - mean.unsqueeze(1)) / total.unsqueeze(1)
    return Expectation(mean, _variance(beams, weights.detach(), f.detach()))


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
