"""The public (x, k) → k-hot functions."""

from ._custom import relaxation
from ._family import Relaxation, cauchy_topk, euclidean_topk, laplace_topk, normal_topk, power_topk, sigmoid_topk
from ._hard import hard_topk, straight_through
from ._slots import Selection, SoftTopK, iterative_topk, ordered_topk, soft_topk, successive_halving_topk
from ._statistical import statistical_logits, statistical_threshold, statistical_topk
from ._threshold import khot_cross_entropy, log_sigmoid_topk, precision_at_k_loss, recall_at_k_loss, threshold

__all__ = ["Relaxation", "Selection", "SoftTopK", "cauchy_topk", "euclidean_topk", "hard_topk", "iterative_topk"]
__all__ += ["khot_cross_entropy", "laplace_topk", "log_sigmoid_topk", "normal_topk", "ordered_topk", "power_topk"]
__all__ += ["precision_at_k_loss", "recall_at_k_loss", "relaxation", "sigmoid_topk", "soft_topk", "straight_through"]
__all__ += ["statistical_logits", "statistical_threshold", "statistical_topk"]
__all__ += ["successive_halving_topk", "threshold"]
