"""The tables of one row on two ranks, and of autoencoders on many, are those of the committed results."""

import csv

from benchmarks import ranks, ranks_sae
from benchmarks.common import COMMITTED


def committed():
    with (COMMITTED.results / "ranks.csv").open(encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    return [ranks.Row(part, case, float(size), float(value)) for part, case, size, value in lines]


def test_the_table_is_of_the_committed_results():
    assert ranks.report(committed()) == (COMMITTED.tables / "ranks.md").read_text(encoding="utf-8")


def test_rounds_stay_few_and_the_model_is_arithmetic():
    rows = committed()
    rounds = [row.value for row in rows if row.part == "rounds"]
    assert len(rounds) == 2 * len(ranks.HARDNESS)
    assert max(rounds) <= 16
    assert ranks.model_table() == (COMMITTED.tables / "ranks-model.md").read_text(encoding="utf-8")
    parts, messages = ranks.in_parts(ranks.GPU, 10**9, 8)
    assert messages < parts < ranks.by_gathering(ranks.GPU, 10**9, 8) / 20
    assert ranks.by_gathering(ranks.GPU, 10**11, 512) == float("inf")


def test_autoencoders_on_many_processes_have_the_weights_of_one():
    with (COMMITTED.results / "ranks-sae.csv").open(encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    rows = [ranks_sae.Row(part, case, int(n), int(step), float(value)) for part, case, n, step, value in lines]
    assert ranks_sae.report(rows) == (COMMITTED.tables / "ranks-sae.md").read_text(encoding="utf-8")
    weights = [row for row in rows if row.part == "weights"]
    assert {(row.case, row.ranks) for row in weights} == {(kind, n) for kind in ranks_sae.KINDS for n in (2, 4)}
    assert max(row.value for row in weights) <= 1e-5
