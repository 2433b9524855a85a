"""Feature selection, dictionary learning, best-subset regression and metric learning in scikit-learn's terms."""

from .._extras import require

require("sklearn", extra="sklearn")

from ._gate import Gate as Gate
from ._knockoffs import Discoveries as Discoveries
from ._knockoffs import gaussian_knockoffs as gaussian_knockoffs
from ._knockoffs import knockoffs as knockoffs
from ._ksvd import KSVD as KSVD
from ._neighborhood import KHotNeighborhood as KHotNeighborhood
from ._portfolio import Portfolio as Portfolio
from ._portfolio import gating as gating
from ._portfolio import splicing as splicing
from ._portfolio import surfaces as surfaces
from ._portfolio import trees as trees
from ._problem import Choice as Choice
from ._problem import Problem as Problem
from ._regressor import KHotRegressor as KHotRegressor
from ._selector import KHotSelector as KHotSelector
from ._selector import find_task as find_task
from ._selector import number_of_features as number_of_features

__all__ = [
    "KSVD",
    "Choice",
    "Discoveries",
    "Gate",
    "KHotNeighborhood",
    "KHotRegressor",
    "KHotSelector",
    "Portfolio",
    "Problem",
    "gating",
    "gaussian_knockoffs",
    "knockoffs",
    "splicing",
    "surfaces",
    "trees",
]


def __dir__() -> list[str]:
    return __all__
