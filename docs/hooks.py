"""What the site shows otherwise than a code host: `hooks:` of mkdocs.yml.

The Markdown is complete as a code host shows it. For the site, this module
- makes index.md, contributing.md and changelog.md from README.md, CONTRIBUTING.md and CHANGELOG.md;
- turns each name of an API page into its signature and docstring (mkdocstrings);
- turns a `<picture>` into an image for each colour scheme, and a GitHub alert into an admonition;
- typesets `$…$` and `math` fences as MathML, so that the pages need no script for it;
- drops what is meant for code hosts only, and links to files of the repository that the site does not have.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site, and the files of the repository that they are."""
COPIED = ("examples",)
"""Folders of the repository whose files the site has too, so that pages may link to them."""
BOOST = {"": 2, "start": 2, "api": 0.5}
"""How much more, by folder, a page counts in the search: guides stand before signatures."""

FENCE = re.compile(r"^(?P<tick>`{3,}|~{3,}).*?^(?P=tick)[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
HOST_ONLY = re.compile(r"<!-- code host -->.*?<!-- /code host -->\n?", re.DOTALL)
API_ITEM = re.compile(r'^- <a id="(?P<name>khot[\w.]*)"></a>.*(?:\n {2}.*)*$', re.MULTILINE)
PICTURE = re.compile(r"<picture>(?P<inside>.*?)</picture>", re.DOTALL)
IMAGE = re.compile(r"<img\b(?P<inside>[^>]*)>")
ALERT = re.compile(r"^> \[!(?P<kind>NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n(?P<body>(?:>.*\n?)+)", re.MULTILINE)
CODED_MATH = re.compile(r"\$`([^`\n]+)`\$")
INLINE_MATH = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
EXPLORER = '<iframe class="explorer" src="explorer.html" title="Explorer: drag scores, change k and T"></iframe>'


def on_config(config: Any) -> Any:
    """Expand the navigation, show the version, and add the fence of displayed formulas."""
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    config.nav = expand(config.nav, [page for page in pages if page not in set(named(config.nav))])
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src" / "khot" / "_version.py").read_text()).group(1)
    config.copyright = f"khot {version} · Apache License 2.0"
    fence = {"name": "math", "class": "math", "format": lambda source, *_, **__: display(source)}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def named(nav: Any) -> Iterable[str]:
    """Return every path of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [path for entry in (nav.values() if isinstance(nav, dict) else nav or []) for path in named(entry)]


def expand(nav: list[Any], pages: list[str]) -> list[Any]:
    """Replace each entry with a * by the pages it matches, and drop sections that are empty."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            filled = {title: expand(part, pages) if isinstance(part, list) else part for title, part in entry.items()}
            found += [{title: part} for title, part in filled.items() if part]
        elif "*" in entry:
            found += [page for page in pages if fnmatch(page, entry)]
        elif entry:
            found.append(entry)
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the pages made from the root of the repository, and the files that pages may link to."""
    from mkdocs.structure.files import File

    for page, source in MADE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in (path for folder in COPIED for path in sorted((ROOT / folder).glob("*.py"))):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn a page as a code host shows it into one as the site does."""
    uri = page.file.src_uri
    page.meta.setdefault("search", {})["boost"] = BOOST.get(uri.rpartition("/")[0], 1)
    return site_markdown(markdown, uri, {file.src_uri for file in files})


def site_markdown(markdown: str, uri: str, known: set[str]) -> str:
    """Return the Markdown of the site; `known` are the files that it has."""
    text = HOST_ONLY.sub("", markdown)
    text = text.replace("<!-- explorer -->", EXPLORER if "explorer.html" in known else "")
    text = ALERT.sub(admonition, text)
    if uri.startswith("api/"):
        text = API_ITEM.sub(documented, text)
    return outside_fences(text, lambda part: linked(pictured(CODED_MATH.sub(r"$\1$", part)), uri, known))


def outside_fences(text: str, change: Any) -> str:
    """Change what is not in a fenced block."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def documented(item: re.Match[str]) -> str:
    """Return the block of mkdocstrings for an item of an API page."""
    options = "\n    options:\n      members: false" if "<!-- no members -->" in item[0] else ""
    return f"\n::: {item['name']}{options}\n"


def admonition(alert: re.Match[str]) -> str:
    """Return a GitHub alert as an admonition of Material."""
    kind = {"important": "info", "caution": "danger"}.get(alert["kind"].lower(), alert["kind"].lower())
    lines = [line.removeprefix(">").removeprefix(" ") for line in alert["body"].rstrip("\n").split("\n")]
    return f'!!! {kind} ""\n\n' + "\n".join(f"    {line}".rstrip() for line in lines) + "\n"


def attributes(text: str) -> dict[str, str]:
    """Return the attributes of a tag."""
    return {name: html.unescape(value) for name, value in re.findall(r'([\w-]+)="([^"]*)"', text)}


def pictured(text: str) -> str:
    """Return `<picture>` and `<img>` as Markdown images, so that their paths are checked and follow the page."""

    def both(match: re.Match[str]) -> str:
        dark = attributes(re.search(r"<source\b([^>]*)>", match["inside"])[1])["srcset"]
        light = attributes(IMAGE.search(match["inside"])["inside"])
        alt = light["alt"].replace("\n", " ")
        alone = light["src"]  # a picture opens when it is clicked, on white
        return f"[![{alt}]({alone}#only-light)]({alone})\n[![{alt}]({dark}#only-dark)]({alone})"

    def one(match: re.Match[str]) -> str:
        given = attributes(match["inside"])
        width = f"{{ width={given['width']} }}" if "width" in given else ""
        return f"![{given.get('alt', '')}]({given['src']}){width}"

    return IMAGE.sub(one, PICTURE.sub(both, text))


def linked(text: str, uri: str, known: set[str]) -> str:
    """Return the text with links that are right on the site; what the site does not have is not linked."""
    source = MADE.get(uri, f"docs/{uri}")
    made = {origin: page for page, origin in MADE.items()}

    def follow(match: re.Match[str]) -> str:
        path, mark, anchor = match["target"].partition("#")
        text = LINK.sub(follow, match["text"])
        if not path or re.match(r"[a-z]+:", path):
            return f"{match['image']}[{text}]({match['target']})"
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = made.get(place) or place.removeprefix("docs/")
        if page in known or place.startswith("docs/"):  # mkdocs says what is missing in docs/
            start = posixpath.dirname(uri) or "."
            return f"{match['image']}[{text}]({posixpath.relpath(page, start)}{mark}{anchor})"
        return text

    return LINK.sub(follow, text)


def display(latex: str) -> str:
    """Return a displayed formula as MathML."""
    return f'<div class="math-block">{mathml(latex.strip(), "block")}</div>'


FENCES = {r"\lvert": r"\left|", r"\rvert": r"\right|", r"\lVert": r"\left\Vert ", r"\rVert": r"\right\Vert "}


def mathml(latex: str, display: str = "inline") -> str:
    """Return a formula as MathML, with what browsers need: upright names, and bars that know their side."""
    text = re.sub(r"\\mathrm\{([^{}]{2,})\}", r"\\text{\1}", latex)
    text = re.sub(r"\\[lr][vV]ert(?![a-z])", lambda bar: FENCES[bar[0]], text)
    return convert(re.sub(r"\\log(?= [\\\w])", r"\\log\\,", text), display=display)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Typeset the formulas within lines."""
    return typeset(html)


def typeset(text: str) -> str:
    """Return HTML with the formulas that arithmatex marked as MathML."""
    return INLINE_MATH.sub(lambda match: mathml(html.unescape(match[1])), text)
