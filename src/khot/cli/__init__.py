"""The command line. Nothing imports it but `khot_cli`; it alone prints."""

import platform
import sys

import torch

from khot_cli import main as main

from .._extras import require
from .._version import __version__
from ..kernels import status
from ._tour import EXPLORER as EXPLORER
from ._tour import show_explorer as show_explorer


def info() -> None:
    """Print the versions, and which kernels run on which device and why."""
    print(f"khot {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    for device, kernel in status().items():
        print(f"{device}: {kernel}")


def run(extra: str) -> None:
    """Run a command that needs an extra."""
    try:
        for package in ("typer", "rich"):
            require(package, extra=extra)
    except ModuleNotFoundError as missing:
        sys.exit(f"khot: {missing}.")
    from ._app import app

    app(prog_name="khot")
