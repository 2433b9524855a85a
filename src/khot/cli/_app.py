"""The commands."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import torch
import typer

from .._version import __version__
from ..kernels import status
from . import _tour
from ._bench import bench
from ._sae import sae
from ._select import select

app = typer.Typer(
    name="khot",
    help="Everything softmax does for one-hot, done for k-hot: differentiable top-k for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


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
    pass


app.command()(select)
app.command()(bench)
app.command()(sae)


@app.command()
def info() -> None:
    """Print the versions, and which kernels run on which device and why."""
    typer.echo(f"khot {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    for device, kernel in status().items():
        typer.echo(f"{device}: {kernel}")


@app.command()
def tour(
    out: Annotated[Path, typer.Option(help="Where to save the picture (needs khot[plot]).")] = Path("out/tour.png"),
) -> None:
    """A short tour of σ_k: five lines of code, a table over temperatures, a picture."""
    _tour.run(out)
