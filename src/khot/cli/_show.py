"""What the commands share on a terminal: a table and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def table(header: Sequence[str], lines: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Names to the left, figures to the right."""
    result = Table(title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        result.add_column(name, justify="right" if i else "left", no_wrap=i == 0)
    for line in lines:
        result.add_row(*line)
    return result


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, where stdout's readers do not see it: a label, how much is done, and of how much."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda label, done, total: bar.update(task, description=f"{label:<44}", completed=done, total=total)
