"""Routes by σ_k: every expert's score gets a gradient, through the threshold that all of them share."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _check
from ..._math import select
from ..._math.prices import prices
from ...designs import Pivotal
from ...relaxations import sigmoid_topk
from ...relaxations import straight_through as straight
from ._routing import Routing, check_bias, check_capacity, checked


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
    """Choose the k largest of `π = σ_k(logits/T)`, Σπ = k for every token, and weight them by π.

    π_i = σ((x_i − τ)/T), and τ depends on all scores: an expert that was not chosen learns through it, and no other
    expert has to run.

    Args:
        logits: (…, n).
        k: experts for each token.
        temperature: T > 0; larger spreads the gradient over more experts.
        bias: (n), prices of experts with the sign changed, added to the logits; see `update_bias`.
        sample: choose k at random instead, expert i with probability π_i exactly.
        straight_through: weights are 1 forward (1/k normalised), with the gradient of π.
        normalize: weights in proportion to `π·exp(logits/T)`, with sum 1: one expert can have nearly all of it, which
            π, at most 1 and k in total, does not allow, and still all scores get a gradient. With k = 1 the weight is
            1, and nothing is learned by it. Scores of +inf share the whole weight equally.
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
    logits, k = checked(logits, k)
    check_bias(bias, logits.shape[-1])
    priced = logits if bias is None else logits + bias.detach()
    probs = sigmoid_topk(priced, k, temperature=temperature)
    return _chosen(logits, probs, k, temperature, sample, straight_through, normalize, generator)


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
    """Route by σ_k with prices: rows of π sum to k, and no column to more than the capacity.

    `max ⟨logits, π⟩ − T·ΣΩ(π)` with Σ_i π_ti = k and Σ_t π_ti ≤ c: a threshold for each token, and a price ≥ 0 for each
    expert, by Newton's method. The prices are constants to the gradient.

    Args:
        logits: (…, n); all leading dimensions are tokens.
        k: experts for each token.
        capacity: the expected load of an expert at most, ≥ k·tokens/n; None for just that, an equal load for all.
        temperature: T > 0, one for all tokens.
        sample: as for `sigma_topk`; then loads are met in expectation, otherwise by π.
        straight_through: as for `sigma_topk`.
        normalize: as for `sigma_topk`.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        `Routing`, with `probs` π. It looks at all tokens of the call at once, so it is not causal.
    """
    logits, k = checked(logits, k)
    _check.positive("temperature", temperature)
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise ValueError(f"`temperature` must be one number; got a tensor of shape {tuple(temperature.shape)}.")
    flat = logits.reshape(-1, logits.shape[-1])
    tokens, n = flat.shape
    capacity = k * tokens / n if capacity is None else check_capacity(capacity, tokens, n, k)
    with torch.no_grad():
        price = prices(sigmoid_topk, flat.to(torch.float64), k, capacity, float(temperature))
    priced = logits - price.to(logits.dtype)
    probs = sigmoid_topk(priced, k, temperature=temperature)
    return _chosen(logits, probs, k, temperature, sample, straight_through, normalize, generator)


def _chosen(
    logits: Tensor,
    probs: Tensor,
    k: int,
    temperature: float | Tensor,
    sample: bool,
    straight_through: bool,
    normalize: bool,
    generator: torch.Generator | None,
) -> Routing:
    """Choose k experts of each token by their π, and weigh them."""
    if sample and probs.numel():
        certain = probs.detach().to(torch.float64).nan_to_num(k / probs.shape[-1])  # the weights will tell of NaN
        drawn = Pivotal(certain, k, validate_args=False).sample(generator=generator)
        indices = select.indices(drawn)
    else:
        indices = probs.detach().topk(k, -1).indices
    weights = probs.gather(-1, indices)
    if straight_through:
        weights = straight(torch.ones_like(weights), weights)
        weights = weights / k if normalize else weights
    elif normalize:
        weights = _normalized(logits.gather(-1, indices), weights, temperature)
    return Routing(logits, weights, indices, probs)


def _normalized(x: Tensor, probs: Tensor, temperature: float | Tensor) -> Tensor:
    """Return weights in proportion to `π·exp(x/T)`, (…, k); in their limit where scores are +inf."""
    heat = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    is_infinite = x == torch.inf
    has_infinite = is_infinite.any(-1, keepdim=True)
    exponent = x.masked_fill(has_infinite, 0.0) / heat + probs.log()
    limit = torch.zeros_like(x).masked_fill(~is_infinite, -torch.inf)
    return torch.where(has_infinite, limit, exponent).softmax(-1)
