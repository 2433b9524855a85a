"""Routes as models have them: softmax, sigmoid gates with a bias, noise, experts that choose, and binary codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ... import _check
from ._routing import Routing, check_bias, checked, widened

GAMMA = 1.0
"""The width of DSelect-k's smooth step."""


def softmax_topk(logits: Tensor, k: int, *, normalize: bool = True) -> Routing:
    """Choose the k largest of a softmax, as in Mixtral; normalised, it is a softmax over the chosen alone.

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
    logits, k = checked(logits, k)
    indices = logits.detach().topk(k, -1).indices  # of the scores: probabilities may underflow
    return _weighted(logits, logits, logits.softmax(-1), indices, normalize)


def sigmoid_gates(logits: Tensor, k: int, *, bias: Tensor | None = None, normalize: bool = True) -> Routing:
    """Choose by sigmoid gate plus bias and weight by the gate alone: loss-free balancing, as in DeepSeek-V3.

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
    logits, k = checked(logits, k)
    check_bias(bias, logits.shape[-1])
    gates = logits.sigmoid()
    wanted = gates.detach() if bias is None else gates.detach() + bias.detach()
    indices = wanted.topk(k, -1).indices
    return _weighted(logits, logsigmoid(logits), gates, indices, normalize)


def _weighted(logits: Tensor, log_probs: Tensor, probs: Tensor, indices: Tensor, normalize: bool) -> Routing:
    """Weigh the chosen; normalised by their logarithms, since all of them may underflow."""
    weights = log_probs.gather(-1, indices).softmax(-1) if normalize else probs.gather(-1, indices)
    return Routing(logits, weights, indices, probs)


def noisy_topk(
    logits: Tensor, k: int, *, normalize: bool = True, training: bool = True, generator: torch.Generator | None = None
) -> Routing:
    """Apply `softmax_topk` to noisy scores, `h = x + ε·softplus(s)`, ε ~ N(0, 1).

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
    _check.scores(logits, -1, "logits")
    if logits.shape[-1] % 2:
        raise ValueError(f"`logits` must have 2n entries, scores and scales; got {logits.shape[-1]}.")
    x, raw = widened(logits).chunk(2, -1)
    if training:
        noise = torch.empty_like(x).normal_(generator=generator)
        x = x + noise * softplus(raw)
    return softmax_topk(x, k, normalize=normalize)


vars(noisy_topk)["width"] = lambda n, k: 2 * n


def expert_choice(logits: Tensor, k: int) -> Routing:
    """Let every expert take the k·tokens/n tokens (rounded up) that want it most: the load is equal.

    A token may be taken by no expert, or by all. It looks at all tokens of the call at once, so it is not causal.

    Args:
        logits: (…, n); all leading dimensions are tokens.
        k: experts for each token on average.

    Returns:
        `Routing`, with `probs` the softmax over experts, and as many slots as the busiest token needs.

    Reference: Zhou et al., "Mixture-of-experts with expert choice routing" (2022).
    """
    logits, k = checked(logits, k)
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


def _bits(n: int) -> int:
    """Return how many binary digits number n experts."""
    return max(1, (n - 1).bit_length())


def dselect_k(logits: Tensor, k: int, *, num_experts: int) -> Routing:
    """Mix k slots, each a smooth binary code of an expert, by a softmax: at most k experts once codes are sharp.

    `g = Σ_s softmax(w)_s r(z_s)`, `r(z)_i = Π_b S(z_b)` or `1 − S(z_b)` by the binary digits of i, where S is a smooth
    step, exactly 0 and 1 outside [−½, ½].

    Args:
        logits: (…, k·m + k): codes z of m = ⌈log₂ n⌉ digits for each slot, then the slots' weights w.
        k: slots.
        num_experts: n.

    Returns:
        `Routing` with the n gates as `probs` and `logits`, and as many slots as have a positive gate: until codes are
        sharp, that may be all experts. Gates sum to 1 if n is a power of two; else to less, because the codes that
        number no expert take their part.

    Reference: Hazimeh et al., "DSelect-k" (2021).
    """
    _check.at_least("num_experts", num_experts, 1)
    _check.at_least("k", k, 1)
    k, m = int(k), _bits(int(num_experts))
    _check.last_dim("logits", logits, k * m + k)
    x = widened(logits)
    codes = _smooth_step(x[..., : k * m].unflatten(-1, (k, m)))  # (…, k, m)
    digits = torch.arange(num_experts, device=x.device)[:, None] >> torch.arange(m, device=x.device) & 1  # (n, m)
    each = torch.where(digits.bool(), codes[..., None, :], 1 - codes[..., None, :]).prod(-1)  # (…, k, n)
    gates = (x[..., k * m :].softmax(-1)[..., None] * each).sum(-2)
    slots = max(1, int((gates > 0).sum(-1).max())) if gates.numel() else k
    weights, indices = gates.topk(slots, -1)
    return Routing(gates, weights, torch.where(weights > 0, indices, num_experts), gates)


vars(dselect_k)["width"] = lambda n, k: k * _bits(n) + k


def _smooth_step(t: Tensor) -> Tensor:
    """Return 0 below −γ/2, 1 above γ/2, and a cubic between: `−2t³/γ³ + 3t/(2γ) + ½`."""
    t = t.clamp(-GAMMA / 2, GAMMA / 2)
    return -2 * t**3 / GAMMA**3 + 3 * t / (2 * GAMMA) + 0.5
