"""Routers by σ_k: every expert's score gets a gradient, through the threshold that all of them share."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _check
from ..._math import select
from ...designs import Pivotal
from ...relaxations._hard import straight_through as straight
from ...relaxations._threshold import sigmoid_topk, threshold
from ._routing import Routing, scores

ITERATIONS = 200
"""Of the two-sided router at most; each doubles the digits or so."""
CLOSE = 1e-4
"""How far a load may be from its capacity, in shares of it, for the iteration to end."""


def sigma_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    sample: bool = False,
    straight_through: bool = False,
    normalize: bool = False,
    generator: torch.Generator | None = None,
) -> Routing:
    """σ_k routing: `π = σ_k(logits/T)`, Σπ = k for every token, the k greatest chosen and weighted by π.

    π_i = σ((x_i − τ)/T), and τ depends on all scores: an expert that was not chosen learns through it, at no expert's
    cost.

    Args:
        logits: (…, n).
        k: experts for each token.
        temperature: T > 0; larger spreads the gradient over more experts.
        bias: (n), prices of experts with the sign changed, added to the logits; see `update_bias`.
        sample: choose k at random instead, expert i with probability π_i exactly.
        straight_through: weights are 1 forward (1/k normalised), with the gradient of π.
        normalize: divide the weights by their sum; with k = 1 they are 1 then, and nothing is learned by them.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        `Routing`, with `probs` π.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> routing = sigma_topk(x, 2)
        >>> routing.indices, routing.probs.sum()
        (tensor([0, 1]), tensor(2., grad_fn=<SumBackward0>))
        >>> torch.autograd.grad(routing.weights[0], x)[0]  # nothing is 0
        tensor([ 0.1202, -0.0456, -0.0456, -0.0290])
    """
    _check.experts(logits, k)
    logits = scores(logits)
    priced = logits if bias is None else logits + bias.detach()
    probs = sigmoid_topk(priced, k, temperature=temperature)
    return _chosen(logits, probs, k, sample, straight_through, normalize, generator)


def balanced_sigma_topk(
    logits: Tensor,
    k: int,
    *,
    capacity: float | None = None,
    temperature: float | Tensor = 1.0,
    sample: bool = False,
    straight_through: bool = False,
    normalize: bool = False,
    generator: torch.Generator | None = None,
) -> Routing:
    """σ_k routing with prices: rows of π sum to k, and no column to more than the capacity.

    `max ⟨logits, π⟩ − T·ΣΩ(π)` with Σ_i π_ti = k and Σ_t π_ti ≤ c, by exact alternate steps in the dual: the threshold
    of each token, and a price ≥ 0 for each expert. The prices are constants to the gradient.

    Args:
        logits: (…, n); all leading dimensions are tokens.
        k: experts for each token.
        capacity: the expected load of an expert at most, ≥ k·tokens/n; None for just that, an equal load for all.
        temperature: T > 0.
        sample: as for `sigma_topk`; then loads are met in expectation, otherwise by π.
        straight_through: as for `sigma_topk`.
        normalize: as for `sigma_topk`.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        `Routing`, with `probs` π. It looks at all tokens of the call at once, so it is not causal.
    """
    _check.experts(logits, k)
    _check.positive("temperature", temperature)
    logits = scores(logits)
    flat = logits.reshape(-1, logits.shape[-1])
    mean = k * len(flat) / flat.shape[-1]
    _check.capacity(capacity, mean, len(flat), flat.shape[-1], k)
    with torch.no_grad():
        prices = _prices(flat.to(torch.float64), k, mean if capacity is None else capacity, temperature)
    priced = logits - prices.to(logits.dtype)
    probs = sigmoid_topk(priced, k, temperature=temperature)
    return _chosen(logits, probs, k, sample, straight_through, normalize, generator)


def _prices(x: Tensor, k: int, capacity: float, temperature: float | Tensor) -> Tensor:
    """(n): zero, or such that the expert's load is the capacity."""
    prices = x.new_zeros(x.shape[-1])
    is_equal = capacity <= k * len(x) / x.shape[-1]
    for _ in range(ITERATIONS if len(x) else 0):
        tokens = threshold(x - prices, k, temperature=temperature)  # (tokens)
        loads = torch.sigmoid((x - prices - tokens[:, None]) / temperature).sum(0)
        over = (
            (loads - capacity).abs()
            if is_equal
            else torch.where(prices > 0, (loads - capacity).abs(), loads - capacity)
        )
        if bool((over <= CLOSE * capacity).all()):
            break
        prices = threshold(x - tokens[:, None], capacity, dim=0, temperature=temperature)
        prices = prices - prices.mean() if is_equal else prices.clamp(min=0)
    return prices


def _chosen(
    logits: Tensor,
    probs: Tensor,
    k: int,
    sample: bool,
    straight_through: bool,
    normalize: bool,
    generator: torch.Generator | None,
) -> Routing:
    """k experts of each token by their π."""
    if sample:
        drawn = Pivotal(probs.detach().to(torch.float64), k, validate_args=False).sample(generator=generator)
        indices = select.indices(drawn)
    else:
        indices = probs.detach().topk(k, -1).indices
    weights = probs.gather(-1, indices)
    if straight_through:
        weights = straight(torch.ones_like(weights), weights)
        return Routing(logits, weights / k if normalize else weights, indices, probs)
    return Routing(logits, weights / weights.sum(-1, keepdim=True) if normalize else weights, indices, probs)
