"""Is the load even? Losses that make it so, a bias that does it without a loss, and measures."""

from __future__ import annotations

import torch
from torch import Tensor

from ._routing import Routing


def load(routing: Routing) -> Tensor:
    """How many tokens each expert has, (n)."""
    n = routing.probs.shape[-1]
    return torch.bincount(routing.indices.reshape(-1), minlength=n + 1)[:n]


def load_balance_loss(routing: Routing) -> Tensor:
    """`n Σ_i f_i P_i`: the share f of the choices times the mean share P of the probability; 1 if all is even.

    Switch Transformer's loss (k = 1) and GShard's. Its gradient goes to P alone.
    """
    n = routing.probs.shape[-1]
    share = load(routing).to(routing.probs.dtype)
    share = share / share.sum().clamp(min=1)
    probs = routing.probs.reshape(-1, n).sum(0)
    return n * (share * probs / probs.sum().clamp(min=1e-20)).sum()


def importance_loss(routing: Routing) -> Tensor:
    """`CV²` of the total probability of experts, var/mean²: 0 if all is even. Shazeer's, and that of σ_k routing."""
    return cv_squared(routing.probs.reshape(-1, routing.probs.shape[-1]).sum(0))


def cv_squared(x: Tensor) -> Tensor:
    """The squared coefficient of variation of a vector."""
    mean = x.mean()
    return (x - mean).square().mean() / mean.square().clamp(min=1e-20)


def z_loss(routing: Routing) -> Tensor:
    """`mean (log Σ exp logits)²`: keeps scores small, so that half precision does no harm (ST-MoE)."""
    return _mean(routing.logits.logsumexp(-1).square())


@torch.no_grad()
def update_bias(bias: Tensor, routing: Routing, *, rate: float = 1e-3) -> None:
    """Move a bias, in place, towards an even load: up for experts with less than the mean load, down for the others.

    Call it after each step of the optimiser, with the bias that `sigmoid_gates` or `sigma_topk` chose by. It is ascent,
    by sign, on the price of a load constraint.
    """
    tokens = load(routing).to(bias.dtype)
    bias += rate * (tokens.mean() - tokens).sign()


def max_violation(routing: Routing) -> float:
    """MaxVio: the greatest load over the mean load, minus 1; 0 if all is even."""
    tokens = load(routing).to(torch.float64)
    return float(tokens.max() / tokens.mean() - 1) if tokens.any() else 0.0


def dead_experts(routing: Routing) -> int:
    """How many experts have no token."""
    return int((load(routing) == 0).sum())


def routing_entropy(routing: Routing) -> float:
    """The mean entropy of a token's probabilities, made to sum to 1, in nats: log n if it does not care."""
    probs = routing.probs.detach() / routing.probs.detach().sum(-1, keepdim=True).clamp(min=1e-20)
    return float(_mean(torch.special.entr(probs).sum(-1)))


def _mean(x: Tensor) -> Tensor:
    """Over tokens; 0 if there are none."""
    return x.sum() / max(1, x.numel())
