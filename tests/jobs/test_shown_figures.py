"""Figures as tables show them."""

import pytest

from khot.jobs.select_report import _rounded


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(66.3, 2, "66"), (100, 2, "100"), (10.2, 1, "10"), (1e-10, 2, "0"), (-1e-9, 2, "0"), (0.0013, 2, "0.0013")],
)
def test_shares_have_no_exponents(value, digits, shown):
    """The table said "33 ± 1e+01 %", and "1e-10 ± 0 %" of features without effect."""
    assert _rounded(value, digits) == shown
