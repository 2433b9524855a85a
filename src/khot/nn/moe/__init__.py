"""Mixtures of experts: routes as functions of scores, losses and measures of their load, and the two layers."""

from ._layers import MoE as MoE
from ._layers import MoEOutput as MoEOutput
from ._layers import Router as Router
from ._routes import balanced_sigma_topk, dselect_k, expert_choice, noisy_topk, sigma_topk, sigmoid_gates, softmax_topk
from ._routing import BoundRoute as BoundRoute
from ._routing import (
    Route,
    Routing,
    cv_squared,
    dead_experts,
    importance_loss,
    load,
    load_balance_loss,
    max_violation,
    routing_entropy,
    update_bias,
    z_loss,
)

__all__ = ["Route", "Routing", "balanced_sigma_topk", "cv_squared", "dead_experts", "dselect_k", "expert_choice"]
__all__ += ["importance_loss", "load", "load_balance_loss", "max_violation", "noisy_topk", "routing_entropy"]
__all__ += ["sigma_topk", "sigmoid_gates", "softmax_topk", "update_bias", "z_loss"]
