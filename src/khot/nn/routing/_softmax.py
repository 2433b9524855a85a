"""Routers as models have them: softmax, sigmoid gates with a bias, noise, and experts that choose."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ... import _check
from ._routing import Routing, scores


def softmax_topk(logits: Tensor, k: int, *, normalize: bool = True) -> Routing:
    """The k greatest of a softmax, as in Mixtral; normalised, it is a softmax over the chosen alone.

    Then scores of experts that are not chosen get no gradient: `w = softmax(KeepTopK(logits))`.

    Args:
        logits: (…, n).
        k: experts for each token.
        normalize: divide the weights by their sum, as `norm_topk_prob` does; with k = 1 they are 1 then.

    Returns:
        `Routing`, with `probs` the softmax over all.

    Examples:
        >>> softmax_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2).weights
        tensor([0.7311, 0.2689])
    """
    _check.experts(logits, k)
    logits = scores(logits)
    indices = logits.detach().topk(k, -1).indices  # of the scores: probabilities may underflow
    return _weighted(logits, logits, logits.softmax(-1), indices, normalize)


def sigmoid_gates(logits: Tensor, k: int, *, bias: Tensor | None = None, normalize: bool = True) -> Routing:
    """Sigmoid gates, chosen by gate plus bias and weighted by the gate alone: loss-free balancing, as in DeepSeek-V3.

    This is what "sigmoid top-k" means in mixture-of-experts code, not σ_k: gates do not know of each other.

    Args:
        logits: (…, n).
        k: experts for each token.
        bias: (n), see `update_bias`; None for zeros.
        normalize: divide the weights by their sum.

    Returns:
        `Routing`, with `probs` the gates.

    Examples:
        >>> sigmoid_gates(torch.tensor([2.0, 1.0, 0.0]), 1, bias=torch.tensor([0.0, 0.5, 0.0])).indices
        tensor([1])
    """
    _check.experts(logits, k)
    logits = scores(logits)
    _check.expert_bias(bias, logits.shape[-1])
    gates = logits.sigmoid()
    wanted = gates.detach() if bias is None else gates.detach() + bias.detach()
    indices = wanted.topk(k, -1).indices
    return _weighted(logits, logsigmoid(logits), gates, indices, normalize)


def _weighted(logits: Tensor, log_probs: Tensor, probs: Tensor, indices: Tensor, is_normalized: bool) -> Routing:
    """Weights of the chosen; normalised by their logarithms, since all of them may underflow."""
    weights = log_probs.gather(-1, indices).softmax(-1) if is_normalized else probs.gather(-1, indices)
    return Routing(logits, weights, indices, probs)


def noisy_topk(
    logits: Tensor, k: int, *, normalize: bool = True, training: bool = True, generator: torch.Generator | None = None
) -> Routing:
    """Softmax over the k greatest of noisy scores, `h = x + ε·softplus(s)`, ε ~ N(0, 1).

    Args:
        logits: (…, 2n): scores x, then the raw scales s of the noise.
        k: experts for each token.
        normalize: divide the weights by their sum.
        training: whether there is noise.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        `Routing` with n experts and noisy `logits`.

    Reference: Shazeer et al., "Outrageously large neural networks" (2017).
    """
    _check.halves("logits", logits)
    x, raw = scores(logits).chunk(2, -1)
    if training:
        noise = torch.empty_like(x).normal_(generator=generator)
        x = x + noise * softplus(raw)
    return softmax_topk(x, k, normalize=normalize)


def expert_choice(logits: Tensor, k: int) -> Routing:
    """Every expert takes the tokens that want it most, k·tokens/n of them (rounded up): the load is equal.

    A token may be taken by no expert, or by all. It looks at all tokens of the call at once, so it is not causal.

    Args:
        logits: (…, n); all leading dimensions are tokens.
        k: experts for each token on average.

    Returns:
        `Routing`, with `probs` the softmax over experts, and as many slots as the busiest token needs.

    Reference: Zhou et al., "Mixture-of-experts with expert choice routing" (2022).
    """
    _check.experts(logits, k)
    logits = scores(logits)
    n = logits.shape[-1]
    probs = logits.softmax(-1)
    flat = probs.reshape(-1, n)  # (tokens, n)
    count = min(len(flat), -(-k * len(flat) // n))
    taken = torch.zeros_like(flat, dtype=torch.bool)
    taken.scatter_(0, flat.topk(count, 0).indices, True)
    slots = int(taken.sum(-1).max()) if len(flat) else k
    order = torch.where(taken, flat.detach(), -1.0).topk(max(1, slots), -1).indices
    is_taken = taken.gather(-1, order)
    indices, weights = torch.where(is_taken, order, n), flat.gather(-1, order) * is_taken
    shape = (*logits.shape[:-1], order.shape[-1])
    return Routing(logits, weights.reshape(shape), indices.reshape(shape), probs)
