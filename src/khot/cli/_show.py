"""What the commands share on a terminal: a table, a progress bar, an error, and the command itself as text."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..distributed import ON_ALL


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
def progress(label: str, *, is_shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal; call it with a label, the work done, and all the work."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    is_off = not is_shown or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_off) as bar:
        task = bar.add_task(label, total=None)
        yield lambda label, done, total: bar.update(task, description=f"{label:<38}", completed=done, total=total)


@contextmanager
def processes(command: str) -> Iterator[tuple[Any, bool]]:
    """Join the processes that torchrun started; yield their group, None if there is one process, and who is first.

    Bad input, on any of them, is one line by the first one, and exit code 2 for all.
    """
    group, is_first = None, os.environ.get("RANK", "0") == "0"
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo")
            group = dist.group.WORLD
        yield group, is_first
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if not is_first and (ON_ALL in getattr(error, "__notes__", ()) or isinstance(error, FloatingPointError)):
            raise typer.Exit(2) from None
        fail(command, str(error))
    except RuntimeError as error:
        if group is None or not any(word in str(error) for word in ("gloo", "peer")):
            raise
        lost = "the connection to another process was lost; files that were written are complete"
        fail(command, f"{lost}, and --resume continues from the last checkpoint")
    finally:
        if group is not None:
            dist.destroy_process_group()


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
