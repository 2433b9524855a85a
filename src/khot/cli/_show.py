"""What the commands share on a terminal: a table, a progress bar, an error, and the command itself as text."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Never

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, all_left: bool = False) -> Table:
    """Make a table with names on the left and figures on the right, or with all on the left; text is as it is."""
    result = Table(pad_edge=False, padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        result.add_column(name, justify="right" if i and not all_left else "left", no_wrap=i == 0)
    for line in lines:
        result.add_row(*map(Text, line))
    return result


def console() -> Console:
    """Return a console that prints text as it is: brackets stay, and numbers have no colours."""
    return Console(markup=False, highlight=False)


@contextmanager
def progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr; call it with a label, the work done, and all the work."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda label, done, total: bar.update(task, description=f"{label:<38}", completed=done, total=total)


def fail(command: str, message: str) -> Never:
    """Print one line to stderr and exit with code 2."""
    line = " ".join(message.split())
    typer.echo(f"khot {command}: {line if line.endswith(('.', '?')) else line + '.'}", err=True)
    raise typer.Exit(2)


def link(path: Path) -> str:
    """Return an address that a terminal opens in a browser."""
    return path.resolve().as_uri()


def command() -> str:
    """Return what the user typed, without `--resume`, which is not for the first time."""
    return shlex.join(["khot", *(word for word in sys.argv[1:] if word != "--resume")])
