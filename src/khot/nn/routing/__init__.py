"""Routers of mixtures of experts, as functions of scores; losses and measures of their load."""

from ._balance import cv_squared as cv_squared
from ._balance import dead_experts as dead_experts
from ._balance import importance_loss as importance_loss
from ._balance import load as load
from ._balance import load_balance_loss as load_balance_loss
from ._balance import max_violation as max_violation
from ._balance import routing_entropy as routing_entropy
from ._balance import update_bias as update_bias
from ._balance import z_loss as z_loss
from ._dselect import dselect_k as dselect_k
from ._routing import Routing as Routing
from ._sigma import balanced_sigma_topk as balanced_sigma_topk
from ._sigma import sigma_topk as sigma_topk
from ._softmax import expert_choice as expert_choice
from ._softmax import noisy_topk as noisy_topk
from ._softmax import sigmoid_gates as sigmoid_gates
from ._softmax import softmax_topk as softmax_topk
