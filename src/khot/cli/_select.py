"""`khot select`: which k features matter?"""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._extras import require
from .._process import check_writable, write
from ._show import command, console, fail, link, progress, table

if TYPE_CHECKING:
    from ..jobs.select import Selection

NEXT = """\
Next, on a table of your own: khot select your.csv --target y -k 5 --out out
What σ_k does, in a picture:  khot tour"""
STOPPING = "Stopping; the best so far will be written. Ctrl-C again stops at once and writes nothing."

Task = StrEnum("Task", ["auto", "classification", "regression", "reconstruction"])
Model = StrEnum("Model", ["linear", "forest"])
Decimal = StrEnum("Decimal", {"point": ".", "comma": ","})
File = typer.Argument(
    help="A CSV, Parquet or npz file, also with .gz; - for standard input. If omitted, scikit-learn's digits.",
    show_default=False,
)
Target = typer.Option(
    metavar="COLUMN",
    help="The column to predict; repeat for several of numbers. If omitted, choose the k columns that best "
    "reconstruct the others.",
)
Weight = typer.Option(metavar="COLUMN", help="A column with the weight of each row, > 0.")
RowsOf = typer.Option(
    metavar="COLUMN", help="Rows with the same value, such as one patient's, stay on one side of every split."
)
Group = typer.Option(
    metavar="NAME=A,B",
    help="Features that count as one, such as size=width,height; or a column of strings. Repeat for more.",
)
Costs = typer.Option(help="A CSV file with a feature or group and its cost in each line. Needs --budget.")
FalseDiscoveries = typer.Option(
    metavar="Q", help="Also list features of which at most a share Q is expected to be false (Gaussian knockoffs)."
)


