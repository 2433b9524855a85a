"""Optional packages: imported where they are used, with one message that says how to install them."""

from importlib import import_module
from typing import Any


def require(module: str, *, extra: str) -> Any:
    """Import a module of an optional package and return it.

    Raises ModuleNotFoundError, with the command that installs it, if the package is missing. khot is not on PyPI, so
    the command is one for a clone.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or module).partition(".")[0]
        if name != module.partition(".")[0]:  # the package is there, and broken
            raise
        package = {"sklearn": "scikit-learn"}.get(name, name)
        fix = f"{package} is missing: run pip install '.[{extra}]' in a clone of khot"
        raise ModuleNotFoundError(fix, name=name) from None
