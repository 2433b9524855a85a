"""`khot select`: which k features matter?"""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .._files import check_writable, write
from ._show import command, fail, progress, table

if TYPE_CHECKING:
    from ..jobs.select import Selection

NEXT = """\
Next: khot select your.csv --target y -k 5 --report report.html   (your own table)
      khot tour   (what σ_k does, in a picture)"""
STOPPING = "Stopping; the best so far will be written. Ctrl-C again stops at once and writes nothing."


Task = StrEnum("Task", ["auto", "classification", "regression", "reconstruction"])
Model = StrEnum("Model", ["linear", "forest"])


def select(
    file: Annotated[
        Path | None,
        typer.Argument(help="A CSV, Parquet or npz file. If omitted, scikit-learn's digits.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The column to predict. If omitted, choose the k columns that best reconstruct all the others."
        ),
    ] = None,
    k: Annotated[int, typer.Option("-k", "--k", help="How many features to choose.")] = 10,
    task: Annotated[Task, typer.Option(help="auto finds it from the target.")] = Task.auto,
    model: Annotated[
        Model, typer.Option(help="The plain model that scores all choices; forest sees what is not linear.")
    ] = Model.linear,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat for more.")] = None,
    steps: Annotated[int, typer.Option(help="Largest number of training steps, of each fit.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same choice.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for report.html, selection.json and features.csv.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report, one HTML file, here.")] = None,
) -> None:
    """Choose the k features that matter, and compare the choice with others.

    A gate over all features and a network are trained together; the k best features are then scored with a plain model,
    cross-validated, against all features, random ones, and scikit-learn's SelectKBest, L1 and RFE. Missing values are
    replaced by the median, columns of strings become one feature for each value; both are said. Ctrl-C keeps the best
    so far and still writes the report; twice, and nothing is written.

    For example:

    khot select                                      ten of the 64 pixels of scikit-learn's digits

    khot select houses.csv --target price -k 5 --report report.html

    khot select cells.npz -k 20 --task reconstruction --json
    """
    try:
        from ..jobs import select as job
        from ..jobs.select_report import report as make_report
    except ModuleNotFoundError as missing:
        fail("select", f"it needs {missing.name}: pip install 'khot[select]'")
    report_path = report or (out / "report.html" if out else None)
    try:
        source = job.digits() if file is None else job.read_table(file, target, drop or ())
        if file is None and (target is not None or drop):
            raise job.TableError("--target and --drop need a FILE")
        if not 1 <= k <= len(source.names):
            raise job.TableError(f"-k must satisfy 1 ≤ k ≤ {len(source.names)} (number of features); got {k}")
        if not 0 <= seed < 2**32:
            raise job.TableError(f"--seed must satisfy 0 ≤ seed < 2³²; got {seed}")
        if steps < 1:
            raise job.TableError(f"--steps must be ≥ 1; got {steps}")
        kind = job.find_task_of(source, task)
        for path in (report_path, out and out / "selection.json", out and out / "features.csv"):
            if path is not None:
                check_writable(path)
    except (ValueError, ModuleNotFoundError) as problem:
        fail("select", str(problem))
    with progress() as on_progress:
        warn = partial(typer.echo, STOPPING, err=True)
        result = job.select(
            source, kind, k, seed=seed, model=model, steps=steps, on_progress=on_progress, on_interrupt=warn
        )
    as_json = job.to_json(result, report_path)
    if report_path is not None:
        write(report_path, make_report(result, command()))
    if out is not None:
        write(out / "selection.json", as_json + "\n")
        write(out / "features.csv", job.to_csv(result))
    if json:
        typer.echo(as_json)
    else:
        _show(result, report_path)
    if not result.is_complete:
        raise typer.Exit(130)


def _show(result: "Selection", report: Path | None) -> None:
    from ..jobs.select_report import measure, verdict

    console = Console(highlight=False)
    source = result.table
    console.print(f"\n[bold]{result.k} of {len(source.names)} features[/bold], {result.task}, ", end="")
    console.print(f"{len(source.x)} rows, {source.source}", markup=False)
    for note in source.notes:
        console.print(note, style="dim", markup=False)
    if source.image is not None:  # the pixels as text; chosen ones are blocks
        height, width = source.image
        chosen = {feature.name for feature in result.chosen}
        cells = ["██" if name in chosen else "· " for name in source.names]
        console.print("\n".join("".join(cells[i * width : (i + 1) * width]) for i in range(height)), markup=False)
    rows = [[escape(f.name), str(f.rank), f"{f.inclusion_probability:.3f}"] for f in result.chosen]
    console.print(table(["feature", "rank", "inclusion probability"], rows))
    if result.scores:
        scores = [[name, f"{score.mean:.3f} ± {score.std:.3f}"] for name, score in result.scores.items()]
        console.print(table(["features by", measure(result)], scores))
        console.print(verdict(result), highlight=False)
    if not result.is_complete:
        console.print("[bold]Cut short[/bold]: this is the best so far.")
    if report is not None:
        console.print(f"Report: {report}", markup=False)
    console.print(NEXT if report is not None else "Pictures: add --report report.html", style="dim", markup=False)
