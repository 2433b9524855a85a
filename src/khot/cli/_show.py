"""What the commands share on a terminal: a table, a progress bar, an error, and the command itself as text."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Never

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, all_left: bool = False) -> Table:
    """Make a table with names on the left and figures on the right, or with all on the left."""
    result = Table(pad_edge=False, padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        result.add_column(name, justify="right" if i and not all_left else "left", no_wrap=i == 0)
    for line in lines:
        result.add_row(*line)
    return result


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr; call it with a label, the work done, and all the work."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda label, done, total: bar.update(task, description=f"{label:<44}", completed=done, total=total)


def fail(command: str, message: str) -> Never:
    """Print one line to stderr and exit with code 2."""
    line = " ".join(message.split())
    typer.echo(f"khot {command}: {line if line.endswith(('.', '?')) else line + '.'}", err=True)
    raise typer.Exit(2)


def command() -> str:
    """Return what the user typed."""
    return shlex.join(["khot", *sys.argv[1:]])
