"""Feature selection, dictionary learning, best-subset regression and metric learning in scikit-learn's terms."""

from .._extras import require

require("sklearn", extra="sklearn")

from ._ksvd import KSVD as KSVD
from ._neighborhood import KHotNeighborhood as KHotNeighborhood
from ._regressor import KHotRegressor as KHotRegressor
from ._selector import KHotSelector as KHotSelector
from ._selector import find_task as find_task
from ._selector import number_of_features as number_of_features

__all__ = ["KSVD", "KHotNeighborhood", "KHotRegressor", "KHotSelector"]


def __dir__() -> list[str]:
    return __all__
