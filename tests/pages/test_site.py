"""The built site: links, anchors and images; in a browser its width, its search, its copy button and its requests."""

import os
import subprocess
import sys
from pathlib import Path

import markup
import pytest
from chromium import BROWSER, REQUIRED, Chromium, Server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
browser = pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def html_pages(folder):
    """The pages of a site, by path; the page for missing addresses has absolute links, which need a host."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.html"))}
    return {name: markup.Page(path.read_text(encoding="utf-8")) for name, path in found.items() if name != "404.html"}


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.long
def test_links_anchors_and_images(site):
    pages = html_pages(site)
    assert len(pages) > 20
    assert markup.problems(pages, files_of(site), "index.html") == []


def test_a_broken_site_is_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="other/">gone</a><a href="#x">no anchor</a><img src="img/x.svg"><script src="https://example.com/x.js">'
    )
    assert len(markup.problems(html_pages(tmp_path), files_of(tmp_path), "index.html")) == 4


def test_the_site_is_typeset(site):
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    assert sum(text.count("<math") for text in pages.values()) > 50
    assert [path for path, text in pages.items() if "arithmatex" in text or "\\(" in text] == []
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "khot 0." in home, "the version is shown"
    signature = (site / "api" / "relaxations" / "index.html").read_text(encoding="utf-8")
    assert 'id="khot.sigmoid_topk"' in signature


@pytest.fixture(scope="module")
def served(site):
    with Server(site) as server:
        yield server


@pytest.fixture(scope="module")
def tab():
    with Chromium() as page:
        yield page


CUT = "[...document.querySelectorAll('.doc-signature pre > code')].map(c => c.scrollWidth > c.clientWidth)"


@browser
@pytest.mark.browser
def test_no_signature_is_cut(site, served, tab):
    tab.resize(1400, 900)
    seen = 0
    for path in sorted((site / "api").glob("*/index.html")):
        tab.open(served.url + path.relative_to(site).as_posix())
        cut = tab.js(CUT)
        seen += len(cut)
        assert not any(cut), path
    assert seen > 100
    tab.js("document.querySelector('.doc-signature pre').style.width = '5rem'")
    assert any(tab.js(CUT)), "the check finds one that is"


OVERHANG = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@browser
@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1400])
def test_no_page_overflows(site, served, tab, width):
    tab.resize(width, 900)
    wide = {}
    for path in sorted(site.rglob("*.html")):
        tab.open(served.url + path.relative_to(site).as_posix())
        wide[path.relative_to(site).as_posix()] = tab.js(OVERHANG)
    assert {path: by for path, by in wide.items() if by > 0} == {}


@browser
@pytest.mark.browser
def test_nothing_is_asked_from_outside(served, tab):
    tab.requests.clear()
    tab.open(served.url + "moe/")
    assert len(tab.requests) > 3
    assert [url for url in tab.requests if not url.startswith((served.url, "data:"))] == []


@browser
@pytest.mark.browser
def test_wide_pages_and_outside_requests_are_found(tmp_path, tab):
    (tmp_path / "wide.html").write_text('<div style="width:3000px">w</div><img src="http://outside.invalid/x.png">')
    tab.requests.clear()
    with Server(tmp_path) as server:
        tab.open(server.url + "wide.html")
        assert tab.js(OVERHANG) > 0
        assert [url for url in tab.requests if not url.startswith(server.url)] == ["http://outside.invalid/x.png"]


@browser
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_follow_the_colour_scheme(served, scheme):
    shown = "[...document.images].filter(i => i.src.includes('#only-') && i.offsetWidth > 0).map(i => i.src)"
    with Chromium(dark=scheme == "dark") as page:
        page.open(served.url + "sigmoid-topk/")
        found = page.js(shown)
        assert len(found) == 2
        assert all(url.endswith(f"#only-{scheme}") for url in found)
        other = {"dark": "default", "light": "slate"}[scheme]  # what the switch in the header sets
        page.js(f"document.body.dataset.mdColorScheme = '{other}'")
        assert set(page.js(shown)).isdisjoint(found)


TERMS = {
    "topk": "sigmoid-topk/",
    "sigmoid_topk": "api/relaxations/",
    "attention": "",
    "sparsemax": "family/",
    "temperature": "sigmoid-topk/",
    "gumbel": "designs/",
    "mask": "sigmoid-topk/",
    "router": "moe/",
    "autoencoder": "sae/",
    "pivotal": "api/designs/",
    "glossary": "glossary/",
}
"""What people look for, and a page that must be among those found; "" for any."""


def search(tab, url, term):
    """The pages that the site's search finds, without their anchors."""
    tab.open(f"{url}?q={term}")
    tab.wait(
        "document.querySelector('[data-md-component=search-result] .md-search-result__meta')?.innerText.match(/match/)"
    )
    links = "Array.from(document.querySelectorAll('.md-search-result__link'), a => a.href)"
    return {link.removeprefix(url).partition("?")[0].partition("#")[0] for link in tab.js(links)}


@browser
@pytest.mark.browser
@pytest.mark.parametrize("term", TERMS)
def test_search(served, tab, term):
    tab.resize(1400, 900)
    found = search(tab, served.url, term)
    assert found
    assert not TERMS[term] or TERMS[term] in found


@browser
@pytest.mark.browser
def test_search_finds_nothing_where_there_is_nothing(served, tab):
    assert search(tab, served.url, "xylophone") == set()


@browser
@pytest.mark.browser
def test_the_copy_button_leaves_prompts_and_answers_out(served, tab):
    tab.open(served.url + "sigmoid-topk/")
    tab.js("document.addEventListener('copy', () => { window.copied = document.activeElement.value })")
    tab.wait("document.querySelector('[data-clipboard-target]')")
    shows_prompts = "document.querySelector(b.dataset.clipboardTarget).innerText.includes('>>>')"
    tab.js(f"[...document.querySelectorAll('[data-clipboard-target]')].find(b => {shows_prompts}).click()")
    tab.wait("window.copied")
    copied = tab.js("window.copied")
    assert "khot.sigmoid_topk(x, 2)" in copied
    assert ">>>" not in copied
    assert "tensor([0." not in copied
