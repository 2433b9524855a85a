"""The public (x, k) → k-hot functions."""

from ._custom import relaxation as relaxation
from ._family import Relaxation as Relaxation
from ._family import cauchy_topk as cauchy_topk
from ._family import euclidean_topk as euclidean_topk
from ._family import laplace_topk as laplace_topk
from ._family import normal_topk as normal_topk
from ._family import power_topk as power_topk
from ._family import sigmoid_topk as sigmoid_topk
from ._hard import hard_topk as hard_topk
from ._hard import straight_through as straight_through
from ._slots import Selection as Selection
from ._slots import SoftTopK as SoftTopK
from ._slots import iterative_topk as iterative_topk
from ._slots import ordered_topk as ordered_topk
from ._slots import soft_topk as soft_topk
from ._slots import successive_halving_topk as successive_halving_topk
from ._threshold import khot_cross_entropy as khot_cross_entropy
from ._threshold import log_sigmoid_topk as log_sigmoid_topk
from ._threshold import precision_at_k_loss as precision_at_k_loss
from ._threshold import recall_at_k_loss as recall_at_k_loss
from ._threshold import threshold as threshold
