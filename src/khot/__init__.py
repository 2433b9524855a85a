"""khot: everything softmax does for one-hot, done for k-hot."""

from . import constraints as constraints
from . import kernels as kernels
from . import nn as nn
from . import testing as testing
from ._version import __version__ as __version__
from .relaxations._hard import hard_topk as hard_topk
from .relaxations._hard import straight_through as straight_through
from .relaxations._threshold import khot_cross_entropy as khot_cross_entropy
from .relaxations._threshold import log_sigmoid_topk as log_sigmoid_topk
from .relaxations._threshold import sigmoid_topk as sigmoid_topk
from .relaxations._threshold import threshold as threshold

__all__ = [
    "hard_topk",
    "khot_cross_entropy",
    "log_sigmoid_topk",
    "sigmoid_topk",
    "straight_through",
    "threshold",
]
