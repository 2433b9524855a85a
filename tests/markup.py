"""Links, anchors, images and left-over markup of pages: Markdown as a code host renders it, and HTML as it is."""

import posixpath
import re
from html.parser import HTMLParser
from urllib.parse import unquote

from markdown_it import MarkdownIt

ALERT = re.compile(r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]$", re.MULTILINE)
RAW = {
    "a snippet": re.compile(r"--8<--"),
    "an mkdocstrings block": re.compile(r"^:::", re.MULTILINE),
    "an admonition": re.compile(r"^(!!!|\?\?\?)", re.MULTILINE),
    "an unresolved reference": re.compile(r"\]\["),
    "an attribute list": re.compile(r"\{ ?[:.#]\w"),
    "an alert that is none": re.compile(r"\[!\w+\]"),
}


class Page(HTMLParser):
    """What a page offers (ids), what it wants (links, resources), and its text outside code."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.resources, self.headings, self.text, self._in = [], [], [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given[name] for name in ("id", "name") if given.get(name) and not (name == "name" and tag != "a")]
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "iframe", "source") or (tag == "link" and given.get("rel") != "canonical"):
            found = given.get("src") or given.get("srcset") or (given.get("href") if tag == "link" else None)
            self.resources += [found] if found else []
        if tag in ("code", "pre", "script", "style"):
            self._in.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append("")
            self._in.append(tag)

    def handle_endtag(self, tag):
        if tag in self._in:
            self._in.remove(tag)

    def handle_data(self, data):
        if any(re.fullmatch("h[1-6]", tag) for tag in self._in):
            self.headings[-1] += data
        if not any(tag in ("code", "pre", "script", "style") for tag in self._in):
            self.text += data


def slugs(headings):
    """The anchors that a code host gives to headings: GitHub's rule."""
    found = []
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        copies = sum(re.fullmatch(re.escape(slug) + r"(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{copies}" if copies else slug)
    return found


def of_markdown(text):
    """A page of Markdown as a code host renders it."""
    page = Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(ALERT.sub("> **\\1**", text)))
    page.ids += slugs(page.headings)
    return page


def problems(pages, files, folder_index=None):
    """What is wrong with pages, `{path: Page}`, in a tree with these files; links to folders need a `folder_index`."""

    def target(path, link):
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(link)))
        inside = posixpath.normpath(posixpath.join(found, folder_index or ""))
        return inside if folder_index and inside in files else found

    wrong = []
    for path, page in pages.items():
        for link in page.links + page.resources:
            if re.match(r"[a-z]+:|//", link):
                if link in page.resources and not link.startswith("data:"):
                    wrong.append(f"{path} asks for {link} from outside")
                continue
            place, _, anchor = link.partition("#")
            there = target(path, place.partition("?")[0]) if place else path
            if there not in files:
                wrong.append(f"{path} links to {link}, which is not there")
            elif (
                anchor and there in pages and unquote(anchor) not in pages[there].ids and not anchor.startswith("only-")
            ):
                wrong.append(f"{path} links to {link}, which has no such anchor")
    return wrong


FORMULA = re.compile(r"(?<![\w\\$`])\$(?![\s`$])([^$\n]*[^$\s])\$(?![\w$])")


def changed_formulas(path, text, page):
    """The formulas `$…$` that Markdown changes before a code host typesets them, such as by an underscore."""
    bare = re.sub(r"^(`{3,}).*?^\1[ \t]*$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [formula[1] for formula in FORMULA.finditer(bare)]
    return [f"{path}: write $`{formula}`$" for formula in found if f"${formula}$" not in page.text]


def raw_markup(path, page):
    """The left-over markup of a page."""
    return [f"{path} shows {what}: {found[0]!r}" for what, mark in RAW.items() if (found := mark.search(page.text))]
