"""Reports: what each layer keeps, as a table and as a picture."""

from typing import Any, NamedTuple

from ... import _extras


class Row(NamedTuple):
    """Hold what one group of items keeps; soft masks count in part."""

    name: str
    """Of the tensor, or of the first layer of a set of channels."""
    items: int
    """How many items there are: weights, rows, channels and so on."""
    kept: float
    """How many of them are kept, Σm."""
    cost: float
    """What they cost, with everything else as it is; for channels, what their own rows cost at full width."""
    share: float
    """Of the cost of all groups, in [0, 1]."""

    @property
    def density(self) -> float:
        """Return the share of the items that is kept."""
        return self.kept / self.items


class Report(NamedTuple):
    """Hold what a `Sparsifier` keeps now; print it, or draw it with `plot`."""

    rows: list[Row]
    """One for each group."""
    cost: float
    """The cost of what is kept."""
    budget: float
    """The budget at the end."""
    total: float
    """The cost of everything."""

    def __str__(self) -> str:
        head = ("name", "items", "kept", "density", "cost", "share")
        cells = [
            (r.name, f"{r.items:,}", f"{r.kept:,.1f}", f"{r.density:.2%}", f"{r.cost:,.1f}", f"{r.share:.1%}")
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in [head, *cells]
        ]
        total = f"kept {self.cost:,.1f} of {self.total:,.1f} ({self.cost / self.total:.2%}); budget {self.budget:,.1f}"
        return "\n".join([*lines, total])

    def plot(self, ax: Any = None) -> Any:
        """Draw the density of each group as a bar, with the overall one as a line; needs matplotlib.

        Args:
            ax: axes of matplotlib; new ones if None.

        Returns:
            The axes.
        """
        if ax is None:
            _, ax = _extras.require("matplotlib.pyplot", extra="plot").subplots(
                figsize=(6, 0.5 + 0.35 * len(self.rows))
            )
        names = [row.name for row in self.rows]
        bars = ax.barh(names, [row.density for row in self.rows], color="tab:blue")
        ax.bar_label(bars, [f"{row.density:.1%} of {row.items:,}" for row in self.rows], padding=3)
        ax.axvline(self.cost / self.total, color="tab:orange", label=f"whole: {self.cost / self.total:.1%} of the cost")
        ax.set(xlim=(0, 1.35), xlabel="share that is kept")
        ax.invert_yaxis()
        ax.legend(loc="lower right")
        return ax
