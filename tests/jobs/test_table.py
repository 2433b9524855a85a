"""Tables from files: what is read, and what is done to it."""

import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
from select_tables import rewritten, write_table

from khot.jobs.select import Reading, TableError, read_table

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


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_separator_at_the_end_of_each_line(tmp_path, quote):
    """The column behind it has no name, which was an error that no option could avoid. With values in it, it is."""
    lines = [f"{quote}{i % 7}{quote};{i * i};" for i in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["a;b;", *lines]))
    assert read_table(tmp_path / "a.csv", None).names == ["a", "b"]
    (tmp_path / "a.csv").write_text("\n".join(["a;b;", *lines[1:], lines[0] + "1"]))
    with pytest.raises(TableError, match="column 3 must have a name"):
        read_table(tmp_path / "a.csv", None)


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


def test_a_sample_of_a_large_parquet_file(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "large.parquet"
    pl.DataFrame({"a": np.arange(5000.0) + 0.5, "row": rng.random(5000)}).write_parquet(path, row_group_size=700)
    found = read_table(path, None, (), Reading(rows=1000, seed=3))
    a = found.x[:, 0]
    assert len(np.unique(a)) == len(a) == 1000, "without replacement"
    assert set(a) <= set(np.arange(5000.0) + 0.5)
    assert found.notes == [
        "A uniform sample of 1,000 of the 5,000 rows was read, without replacement, with the seed 3 (--rows)."
    ]
    again, other = (read_table(path, None, (), Reading(rows=1000, seed=seed)).x[:, 0] for seed in (3, 4))
    assert np.array_equal(again, a)
    assert not np.array_equal(other, a)
    # Of 40 samples of half the rows each row is in 20 ± 3.2: the mean square tells a uniform sample from another.
    small = tmp_path / "small.parquet"
    pl.DataFrame({"a": np.arange(100.0) + 0.5}).write_parquet(small)
    counts = np.zeros(100)
    for seed in range(40):
        counts[read_table(small, None, (), Reading(rows=50, seed=seed)).x[:, 0].astype(int)] += 1
    assert 6 < ((counts - 20) ** 2).mean() < 14
    assert read_table(small, None, (), Reading(rows=100)).notes == []


PEAK = r"""
import re, sys
from pathlib import Path
from khot.jobs.select import Reading, read_table
rows = int(sys.argv[2])
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
print(*read_table(Path(sys.argv[1]), None, (), Reading(rows=rows)).x.shape, peak() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_parquet_file_is_not_held_in_memory(tmp_path):
    """320 MB of numbers: a sample takes less than half of that, and the whole table more (the control)."""
    rng, path = np.random.default_rng(0), tmp_path / "large.parquet"
    pl.DataFrame({f"x{i}": rng.random(2_000_000) for i in range(20)}).write_parquet(path, row_group_size=100_000)
    peaks = []
    for rows in (10_000, 2_000_000):
        command = [sys.executable, "-c", PEAK, str(path), str(rows)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
        *shape, peak = (int(word) for word in said.split())
        assert shape == [rows, 20]
        peaks.append(peak / 1024)
    assert peaks[0] < 160 < 320 < peaks[1], peaks


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


def test_the_y_of_an_npz_file_is_the_target_from_the_command_line_too(tmp_path):
    """`khot select a.npz` gave an empty list of targets: y became a feature, and the task was reconstruction."""
    x, y = np.random.default_rng(0).standard_normal((20, 3)), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", X=x, y=y)
    for none in (None, (), []):
        found = read_table(tmp_path / "a.npz", none)
        assert (found.target, found.names) == ("y", ["x0", "x1", "x2"])
    for odd in (y[:5], x):
        np.savez(tmp_path / "odd.npz", X=x, y=odd)
        with pytest.raises(TableError, match=r"y must have a value for each of the 20 rows of X; got \("):
            read_table(tmp_path / "odd.npz", None)
    np.savez(tmp_path / "more.npz", X=x, y=y, version=3)
    assert any("version ()" in note for note in read_table(tmp_path / "more.npz", ()).notes)
    np.savez(tmp_path / "none.npz", X=x[:0], y=y[:0])
    with pytest.raises(TableError, match=r"the target .y. has no values"):
        read_table(tmp_path / "none.npz", ())


def test_rows_without_a_group_are_counted(tmp_path):
    rows = [f"{i},{i % 7},{'' if i % 3 else f'p{i % 5}'}" for i in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["a,y,who", *rows]))
    found = read_table(tmp_path / "a.csv", "y", rows_of="who")
    assert any("6 groups, of which one has the 20 rows without a value." in note for note in found.notes)
