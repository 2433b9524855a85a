"""The commands, and the two short ones themselves: `khot info` and `khot tour`."""

import platform
from typing import Annotated

import torch
import typer

from .._version import __version__
from ..kernels import status
from ._bench import bench
from ._sae import sae
from ._select import select
from ._tour import show_explorer

app = typer.Typer(name="khot", no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
for command in (select, bench, sae):
    app.command()(command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"khot {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Everything softmax does for one-hot, done for k-hot: differentiable top-k for PyTorch."""


@app.command()
def info() -> None:
    """Print the versions, and which kernels run on which device and why."""
    typer.echo(f"khot {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    for device, kernel in status().items():
        typer.echo(f"{device}: {kernel}")


@app.command()
def tour(
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address only; open no browser.")] = False,
) -> None:
    """Open the explorer in a browser: drag scores, and see what σ_k, its gradient and its samples do."""
    show_explorer(is_opened=not no_open)
