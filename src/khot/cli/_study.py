"""`khot study`: which gradient estimator?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Never

import typer
from rich.console import Console

from ..bench import write
from ..bench._contenders import CONTENDERS
from ..bench._curves import figure, protocol, table, to_csv, to_json, to_markdown, verdict
from ..bench._estimator_report import (
    COLUMNS,
    TITLES,
    estimators_csv,
    estimators_figure,
    estimators_json,
    estimators_markdown,
    number,
)
from ..bench._estimators import ENTRANTS, OBJECTIVES, SEEDS, Figures, study
from ..bench._files import save
from ..bench._learning import Study, run
from ..bench._regression import STUDY as REGRESSION
from ..bench._vae import STUDY as VAE
from ._show import progress
from ._show import table as show_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(help="Studies: experiments that settle which method to use.", no_args_is_help=True)
QUICK_DRAWS, QUICK_SEEDS = 1000, SEEDS[:3]

Names = Annotated[list[str] | None, typer.Option("--estimator", help="An estimator; repeat for more. Default: all.")]
Quick = Annotated[bool, typer.Option("--quick", help="Less of all, settings not tuned: under a minute.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Csv = Annotated[Path | None, typer.Option(help="Write a CSV file as well.")]
Markdown = Annotated[Path | None, typer.Option(help="Write a Markdown table as well.")]
Plot = Annotated[Path | None, typer.Option(help="Save a picture as well (needs khot[plot]).")]


@app.command()
def estimators(
    quick: Annotated[bool, typer.Option("--quick", help="Three seeds and 1000 draws: half a minute.")] = False,
    estimator: Names = None,
    objective: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(OBJECTIVES)}; repeat for more. Default: all.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Estimates for each mean that cannot be had exactly.")] = 10_000,
    json: Json = False,
    csv: Csv = None,
    markdown: Markdown = None,
    plot: Plot = None,
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
    with progress() as on_progress:
        rows = study(
            names,
            objectives,
            draws=min(draws, QUICK_DRAWS) if quick else draws,
            seeds=seeds,
            on_progress=on_progress,
        )
    if json:
        typer.echo(estimators_json(rows))
    else:
        _show(rows, objectives, len(seeds))
    _save(csv, lambda: estimators_csv(rows))
    _save(markdown, lambda: estimators_markdown(rows))
    _picture(plot, lambda: estimators_figure(rows))
    if len(rows) < len(names) * len(objectives):
        raise typer.Exit(130)


@app.command()
def regression(
    quick: Quick = False,
    estimator: Names = None,
    json: Json = False,
    csv: Csv = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Subset selection in linear regression, n = 50, k = 5, learned by each estimator at an equal budget.

    60 examples, five true features among 50 correlated ones; scores are trained by Adam, eight evaluations of the
    objective a step, and the five greatest are taken. Forty seeds, settings of each estimator chosen on ten others; a
    few minutes, one thread. Ctrl-C ends early and keeps what was measured.

    For example:

    khot study regression --quick --plot regression.png

    khot study regression --estimator simple --estimator rloo --csv curves.csv
    """
    _learn(REGRESSION, quick, estimator, json, csv, markdown, plot)


@app.command()
def vae(
    quick: Quick = False,
    estimator: Names = None,
    json: Json = False,
    csv: Csv = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """An autoencoder of digits whose code is a k-subset, n = 32, k = 8, trained by each estimator at an equal budget.

    Scikit-learn's digits (needs khot[study]); less is better of the negative evidence lower bound, in nats, on held-out
    images. Five seeds, settings of each estimator chosen on another; some seven minutes, one thread. Ctrl-C ends early
    and keeps what was measured.

    For example:

    khot study vae --quick --plot vae.png

    khot study vae --estimator simple --estimator relaxed --csv curves.csv
    """
    _learn(VAE, quick, estimator, json, csv, markdown, plot)


def _learn(
    problem: Study,
    quick: bool,
    estimator: list[str] | None,
    json: bool,
    csv: Path | None,
    markdown: Path | None,
    plot: Path | None,
) -> None:
    names = _known("--estimator", estimator, tuple(CONTENDERS))
    settings = problem.quick if quick else problem.full
    with progress() as on_progress:
        try:
            rows = run(problem, names, settings, on_progress)
        except ModuleNotFoundError as missing:
            _fail(str(missing).removesuffix("."))
    if not rows:
        raise typer.Exit(130)
    if json:
        typer.echo(to_json(problem, rows))
    else:
        header, lines = table(problem, rows)
        console = Console()
        console.print(show_table(header, lines))
        console.print(verdict(problem, rows).replace("`", ""), highlight=False)
        console.print(protocol(problem, rows).replace("`", ""), style="dim", highlight=False)
    _save(csv, lambda: to_csv(rows))
    _save(markdown, lambda: to_markdown(problem, rows))
    _picture(plot, lambda: figure(problem, rows))
    if {row.estimator for row in rows if row.step == settings.steps} < set(names):
        raise typer.Exit(130)


def _save(path: Path | None, text: Callable[[], str]) -> None:
    if path is not None:
        write(path, text())


def _picture(path: Path | None, draw: Callable[[], Figure]) -> None:
    if path is not None:
        try:
            save(draw(), path)
        except ModuleNotFoundError as missing:
            _fail(f"--plot needs {missing.name}: pip install 'khot[plot]'")


def _show(rows: list[Figures], objectives: tuple[str, ...], seeds: int) -> None:
    console = Console()
    for objective in objectives:
        lines = [
            [row.estimator, str(row.evaluations), *(number(getattr(row, name)) for name in COLUMNS)]
            for row in rows
            if row.objective == objective
        ]
        console.print(show_table(["estimator", "calls", *COLUMNS], lines, TITLES[objective]))
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
