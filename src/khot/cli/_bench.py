"""`khot bench`: your shapes, khot against the field."""

import difflib
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import bench as job
from .._process import check_writable, write
from ._show import console, fail, progress, table

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
Op = typer.Option(metavar="NAME", help="A contender; repeat for more. Default: all. sigmoid_topk always runs.")
Also = typer.Option(metavar="MODULE:NAME", help="A dict of more khot.bench.Contender; repeat for more.")
Threads = typer.Option(help="Threads. With 1 the clock is CPU time, else wall time.")


def bench(
    shape: Annotated[str, typer.Option(help="Shape of the scores; rows lie along the last dim.")] = "4096x64",
    k: Annotated[str, typer.Option("-k", "--k", help="How many to choose: 8, 2.5 or 10% of n (at least 1).")] = "8",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    op: Annotated[list[str] | None, Op] = None,
    also: Annotated[list[str] | None, Also] = None,
    threads: Annotated[int, Threads] = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="Put every contender through torch.compile.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds of samples for each contender.")] = 1.0,
    csv: Annotated[Path | None, typer.Option(help="Write a CSV file as well.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the contenders and exit.")] = False,
) -> None:
    """Time σ_k against torch's operators, installed packages and your own functions, at your shape.

    Contenders take turns, so that noise hits all alike; figures are medians with the 20th and 80th percentile.

    A contender that cannot run is named with the reason. Ctrl-C ends early and keeps what was measured.

    For example:

    khot bench --shape 4096x64 --k 8

    khot bench --shape 1000000 --k 10% --op torch.topk --op laplace_topk --budget 5 --csv out.csv

    khot bench --list
    """
    known = job.CONTENDERS | (_imported(also) if also else {})
    if listing:
        lines = []
        for name, c in known.items():
            missing = f" ({c.package} is not installed)" if c.fn is None else ""
            lines.append([name, c.kind, c.what + missing, "integer" if c.integer_k else "any"])
        console().print(table(["contender", "kind", "method", "k"], lines, all_left=True))
        return
    contenders = _contenders(known, op or list(known))
    settings = _settings(shape, k, dtype, device, threads, compiled, budget)
    try:
        if csv is not None:
            check_writable(csv)
        with progress("starting") as on_progress:
            report = job.measure(contenders, settings, on_progress)
    except ValueError as problem:
        fail("bench", str(problem))
    except (RuntimeError, MemoryError) as error:  # contenders' own failures are reasons in the report
        fail("bench", f"--shape must fit into memory; got {shape}: {str(error).splitlines()[0]}")
    rows = job.records(report)
    if json:
        typer.echo(job.to_json(rows))
    else:
        _show(report)
    if csv is not None:
        write(csv, job.to_csv(rows))
    if report.interrupted:
        raise typer.Exit(130)


def _settings(shape: str, k: str, dtype: str, device: str, threads: int, compiled: bool, budget: float) -> job.Settings:
    if not re.fullmatch(r"[1-9]\d*([x×][1-9]\d*)*", shape):
        fail("bench", f"--shape must be positive integers joined by x, such as 4096x64; got {shape!r}")
    sizes = tuple(map(int, re.split("[x×]", shape)))
    if dtype not in DTYPES:
        fail("bench", f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if threads < 1:
        fail("bench", f"--threads must be ≥ 1; got {threads}")
    if not budget > 0:
        fail("bench", f"--budget must be > 0 seconds; got {budget:g}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        fail("bench", f"--device must be cpu, cuda or cuda:N; got {device!r}")
    if device != "cpu" and not torch.cuda.is_available():
        fail("bench", f"--device {device} needs a CUDA build of torch and a GPU; torch.cuda.is_available() is False")
    where: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device, "threads": threads}
    return job.Settings(shape=sizes, k=_count(k, sizes[-1]), compile=compiled, budget=budget, **where)


def _count(text: str, n: int) -> float:
    try:
        value = max(1, round(float(text[:-1]) / 100 * n)) if text.endswith("%") else float(text)
    except (ValueError, OverflowError):
        fail("bench", f"--k must be a number such as 8 or 2.5, or a share such as 10%; got {text!r}")
    if not 0 <= value <= n or (text.endswith("%") and not 0 <= float(text[:-1]) <= 100):
        fail("bench", f"--k must satisfy 0 ≤ k ≤ {n} (the last size of --shape); got {text}")
    return int(value) if value == int(value) else value


def _imported(places: list[str]) -> dict[str, job.Contender]:
    """Import the mappings that `--also` names; modules in the current folder are found too."""
    found: dict[str, job.Contender] = {}
    sys.path.append(os.getcwd())
    for place in places:
        module, _, name = place.partition(":")
        try:
            found |= getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError, TypeError) as problem:
            fail("bench", f"--also must be MODULE:NAME of a dict of khot.bench.Contender; got {place!r}: {problem}")
    if any(not isinstance(contender, job.Contender) for contender in found.values()):
        fail("bench", f"--also must name dicts of khot.bench.Contender; got other values in {', '.join(places)}")
    return found


def _contenders(known: dict[str, job.Contender], names: list[str]) -> dict[str, job.Contender]:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "khot bench --list names them all"
            fail("bench", f"--op must be a known contender; got {name!r}: {hint}")
    return {name: known[name] for name in dict.fromkeys((job.BASELINE, *names))}


def _show(report: job.Report) -> None:
    show = console()
    if not show.is_terminal and "COLUMNS" not in os.environ:
        show.width = 140  # nothing limits it
    show.print(job.to_table(report, show.width))
    legend = "Times are medians. × khot: above 1 is slower than sigmoid_topk. – does not apply."
    if show.width >= job.WIDE:
        legend += " In brackets: 20th and 80th percentile. Memory: peak of a forward call in units of the input. "
        legend += "|Σ−k|: relative, worst row. range: entries outside [0, 1]."
    show.print(legend, style="dim")
    for result in report.results:
        said = (result.skipped and f"skipped: {result.skipped}", result.note, *result.flags)
        if any(said):
            show.print(f"{result.name}: {'; '.join(filter(None, said))}")
    if said_last := job.conclusion(report):
        show.print(said_last, style="bold")
