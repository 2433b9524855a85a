"""The commands, and a short one itself: `khot tour`."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor

from .._extras import require
from .._version import __version__
from ..relaxations import hard_topk, sigmoid_topk, threshold
from . import info
from ._bench import bench
from ._sae import sae
from ._select import select

EXAMPLE = """\
import torch, khot

x = torch.tensor([2.0, 1.0, 0.6, 0.0, -0.5, -1.5], requires_grad=True)
p = khot.sigmoid_topk(x, 2)      # soft 2-hot: in [0, 1], sums to 2
p[2].backward()                  # and every score gets a gradient
"""
SCORES = (2.0, 1.0, 0.6, 0.0, -0.5, -1.5)
TEMPERATURES = (0.01, 0.1, 0.3, 1.0, 3.0, 100.0)

app = typer.Typer(name="khot", no_args_is_help=True, add_completion=False, rich_markup_mode=None)
for command in (select, bench, sae, info):
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
def tour(
    out: Annotated[Path, typer.Option(help="Where to save the picture (needs the extra plot).")] = Path("out/tour.png"),
) -> None:
    """A short tour of σ_k: five lines of code, a table over temperatures, a picture."""
    console = Console()
    x = torch.tensor(SCORES, requires_grad=True)
    p = sigmoid_topk(x, 2)
    (gradient,) = torch.autograd.grad(p[2], x)

    console.print("\n[bold]σ_k, the sigmoid top-k[/bold]: everything softmax does for one-hot, done for k-hot\n")
    console.print(Syntax(EXAMPLE, "python", theme="ansi_light", background_color="default"))
    shown = [" ".join(f"{v:+.4f}" for v in values.tolist()) for values in (p, gradient)]
    console.print(f"   p      = [{shown[0]}]   sum = {p.sum():.6f}")
    console.print(f"   x.grad = [{shown[1]}]   sum = {gradient.sum():+.6f}\n")
    console.print(_table(x.detach()))
    console.print("Small T is hard top-k, large T is k/n; every row sums to 2. The scores need no sorting.\n")
    try:
        _save_picture(out)
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        console.print(f"No picture: {missing}.", markup=False)
    else:
        console.print(f"Picture: [bold]{out}[/bold]")
    console.print("Next: khot select, khot bench --shape 4096x64 --k 6, khot info, help(khot.sigmoid_topk).\n")


def _table(x: Tensor) -> Table:
    table = Table("T", *(f"x={value:g}" for value in SCORES), "sum", "τ", title="σ_2(x) by temperature", padding=0)
    for temperature in TEMPERATURES:
        p = sigmoid_topk(x, 2, temperature=temperature)
        tau = threshold(x, 2, temperature=temperature)
        table.add_row(f"{temperature:g}", *(f"{v:.4f}" for v in p.tolist()), f"{p.sum():.4f}", f"{tau:.3f}")
    hard = hard_topk(x, 2)
    table.add_row("hard", *(f"{v:.0f}" for v in hard.tolist()), f"{hard.sum():.0f}", "", style="dim")
    return table


def _save_picture(out: Path) -> None:
    Figure = require("matplotlib.figure", extra="plot").Figure
    x = torch.tensor(SCORES)
    temperatures = torch.logspace(-2, 2, 200)
    p = sigmoid_topk(x.expand(200, -1), 2, temperature=temperatures)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for score, curve in zip(SCORES, p.T, strict=True):
        axes.plot(temperatures, curve, label=f"{score:g}", linewidth=2)
    axes.axhline(2 / len(SCORES), color="0.6", linestyle=":", zorder=0)
    axes.set(xscale="log", xlabel="temperature T", ylabel="σ₂(x/T)", title="From hard top-2 to k/n = 1/3")
    axes.legend(title="score", loc="upper right", frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
