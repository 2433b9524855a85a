"""The feature browser of the report of `khot sae`: its contents, and in Chromium its search, order, links and looks."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from chromium import BROWSER, REQUIRED, Chromium

from khot.jobs import _browser
from khot.jobs._page import meter, page, table
from khot.jobs.sae_report import FRONTIER
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Tokens, features

HOSTILE = "</script><script>document.title='owned'</script><img src=https://example.com/x.png>"
WORDS = ["king", "queen", "sword", "night", HOSTILE, "##ing", "day", "&amp;<b>"]
LATENTS = 12
browser = pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="no Chromium on this machine")


def found(tokens=True, documents=20, length=30, latents=LATENTS):
    """Latent i is active at word i, and there the stronger the later; those without a word are dead."""
    rng = np.random.default_rng(0)
    sae = SparseAutoencoder(SparseAutoencoderConfig(d_in=latents, latents=latents, k=2)).requires_grad_(False)
    for weight in (sae.W_enc, sae.W_dec):
        weight.copy_(torch.eye(latents))
    sae.W_dec[1, 0] = 0.5  # the queen is near the king
    ids = rng.integers(0, len(WORDS), documents * length)
    ids[ids == 0] = np.where(rng.random((ids == 0).sum()) < 0.3, 0, 3)  # kings are rare, nights frequent
    x = torch.nn.functional.one_hot(torch.from_numpy(ids), latents) * torch.linspace(1, 2, len(ids))[:, None]
    x[:, 0] *= 3
    texts = Tokens.of([[WORDS[i] for i in part] for part in ids.reshape(documents, length)])
    unembedding = torch.eye(latents)[: len(texts.vocabulary)] if tokens else None
    return features(sae.eval(), x.float(), tokens=texts if tokens else None, unembedding=unembedding, context=4)


def written(tmp_path, of, name="report.html"):
    text = page("t", _browser.browser(of), command="c", packages=(), style=_browser.STYLE, script=_browser.SCRIPT)
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def data_of(path):
    raw = re.search(r'<script type="application/json" id="features">(.*?)</script>', path.read_text(), re.DOTALL)[1]
    return json.loads(raw)


def test_what_the_page_has(tmp_path):
    of = found()
    data = data_of(written(tmp_path, of))
    assert [latent[0] for latent in data["latents"]] + data["dead"] == [*range(LATENTS)]
    for number, count, mean, largest, first, counts, top, sampled, near, cosines, *_ in data["latents"]:
        assert count == int(of.count[number]) == sum(counts)
        assert largest == pytest.approx(float(of.maximum[number]), rel=1e-3)
        assert mean == pytest.approx(float(of.mean[number]), rel=1e-3)
        assert data["edges"][first] <= largest * 1.001
        assert near == of.neighbors.index[number].tolist()
        assert cosines == [round(100 * c) for c in of.neighbors.values[number].tolist()]
        for (row, value, start, offset, shades), at in zip(top, of.top.rows[number].tolist(), strict=False):
            assert row == at
            assert value == pytest.approx(float(of.tokens and of.top.values[number].max()), rel=1)
            words = [data["words"][data["text"][start + i]] for i in range(len(shades))]
            expected = [of.tokens.text(i) for i in range(row - offset, row - offset + len(shades))]
            assert [w.strip() for w in words] == [w.removeprefix("##") for w in expected]
            assert [int(s) > 0 for s in shades] == [w == WORDS[number] for w in expected]
        assert len(sampled) == 8
    queen = next(latent for latent in data["latents"] if latent[0] == 1)
    assert queen[8][0] == 0, "the king is nearest"


def test_hostile_tokens_stay_text(tmp_path):
    text = written(tmp_path, found()).read_text()
    assert HOSTILE not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text


def test_the_number_of_latents_is_bounded_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(_browser, "MOST_LATENTS", 3)
    of = found()
    path = written(tmp_path, of)
    kept = {latent[0] for latent in data_of(path)["latents"]}
    assert kept == set(of.energy.topk(3).indices.tolist())
    assert "The 3 that add most to reconstructions" in path.read_text()
    monkeypatch.undo()
    assert "that add most" not in written(tmp_path, of).read_text()


def test_words_are_spelled_as_their_tokenizer_means_them():
    def spelled(*vocabulary):
        return "".join(map(_browser._spelling(vocabulary), range(len(vocabulary))))

    assert spelled("play", "##ing", "!") == " playing !"
    assert spelled("Ġto", "day", "Ċ") == " today⏎"
    assert spelled("▁to", "day") == " today"
    assert spelled(" to", "day", "\n") == " today⏎"


class Tab(Chromium):
    """A tab that writes down what goes wrong."""

    def __init__(self, **options):
        self.errors = []
        super().__init__(**options)
        self.call("Log.enable")

    def _message(self, seconds):
        message = super()._message(seconds)
        if message and message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(message["params"])
        return message

    def show(self, path, address=""):
        self.open("about:blank")
        self.errors.clear()
        self.requests.clear()
        self.open(path.as_uri() + address)
        self.wait("document.querySelector('#list button')")

    def listed(self):
        return self.js("[...document.querySelectorAll('#list button[data-latent]')].map(b => +b.dataset.latent)")

    def search(self, text):
        self.js(f"(q => {{ q.value = {json.dumps(text)}; q.dispatchEvent(new Event('input')) }})(query)")

    def pick(self, place, value):
        self.js(f"(s => {{ s.value = '{value}'; s.dispatchEvent(new Event('change')) }})({place})")

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def detail(self):
        return self.js("document.getElementById('detail').innerText")


@pytest.fixture(scope="module")
def tab():
    with Tab() as page:
        yield page


@browser
@pytest.mark.browser
@pytest.mark.slow
class TestInChromium:
    def test_search_order_and_dead_latents(self, tab, tmp_path):
        of = found()
        tab.show(written(tmp_path, of))
        alive = (of.count > 0).nonzero().squeeze(1).tolist()
        assert sorted(tab.listed()) == alive
        assert tab.listed() == sorted(alive, key=lambda i: (-float(of.maximum[i]), i))
        tab.pick("order", "rare")
        assert tab.listed()[0] == int(of.count[alive].argmin())
        tab.pick("order", "number")
        assert tab.listed() == alive
        tab.search("queen")
        assert tab.listed()[0] == 1, "the latent that is active at it comes first"
        tab.search("<b>")
        assert tab.listed()[0] == 7
        tab.search("no such word")
        assert tab.listed() == []
        assert "No latent" in tab.js("document.getElementById('status').textContent")
        tab.search("3")
        assert tab.listed() == [3], "a number is a latent"
        tab.search("")
        tab.js("alive.click()")
        assert tab.listed() == [*range(LATENTS)]
        assert tab.errors == []

    def test_a_latent_and_its_contexts(self, tab, tmp_path):
        of = found()
        tab.show(written(tmp_path, of))
        tab.js("document.querySelector('#list button[data-latent=\"2\"]').click()")
        assert tab.js("location.hash") == "#latent=2"
        assert tab.js("document.querySelectorAll('#detail li.context .focus').length") >= 8
        assert set(tab.js("[...document.querySelectorAll('#detail .focus')].map(f => f.textContent)")) == {"sword"}
        shaded = tab.js("[...document.querySelectorAll('#detail [data-shade]')].map(f => f.textContent)")
        assert set(shaded) == {"sword"}
        plain = "[...document.querySelectorAll('#detail .text span:not([data-shade])')].map(f => f.textContent)"
        assert "sword" not in tab.js(plain), "a negative control: what is not active has no shade"
        assert f"({int(of.count[2])})" in tab.detail()
        assert tab.js("document.querySelectorAll('#detail svg rect').length") >= 1
        tab.js("document.querySelector('#detail a.near').click()")
        tab.wait("location.hash !== '#latent=2'")
        other = int(of.neighbors.index[2, 0])
        tab.wait(f"document.querySelector('#detail h3').textContent === 'Latent {other}'")
        assert tab.errors == []

    def test_logit_effects_only_with_an_unembedding(self, tab, tmp_path):
        tab.show(written(tmp_path, found()), "#latent=1")
        assert "Promotes" in tab.detail()
        tab.show(written(tmp_path, found(tokens=False)), "#latent=1")
        assert "Promotes" not in tab.detail()

    def test_an_address_leads_to_a_latent(self, tab, tmp_path):
        path = written(tmp_path, found())
        tab.show(path, "#latent=6")
        assert tab.detail().startswith("Latent 6")
        tab.show(path, "#latent=11")
        assert "none of" in tab.detail(), "a dead one"
        tab.show(path, "#latent=999")
        assert "not on this page" in tab.detail()
        tab.show(path)
        assert tab.detail().startswith(f"Latent {tab.listed()[0]}")

    def test_an_address_opens_the_list_where_the_latent_is(self, tab, tmp_path):
        path = tmp_path / "report.html"
        script = _browser.SCRIPT.replace("[300, 6, 7]", "[2, 6, 7]")
        assert script != _browser.SCRIPT
        text = page("t", _browser.browser(found()), command="c", packages=(), style=_browser.STYLE, script=script)
        path.write_text(text, encoding="utf-8")
        tab.show(path)
        first, second = tab.listed()
        last = min({1, 2, 3, 5, 6} - {first, second})
        assert tab.js("document.querySelectorAll('#more').length") == 1
        tab.show(path, f"#latent={last}")
        assert last in tab.listed()
        assert tab.js("+document.querySelector('#list [aria-current]').dataset.latent") == last

    def test_the_keyboard(self, tab, tmp_path):
        tab.show(written(tmp_path, found()))
        first, second, third, *_ = tab.listed()
        tab.key("j")
        tab.key("j")
        assert tab.js("location.hash") == f"#latent={third}"
        tab.key("k")
        assert tab.js("location.hash") == f"#latent={second}"
        tab.key("/")
        assert tab.js("document.activeElement.id") == "query"
        tab.key("j")
        assert tab.js("query.value") == "j", "in the search field a letter is a letter"
        assert tab.js("location.hash") == f"#latent={second}"
        tab.key("Escape")
        assert tab.js("document.activeElement.id") != "query"
        assert first not in (second, third)

    def test_hostile_tokens_do_nothing(self, tab, tmp_path):
        tab.show(written(tmp_path, found()), "#latent=4")
        assert HOSTILE.lower() in tab.detail().lower()
        assert tab.js("document.title") == "t"
        assert tab.js("document.querySelectorAll('img').length") == 0
        assert [url for url in tab.requests if not url.startswith(("file:", "about:"))] == []
        assert tab.errors == []

    def test_another_script_is_refused(self, tab, tmp_path):
        """The policy of the page: a negative control of the above."""
        path = written(tmp_path, found())
        path.write_text(path.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
        tab.show(path)
        assert tab.js("document.title") == "t"
        assert any("Content Security Policy" in json.dumps(error) for error in tab.errors)

    def test_rows_without_tokens_are_named_by_number(self, tab, tmp_path):
        of = found(tokens=False)
        tab.show(written(tmp_path, of), "#latent=2")
        assert f"row {int(of.top.rows[2, 0])}" in tab.detail()
        assert "No tokens were given" in tab.js("document.body.innerText")

    @pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1200, False), (1200, True)])
    def test_it_fits_and_can_be_read(self, tmp_path, width, dark):
        with Tab(width=width, height=800, dark=dark) as tab:
            tab.show(written(tmp_path, found()), "#latent=4")
            assert tab.js("document.documentElement.scrollWidth") <= width
            colours = tab.js(
                "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
                " getComputedStyle(document.querySelector('#list button')).color]"
            )
            light = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours]
            assert (light[0] < light[1]) == dark
            assert abs(light[0] - light[2]) > 300
            is_beside = tab.js(
                "document.getElementById('detail').getBoundingClientRect().top"
                " < document.getElementById('list').getBoundingClientRect().bottom - 20"
            )
            assert is_beside == (width > 700), "beside the list, and on a phone below it"
            assert len(base64.b64decode(tab.call("Page.captureScreenshot")["data"])) > 5000


@browser
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1000])
def test_figures_stand_below_their_names_at_any_width(tmp_path, width):
    """On a phone the first, empty name of the table of a sweep was hidden, so L0 stood below FVU."""
    tables = [
        table(FRONTIER, [["k8", "8", "0.3", "0.4", "99"]]),
        table(["share of tokens", "", "latents"], [["1e-3", meter(1), "7"]]),
        table(["", "a", "", "b", "c"], [["x", "1", meter(1), "2", "3"]]),
    ]
    path = tmp_path / "tables.html"
    path.write_text(page("tables", *tables, command="khot", packages=()), encoding="utf-8")
    with Chromium(width=width) as one:
        one.open(path.as_uri())
        shift = """Math.max(...[...document.querySelectorAll("table")].flatMap((table) => {
          const right = (cell) => cell.getBoundingClientRect().right;
          const [names, cells] = [...table.rows].map((row) => [...row.cells].map(right));
          return names.map((end, i) => Math.abs(end - cells[i]));
        }))"""
        assert one.js(shift) < 1
