"""Files as people have them: what is found out about a text file, what is said about it, and what overrides it."""

import gzip
import io
import sys
from datetime import date, datetime, time, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from khot.jobs.select import Reading, TableError, read_table

pytestmark = pytest.mark.slow


def read(tmp_path, header, *lines, how=None, name="a.csv", encoding="utf-8", target=None):
    """A table whose lines are repeated, so that there are enough rows and no identifiers."""
    path = tmp_path / name
    path.write_bytes("\n".join([header, *(lines * 10)]).encode(encoding))
    return read_table(path, target, (), how or Reading())


def column(found, name, rows=2):
    return found.x[:rows, found.names.index(name)].tolist()


@pytest.mark.parametrize(
    ("header", "lines", "values", "said"),
    [
        ("a;b", ("3,5;1", "-0,25;2"), [3.5, -0.25], "decimal commas (--decimal) in 'a'"),
        ("a;b", ("1.234,5;1", "7,5;2"), [1234.5, 7.5], "separated thousands (--decimal) in 'a'"),
        ("a;b", ("1.234;3,5", "2.345;1,5"), [1234, 2345], "separated thousands (--decimal) in 'a'"),
        ("a;b", ("1,234;1", "2,345;2"), [1.234, 2.345], "decimal commas (--decimal) in 'a'"),
        ("a;b", ("1,234;0.5", "2,345;1.5"), [1234, 2345], "separated thousands (--decimal) in 'a'"),
        ("a,b", ('"1,234",1', '"2,345,678",2'), [1234, 2345678], "separated thousands (--decimal) in 'a'"),
        ("a,b", ('"1,234",1', "999,2"), [1234, 999], "separated thousands (--decimal) in 'a'"),
        ("a,b", ('"1,5",1', '"2,5e3",2'), [1.5, 2500], "decimal commas (--decimal) in 'a'"),
        ("a\tb", ("1 234.5\t1", "12\u202f345\t2"), [1234.5, 12345], "separated thousands (--decimal) in 'a'"),
        ("a;b", ("1.234;0.5", "2.345;2"), [1.234, 2.345], "semicolons between values (--separator)."),
        ("a;b", ("14.010;1", "350;2"), [14010, 350], "separated thousands (--decimal) in 'a'"),
        ("a,b", ("1.5,1", "-.5e-3,2"), [1.5, -0.0005], None),
    ],
)
def test_decimal_marks_and_thousands(tmp_path, header, lines, values, said):
    found = read(tmp_path, header, *lines)
    assert column(found, "a") == pytest.approx(values, rel=1e-15)
    assert found.notes == [] if said is None else said in found.notes[0]


def test_numbers_that_can_be_read_in_two_ways(tmp_path):
    """Nothing decides: an error, and the option that decides. Both kinds in a file are read each in its way."""
    lines = ("1,234\t1", "2,345\t2")
    with pytest.raises(TableError, match="'a' has numbers such as 1,234: add --decimal"):
        read(tmp_path, "a\tb", *lines)
    assert column(read(tmp_path, "a\tb", *lines, how=Reading(decimal=",")), "a") == [1.234, 2.345]
    assert column(read(tmp_path, "a\tb", *lines, how=Reading(decimal=".")), "a") == [1234, 2345]
    found = read(tmp_path, "a;b", "1,5;1.5", "2,5;2.5")
    assert (column(found, "a"), column(found, "b")) == ([1.5, 2.5], [1.5, 2.5])
    with pytest.raises(TableError, match="'c' has numbers such as 1,234"):
        read(tmp_path, "a;b;c", "1,5;1.5;1,234", "2,5;2.5;2,345")


@pytest.mark.parametrize("values", ["1,2,3", "12.34.56", "1,23 4", "0,123,456", "12,34.5", "five", "1,", "--5"])
def test_what_is_no_number_stays_a_string(tmp_path, values):
    found = read(tmp_path, "a;b", f"{values};1", "x;2")
    assert found.names[0].startswith("a=")


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-8", None),
        ("utf-8-sig", "byte order mark"),
        ("latin-1", "latin-1 (cp1252)"),
        ("cp1252", "latin-1 (cp1252)"),
        ("utf-16", "UTF-16"),
    ],
)
def test_encodings(tmp_path, encoding, said):
    found = read(tmp_path, "Größe,b", "1,1", "2,2", encoding=encoding)
    assert found.names == ["Größe", "b"]
    assert found.notes == [] if said is None else said in found.notes[0]


def test_an_encoding_can_be_given(tmp_path):
    found = read(tmp_path, "цена,b", "1,1", "2,2", encoding="koi8-r", how=Reading(encoding="koi8-r"))
    assert (found.names, found.notes) == (["цена", "b"], [])
    assert read(tmp_path, "a,b", "1,1", encoding="utf-8-sig", how=Reading(encoding="utf-8")).names == ["a", "b"]
    assert read(tmp_path, "\x81é,b", "1,1", encoding="latin-1").names == ["\x81é", "b"]  # not in cp1252


