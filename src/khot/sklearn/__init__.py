"""scikit-learn's selector interface; needs `khot[sklearn]`.

Beside the public `KHotSelector`, other rooms may use how a task is found and how gate and network are trained.
"""

try:
    from ._selector import KHotSelector as KHotSelector
    from ._selector import find_task as find_task
    from ._training import Plan as Plan
    from ._training import Rows as Rows
    from ._training import network as network
    from ._training import train as train
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"`khot.sklearn` needs {missing.name}: pip install 'khot[sklearn]'.", name=missing.name
    ) from missing

__all__ = ["KHotSelector"]


def __dir__() -> list[str]:
    return __all__
