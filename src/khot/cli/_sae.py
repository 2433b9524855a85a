"""`khot sae`: a sparse autoencoder of a file of activations."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from .._extras import require
from .._files import check_writable, write
from ..distributed import on_first, together
from ..jobs.sae_names import Names, look, read_names
from ..jobs.sae_report import REPORT, figures, report, verdict
from ..nn import SparseAutoencoderConfig
from ..sae import RECIPES, Activations, Point, Training, check_activations, open_activations, train
from ._show import command, console, link, processes, progress, table

Tokenized = typer.Option(
    help="The token of each row: .jsonl (strings, or lists), .txt (one a line) or .npy of numbers."
)
Vocabulary = typer.Option(help="The texts of token numbers: .json (a list, or {text: number}) or .txt, one a line.")
Kind = typer.Option(help="topk: k for each token; batch: in the mean; feature: tokens for each latent.")


def sae(
    activations: Annotated[Path, typer.Argument(help="A .npy, .npz or .safetensors file of floats, (tokens, d).")],
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("sae"),
    k: Annotated[float, typer.Option("-k", "--k", help="Active latents a token.")] = 32,
    latents: Annotated[int, typer.Option(help="How many latents.")] = 4096,
    kind: Annotated[str, Kind] = "topk",
    selector: Annotated[str, typer.Option(help=f"{', '.join(RECIPES)}.")] = "straight-through",
    zipf: Annotated[float, typer.Option(help="Exponent of the latents' budgets, for feature; 0: all the same.")] = 0.0,
    layer_norm: Annotated[bool, typer.Option("--layer-norm", help="Normalise each token first.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of Adam.")] = 4000,
    batch_size: Annotated[int, typer.Option(help="Tokens in a step.")] = 1024,
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, if there is one.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    array: Annotated[str | None, typer.Option(help="Which array of the file, if there are several.")] = None,
    tokens: Annotated[Path | None, Tokenized] = None,
    vocabulary: Annotated[Path | None, Vocabulary] = None,
    unembedding: Annotated[Path | None, typer.Option(help="A matrix (vocabulary, d): shows logit effects.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON, and nothing else.")] = False,
) -> None:
    """Train a sparse autoencoder on activations; the result loads in SAELens.

    Writes cfg.json, sae_weights.safetensors, metrics.json and report.html. The activations are read from the disk as
    they are needed, so the file may be larger than memory.

    Checkpoints are atomic: after a crash or Ctrl-C, --resume continues to the same result, bit for bit. Ctrl-C
    also writes the results so far. Under torchrun, each process takes its part of every batch, and the first one
    writes; a run may be resumed at another number of processes.

    For example:

    khot sae acts.npz -k 32 --latents 4096 --out sae

    khot sae acts.safetensors --kind batch --out sae --steps 20000 --resume

    torchrun --nproc-per-node 4 -m khot sae acts.npz --out sae
    """

    def set_up() -> tuple[Activations, SparseAutoencoderConfig, Training, Names]:
        for package in ("safetensors", "matplotlib"):
            require(package, extra="sae")
        data = open_activations(activations, array)
        count = int(k) if k.is_integer() else k
        shape: dict[str, Any] = {"d_in": data.d, "latents": latents, "k": count, "kind": kind, "zipf": zipf}
        config = SparseAutoencoderConfig(**shape, layer_norm=layer_norm)
        training = Training(selector=selector, steps=steps, batch_size=batch_size, lr=lr, seed=seed)
        return data, config, training, read_names(data, tokens, vocabulary, unembedding)

    with processes("sae") as (group, is_first):
        data, config, training, names = together(set_up, group)
        with progress("starting", is_shown=is_first) as on_progress:

            def check() -> int:
                check_writable(out / REPORT)
                return check_activations(data, lambda done: on_progress("checking the activations", done, data.tokens))

            data.crc = on_first(check, group)

            def on_step(point: Point, total: int) -> None:
                on_progress(_label(point), point.step, total)

            how: dict[str, Any] = {"resume": resume, "checkpoint_every": checkpoint_every, "on_step": on_step}
            result = train(data, config, training, out, **how, group=group)

            def finish() -> None:
                found = look(out, data, names, lambda *of: on_progress("looking at the latents", *of))
                write(out / REPORT, report(result, activations.name, command(), found))

            on_first(finish, group)
    if not is_first:
        raise typer.Exit(0 if result.is_complete else 130)
    if json:
        typer.echo(dumps(result.metrics, indent=1, allow_nan=False))
    else:
        show = console()
        show.print(table(["", "all tokens", "held out"], figures(result.metrics)))
        show.print(verdict(result.metrics), style="bold")
        show.print(f"The model is in {out}. Report, with pictures: {link(out / REPORT)}")
    if not result.is_complete:
        typer.echo("khot sae: interrupted; --resume continues from here.", err=True)
        raise typer.Exit(130)


def _label(point: Point) -> str:
    return f"FVU {point.fvu:.3f}  L0 {point.l0:.1f}  dead {point.dead}"
