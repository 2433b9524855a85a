"""The explorer in a browser: mouse, keyboard, screen readers, small screens; and its routers against khot's."""

import json

import pytest
import torch
from chromium import Server
from explorer_page import URL, Page, needs_browser

from khot.cli import EXPLORER
from khot.nn import routing

pytestmark = [pytest.mark.slow, pytest.mark.browser, needs_browser]


@pytest.fixture(scope="module")
def page():
    with Page() as page:
        yield page


@pytest.fixture
def explorer(page):
    page.reset()
    yield page
    page.rest(0)
    assert page.errors == []


def center(page, dot):
    box = page.js(
        f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
        f"(document.querySelector('#dot-{dot} circle:nth-child(2)').getBoundingClientRect())"
    )
    return tuple(box)


def score(page, dot):
    return page.js(f"khot.state().x[{dot}]")


def kind(page, dot):
    return page.js(f"khot.state().kinds[{dot}]")


def test_dots_move_by_keyboard(explorer):
    explorer.js("document.getElementById('with-costs').focus()")
    explorer.press("Tab")
    assert explorer.js("document.activeElement.id") == "dot-0", "the first dot follows the controls"
    explorer.press("Tab")
    assert explorer.js("document.activeElement.id") == "dot-1"
    assert explorer.js("khot.state().selected") == 1
    before, height = score(explorer, 1), explorer.js("khot.solve(khot.problem()).y[1]")
    explorer.press("ArrowLeft")
    assert score(explorer, 1) == pytest.approx(before - 0.1)
    explorer.press("ArrowRight", shift=True)
    assert score(explorer, 1) == pytest.approx(before - 0.09)
    assert explorer.js("khot.solve(khot.problem()).y[1]") < height
    assert float(explorer.js("document.activeElement.getAttribute('aria-valuenow')")) == score(explorer, 1)
    for key, result in (("m", "mask"), ("+", "+inf"), ("-", "-inf"), ("Escape", "free")):
        explorer.press(key)
        assert kind(explorer, 1) == result
    assert explorer.js("document.activeElement.id") == "dot-1", "focus survives every redraw"


def test_dots_move_by_mouse(explorer):
    x, y = center(explorer, 4)
    explorer.mouse("Pressed", x, y)
    explorer.mouse("Moved", x + 30, y)
    explorer.mouse("Moved", x + 60, y)
    explorer.mouse("Released", x + 60, y)
    moved = score(explorer, 4)
    assert 0.2 < moved < 1.2
    assert explorer.js("khot.state().selected") == 4
    assert center(explorer, 4)[0] == pytest.approx(x + 60, abs=2), "the dot is under the pointer"
    for result in ("mask", "+inf", "-inf", "free"):
        x, y = center(explorer, 4)
        for clicks in (1, 2):
            explorer.mouse("Pressed", x, y, clicks)
            explorer.mouse("Released", x, y, clicks)
        assert kind(explorer, 4) == result
    assert score(explorer, 4) == moved, "a click is not a drag"


