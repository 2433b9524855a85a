"""scikit-learn's selector interface; needs `khot[sklearn]`."""

try:
    from ._selector import KHotSelector as KHotSelector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"`khot.sklearn` needs {missing.name}: pip install 'khot[sklearn]'.", name=missing.name
    ) from missing
