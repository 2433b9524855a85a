"""Feature selection, dictionary learning and best-subset regression in scikit-learn's terms."""

from ._ksvd import KSVD as KSVD
from ._regressor import KHotRegressor as KHotRegressor
from ._selector import KHotSelector as KHotSelector
from ._selector import find_task as find_task
from ._selector import number_of_features as number_of_features

__all__ = ["KSVD", "KHotRegressor", "KHotSelector"]


def __dir__() -> list[str]:
    return __all__
