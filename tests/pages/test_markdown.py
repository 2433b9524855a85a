"""The Markdown is complete as a code host shows it: links, anchors, images, tables, names and no raw markup."""

import ast
import re
from pathlib import Path

import markup
import pytest

import khot
from benchmarks.common import COMMITTED, fill, pages_with, write_table
from docs import hooks, make_api

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SOURCES += sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "tables")
NAMES = [path.relative_to(ROOT).as_posix() for path in SOURCES]
SKIPPED = {".git", ".venv", "site", "out", "build", ".mypy_cache", ".ruff_cache"}


@pytest.fixture(scope="module")
def pages():
    return {name: markup.of_markdown((ROOT / name).read_text(encoding="utf-8")) for name in NAMES}


@pytest.fixture(scope="module")
def files():
    tree = (path for top in ROOT.iterdir() if top.name not in SKIPPED for path in (top, *top.rglob("*")))
    return {path.relative_to(ROOT).as_posix() for path in tree}


def test_links_anchors_and_images(pages, files):
    assert markup.problems(pages, files) == []
    assert sum(len(page.links) for page in pages.values()) > 200, "the check sees the links"


def test_no_raw_markup(pages):
    assert [line for path, page in pages.items() for line in markup.raw_markup(path, page)] == []


def test_formulas_reach_the_reader(pages):
    text = {path: (ROOT / path).read_text(encoding="utf-8") for path in pages}
    assert [line for path, page in pages.items() for line in markup.changed_formulas(path, text[path], page)] == []
    for formula in (r"$a\,b$", r"$(x)_i$ and $\sum_{i}$"):
        assert markup.changed_formulas("page.md", formula, markup.of_markdown(formula)), "it finds what is changed"
    fine = r"$x_i$, $\sum_i x_i$ and $`a\,b`$"
    assert markup.changed_formulas("page.md", fine, markup.of_markdown(fine)) == []


