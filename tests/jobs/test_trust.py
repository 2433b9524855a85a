"""What may be wrong with a choice, what is said about it; and that training rows alone fill and encode."""

import numpy as np
import pytest

from khot.jobs import _compare, _trust, select, select_report
from khot.jobs.select import Table
from khot.sklearn import KHotSelector, Portfolio, splicing, surfaces

pytestmark = pytest.mark.slow


def noise(rows=200, n=4, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, n))


def test_copies_of_a_number_are_found():
    x = noise(n=6)
    y = x[:, 0] + x[:, 1]
    x[:, 2] = -3 * y + 7
    x[:, 3] = np.exp(5 * y)  # not linear, but monotone
    x[:, 4] = y + 0.01 * x[:, 4]
    x[:, 5] = y + 0.3 * x[:, 5]  # good, and no copy
    assert _trust.copies_of(x, y, "regression") == [2, 3, 4]


@pytest.mark.parametrize("classes", [2, 3])
def test_copies_of_classes_are_found(classes):
    x, y = noise(n=6), np.arange(200) % classes
    x[:, 1] = (y * 7) % 5  # a code for each class
    x[:, 2] = y == 1  # one class against the others
    x[:, 3] = y + 0.2 * np.sin(x[:, 3])  # thresholds tell them apart
    x[:, 4] = y + 0.5 * x[:, 4]
    x[:, 5] = 0.0
    assert _trust.copies_of(x, y, "classification") == [1, 2, 3]


def test_a_rare_class_does_not_make_a_copy_of_every_column():
    x, y = noise(2000), np.zeros(2000, dtype=int)
    y[:2] = 1
    assert _trust.copies_of(x, y, "classification") == []


def test_columns_that_could_stand_in():
    x = noise(n=5)
    x[:, 2] = 1e90 * (x[:, 0] + 0.2 * x[:, 2])
    x[:, 3] = -x[:, 0]
    x[:, 4] = 1.0
    found = _trust.stand_ins(x, np.array([1, 0]))
    assert [[i for i, _ in each] for each in found] == [[], [3, 2]]
    expected = np.corrcoef(x[:, :4] / [1, 1, 1e90, 1], rowvar=False)[0]
    assert [r for _, r in found[1]] == pytest.approx([-1, expected[2]], abs=1e-12)


def table_of(x, y, names=None, **more):
    return Table("a test", names or [f"x{i}" for i in range(x.shape[1])], x, y, "y", [], None, **more)


@pytest.mark.long
def test_what_is_said_of_a_choice():
    x = noise(n=5)
    y = np.array(["no", "yes"], dtype=object)[(x[:, 0] + 0.4 * x[:, 1] > 0).astype(int)]
    x[:, 2] = x[:, 0] + 0.1 * x[:, 2]
    x[:, 3] = 4.0
    result = select.select(table_of(x, y), "classification", 1)
    assert result.warnings == ["The same value in all rows, which cannot help: 'x3'."]
    (chosen,) = result.chosen
    other = {"x0": "x2", "x2": "x0"}[chosen.name]
    assert select_report.similar(result) == [f"{other} could stand in for {chosen.name}, r = 0.99."]
    assert sum(feature.stability for feature in result.features) == pytest.approx(1)  # k in each fold
    assert sum(feature.subsamples for feature in result.features) == pytest.approx(1)  # and in each half
    for feature in result.features:
        for said, count in zip(select_report.in_folds(result, feature), (5, 10), strict=True):
            assert said in {f"{i} of {count}" for i in range(count + 1)}
    page = select_report.report(result, "khot select")
    for part in (
        "<strong>Warning</strong>: The same value",
        "could stand in for",
        "chosen in folds",
        "in halves",
        "of 5</td>",
        "of 10</td>",
    ):
        assert part in page
    assert select.to_csv(result).splitlines()[0] == "rank,name,inclusion_probability,selected,stability,subsamples"


def test_a_choice_among_equal_columns_is_not_stable_in_halves():
    """The column that decides is chosen in all halves; which noise goes with it is luck. Ctrl-C leaves no shares."""
    x = np.random.default_rng(2).standard_normal((120, 12))
    khot = KHotSelector(2, random_state=0, strategy=splicing)
    share = _trust.in_halves(x, x[:, 4], "regression", khot, None, lambda *of: None)
    assert share[4] == 1
    assert share.sum() == pytest.approx(2)
    assert np.delete(share, 4).max() < 0.7
    assert _trust.in_halves(x, x[:, 4], "regression", khot, None, lambda name, done, total: done == 3) is None


