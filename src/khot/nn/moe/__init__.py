"""Mixtures of experts: routes as functions of scores, losses and measures of their load, and the two layers."""

from ._layers import MoE as MoE
from ._layers import MoEOutput as MoEOutput
from ._layers import Router as Router
from ._routes import balanced_sigma_topk as balanced_sigma_topk
from ._routes import dselect_k as dselect_k
from ._routes import expert_choice as expert_choice
from ._routes import noisy_topk as noisy_topk
from ._routes import sigma_topk as sigma_topk
from ._routes import sigmoid_gates as sigmoid_gates
from ._routes import softmax_topk as softmax_topk
from ._routing import BoundRoute as BoundRoute
from ._routing import Route as Route
from ._routing import Routing as Routing
from ._routing import cv_squared as cv_squared
from ._routing import dead_experts as dead_experts
from ._routing import importance_loss as importance_loss
from ._routing import load as load
from ._routing import load_balance_loss as load_balance_loss
from ._routing import max_violation as max_violation
from ._routing import routing_entropy as routing_entropy
from ._routing import update_bias as update_bias
from ._routing import z_loss as z_loss