def test_controls(explorer):
    def set_to(control, value):
        explorer.js(
            f"(() => {{ const c = document.getElementById('{control}'); c.value = '{value}';"
            "c.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    set_to("k", "2.7")
    set_to("T", "-1.3")
    set_to("member", "laplace")
    set_to("score", "1.23")
    set_to("kind", "+inf")
    explorer.click("with-costs")
    set_to("cost", "2.5")
    assert explorer.text("code").splitlines() == [
        "import torch, khot",
        "",
        "x = torch.tensor([2.4, 1.4, 0.9, torch.inf, -0.3, -0.9, -1.6, -2.3])",
        "costs = torch.tensor([2.0, 1.0, 1.0, 2.5, 1.0, 0.5, 1.0, 2.0])",
        "y = khot.laplace_topk(x, 2.7, temperature=0.0501, costs=costs)",
    ]
    for _ in range(3):
        explorer.click("many")
    assert explorer.js("khot.state().counts.draws") == 3000
    explorer.click("one")
    assert explorer.js("khot.state().counts.draws") == 3001
    explorer.click("clear")
    assert explorer.js("khot.state().counts.draws") == 0


def test_a_row_without_a_solution_says_so(explorer):
    masked = json.dumps({"kinds": ["mask"] * 6 + ["free"] * 2})
    explorer.js(f"khot.set({masked})")
    assert "No solution" in explorer.text("main-note")
    assert explorer.js("document.getElementById('many').disabled")
    assert explorer.js("khot.solve(khot.problem()).y.every(Number.isNaN)")


def test_copying(explorer):
    explorer.js("document.execCommand = () => (window.copied = String(getSelection()), true)")
    explorer.js("navigator.clipboard && (navigator.clipboard.writeText = (text) => (window.copied = text, null))")
    explorer.click("copy")
    explorer.rest(50)
    assert explorer.js("window.copied").strip() == explorer.js("khot.code()")
    assert explorer.text("copy") == "Copied"


def test_everything_has_a_role_and_a_name(explorer):
    explorer.call("Accessibility.enable")
    for tab in ("row", "routers"):
        explorer.click(f"tab-{tab}")
        nodes = explorer.call("Accessibility.getFullAXTree")["nodes"]
        focusable = [
            (node["role"]["value"], node["name"]["value"])
            for node in nodes
            if any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", ()))
            and node["role"]["value"] != "RootWebArea"
        ]
        assert len(focusable) >= (20 if tab == "row" else 5)
        assert [node for node in focusable if not node[1]] == []
        images = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") in ("image", "img")]
        assert len(images) >= 3
        assert all(images)
        if tab == "row":
            assert [name for role, name in focusable if role == "slider"][2:] == [f"dot {i}" for i in range(1, 9)]
    explorer.call("Accessibility.disable")
    explorer.click("tab-row")
    explorer.rest(800)
    summary = explorer.js("document.querySelector('#summary[aria-live]').textContent")
    assert summary.startswith("sigmoid top-k, k 3, temperature 0.6, threshold 0.62. Dot 1: 0.95")


@pytest.mark.parametrize("width", [360, 390, 768, 1024, 1400])
def test_nothing_overflows(explorer, width):
    explorer.resize(width, 900)
    for address in ("", "#tab=routers", "#costs=4,4,4,4,4,4,4,4&is=pppnnnmm&k=31.9&T=100"):
        explorer.show(URL + address)
        assert explorer.js("document.documentElement.scrollWidth") <= width
        wide = explorer.js(
            "[...document.querySelectorAll('svg text')].filter((t) => { const b = t.getBoundingClientRect();"
            f" return b.width && (b.left < 0 || b.right > {width}); }}).map((t) => t.textContent)"
        )
        assert wide == []


def test_dark(explorer):
    def ground():
        return explorer.js("getComputedStyle(document.body).backgroundColor")

    light = ground()
    explorer.click("theme")
    dark = ground()
    assert dark != light
    explorer.prefer(color_scheme="dark", reduced_motion="reduce")
    explorer.show()
    assert ground() == dark


def test_in_a_page_of_the_docs(explorer, tmp_path):
    """It follows the colours of the page around it, and leaves its own title out."""
    (tmp_path / "explorer.html").write_bytes(EXPLORER.read_bytes())
    (tmp_path / "home.html").write_text(
        "<link rel=icon href=data:,><body data-md-color-scheme=slate><iframe src=explorer.html width=740 height=700>"
    )
    inner = "document.querySelector('iframe').contentDocument"
    with Server(tmp_path) as server:
        explorer.open(server.url + "home.html")
        explorer.wait(f"{inner}.querySelector('#dot-7')")
        assert explorer.js(f"{inner}.documentElement.dataset.theme") == "dark"
        explorer.js("document.body.dataset.mdColorScheme = 'default'")
        explorer.wait(f"{inner}.documentElement.dataset.theme === 'light'")
        assert explorer.js(f"{inner}.querySelector('header').offsetHeight") == 0
        assert explorer.js(f"{inner}.documentElement.scrollWidth") <= 740
        explorer.js(f"{inner}.getElementById('alone').onclick()")
        assert explorer.js(f"{inner}.getElementById('alone').href").startswith(server.url + "explorer.html")


def trained_by_khot(data, kind, rate, steps):
    """The simulation of the page with khot's own routes and autograd."""
    inputs, targets, weights, bias = (torch.tensor(data[name], dtype=torch.float64) for name in data)
    losses, loads = [], []
    for _ in range(steps):
        weights.requires_grad_(), bias.requires_grad_()
        logits = inputs @ weights + bias
        routes = {"softmax": routing.softmax_topk, "sigma": routing.sigma_topk, "balanced": routing.balanced_sigma_topk}
        chosen = routes[kind](logits, 2)
        share = chosen.weights if kind == "softmax" else chosen.weights / 2
        output = torch.zeros_like(targets).scatter(-1, chosen.indices, share)
        loss = (output - targets).square().sum(-1).mean()
        slopes = torch.autograd.grad(loss, (weights, bias))
        weights, bias = (p.detach() - rate * g for p, g in zip((weights, bias), slopes, strict=True))
        losses.append(float(loss.detach()))
        loads.append(routing.load(chosen).tolist())
    return torch.tensor(losses), loads


def trained_by_page(page, kind, rate, steps):
    found = page.js(
        f"(() => {{ const r = khot.newRouter('{kind}'), loads = [];"
        f" for (let i = 0; i < {steps}; i++) loads.push(khot.train(r, {rate}).load); return [r.losses, loads]; }})()"
    )
    return torch.tensor(found[0]), found[1]


@pytest.mark.parametrize(
    ("kind", "rate", "close"), [("softmax", 10, 1e-6), ("sigma", 30, 1e-6), ("balanced", 30, 1e-3)]
)
def test_the_routers_are_those_of_khot(explorer, kind, rate, close):
    """khot solves for prices to 1e-4 of a load only; the rest is exact."""
    data = explorer.js("khot.routerData()")
    losses, loads = trained_by_page(explorer, kind, rate, 60)
    wanted, wanted_loads = trained_by_khot(data, kind, rate, 60)
    torch.testing.assert_close(losses, wanted, atol=close, rtol=0)
    if kind != "balanced":
        assert loads == wanted_loads
    other, _ = trained_by_khot(data, "sigma" if kind == "softmax" else "softmax", rate, 60)
    assert (losses - other).abs().max() > 10 * close, "the comparison tells routers apart"


def test_what_the_page_says_of_routers_is_so(explorer):
    """The best of three learning rates for each; expert 8 stays dead under softmax, and comes back under σ_k."""
    for kind, best in (("softmax", 10), ("sigma", 30), ("balanced", 30)):
        runs = {rate: trained_by_page(explorer, kind, rate, 200) for rate in (4, 10, 30)}
        assert min(runs, key=lambda rate: runs[rate][0][-20:].mean()) == best
        alive = {rate: any(load[7] for load in loads) for rate, (_, loads) in runs.items()}
        wanted = {"softmax": (False, False, False), "sigma": (False, False, True), "balanced": (True, True, True)}
        assert tuple(alive.values()) == wanted[kind]
    explorer.show(URL + "#tab=routers")
    explorer.click("train")
    explorer.rest(100)
    said = explorer.text("router-said")
    assert "under softmax: still dead" in said
    assert "Under σ_k: back since step" in said
    explorer.click("train-reset")
    assert explorer.text("router-step") == "step 0"
