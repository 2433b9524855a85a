"""`khot sae`: a sparse autoencoder of a file of activations."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from .._extras import require
from .._process import check_writable, write
from ..distributed import on_first, together
from ..jobs.sae_names import Names, look, read_names
from ..jobs.sae_report import FRONTIER, REPORT, figures, frontier, report, sweep_report, verdict
from ..nn import SparseAutoencoderConfig
from ..sae import RECIPES, Activations, Pairs, Point, Training, check_activations, open_activations, sweep, train
from ._show import command, console, link, processes, progress, table

Kind = typer.Option(help="topk: k for each token; batch: in the mean; feature: tokens for each latent; jumprelu.")
Count = typer.Option("-k", "--k", help="Active latents a token; several, such as 16,32,64, are a sweep.")
Target = typer.Option(help="A file of targets, row by row beside the activations: a transcoder.")
Prefixes = typer.Option(help="Numbers of first latents that also reconstruct alone, such as 256,1024 (Matryoshka).")
Precision = typer.Option(help="float32, or bfloat16 for the largest products.")
Tokenized = typer.Option(
    help="The token of each row: .jsonl (strings, or lists), .txt (one a line) or .npy of numbers."
)
Vocabulary = typer.Option(help="The texts of token numbers: .json (a list, or {text: number}) or .txt, one a line.")


def sae(
    activations: Annotated[Path, typer.Argument(help="A .npy, .npz or .safetensors file of floats, (tokens, d).")],
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("sae"),
    k: Annotated[str, Count] = "32",
    latents: Annotated[int, typer.Option(help="How many latents.")] = 4096,
    kind: Annotated[str, Kind] = "topk",
    selector: Annotated[str, typer.Option(help=f"{', '.join(RECIPES)}.")] = "straight-through",
    zipf: Annotated[float, typer.Option(help="Exponent of the latents' budgets, for feature; 0: all the same.")] = 0.0,
    prefixes: Annotated[str, Prefixes] = "",
    target: Annotated[Path | None, Target] = None,
    layer_norm: Annotated[bool, typer.Option("--layer-norm", help="Normalise each token first.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of Adam.")] = 4000,
    batch_size: Annotated[int, typer.Option(help="Tokens in a step.")] = 1024,
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, if there is one.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    array: Annotated[str | None, typer.Option(help="Which array of the file, if there are several.")] = None,
    target_array: Annotated[str | None, typer.Option(help="Which array of the file of targets.")] = None,
    precision: Annotated[str, Precision] = "float32",
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
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

    Several values of -k are trained one after the other, into subfolders, and the report shows the frontier.

    For example:

    khot sae acts.npz -k 32 --latents 4096 --out sae

    khot sae acts.npz -k 16,32,64 --out sweep --resume

    khot sae before.npz --target after.npz --out transcoder

    khot sae acts.safetensors --kind batch --out sae --steps 20000 --resume

    torchrun --nproc-per-node 4 -m khot sae acts.npz --out sae
    """

    def set_up() -> tuple[Activations, Activations | Pairs, dict[str, SparseAutoencoderConfig], Training, Names]:
        for package in ("safetensors", "matplotlib"):
            require(package, extra="sae")
        if target is None and target_array is not None:
            raise ValueError(f"--target-array needs --target, the file of targets; got {target_array!r} alone")
        inputs = open_activations(activations, array)
        targets = None if target is None else open_activations(target, target_array)
        data, d_out = (inputs, None) if targets is None else (Pairs(inputs, targets), targets.d)
        sizes = _numbers("--prefixes", prefixes)
        if odd := [size for size in sizes if not isinstance(size, int)]:
            raise ValueError(f"--prefixes must be integers, since they count latents; got {odd[0]:g}")
        shape: dict[str, Any] = {"d_in": inputs.d, "d_out": d_out, "latents": latents, "kind": kind, "zipf": zipf}
        more: dict[str, Any] = {"layer_norm": layer_norm, "prefixes": tuple(sizes)}
        counts = _numbers("-k", k)
        configs = {f"k{count:g}": SparseAutoencoderConfig(**shape, **more, k=count) for count in counts}
        how: dict[str, Any] = {"selector": selector, "steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed}
        names = read_names(inputs, d_out or inputs.d, tokens, vocabulary, unembedding)
        return inputs, data, configs, Training(**how, precision=precision, device=device), names

    with processes("sae") as (group, is_first):
        inputs, data, configs, training, names = together(set_up, group)
        with progress("starting", is_shown=is_first) as on_progress:

            def check() -> int:
                _check_free(out, is_sweep=len(configs) > 1)
                check_writable(out / REPORT)
                return check_activations(data, lambda done: on_progress("checking the activations", done, data.tokens))

            data.crc = on_first(check, group)

            def on_step(point: Point, total: int) -> None:
                on_progress(_label(point), point.step, total)

            how: dict[str, Any] = {"resume": resume, "checkpoint_every": checkpoint_every, "on_step": on_step}
            if len(configs) == 1:
                runs = {"": train(data, next(iter(configs.values())), training, out, **how, group=group)}
            else:
                runs = sweep(data, configs, training, out, **how, group=group)

            def write_reports() -> None:
                for name, run in runs.items():
                    found = look(out / name, inputs, names, lambda *of: on_progress("looking at the latents", *of))
                    write(out / name / REPORT, report(run, activations.name, command(), found))
                if len(configs) > 1:
                    write(out / REPORT, sweep_report(runs, len(configs), activations.name, command()))

            on_first(write_reports, group)
    is_complete = all(run.is_complete for run in runs.values())
    if not is_first:
        raise typer.Exit(0 if is_complete else 130)
    if json:
        every = {name: run.metrics for name, run in runs.items()}
        typer.echo(dumps(every if len(configs) > 1 else every[""], indent=1, allow_nan=False))
    elif len(configs) > 1:
        show = console()
        show.print(table(FRONTIER, frontier(runs)))
        show.print(f"The models are in {', '.join(str(out / name) for name in runs)}. Report: {link(out / REPORT)}")
    else:
        show, metrics = console(), runs[""].metrics
        show.print(table(["", "all tokens", "held out"], figures(metrics)))
        show.print(verdict(metrics), style="bold")
        show.print(f"The model is in {out}. Report, with pictures: {link(out / REPORT)}")
    if not is_complete:
        typer.echo("khot sae: interrupted; --resume continues from here.", err=True)
        raise typer.Exit(130)


def _numbers(option: str, text: str) -> list[float]:
    """Read numbers with commas between them, each once."""
    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between them; got {text!r}") from None
    if option == "-k" and not found:
        raise ValueError(f"{option} must be at least one number; got {text!r}")
    if len(set(found)) < len(found):
        raise ValueError(f"{option} must name each number once; got {text!r}")
    return [int(number) if number.is_integer() else number for number in found]


def _check_free(out: Path, *, is_sweep: bool) -> None:
    """Raise if the report of a sweep would replace that of a run in the same folder, or the other way round."""
    has_run = any((out / name).exists() for name in ("metrics.json", "checkpoint.safetensors"))
    if is_sweep and has_run:
        raise FileExistsError(f"{out} holds one run: choose another folder for a sweep")
    if not is_sweep and not has_run and (out / REPORT).exists() and any(out.glob("k*/metrics.json")):
        raise FileExistsError(f"{out} holds a sweep: choose another folder for one run")


def _label(point: Point) -> str:
    return f"FVU {point.fvu:.3f}  L0 {point.l0:.1f}  dead {point.dead}"
