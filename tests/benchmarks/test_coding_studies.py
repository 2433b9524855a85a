"""The studies behind docs/sparse-coding.md: small parts of them, and that the tables are those of the results."""

import csv
from typing import get_type_hints

import numpy as np
import pytest

from benchmarks import best_subset, common, denoising, dictionary, pursuit_speed

pytestmark = pytest.mark.slow
RESULTS, TABLES = common.COMMITTED.results, common.COMMITTED.tables


def read(study, name):
    """Rows of a committed CSV, as the study's own type."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    types = list(get_type_hints(study.Row).values())
    return [study.Row(*(kind(value) for kind, value in zip(types, row, strict=True))) for row in rows]


@pytest.mark.parametrize(
    ("study", "name", "table"),
    [
        (dictionary, "dictionary", lambda rows: dictionary.table(rows)),
        (pursuit_speed, "pursuit_speed", lambda rows: pursuit_speed.table(rows, pursuit_speed.SIGNALS)),
        (denoising, "denoising", lambda rows: denoising.table(rows, 256)),
        (best_subset, "best_subset", lambda rows: best_subset.table(rows, (0, 0)).split("\n\nIn 0 of 0")[0]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_tables_are_those_of_the_results(study, name, table):
    text = table(read(study, name))
    file = TABLES / f"{name.replace('_', '-')}.md"
    if name == "best_subset":
        assert file.read_text(encoding="utf-8").startswith(text)
    else:
        assert file.read_text(encoding="utf-8") == text
    page = (common.ROOT / "docs" / "sparse-coding.md").read_text(encoding="utf-8")
    assert common.fill(page, f"table: {file.stem}", file.read_text(encoding="utf-8")) == page


def test_no_rival_was_timed_without_doing_the_work():
    """A regression: SPAMS returned empty codes, and looked twice as fast."""
    rows = read(pursuit_speed, "pursuit_speed")
    ours = {row.dtype: row.error for row in rows if row.name == "khot `omp`"}
    assert all(abs(row.error - ours[row.dtype]) < 0.05 for row in rows)


def test_dictionaries_are_compared_with_the_truth():
    x, atoms = dictionary.problem(0, 30)
    assert x.shape == (1500, 20)
    assert dictionary.found(-2 * atoms[::-1], atoms) == 50
    assert dictionary.found(np.eye(20), atoms) == 0
    ours = dictionary.LEARNERS["`KSVD`"](x, 10, 0)
    assert dictionary.found(ours, atoms) > 5


def test_small_problems_are_solved():
    assert best_subset.optima(5) == (5, 5)
