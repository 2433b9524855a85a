"""Sparse networks: one budget over the weights of a model, held exactly at every step; see `Sparsifier`."""

from ._costs import Flops, Latency, by_erdos_renyi, by_layer, globally, parameters, uniformly
from ._heads import PrunedAttention, heads
from ._masks import (
    Problem,
    best_gradient,
    dense_gradient,
    drawn,
    hard,
    masked_gradient,
    sampled,
    soft,
    soft_gradient,
    straight_through,
)
from ._modules import choices, combine
from ._report import Report, Row
from ._scores import Known, Score, gradient_growth, learned, magnitude, magnitude_times_learned
from ._sparsifier import Sparsifier
from ._structure import channels
from ._units import Group, Masked, blocks, columns, n_of_m, prunable, rows, weights

__all__ = [
    "Flops",
    "Group",
    "Known",
    "Latency",
    "Masked",
    "Problem",
    "PrunedAttention",
    "Report",
    "Row",
    "Score",
    "Sparsifier",
    "best_gradient",
    "blocks",
]
__all__ += [
    "by_erdos_renyi",
    "by_layer",
    "channels",
    "choices",
    "columns",
    "combine",
    "dense_gradient",
    "drawn",
    "globally",
    "gradient_growth",
    "hard",
    "heads",
    "learned",
]
__all__ += ["magnitude", "magnitude_times_learned", "masked_gradient", "n_of_m", "parameters", "prunable", "rows"]
__all__ += ["sampled", "soft", "soft_gradient", "straight_through", "uniformly", "weights"]


def __dir__() -> list[str]:
    return __all__
