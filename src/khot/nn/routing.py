"""Routes of mixtures of experts, as functions of scores; losses and measures of their load."""

from .moe import Route as Route
from .moe import Routing as Routing
from .moe import balanced_sigma_topk as balanced_sigma_topk
from .moe import cv_squared as cv_squared
from .moe import dead_experts as dead_experts
from .moe import dselect_k as dselect_k
from .moe import expert_choice as expert_choice
from .moe import importance_loss as importance_loss
from .moe import load as load
from .moe import load_balance_loss as load_balance_loss
from .moe import max_violation as max_violation
from .moe import noisy_topk as noisy_topk
from .moe import routing_entropy as routing_entropy
from .moe import sigma_topk as sigma_topk
from .moe import sigmoid_gates as sigmoid_gates
from .moe import softmax_topk as softmax_topk
from .moe import update_bias as update_bias
from .moe import z_loss as z_loss
