"""What strings of a column say: numbers with odd marks and signs, thousands, dates in words, times, and comments."""

import numpy as np
import pytest

from khot.jobs.select import Reading, TableError, read_table

pytestmark = pytest.mark.slow


def read(tmp_path, text, target="y", **how):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    return read_table(path, target, (), Reading(**how))


def table(cells, mark=None, rows=200):
    """A file in which `cells` writes the column a, with one odd mark."""
    a = np.random.default_rng(0).uniform(1, 50, (rows, 2)).round(3)
    lines = [f"{mark if mark is not None and i == 7 else cells(u)},{v},{2 * u + v:.3f}" for i, (u, v) in enumerate(a)]
    return "\n".join(["a,b,y", *lines, ""]), a[:, 0]


@pytest.mark.parametrize("mark", ["n.a.", "unknown", "#DIV/0!", "nil", "oops"])
def test_one_odd_mark_destroyed_a_column_of_numbers(tmp_path, mark):
    """ "column 'a' has a different string in each row, like a name": it was left out."""
    text, a = table(str, mark)
    found = read(tmp_path, text)
    assert (found.names, found.warnings) == (["a", "b"], ())
    assert np.isnan(found.x[:, 0]).nonzero()[0].tolist() == [7]
    np.testing.assert_array_equal(np.delete(found.x[:, 0], 7), np.delete(a, 7))
    assert "as missing (--missing)" in found.notes[0]
    if mark == "oops":
        assert "'a' holds 199 numbers and \"oops\", taken as missing" in found.notes[0]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (lambda v: f"{v}%", "numbers without their %"),
        (lambda v: f"${v}", "numbers without their $"),
        (lambda v: f"{v} €", "numbers without their €"),
        (lambda v: f"({v})", "numbers in parentheses as negative ones"),
        (lambda v: f"\u2212{v}", None),
    ],
)
def test_signs_beside_numbers_made_names_of_them(tmp_path, cells, said):
    text, a = table(cells)
    found = read(tmp_path, text)
    sign = -1 if said is None or "negative" in said else 1
    np.testing.assert_array_equal(found.x[:, 0], sign * a)
    assert found.names == ["a", "b"]
    assert said is None or f"{said} in 'a'" in found.notes[0]


def test_mixed_units_and_many_other_strings_are_errors(tmp_path):
    text, _ = table(lambda v: f"{v}%" if v > 25 else v)
    with pytest.raises(TableError, match="must have one unit; got % and none: write them alike, or add --drop a"):
        read(tmp_path, text)
    text, _ = table(lambda v: v if v > 15 else f"A/{v}")
    with pytest.raises(
        TableError, match=r"holds \d+ numbers and \d+ other values, such as 'A/.*with --missing, or add"
    ):
        read(tmp_path, text)
    assert read(tmp_path, text, missing=("none",)).names == ["b"]
    text, _ = table(lambda v: f"{int(v) % 3 or 'x'}")  # few different strings: categories
    assert read(tmp_path, text).names == ["a=1", "a=2", "a=x", "b"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (lambda v: f"{1 + int(v) % 28:02d} Jan 2020", "dates, %d %b %Y (--dates)"),
        (lambda v: f"January {1 + int(v) % 28}, 2020", "dates, %B %d, %Y"),
        (lambda v: f"{int(v) % 24:02d}:{int(v):02d}", "times of day, as parts of a day"),
    ],
)
def test_dates_in_words_and_times_of_day_were_categories(tmp_path, cells, said):
    lines = [f'"{cells(v)}",{v},{v}' for v in np.random.default_rng(0).uniform(0, 50, 60).round(3)]
    found = read(tmp_path, "\n".join(["a,b,y", *lines]))
    assert found.names == ["a", "b"]
    assert said in found.notes[0]
    v = found.x[:, 1]
    minutes = (v.astype(int) % 24 * 60 + v.astype(int)) / 1440
    expected = minutes if "times" in said else 18262 + v.astype(int) % 28
    np.testing.assert_allclose(found.x[:, 0], expected, rtol=1e-12)


