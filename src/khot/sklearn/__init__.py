"""scikit-learn's selector interface; needs `khot[sklearn]`."""

try:
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "`khot.sklearn` needs scikit-learn: pip install 'khot[sklearn]'.", name=missing.name
    ) from missing

from ._selector import KHotSelector as KHotSelector
