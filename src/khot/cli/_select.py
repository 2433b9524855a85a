"""`khot select`: which k features matter?"""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .._files import check_writable, write
from ..jobs._interrupts import interruptible
from ._show import fail, progress, table

if TYPE_CHECKING:
    from ..jobs._select import Selection

NEXT = """\
Next: khot select your.csv --target y -k 5 --report report.html   (your own table)
      khot study estimators --quick   (which gradient to train with)
      khot tour   (what σ_k does, in a picture)"""


class Task(StrEnum):
    """What the features are chosen for."""

    auto = "auto"
    classification = "classification"
    regression = "regression"
    reconstruction = "reconstruction"


class Model(StrEnum):
    """What scores the choices."""

    linear = "linear"
    forest = "forest"


def select(
    file: Annotated[
        Path | None, typer.Argument(help="A CSV, Parquet or npz file. None: scikit-learn's digits.", show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The column to predict. None: choose what all columns can be told from.")
    ] = None,
    k: Annotated[int, typer.Option("-k", "--k", help="How many features to choose.")] = 10,
    task: Annotated[Task, typer.Option(help="auto finds it from the target.")] = Task.auto,
    model: Annotated[
        Model, typer.Option(help="The plain model that scores all choices; forest sees what is not linear.")
    ] = Model.linear,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat for more.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same choice.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write report.html, selection.json and features.csv to this directory.")
    ] = None,
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
        from ..jobs import _select as job
        from ..jobs import _select_report, _table
        from ..jobs._readers import TableError
    except ModuleNotFoundError as missing:
        fail("select", f"it needs {missing.name}: pip install 'khot[sklearn]'")
    report_path = report or (out / "report.html" if out else None)
    try:
        found = _table.digits() if file is None else _table.read(file, target, drop or ())
        if file is None and (target is not None or drop):
            raise TableError("--target and --drop need a FILE")
        if not 1 <= k <= len(found.names):
            raise TableError(f"-k must satisfy 1 ≤ k ≤ {len(found.names)} (number of features); got {k}")
        if not 0 <= seed < 2**32:
            raise TableError(f"--seed must satisfy 0 ≤ seed < 2³²; got {seed}")
        kind = job.task_of(found, task)
        for path in (report_path, *((out / name for name in ("selection.json", "features.csv")) if out else ())):
            if path is not None:
                check_writable(path)
    except (ValueError, ModuleNotFoundError) as problem:
        fail("select", str(problem))
    with interruptible(_stopping) as is_stopped, progress() as show:

        def on_progress(label: str, done: int, total: int) -> bool:
            show(label, done, total)
            return is_stopped()

        for state in job.select(found, kind, k, seed, model, on_progress):
            result = state
    if report_path is not None:
        write(report_path, _select_report.report(result, _command()))
    if out is not None and report_path is not None:
        for name, text in job.files(result, report_path).items():
            write(out / name, text)
    if json:
        typer.echo(job.to_json(result, report_path))
    else:
        _show(result, report_path)
    if not result.is_whole:
        raise typer.Exit(130)


def _show(result: Selection, report: Path | None) -> None:
    from ..jobs._select_report import measure, verdict

    console = Console(highlight=False)
    source = result.table
    console.print(f"\n[bold]{result.k} of {len(source.names)} features[/bold], {result.task}, ", end="")
    console.print(f"{len(source.x)} rows, {source.source}", markup=False)
    for note in source.notes:
        console.print(note, style="dim", markup=False)
    if source.image is not None:
        console.print(_picture(result), markup=False)
    rows = [[escape(f.name), str(f.rank), f"{f.inclusion_probability:.3f}"] for f in result.chosen]
    console.print(table(["feature", "rank", "inclusion probability"], rows))
    if result.scores:
        scores = [[name, f"{score.mean:.3f} ± {score.std:.3f}"] for name, score in result.scores.items()]
        console.print(table(["features by", measure(result)], scores))
        console.print(verdict(result), highlight=False)
    if not result.is_whole:
        console.print("[bold]Cut short[/bold]: this is the best so far.")
    if report is not None:
        console.print(f"Report: {report}", markup=False)
    console.print(NEXT if report is not None else "Pictures: add --report report.html", style="dim", markup=False)


def _picture(result: Selection) -> str:
    """The pixels as text: chosen ones are blocks."""
    assert result.table.image is not None
    chosen = {feature.name for feature in result.chosen}
    cells = ["██" if name in chosen else "· " for name in result.table.names]
    width = result.table.image[1]
    return "\n".join("".join(cells[i : i + width]) for i in range(0, len(cells), width))


def _stopping() -> None:
    typer.echo("Stopping; what there is will be written. Ctrl-C again: at once, nothing is written.", err=True)


def _command() -> str:
    return shlex.join(["khot", *sys.argv[1:]])
