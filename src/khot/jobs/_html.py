"""HTML in which every string from outside is escaped: elements, tables, and the page around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

STYLE = (files(__package__) / "report.css").read_text(encoding="utf-8")


class Html(str):
    """Text that is HTML already; a plain `str` is escaped wherever it goes in."""


Child = str | Html
Attributes = dict[str, object]


def tag(name: str, *children: Child, **attributes: object) -> Html:
    """An element; `class_` is `class`, and `_` in the names of attributes is `-`."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """One after the other."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def paragraph(*children: Child) -> Html:
    """A `p`."""
    return tag("p", *children)


def dim(*children: Child) -> Html:
    """A `p` of small print."""
    return tag("p", *children, class_="dim")


def table(header: Sequence[str], rows: Iterable[Sequence[Child]], marked: Sequence[int] = ()) -> Html:
    """Names to the left, figures to the right; `marked` rows stand out."""
    head = tag("tr", *(tag("th", name) for name in header))
    body = [
        tag("tr", *(tag("td", cell) for cell in row), **({"class_": "mark"} if i in marked else {}))
        for i, row in enumerate(rows)
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def figure(picture: Html, caption: Child = "") -> Html:
    """A picture with a line below it."""
    return tag("figure", picture, tag("figcaption", caption) if caption else Html())


def section(title: str, *children: Child) -> Html:
    """A heading and what is below it."""
    return tag("section", tag("h2", title), *children)


def page(title: str, *children: Child) -> str:
    """A whole document in one file, which asks for nothing from outside, and may not."""
    head = join(
        [
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html(
                '<meta http-equiv="Content-Security-Policy" '
                "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
            ),
            tag("title", title),
            Html(f"<style>{STYLE}</style>"),
        ]
    )
    body = tag("body", tag("main", tag("h1", title), *children))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'