def test_german_thousands_became_decimals(tmp_path):
    """14.010 beside 350 was 14.01, in silence."""
    values = np.random.default_rng(0).integers(200, 50_000, 200)
    lines = [f"{f'{v:,}'.replace(',', '.')};{i};{v}" for i, v in enumerate(values)]
    found = read(tmp_path, "\n".join(["a;b;y", *lines]))
    np.testing.assert_array_equal(found.x[:, 0], values)
    assert "separated thousands (--decimal) in 'a'" in found.notes[0]
    lines = [line for line in lines if "." in line]
    with pytest.raises(TableError, match=r"'a' has numbers such as .*: add --decimal , or --decimal \."):
        read(tmp_path, "\n".join(["a;b;y", *lines]))
    assert read(tmp_path, "\n".join(["a;b;y", *lines]), decimal=".").x[:, 0].max() < 50


def test_comments_and_the_separator_line_of_excel_were_names(tmp_path):
    body = "a;b;y\n" + "1;2;3\n4;5;6\n" * 10
    found = read(tmp_path, "sep=;\n" + body)
    assert (found.names, len(found.x)) == (["a", "b"], 20)
    assert "the line sep=; as the separator of the rest" in found.notes[0]
    found = read(tmp_path, "# exported\n# twice\n" + body)
    assert found.names == ["a", "b"]
    assert "2 lines of comments, left out" in found.notes[0]
    assert read(tmp_path, "#" + body).names == ["#a", "b"]  # a name may begin so


def test_two_strings_were_two_complementary_features(tmp_path):
    text, _ = table(lambda v: "ja" if v > 25 else "nein")
    assert read(tmp_path, text).names == ["a=nein", "b"]


@pytest.mark.parametrize("is_quoted", [True, False])
def test_the_quick_reader_and_the_other_one_agree(tmp_path, is_quoted):
    """Quotes and blank lines need the slower one; ragged lines are errors of both."""
    rows = [f"{i / 7:.4f},w{i % 3},{i}" for i in range(60)]
    quick = read(tmp_path, "\n".join(["a,c,y", *rows]))
    slow = read(tmp_path, "\r\n".join(['"a",c,y', *rows]) if is_quoted else "\n".join(["a,c,y", *rows, "", ""]))
    assert quick.names == slow.names
    np.testing.assert_array_equal(quick.x, slow.x)
    for bad in ("1,2", "1,2,3,4"):
        with pytest.raises(
            TableError, match=f"row 4 must have 3 values, like the first line; got {bad.count(',') + 1}"
        ):
            read(tmp_path, "\n".join(["a,c,y", *rows[:3], bad, *rows]))


def test_weights_groups_of_rows_and_several_targets_of_a_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,who,w,y,z\n" + "".join(f"{i},p{i // 4},{1 + i % 2},{i % 3},{i % 5}\n" for i in range(40)))
    found = read_table(path, ["y", "z"], weight="w", rows_of="who")
    assert (found.names, found.target, found.y.shape) == (["a"], "y, z", (40, 2))
    assert found.weight[:3].tolist() == [1, 2, 1]
    assert len(np.unique(found.groups)) == 10
    assert len(np.unique(found.groups[:4])) == 1
    with pytest.raises(TableError, match="only one of --target, --weight, --rows-of and --drop"):
        read_table(path, ["y"], weight="y")
    with pytest.raises(TableError, match="--weight a must hold a number > 0 in each row"):
        read_table(path, ["y"], weight="a")
    with pytest.raises(TableError, match="several targets must be numbers; got strings in 'who'"):
        read_table(path, ["y", "who"])


@pytest.mark.parametrize("of_ten", [1, 3, 6, 9])
def test_a_column_of_commas_and_points_is_not_one_of_words(tmp_path, of_ten):
    """Each number became a category of its own, and the column that mattered most was of no use."""
    rng = np.random.default_rng(0)
    lines = ["a;b;y"]
    for i in range(200):
        a, b = rng.standard_normal(2).round(4)
        lines.append(f"{str(a).replace('.', ',') if i % 10 < of_ten else a};{b};{a + b}")
    with pytest.raises(TableError, match=r"column 'a' must have one decimal mark; got .* and .*: write them alike"):
        read(tmp_path, "\n".join(lines))
    with pytest.raises(TableError, match=r"column 'a' must have one decimal mark"):
        read(tmp_path, "\n".join(lines), decimal=".")
