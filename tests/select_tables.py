"""Tables for the tests of `khot select`."""

import csv

import numpy as np
from typer.testing import CliRunner

from khot.cli._app import app


def khot(*arguments):
    """Call `khot select`."""
    return CliRunner().invoke(app, ["select", *map(str, arguments)])


def write_table(path):
    """Two columns that decide the label, two that do not, one of strings, one with holes."""
    x = np.random.default_rng(0).standard_normal((60, 4))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["alpha", "beta", "gamma", "delta", "colour", "label"])
        for i, row in enumerate(x):
            cells = [f"{v:.4f}" for v in row]
            cells[3] = "" if i % 10 == 0 else cells[3]
            writer.writerow([*cells, ["red", "green", "NA"][i % 3], "yes" if row[0] + row[1] > 0 else "no"])
    return path


def rewritten(path, old, new):
    """Replace text in a file."""
    path.write_text(path.read_text().replace(old, new))
    return path
