"""Results as tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown_table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    heading = [text.replace("|", "\\|") for text in heading]
    lines = [heading, [":---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(figure: Figure, path: Path) -> None:
    """The same bytes each time."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "khot"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
