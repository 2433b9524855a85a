"""Complete the lists of names on the API pages from the docstrings.

`python docs/make_api.py` rewrites docs/api/*.md: each line that begins with `- khot.name`, or with the item that it
became, gets the name, a link to its source and the first sentence of its docstring. A test compares the pages with the
sources. To add a name, write `- khot.name` on its page and run this.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from textwrap import wrap

import griffe

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "api"
ITEM = re.compile(
    r'^- (?:<a id="(?P<old>khot[\w.]*)"></a>.*(?:\n {2}.*)*|(?P<new>khot[\w.]+))(?P<mark> <!-- no members -->)?$',
    re.MULTILINE,
)


def load() -> griffe.Object | griffe.Alias:
    """Read the sources, without importing them."""
    return griffe.load("khot", search_paths=[str(ROOT / "src")], resolve_aliases=True)


def find(package: griffe.Object | griffe.Alias, name: str) -> griffe.Object | griffe.Alias:
    """Return the object of a public name such as khot.designs.Pivotal."""
    found = package[name.removeprefix("khot.")]
    return found.final_target if found.is_alias else found


def summary(found: griffe.Object | griffe.Alias) -> str:
    """Return the first sentence of a docstring."""
    if found.docstring is None:
        raise LookupError(f"{found.path} must have a docstring; it has none.")
    paragraph = " ".join(found.docstring.value.strip().split("\n\n")[0].split())
    return re.match(r".+?(?:[.:;](?=\s|$)|$)", paragraph)[0].rstrip(":;.") + "."


def listed(page: str) -> list[str]:
    """Return the names that a page lists."""
    return [match["old"] or match["new"] for match in ITEM.finditer(page)]


def completed(page: str, package: griffe.Object | griffe.Alias) -> str:
    """Return a page with its items written from the sources."""

    def item(match: re.Match[str]) -> str:
        name = match["old"] or match["new"]
        found = find(package, name)
        source = posixpath.relpath(Path(found.filepath).as_posix(), PAGES.as_posix())
        first = f'<a id="{name}"></a>[`{name}`]({source}):'
        mark = " <!-- no members -->" if "<!-- no members -->" in match[0] else ""
        lines = wrap(summary(found) + mark, 117, break_long_words=False, break_on_hyphens=False)
        return "\n".join([f"- {first}", *(f"  {line}" for line in lines)])

    return ITEM.sub(item, page)


def main() -> None:
    """Complete all pages."""
    package = load()
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(completed(path.read_text(encoding="utf-8"), package), encoding="utf-8")


if __name__ == "__main__":
    main()
