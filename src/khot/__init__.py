"""khot: everything softmax does for one-hot, done for k-hot."""

import sys as _sys

# `python -m khot --help` answers before torch is imported.
if _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv) :][:1] == ["khot"]:
    import khot_cli as _command

    _command.answer((*_sys.argv[1:], "--help")[0])

from . import attention as attention
from . import boosts as boosts
from . import coding as coding
from . import constraints as constraints
from . import data as data
from . import designs as designs
from . import estimators as estimators
from . import kernels as kernels
from . import metrics as metrics
from . import nn as nn
from . import search as search
from . import survey as survey
from . import testing as testing
from ._version import __version__ as __version__
from .designs import horvitz_thompson as horvitz_thompson
from .designs import horvitz_thompson_variance as horvitz_thompson_variance
from .designs import inclusion_probs as inclusion_probs
from .designs import sample_khot as sample_khot
from .designs import sample_relaxed_khot as sample_relaxed_khot
from .designs import sample_rows as sample_rows
from .relaxations import cauchy_topk as cauchy_topk
from .relaxations import euclidean_topk as euclidean_topk
from .relaxations import hard_topk as hard_topk
from .relaxations import iterative_topk as iterative_topk
from .relaxations import khot_cross_entropy as khot_cross_entropy
from .relaxations import laplace_topk as laplace_topk
from .relaxations import log_sigmoid_topk as log_sigmoid_topk
from .relaxations import normal_topk as normal_topk
from .relaxations import ordered_topk as ordered_topk
from .relaxations import power_topk as power_topk
from .relaxations import precision_at_k_loss as precision_at_k_loss
from .relaxations import recall_at_k_loss as recall_at_k_loss
from .relaxations import relaxation as relaxation
from .relaxations import sigmoid_topk as sigmoid_topk
from .relaxations import soft_topk as soft_topk
from .relaxations import statistical_logits as statistical_logits
from .relaxations import statistical_threshold as statistical_threshold
from .relaxations import statistical_topk as statistical_topk
from .relaxations import straight_through as straight_through
from .relaxations import successive_halving_topk as successive_halving_topk
from .relaxations import threshold as threshold

__all__ = ["cauchy_topk", "euclidean_topk", "hard_topk", "horvitz_thompson", "horvitz_thompson_variance"]
__all__ += ["iterative_topk", "khot_cross_entropy", "laplace_topk", "log_sigmoid_topk", "normal_topk", "ordered_topk"]
__all__ += ["power_topk", "precision_at_k_loss", "recall_at_k_loss", "relaxation", "sample_khot", "sample_relaxed_khot"]
__all__ += ["statistical_logits", "statistical_threshold", "statistical_topk"]
__all__ += ["sigmoid_topk", "soft_topk", "straight_through", "successive_halving_topk", "threshold"]
__all__ += ["inclusion_probs", "sample_rows"]
