"""HTML and charts of the reports."""

import pytest

from khot.jobs import _page

pytestmark = pytest.mark.slow


def test_everything_from_outside_is_escaped():
    assert _page.tag("p", "<script>", class_='a"b') == '<p class="a&quot;b">&lt;script&gt;</p>'
    assert "&lt;b&gt;" in _page.page("<b>", "x", command="khot", packages=())
    assert "<b>" not in _page.page("<b>", "x", command="khot", packages=()).replace("<body>", "")
    assert "&lt;i&gt;" in _page.bars([_page.Bar("<i>", 0.5)], description="d")


def test_charts_of_odd_data():
    both = _page.bars([_page.Bar("a", -0.2), _page.Bar("b", -0.1), _page.Bar("c", float("nan"))], description="d")
    assert both.count('width="0.0"') == 3  # no bar below 0, and none of full width
    for points in ([], [(1.0, 2.0)], [(1.0, float("nan")), (2.0, 1.0)], [(0.0, 3.0), (1.0, 3.0)]):
        assert "<svg" in _page.lines({"a": points}, x_label="x", y_label="y", description="d")
        assert "<svg" in _page.lines({"a": points}, x_label="x", y_label="y", log_y=True, description="d")
    assert "nan" not in _page.bars([_page.Bar("a", 0.0)], description="d")
    assert _page.bars([_page.Bar("a", -1.0)], description="d").count("<rect") == 1
