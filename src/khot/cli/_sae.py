"""`khot sae`: a sparse autoencoder of a file of activations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Never, cast

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..jobs._activations import check_finite, open_activations
from ..jobs._sae import RECIPES, Point, Training
from ..jobs._sae_run import REPORT, run
from ..nn import SparseAutoencoderConfig

SHOWN = {
    "fvu": "fraction of variance unexplained",
    "l0": "active latents a token",
    "alive": "latents that are active at all",
    "cosine": "cosine of input and reconstruction",
    "relative_reconstruction_bias": "size of reconstructions; 1 is right",
}


def sae(
    activations: Annotated[Path, typer.Argument(help="A .npy, .npz or .safetensors file of floats, (tokens, d).")],
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("sae"),
    k: Annotated[float, typer.Option(help="Active latents a token.")] = 32,
    latents: Annotated[int, typer.Option(help="How many latents.")] = 4096,
    kind: Annotated[
        str, typer.Option(help="topk: k for each token; batch: in the mean; feature: tokens for each latent.")
    ] = "topk",
    selector: Annotated[str, typer.Option(help=f"{', '.join(RECIPES)}.")] = "straight-through",
    zipf: Annotated[float, typer.Option(help="Exponent of the latents' budgets, for feature; 0: all the same.")] = 0.0,
    layer_norm: Annotated[bool, typer.Option("--layer-norm", help="Normalise each token first.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of Adam.")] = 4000,
    batch_size: Annotated[int, typer.Option(help="Tokens in a step.")] = 1024,
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, if there is one.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    array: Annotated[str | None, typer.Option(help="Which array of the file, if there are several.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the metrics as JSON, and nothing else, to stdout.")
    ] = False,
) -> None:
    """Train a sparse autoencoder on activations; the result loads in SAELens.

    The folder ends with cfg.json, sae_weights.safetensors, metrics.json and report.html. The file is read where it
    lies, so it may be larger than memory. Checkpoints are atomic: after a crash or Ctrl-C, --resume goes on to the same
    result, bit for bit. Ctrl-C also writes the results so far.

    For example:

    khot sae acts.npz --k 32 --latents 4096 --out sae

    khot sae acts.safetensors --kind batch --out sae --steps 20000 --resume
    """
    try:
        data = open_activations(activations, array)
        config = SparseAutoencoderConfig(
            d_in=data.d,
            latents=latents,
            k=int(k) if k == int(k) else k,
            kind=cast(Any, kind),
            zipf=zipf,
            layer_norm=layer_norm,
        )
        training = Training(selector=selector, steps=steps, batch_size=batch_size, lr=lr, seed=seed)
        if checkpoint_every < 1:
            raise ValueError(f"--checkpoint-every must be ≥ 1; got {checkpoint_every}")
        with _progress() as (on_rows, on_step):
            check_finite(data, on_rows(data.tokens))
            result = run(data, config, training, out, resume=resume, every=checkpoint_every, on_step=on_step)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _fail(" ".join(str(error).removesuffix(".").split()))
    if json:
        typer.echo(dumps(result.metrics, indent=1))
    else:
        _show(result.metrics, out)
    if not result.is_complete:
        typer.echo("khot sae: interrupted; --resume goes on from here.", err=True)
        raise typer.Exit(130)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int], Callable[[int], None]], Callable[[Point, int], None]]]:
    """Bars on stderr, where stdout's readers do not see them: for the check of the rows, and for the steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=None)

        def on_rows(total: int) -> Callable[[int], None]:
            bar.update(task, description="checking rows", total=total)
            return lambda rows: bar.advance(task, rows)

        def on_step(point: Point, steps: int) -> None:
            says = f"FVU {point.fvu:.3f}  L0 {point.l0:.1f}  dead {point.dead}"
            bar.update(task, description=says, completed=point.step, total=steps)

        yield on_rows, on_step


def _show(metrics: dict[str, Any], out: Path) -> None:
    table = Table("", "all tokens", "held out", pad_edge=False, padding=(0, 2, 0, 0), box=box.SIMPLE_HEAD)
    for name, what in SHOWN.items():
        held_out = metrics["held_out"]
        table.add_row(what, f"{metrics[name]:.4g}", f"{held_out[name]:.4g}" if held_out else "–")
    console = Console()
    console.print(table)
    console.print(f"{metrics['steps']} steps; results in {out}, for a browser {out / REPORT}", style="dim")


def _fail(message: str) -> Never:
    typer.echo(f"khot sae: {message}.", err=True)
    raise typer.Exit(2)