BROKEN = {
    "which is not there": "[a](b.md) ![c](d.svg)",
    "no such anchor": "# One\n\n[a](#two)",
    "from outside": "![a](https://example.com/x.png)",
    "a snippet": '--8<-- "docs/tables/sae.md"',
    "an mkdocstrings block": "::: khot.sigmoid_topk",
    "an admonition": '!!! note "Title"\n    text',
    "an unresolved reference": "[simple][khot.estimators.simple]",
    "an attribute list": "![a](page.md){ .wide }",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_page_is_found(what):
    page = markup.of_markdown(BROKEN[what])
    found = markup.problems({"page.md": page}, {"page.md"}) + markup.raw_markup("page.md", page)
    assert any(what in line for line in found), found


def test_anchors_by_the_rule_of_code_hosts():
    text = "# What σ_k *costs*: `a.b`, really?\n\n## Twice\n\n## Twice\n\n[a](#what-σ_k-costs-ab-really) [b](#twice-1)"
    assert markup.problems({"page.md": markup.of_markdown(text)}, {"page.md"}) == []


def test_the_tables_of_the_pages_are_those_of_the_scripts():
    for table in sorted(COMMITTED.tables.glob("*.md")):
        shown = pages_with(table.stem)
        assert len(shown) == 1, f"{table.name} must be shown by one page; it is by {len(shown)}"
        text = shown[0].read_text(encoding="utf-8")
        fresh = fill(text, f"table: {table.stem}", table.read_text(encoding="utf-8"))
        assert text == fresh, f"{shown[0].name} and {table.name} differ: run its script"
    pages = (path.read_text("utf-8") for path in SOURCES if path.is_relative_to(ROOT / "docs"))
    marked = {name for page in pages for name in re.findall(r"<!-- table: ([\w-]+) -->", page)}
    assert marked == {path.stem for path in COMMITTED.tables.glob("*.md")}


def test_a_script_writes_its_table_into_the_page(tmp_path, monkeypatch):
    (tmp_path / "docs" / "tables").mkdir(parents=True)
    page = tmp_path / "docs" / "page.md"
    page.write_text("before\n\n<!-- table: t -->\n\nold\n\n<!-- /table: t -->\n\nafter\n")
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.common.COMMITTED", COMMITTED._replace(tables=tmp_path / "docs" / "tables"))
    write_table(tmp_path / "docs" / "tables" / "t.md", "| new |\n")
    assert page.read_text() == "before\n\n<!-- table: t -->\n\n| new |\n\n<!-- /table: t -->\n\nafter\n"
    write_table(tmp_path / "t.md", "| a quick run |\n")
    assert "quick" not in page.read_text(), "only committed tables reach the pages"
    with pytest.raises(LookupError, match="it has not both"):
        fill("no marks", "t", "")


@pytest.fixture(scope="module")
def package():
    return make_api.load()


def test_the_api_pages_are_those_of_the_docstrings(package):
    for path in sorted(make_api.PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert make_api.completed(text, package) == text, f"{path.name} is stale: run `python docs/make_api.py`"
        assert make_api.completed(text.replace(":\n  ", ":\n  Stale. "), package) == text


PACKAGE = Path(khot.__file__).parent
INNER = {"cli", "jobs", "ops", "relaxations", "nn.moe", "nn.sae", "bench"}
"""Rooms whose names other rooms export, and `bench`, a harness of which a few parts are for users."""
UNLISTED = {
    "sae": {"HELD_OUT", "Point", "RECIPES", "Recipe"},
    "testing": {"SCORE_KINDS"},
    "kernels": {"cpu", "cpu_costs", "cpu_logs", "cpu_samplers"},
    "nn": {"neighbors", "routing", "schedules", "selectors", "sparsity", "spark", "tokens"},
}
"""Public names that need no entry: constants and records that the entries speak of, and modules."""


def exported(source):
    """The names that the file of a room makes public: `import name as name`, `__all__`, or what it defines."""
    tree = ast.parse(source)
    again = {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname == a.name}
    every = [n.value for n in tree.body if isinstance(n, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(n)]
    own = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")}
    return {name for part in every for name in ast.literal_eval(part)} if every else again or own


def test_every_public_name_has_an_entry():
    listed = [
        name for path in make_api.PAGES.glob("*.md") for name in make_api.listed(path.read_text(encoding="utf-8"))
    ]
    assert len(listed) == len(set(listed)), "a name stands once"
    assert {f"khot.{name}" for name in khot.__all__} <= set(listed)
    entries = {name.rpartition(".")[2] for name in listed}
    files = [path for path in (*PACKAGE.glob("*.py"), *PACKAGE.glob("nn/*.py")) if not path.stem.startswith("_")]
    missing = []
    for path in (*files, *PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("nn/*/__init__.py")):
        room = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
        if room not in INNER and not room.startswith("_"):
            names = exported(path.read_text(encoding="utf-8")) - UNLISTED.get(room, set()) - entries
            missing += sorted(f"khot.{room}.{name}" for name in names)
    assert missing == [], "write `- khot.name` on a page of docs/api/ and run `python docs/make_api.py`"
    assert make_api.listed("- khot.new_name\n- another line\n") == ["khot.new_name"]
    assert exported("from ._a import b as b\nfrom ._c import d\ndef e(): ...") == {"b"}
    assert exported("import torch\ndef e(): ...\ndef _f(): ...") == {"e"}


def test_the_home_page_is_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    home = hooks.site_markdown(text, "index.md", {"designs.md", "contributing.md", "explorer.html", "img/hero.svg"})
    assert home.count("\n## ") == text.count("\n## "), "all of its sections"
    assert "](designs.md)" in home
    assert "](contributing.md)" in home
    assert "](docs/" not in home
    assert "LICENSE)" not in home, "the site has no such file"
    assert hooks.EXPLORER in home
    assert hooks.EXPLORER not in hooks.site_markdown(text, "index.md", set())


def test_what_the_site_changes():
    text = '# API\n\n- <a id="khot.threshold"></a>[`khot.threshold`](../../src/x.py):\n  Return it.\n\n'
    text += "<!-- code host -->\nhere\n<!-- /code host -->\n> [!NOTE]\n> **A note.** Text.\n\n"
    text += '<picture><source media="(prefers-color-scheme: dark)" srcset="../img/a-dark.svg">\n'
    text += '<img alt="A &amp; b" src="../img/a.svg"></picture>\n\n[s](../../src/x.py) [c](../../CHANGELOG.md#x)\n\n'
    text += "```md\n[kept](../../src/x.py)\n```\n"
    site = hooks.site_markdown(text, "api/page.md", {"img/a.svg", "img/a-dark.svg", "changelog.md"})
    assert "\n::: khot.threshold\n" in site
    assert "code host" not in site
    assert '!!! note ""\n\n    **A note.** Text.\n' in site
    assert "[![A & b](../img/a.svg#only-light)](../img/a.svg)" in site
    assert "[![A & b](../img/a-dark.svg#only-dark)](../img/a.svg)" in site
    assert "\ns [c](../changelog.md#x)" in site
    assert "[kept](../../src/x.py)" in site


def test_the_navigation_has_every_page():
    nav = [{"A": ["a.md", {"B": "b/b.md"}, "b/*.md"]}, {"C": ["c/*.md"]}]
    assert hooks.expand(nav, ["b/x.md"]) == [{"A": ["a.md", {"B": "b/b.md"}, "b/x.md"]}]
    text = re.sub(r"slugify: !!python.*", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    import yaml

    nav = yaml.safe_load(text)["nav"]
    there = {path.relative_to(ROOT / "docs").as_posix() for path in SOURCES if path.is_relative_to(ROOT / "docs")}
    rest = sorted(there - set(hooks.named(nav)))
    shown = set(hooks.named(hooks.expand(nav, rest)))
    assert shown == there | set(hooks.MADE) | {name for name in shown if name.endswith(".html")}