def select(
    context: typer.Context,
    file: Annotated[Path | None, File] = None,
    target: Annotated[list[str] | None, Target] = None,
    k: Annotated[str, typer.Option("-k", "--k", help="How many features to choose, or auto.")] = "10",
    max_k: Annotated[int | None, typer.Option(help="With -k auto, the largest number; 30 if omitted.")] = None,
    weight: Annotated[str | None, Weight] = None,
    rows_of: Annotated[str | None, RowsOf] = None,
    group: Annotated[list[str] | None, Group] = None,
    costs: Annotated[Path | None, Costs] = None,
    budget: Annotated[float | None, typer.Option(help="Instead of -k: the most that a choice may cost.")] = None,
    false_discoveries: Annotated[float | None, FalseDiscoveries] = None,
    task: Annotated[Task, typer.Option(help="auto finds it from the target.")] = Task.auto,
    model: Annotated[Model, typer.Option(help="The model that scores all choices.")] = Model.linear,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column to leave out; repeat for more.")
    ] = None,
    separator: Annotated[str | None, typer.Option(help="Between values: , ; | or tab.")] = None,
    decimal: Annotated[
        Decimal | None, typer.Option(help="The decimal mark; the other one separates thousands.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="Of a text file, such as latin-1.")] = None,
    missing: Annotated[
        list[str] | None, typer.Option(metavar="MARK", help="What stands for a missing value; repeat for more.")
    ] = None,
    dates: Annotated[str | None, typer.Option(metavar="FORMAT", help="Of dates, such as %d.%m.%Y.")] = None,
    levels: Annotated[
        int, typer.Option(help="Most different strings of which each becomes a feature; more are target-encoded.")
    ] = 20,
    rows: Annotated[
        int, typer.Option(help="Of a Parquet file with more rows, a uniform sample of so many is read.")
    ] = 300_000,
    jobs: Annotated[int, typer.Option(help="Processes that try strategies at the same time.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same choice.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for report.html, selection.json and features.csv.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report, one HTML file, here.")] = None,
) -> None:
    """Choose the k features that matter, and compare the choice with others.

    Several strategies choose, and held-out rows decide between them: best subsets of a linear model, of steps and
    products of features, boosted trees, and a gate that is trained with a network. The choice is then scored with a
    plain model, cross-validated, against all features, random ones, and scikit-learn's SelectKBest, L1 and RFE.

    Separators, decimal commas, dates, encodings and marks of missing values are found out, and said; options override
    them. Missing values are replaced by the median of the rows that are trained on. A column of strings becomes one
    feature for each value, or is target-encoded. The command warns of columns that are constant, number the rows, or
    copy the target. Ctrl-C keeps the best so far and still writes the report; twice, and nothing is written.

    Without a file, it first shows a case that only khot solves, and then chooses ten of the 64 pixels of scikit-learn's
    digits.

    For example:

    khot select houses.csv --target price -k 5 --report report.html

    khot select houses.csv --target price -k auto --max-k 12

    khot select patients.csv --target ill --costs costs.csv --budget 100 --group blood=iron,sugar

    khot select visits.csv --target pain --target sleep --rows-of patient --weight share -k 5

    khot select cells.npz -k 20 --task reconstruction --json
    """
    with progress("loading") as on_progress:
        try:
            for package in ("sklearn", "polars", "matplotlib"):
                require(package, extra="select")
            from ..jobs import select as job
            from ..jobs.select_report import report as make_report

            counts = {"--levels": levels, "--rows": rows, "--jobs": jobs, "--max-k": 1 if max_k is None else max_k}
            for option, value in counts.items():
                if value < 1:
                    raise job.TableError(f"{option} must be ≥ 1; got {value}")
            given = {"separator": separator, "decimal": decimal, "encoding": encoding, "dates": dates}
            how = job.Reading(**given, missing=tuple(missing) if missing else None, levels=levels, rows=rows, seed=seed)
            by_row = {"weight": weight, "rows_of": rows_of}
            source = job.digits() if file is None else job.read_table(file, target or (), drop or (), how, **by_row)
            if file is None and (target or drop or weight or rows_of or how != job.Reading(seed=seed)):
                raise job.TableError("--target, --drop and how to read need a FILE")
            kind = job.find_task_of(source, task)
            names = source.features(kind)
            wish = job.Wish(
                max_k=max_k,
                groups=job.read_groups(group or (), names, source.together(kind)),
                costs=None if costs is None else job.read_costs(costs),
                budget=budget,
                false_discoveries=false_discoveries,
                n_jobs=jobs if jobs > 1 else None,
            )
            if budget is not None and getattr(context.get_parameter_source("k"), "name", "") == "COMMANDLINE":
                raise job.TableError(
                    f"-k and --budget exclude each other: leave one out; got -k {k}, --budget {budget:g}"
                )
            count: int | str = k
            if k != "auto":
                if not k.lstrip("-").isdigit():
                    raise job.TableError(f"-k must be a whole number or auto; got {k!r}")
                count = int(k)
            wish.selector(count, names, kind, 0)
            if not 0 <= seed < 2**32:
                raise job.TableError(f"--seed must satisfy 0 ≤ seed < 2³²; got {seed}")
            if false_discoveries is not None and (kind == "reconstruction" or not 0 < false_discoveries < 1):
                raise job.TableError(f"--false-discoveries needs a target and 0 < Q < 1; got {false_discoveries:g}")
            if false_discoveries is not None and (weight or rows_of or len(target or ()) > 1):
                raise job.TableError("--false-discoveries needs one --target, and neither --weight nor --rows-of")
            report_path = report or (out / "report.html" if out else None)
            for path in (report_path, out and out / "selection.json", out and out / "features.csv"):
                if path is not None:
                    check_writable(path)
        except (ValueError, ModuleNotFoundError) as problem:
            fail("select", str(problem))
        warn = partial(typer.echo, STOPPING, err=True)
        work: dict[str, Any] = {"wish": wish, "seed": seed, "model": model, "with_xor": file is None}
        try:
            result = job.select(source, kind, count, **work, on_progress=on_progress, on_interrupt=warn)
        except MemoryError:
            fail("select", f"{len(names)} features need more memory than there is: leave some out with --drop")
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
    from ..jobs.select_report import (
        XOR_HEADER,
        candidate_rows,
        candidates_header,
        discovered,
        headline,
        in_folds,
        measure,
        missed,
        missed_header,
        similar,
        spent,
        stability_header,
        sure,
        verdict,
        xor_rows,
        xor_verdict,
    )

    show, source = console(), result.table
    if result.xor:
        show.print("\n1. Two columns that matter only together: who finds them?", style="bold")
        show.print(xor_verdict(result))
        show.print(table(XOR_HEADER, xor_rows(result)))
    title = f"{result.k} of {len(result.features)} features, {result.task}, {len(source.x)} rows, {source.source}"
    show.print(f"\n{'2. ' * bool(result.xor)}{title}", style="bold")
    for note in source.notes:
        show.print(note, style="dim")
    for said in result.warnings:
        show.print(f"Warning: {said}", style="yellow")
    rows = [
        [f.name, str(f.rank), *missed(result, f), f"{f.inclusion_probability:.3f}", *in_folds(result, f)]
        for f in result.chosen
    ]
    header = ["feature", "rank", *missed_header(result), "inclusion probability", *stability_header(result)]
    show.print(table(header, rows))
    for said in (*spent(result), *similar(result), *sure(result), *discovered(result)):
        show.print(said)
    if result.candidates:
        show.print(table(candidates_header(result), candidate_rows(result)))
    if result.scores:
        scores = [[name, f"{score.mean:.3f} ± {score.std:.3f}"] for name, score in result.scores.items()]
        show.print(table(["features by", measure(result)], scores))
    if source.image is not None:  # the pixels as text; chosen ones are blocks
        width, chosen = source.image[1], {feature.name for feature in result.chosen}
        cells = ["██" if name in chosen else "· " for name in source.names]
        show.print("\n".join("".join(cells[i : i + width]) for i in range(0, len(cells), width)), "\n")
    if said := headline(result):
        show.print(said, style="bold")
    if result.scores:
        show.print(verdict(result))
    if not result.is_complete:
        show.print("Cut short: this is the best so far.", style="bold")
    show.print(f"Report, with pictures: {link(report)}" if report else "For pictures, add --report report.html")
    show.print(f"This took {result.seconds:.0f} s.")
    if result.xor:  # not for those who just ran it on a table of their own
        show.print(NEXT, style="dim")
