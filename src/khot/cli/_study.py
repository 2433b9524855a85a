"""`khot study`: which gradient estimator?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Never

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..bench import write
from ..bench._estimator_report import (
    COLUMNS,
    TITLES,
    estimators_csv,
    estimators_json,
    estimators_markdown,
    number,
    plot_estimators,
)
from ..bench._estimators import ENTRANTS, OBJECTIVES, SEEDS, Figures, study

app = typer.Typer(help="Studies: experiments that settle which method to use.", no_args_is_help=True)
QUICK_DRAWS, QUICK_SEEDS = 1000, SEEDS[:3]


@app.callback()
def _studies() -> None:
    pass


@app.command()
def estimators(
    quick: Annotated[bool, typer.Option("--quick", help="Three seeds and 1000 draws: half a minute.")] = False,
    estimator: Annotated[list[str] | None, typer.Option(help="An estimator; repeat for more. Default: all.")] = None,
    objective: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(OBJECTIVES)}; repeat for more. Default: all.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Estimates for each mean that cannot be had exactly.")] = 10_000,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write a CSV file as well.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown table as well.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a picture as well (needs khot[plot]).")] = None,
) -> None:
    """Bias, variance and error of gradient estimators for k-subsets, n = 10, k = 5, against the exact gradient.

    The protocol is that of SIMPLE and SFESS, over ten seeds; means are exact, over all 252 subsets, where an estimator
    draws one or two. bias = 1 − cos(E ĝ, ∇F); variance = Var cos(ĝ, E ĝ); error = E[1 − cos(ĝ, ∇F)]; and, since the
    cosine hides the scale, ‖E ĝ − ∇F‖/‖∇F‖ and E‖ĝ − E ĝ‖²/‖∇F‖². Ctrl-C ends early and keeps what was measured.

    For example:

    khot study estimators --quick

    khot study estimators --objective paper --estimator simple --estimator rloo_32 --json
    """
    names = _known("--estimator", estimator, tuple(ENTRANTS))
    objectives = _known("--objective", objective, OBJECTIVES)
    if draws < 2:
        _fail(f"--draws must be ≥ 2; got {draws}")
    seeds = QUICK_SEEDS if quick else SEEDS
    rows = _run(names, objectives, min(draws, QUICK_DRAWS) if quick else draws, seeds)
    if json:
        typer.echo(estimators_json(rows))
    else:
        _show(rows, objectives, len(seeds))
    for path, text in ((csv, estimators_csv(rows)), (markdown, estimators_markdown(rows))):
        if path is not None:
            write(path, text)
    if plot is not None:
        try:
            plot_estimators(rows, plot)
        except ModuleNotFoundError as missing:
            _fail(f"--plot needs {missing.name}: pip install 'khot[plot]'")
    if len(rows) < len(names) * len(objectives):
        raise typer.Exit(130)


def _run(names: tuple[str, ...], objectives: tuple[str, ...], draws: int, seeds: tuple[int, ...]) -> list[Figures]:
    """With a bar on stderr, where stdout's readers do not see it."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        return study(
            names,
            objectives,
            draws=draws,
            seeds=seeds,
            on_progress=lambda label, done, total: bar.update(
                task, description=f"{label:<36}", completed=done, total=total
            ),
        )


def _show(rows: list[Figures], objectives: tuple[str, ...], seeds: int) -> None:
    console = Console()
    for objective in objectives:
        table = Table(title=TITLES[objective], title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("estimator", no_wrap=True)
        for name in ("calls", *COLUMNS):
            table.add_column(name, justify="right", no_wrap=True)
        for row in (row for row in rows if row.objective == objective):
            table.add_row(row.estimator, str(row.evaluations), *(number(getattr(row, name)) for name in COLUMNS))
        console.print(table)
    console.print(
        f"Means over {seeds} seeds; calls: of the objective, for one estimate. khot study estimators --help explains.",
        style="dim",
    )


def _known(option: str, given: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    for name in given or ():
        if name not in known:
            _fail(f"{option} must be one of {', '.join(known)}; got {name!r}")
    return tuple(dict.fromkeys(given)) if given else known


def _fail(message: str) -> Never:
    typer.echo(f"khot study: {message}.", err=True)
    raise typer.Exit(2)
