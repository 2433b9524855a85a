"""Figures as tables show them."""

from types import SimpleNamespace

import pytest

from khot.jobs import _page
from khot.jobs.select_report import _rounded, candidates_header


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(66.3, 2, "66"), (100, 2, "100"), (10.2, 1, "10"), (1e-10, 2, "0"), (-1e-9, 2, "0"), (0.0013, 2, "0.0013")],
)
def test_shares_have_no_exponents(value, digits, shown):
    """The table said "33 ± 1e+01 %", and "1e-10 ± 0 %" of features without effect."""
    assert _rounded(value, digits) == shown


def test_a_mean_that_is_not_that_of_the_figures_beside_it_says_so():
    """The table had −0.089 and −0.503, and 0.008 as their mean."""
    for linear, says in ((0.2, "mean"), (-0.089, "mean, R² < 0 as 0")):
        found = SimpleNamespace(candidates=[{"linear": linear, "boosted": 0.1}])
        assert candidates_header(found)[-1] == says


def test_numbers_of_features_are_whole():
    """The curve of k had ticks at 1.5 and 2.5 features."""
    chart = _page.lines({"score": [(k, 0.1 * k) for k in range(1, 6)]}, y="score", x="features", description="d")
    assert ">2.5</text>" not in chart
    assert ">2</text>" in chart