@pytest.mark.parametrize(
    ("lines", "day", "said"),
    [
        (("2024-01-31", "2024-02-01"), 19753, "dates, %Y-%m-%d (--dates), as days since 1970 in 'a'"),
        (("31.01.2024", "1.2.2024"), 19753, "%d.%m.%Y (--dates)"),
        (("01/31/2024", "02/01/2024"), 19753, "%m/%d/%Y (--dates)"),
        (("01/02/2024", "02/02/2024"), 19754, "%d/%m/%Y, though %m/%d/%Y fits too (--dates)"),
        (("2024-01-31T12:00:00Z", "2024-02-01T13:00:00+01:00"), 19753.5, "%Y-%m-%dT%H:%M:%S%.f%#z"),
        (("2024-01-31 12:00", "2024-02-01 12:00"), 19753.5, "%Y-%m-%d %H:%M"),
    ],
)
def test_dates_are_days(tmp_path, lines, day, said):
    found = read(tmp_path, "a,b", *(f"{value},{i}" for i, value in enumerate(lines)))
    assert column(found, "a") == [day, day + 1]
    assert said in found.notes[0]
    assert (date(2024, 1, 31) - date(1970, 1, 1)).days == 19753


def test_a_format_of_dates_can_be_given(tmp_path):
    found = read(tmp_path, "a,b", "01/02/2024,1", "02/02/2024,2", how=Reading(dates="%m/%d/%Y"))
    assert column(found, "a") == [19724, 19755]
    found = read(tmp_path, "a,b", "20240201,1.5", "20240202,2.5", how=Reading(dates="%Y%m%d"))
    assert column(found, "a") == [19754, 19755]
    assert read(tmp_path, "a,b", "30.02.2024,1", "01.02.2024,2").names[0] == "a=30.02.2024"  # there is no such day


def test_missing_values(tmp_path):
    marks = ("NA", "?", "-", "", "n/a", "NULL", "#N/A", "nan")
    found = read(tmp_path, "a,b", "1.5,1", *(f"{mark},1" for mark in marks))
    assert np.isnan(column(found, "a", 9)).tolist() == [False] + [True] * 8
    assert "#N/A - ? NA NULL n/a nan as missing (--missing) in 'a'" in found.notes[0]
    found = read(tmp_path, "strand,b", "+,1", "-,2")
    assert found.names == ["strand=-", "b"]  # here a minus is a value
    found = read(tmp_path, "a,b", "-999,1", "2,2", how=Reading(missing=("-999",)))
    assert np.isnan(column(found, "a")).tolist() == [True, False]
    found = read(tmp_path, "a,b", "nan,1", "2,2", how=Reading(missing=("-999",)))
    assert np.isnan(column(found, "a")).tolist() == [True, False]  # whatever else is missing
    found = read(tmp_path, "a,b", "NA,1", "x,2", how=Reading(missing=("-999",)))
    assert found.names == ["a=x", "b"]


def test_booleans_are_one_feature_and_the_classes_of_a_target_keep_their_names(tmp_path):
    found = read(tmp_path, "a,b,c,y", "yes,TRUE,t,yes", "No,False,NA,no", target="y")
    assert found.names == ["a", "b", "c"]
    np.testing.assert_array_equal(found.x[:2], [[1, 1, 1], [0, 0, np.nan]])
    assert set(found.y) == {"yes", "no"}
    assert "yes and no as 1 and 0 in 'a'" in found.notes[0]


def test_compressed_files_and_standard_input(tmp_path, monkeypatch):
    text = b"a;b\n" + b"1,5;1\n2,5;2\n" * 10
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    assert column(read_table(tmp_path / "a.csv.gz", None), "a") == [1.5, 2.5]
    frame = pl.DataFrame({"a": [1.5, 2.5] * 10, "b": [1, 2] * 10})
    frame.write_parquet(parquet := io.BytesIO())
    np.savez(npz := io.BytesIO(), X=np.ones((20, 2)) * [[1.5, 1]] * np.tile([[1], [2]], (10, 1)), names=["a", "b"])
    for data in (text, gzip.compress(text), parquet.getvalue(), npz.getvalue()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        found = read_table(Path("-"), None)
        assert (found.source, found.names, column(found, "a", 1)) == ("standard input", ["a", "b"], [1.5])


def test_dates_and_missing_values_of_parquet(tmp_path):
    columns = {
        "day": [date(1970, 1, 2), None] * 10,
        "moment": [datetime(1970, 1, 1, 12), datetime(1970, 1, 2)] * 10,
        "time": [time(6), time(12)] * 10,
        "span": [timedelta(days=2), timedelta(hours=12)] * 10,
        "code": [-999, 3] * 10,
        "text": ["3,5", "1.234,5"] * 10,
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    found = read_table(tmp_path / "a.parquet", None, (), Reading(missing=("-999",)))
    expected = [[1, 0.5, 0.25, 2, np.nan, 3.5], [np.nan, 1, 0.5, 0.5, 3, 1234.5]]
    np.testing.assert_array_equal(found.x[:2], expected)
