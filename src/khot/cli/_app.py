"""The commands together."""

from typing import Annotated

import typer

from . import info
from ._bench import bench
from ._sae import sae
from ._select import select
from ._tour import show_explorer

app = typer.Typer(name="khot", no_args_is_help=True, add_completion=False, rich_markup_mode=None)
for command in (select, bench, sae, info):
    app.command()(command)


@app.command()
def tour(
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address only; open no browser.")] = False,
) -> None:
    """Open the explorer in a browser: drag scores, and see what σ_k, its gradient and its samples do."""
    show_explorer(is_opened=not no_open)
