"""Tables from files: what is read, and what is done to it."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from select_tables import rewritten, write_table

from khot.jobs.select import TableError, read_table

pytestmark = pytest.mark.slow


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "table.csv")


def test_a_csv_file(table):
    found = read_table(table, "label")
    assert found.names == ["alpha", "beta", "gamma", "delta", "colour=green", "colour=red"]
    assert found.x.shape == (60, 6)
    assert set(found.y) == {"yes", "no"}
    assert found.x[:3, 4].tolist() == [0, 1, 0]
    assert np.isnan(found.x[:, 3]).nonzero()[0].tolist() == list(range(0, 60, 10))
    assert found.notes == [
        "Assumed of the file: NA as missing (--missing) in 'colour'.",
        "column 'delta' has missing values, replaced by the median of the rows that are trained on.",
        "column 'colour' has strings: each value became a feature of its own, 0 or 1.",
    ]
    assert read_table(table, None, ["colour", "label"]).names == ["alpha", "beta", "gamma", "delta"]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_and_a_byte_order_mark(table, separator):
    text = table.read_text().replace(",", separator)
    table.write_text("\ufeff" + text, encoding="utf-8")
    assert read_table(table, "label").names[0] == "alpha"


def test_a_parquet_file(tmp_path):
    columns = {"a": [1.0, None, 3.0] * 5, "b": [True, False, None] * 5, "c": ["u", "v", None] * 5, "y": list(range(15))}
    path = tmp_path / "table.parquet"
    pl.DataFrame(columns).write_parquet(path)
    found = read_table(path, "y")
    assert found.names == ["a", "b", "c=u", "c=v"]
    nan = np.nan
    np.testing.assert_array_equal(found.x[:3], [[1, 1, 1, 0], [nan, 0, 0, 1], [3, nan, 0, 0]])


def test_an_npz_file(tmp_path):
    generator = np.random.default_rng(0)
    images, y = generator.random((20, 3, 4)), np.arange(20) % 2
    np.savez(tmp_path / "images.npz", X=images, y=y, other=y * 2.0)
    found = read_table(tmp_path / "images.npz", None)
    assert (found.target, found.image) == ("y", None)  # `other` is a feature, so they are not an image
    assert len(found.names) == 13
    found = read_table(tmp_path / "images.npz", "y", ["other"])
    assert (found.image, found.names[5]) == ((3, 4), "pixel_1_1")
    np.savez(tmp_path / "plain.npz", data=images[:, 0], names=["a", "b", "c", "d"])
    assert read_table(tmp_path / "plain.npz", None).names == ["a", "b", "c", "d"]


def test_an_index_and_booleans(tmp_path):
    frame = pd.DataFrame({"a": np.arange(12.0), "b": [True, False] * 6, "y": np.arange(12)})
    frame.to_csv(tmp_path / "a.csv")
    found = read_table(tmp_path / "a.csv", "y")
    assert found.names == ["a", "b"]
    assert found.x[:2, 1].tolist() == [1, 0]
    assert "row numbers" in found.notes[1]


@pytest.mark.parametrize(
    ("name", "values", "is_said"),
    [
        ("PassengerId", [7 * i for i in range(12)], True),
        ("a", [5 + i for i in reversed(range(12))], True),
        ("price", [7 * i for i in range(12)], False),
        ("id", [1.5 * i for i in range(12)], False),
        ("id", [1, 1, *range(10)], False),
    ],
)
def test_a_column_that_numbers_the_rows_is_said(tmp_path, name, values, is_said):
    pl.DataFrame({name: values, "b": np.sin(np.arange(12)), "y": [0, 1] * 6}).write_csv(tmp_path / "a.csv")
    found = read_table(tmp_path / "a.csv", "y")
    assert found.names == [name, "b"]
    assert any(f"add --drop {name}" in note for note in found.warnings) == is_said


def test_rows_without_a_target_are_left_out(table):
    gone = table.read_text().count(",yes\n")
    found = read_table(rewritten(table, ",yes\n", ",\n"), "label")
    assert len(found.x) == 60 - gone
    assert found.notes[1] == f"{gone} rows without a target were left out."


def test_bad_tables_are_value_errors(tmp_path):
    with pytest.raises(TableError, match="is missing"):
        read_table(tmp_path / "a.csv", None)