def test_the_strategy_that_won_chooses_again():
    x = np.random.default_rng(2).standard_normal((300, 6))
    portfolio = Portfolio(strategies=(splicing, surfaces))
    fitted = KHotSelector(2, random_state=0, strategy=portfolio).fit(x, x[:, 0] * x[:, 1])
    assert _trust.winner(fitted) is surfaces
    assert _trust.winner(KHotSelector(2, strategy=splicing).fit(x, x[:, 0])) is splicing


def test_both_of_a_pair_may_be_chosen():
    result = select.Selection(select.digits(), "classification", 2, 0, "linear")
    result.features = [
        select.Feature("a", 1, 0.9, stand_ins=(("b", 0.991),)),
        select.Feature("b", 2, 0.9, stand_ins=(("a", 0.991),)),
    ]
    assert select_report.similar(result) == ["a and b are both chosen and nearly the same, r = 0.99."]
    assert select_report.stability_header(result) == []  # it was cut short


def test_medians_are_those_of_training_rows(monkeypatch):
    """Rows that are scored are filled with the median of the others, whatever they hold themselves."""
    x = noise(50, 2)
    x[::3, 0] = np.nan
    y, seen = np.arange(50) % 2, []
    fill = select.preparation(table_of(x, y), "classification", 0)
    plain = select.prepared

    def watched(prepare, known, y):
        result = plain(prepare, known, y)
        seen.append((np.nanmedian(known[:, 0]), prepare.statistics_[0], len(known)))
        return result

    monkeypatch.setattr(_compare, "prepared", watched)
    monkeypatch.setattr(_compare, "methods", lambda *_: {"all": ["passthrough"]})
    ((_, score),) = select.compare(x, y, "classification", 1, prepare=fill)
    assert len(score.folds) == len(seen) == 5
    assert all(median == used and rows == 40 for median, used, rows in seen)
    assert len({used for _, used, _ in seen}) > 1  # not one for all
    assert select.preparation(table_of(x[1:3], y[1:3]), "classification", 0) is None  # nothing is missing


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_categories_of_noise_do_not_leak_the_target(monkeypatch, task):
    """100 levels in 200 rows: encoded on all rows they would give the target away."""
    generator = np.random.default_rng(0)
    codes, y = generator.integers(0, 100, (200, 1)).astype(float), np.arange(200) % 2
    y = y if task == "classification" else generator.standard_normal(200)
    encode = select.preparation(table_of(codes, y, categories=1), task, 0)
    monkeypatch.setattr(_compare, "methods", lambda *_: {"all": ["passthrough"]})
    ((_, score),) = select.compare(codes, y, task, 1, prepare=encode)
    chance = 0.5 if task == "classification" else 0.0
    assert score.mean < chance + 0.1
    means = np.array([y[codes[:, 0] == code].mean() for code in codes[:, 0]])[:, None]  # a negative control
    ((_, score),) = select.compare(means, y, task, 1)
    assert score.mean > chance + 0.2


@pytest.mark.long
def test_classes_of_few_rows_can_encode_a_category():
    """Five folds of classes with three rows each were an error."""
    codes, y = (np.arange(42) % 21).astype(float)[:, None], (np.arange(42) % 14).astype(str).astype(object)
    table = table_of(np.hstack([noise(42, 2), codes]), y, categories=1)
    result = select.select(table, "classification", 1)
    assert len(result.features) == 2 + 14
    assert np.isfinite(result.scores["khot"].folds).all()


@pytest.mark.long
@pytest.mark.parametrize("classes", [2, 3])
def test_a_category_that_matters_is_found(classes):
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 30, 300).astype(float)
    y = np.array(list("abc"), dtype=object)[(codes % classes).astype(int)]
    codes[::50] = np.nan
    x = np.column_stack([generator.standard_normal((300, 3)), codes])
    table = table_of(x, y, ["u", "v", "w", "city"], categories=1)
    names = ["city"] if classes == 2 else ["city→a", "city→b", "city→c"]
    assert table.features("classification") == ["u", "v", "w", *names]
    result = select.select(table, "classification", 1)
    assert result.chosen[0].name in names
    assert len(result.features) == 3 + len(names)
