"""HTML and charts of the reports."""

import numpy as np
import pytest

from khot.jobs import _page

pytestmark = pytest.mark.slow


def test_everything_from_outside_is_escaped():
    assert _page.tag("p", "<script>", class_='a"b') == '<p class="a&quot;b">&lt;script&gt;</p>'
    assert "&lt;b&gt;" in _page.page("<b>", "x", command="khot", packages=())
    assert "<b>" not in _page.page("<b>", "x", command="khot", packages=()).replace("<body>", "")
    chart = _page.lines({"<i> $x$": [(0, 1), (1, 2)]}, y="<u>", description="<s>")
    assert "&lt;i&gt; $x$" in chart
    assert "&lt;u&gt;" in chart
    assert 'aria-label="&lt;s&gt;"' in chart
    assert not [word for word in ("http", "<i>", "<u>", "<s>") if word in chart]


def test_a_meter_is_a_share_of_its_cell():
    for value, top, width in ((0.5, 1, "50.0%"), (2, 1, "100.0%"), (-0.2, 1, "0.0%"), (float("nan"), 1, "0.0%")):
        assert f'style="width: {width}"' in _page.meter(value, top)
    assert 'style="width: 0.0%"' in _page.meter(1, 0)
    assert 'class="meter mark"' in _page.meter(1, is_marked=True)


def test_charts_of_odd_data():
    for points in ([], [(1.0, 2.0)], [(1.0, float("nan")), (2.0, 1.0)], [(0.0, 3.0), (1.0, 3.0)], [(0, 0), (1, 0)]):
        for log in (False, True):
            assert "<svg" in _page.lines({"a": points}, y="y", log=log, description="d")


def test_charts_have_the_colours_of_the_page_and_axes_of_several_ticks():
    chart = _page.lines({"a": [(i, 0.3 + 0.2 / (1 + i)) for i in range(9)]}, y="FVU", log=True, description="d")
    assert "var(--mark)" in chart
    assert "#0" not in chart.replace('="#', "").replace("url(#", "")  # matplotlib's stand-ins are all replaced
    assert sum(f">0.{i}</text>" in chart for i in range(1, 10)) >= 2
    none = _page.lines({"dead": [(i, 0) for i in range(9)]}, y="latents", description="d")
    assert ">−" not in none  # counts have no axis below 0
    assert ">0</text>" in none


def test_images_are_one_picture_each():
    images, chosen = np.random.default_rng(0).random((3, 4, 5)), np.eye(4, 5, dtype=bool)
    assert _page.pairs(images, chosen, description="d").count("<image") == 6
    assert _page.pairs(0 * images, chosen, description="d").count("<image") == 6
    assert _page.pixels(images[0], chosen, description="d").count("var(--warm)") == 4


def test_a_curve_of_few_points_has_markers():
    """A sweep that was interrupted in its second run had a frontier without a mark: a line of one point is not seen."""
    for count, has_markers in ((1, True), (20, True), (21, False)):
        chart = _page.lines({"a": [(i, 1.5) for i in range(count)]}, y="y", description="d")
        assert ("fill: var(--mark)" in chart) == has_markers
