"""The explorer in a browser: its numbers against khot's, and what a person does with it."""

import json
import math

import pytest
import torch
from explorer_page import URL, Page, needs_browser

import khot

pytestmark = [pytest.mark.slow, pytest.mark.browser, needs_browser]

MEMBERS = ("sigmoid", "laplace", "normal", "cauchy", "euclidean", "power")
TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
INF = math.inf
CLOSE = 1e-9
SCORES = [2.4, 1.4, 0.9, 0.3, -0.3, -0.9, -1.6, -2.3]
COSTS = [2.0, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0, 2.0]
SOME = [True, True, False, True, True, False, True, True]
ROWS = [
    *({"x": SCORES, "k": k} for k in (0, 0.1, 1, 2.5, 3, 4, 7.9, 8)),
    {"x": [1.0, 1.0, 1.0, 0.5, 0.5, -2.0, -2.0, 3.0], "k": 3},  # ties
    {"x": [0.5] * 8, "k": 2.2},
    {"x": [3.0, -3.0, 2.99, -2.99, 0.01, 0.0, -0.01, 1.3], "k": 4.1},
    *({"x": SCORES, "k": k, "mask": SOME} for k in (0, 2.5, 3, 6)),
    *({"x": SCORES, "k": k, "costs": COSTS} for k in (0, 0.3, 3, 5.5, 9)),
    {"x": SCORES, "k": 4.2, "costs": COSTS, "mask": SOME},
    {"x": [INF, 1.4, -INF, 0.3, INF, -0.9, -1.6, -2.3], "k": 3},
    {"x": [INF, 1.4, -INF, 0.3, INF, -0.9, -1.6, -2.3], "k": 1.5},  # too many at +inf share k
    {"x": [INF, 1.4, -INF, 0.3, INF, -0.9, -1.6, -2.3], "k": 2},
    {"x": [INF, 1.4, -INF, 0.3, INF, -0.9, -1.6, -2.3], "k": 4.5, "costs": COSTS},
    {"x": SCORES, "k": 7, "mask": SOME},  # no solution
]


@pytest.fixture(scope="module")
def page():
    with Page() as page:
        yield page


@pytest.fixture
def explorer(page):
    """The page, afresh; afterwards, that it logged nothing and asked for nothing but itself."""
    page.reset()
    yield page
    page.rest(0)
    assert page.errors == []
    assert {url.partition("#")[0] for url in page.requests if not url.startswith("data:")} == {URL}


def solved_by_page(page, cases):
    """y, τ, z and the whole Jacobian of each case; numbers travel as strings, since JSON has no infinity."""
    script = """(() => {
      const text = (v) => Array.isArray(v) ? v.map(text) : String(v);
      return JSON.parse(%s, (_, v) => v === "inf" ? Infinity : v === "-inf" ? -Infinity : v).map((c) => {
        const solved = khot.solve(c);
        return [solved.y, solved.tau, solved.z, c.x.map((_, i) => khot.gradient(c, i, solved))].map(text);
      });
    })()"""
    plain = [case | {"x": [v if math.isfinite(v) else str(v) for v in case["x"]]} for case in cases]
    found = page.js(script % json.dumps(json.dumps(plain)))

    def number(value):
        return [number(v) for v in value] if isinstance(value, list) else float(value)

    return [[torch.tensor(number(part), dtype=torch.float64) for part in case] for case in found]


def solved_by_khot(case, member):
    """y, τ (of σ_k without costs, else None) and the Jacobian."""
    x = torch.tensor(case["x"], dtype=torch.float64, requires_grad=True)
    options = {"temperature": case["T"]}
    if "mask" in case:
        options["mask"] = torch.tensor(case["mask"])
    tau = khot.threshold(x, case["k"], **options).detach() if member == "sigmoid" and "costs" not in case else None
    if "costs" in case:
        options["costs"] = torch.tensor(case["costs"], dtype=torch.float64)
    y = getattr(khot, f"{member}_topk")(x, case["k"], **options)
    jacobian = torch.stack([torch.autograd.grad(v, x, retain_graph=True)[0] for v in y])
    return y.detach(), tau, jacobian


def distance(a, b):
    """The largest difference; 0 where both are the same infinity or both NaN, infinite where one alone is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(INF)).max())


def test_the_numbers_are_those_of_khot(explorer):
    """Values, thresholds and gradients, of all members, from T = 0.01 to 100."""
    cases = [row | {"T": T, "member": member} for member in MEMBERS for T in TEMPERATURES for row in ROWS]
    on_a_corner = 0
    for case, (y, tau, z, jacobian) in zip(cases, solved_by_page(explorer, cases), strict=True):
        wanted, threshold, slopes = solved_by_khot(case, case["member"])
        assert distance(y, wanted) <= CLOSE, case
        if threshold is not None:
            assert distance(tau, threshold) <= CLOSE, case
        near = (z.abs() < 1e-9) | ((z - 1).abs() < 1e-9)
        if case["member"] in ("euclidean", "power") and bool(near.any()):
            on_a_corner += 1  # F has two slopes there, and rounding decides
        elif not wanted.isnan().any():
            assert distance(jacobian, slopes) <= CLOSE, case
    assert on_a_corner <= 0.02 * len(cases)


def test_a_wrong_member_is_found_out(explorer):
    """The comparison above tells members, temperatures and a small change of a score apart."""
    case = {"x": SCORES, "k": 3, "T": 2.0}
    for member in MEMBERS:
        ((y, _, _, jacobian),) = solved_by_page(explorer, [case | {"member": member}])
        for other in MEMBERS:
            wanted, _, slopes = solved_by_khot(case, other)
            if other != member:
                assert min(distance(y, wanted), distance(jacobian, slopes)) > 1e-3
        wanted, _, _ = solved_by_khot(case | {"x": [*SCORES[:3], 0.3 + 1e-7, *SCORES[4:]]}, member)
        assert distance(y, wanted) > CLOSE


@pytest.mark.parametrize("k", [3, 2.5])
def test_pivotal_samples_have_the_probabilities_asked_for(explorer, k):
    """With 40,000 draws and seed 7, and Gumbel top-k as the control that must fail."""
    draws = 40_000
    script = """(() => {
      const p = khot.solve({x: %s, k: %s, T: 0.6, member: "sigmoid"}).y, uniform = khot.random(7), sizes = {};
      const count = (draw) => {
        const counts = p.map(() => 0);
        for (let i = 0; i < %d; i++) {
          const one = draw(p, uniform), size = one.reduce((a, b) => a + b);
          one.forEach((v, j) => counts[j] += v);
          if (draw === khot.pivotal) sizes[size] = (sizes[size] || 0) + 1;
        }
        return counts;
      };
      return {p, pivotal: count(khot.pivotal), gumbel: count(khot.gumbelTopK), sizes};
    })()"""
    found = explorer.js(script % (SCORES, k, draws))
    p = torch.tensor(found["p"], dtype=torch.float64)

    def deviation(counts):  # in standard deviations of a binomial share, the worst item
        return float(((torch.tensor(counts) / draws - p).abs() / (p * (1 - p) / draws).sqrt()).max())

    assert deviation(found["pivotal"]) < 4  # 5e-4 for eight items
    assert deviation(found["gumbel"]) > 20
    assert {int(size) for size in found["sizes"]} == {math.floor(k), math.ceil(k)}


STATES = (
    {},
    {"k": 2.5, "T": 0.07, "member": "normal"},
    {"x": [1.0, 2.0, 0.0, -1.0, 3.0, -3.0, 0.25, 1.5], "T": 100, "member": "cauchy", "selected": 7},
    {"kinds": ["+inf", "mask", "free", "-inf", "free", "free", "mask", "free"], "member": "power"},
    {"costs": COSTS, "k": 5.5, "kinds": ["free", "mask", *["free"] * 6], "member": "euclidean"},
    {"costs": [0.5] * 8, "k": 0, "tab": "row"},
)


@pytest.mark.parametrize("state", STATES)
def test_the_printed_code_runs_and_gives_the_picture(explorer, state):
    explorer.js(f"khot.set({json.dumps(state)})")
    shown = torch.tensor(explorer.js("khot.solve(khot.problem()).y"), dtype=torch.float64)
    for dtype, close in ((torch.float32, 1e-5), (torch.float64, CLOSE)):
        torch.set_default_dtype(dtype)
        try:
            names = {}
            exec(explorer.text("code"), names)
            exec(explorer.text("sample-code"), names)
        finally:
            torch.set_default_dtype(torch.float32)
        assert distance(names["y"].double(), shown) <= close
        assert names["samples"].shape == (1000, 8)


@pytest.mark.parametrize("state", STATES)
def test_the_address_holds_the_state(explorer, state):
    explorer.js(f"khot.set({json.dumps(state)})")
    explorer.rest()
    address, before = explorer.js("location.href"), explorer.js("JSON.stringify(khot.problem())")
    explorer.show(address)
    assert explorer.js("JSON.stringify(khot.problem())") == before
    assert explorer.js("khot.state().selected") == state.get("selected", 3)
    assert explorer.js("location.hash.slice(1) === khot.toHash()")


def test_a_bad_address_is_harmless(explorer):
    usual = explorer.js("JSON.stringify(khot.problem())")
    explorer.show(URL + "#x=1,a&k=99&T=-1&member=__proto__&is=zzz&costs=0&dot=1e9&tab=%3Cimg%3E")
    assert explorer.js("JSON.stringify(khot.problem())") == usual


def test_the_story(explorer):
    said = set()
    for step in range(1, 7):
        explorer.js(f"document.querySelector('[data-step=\"{step}\"]').click()")
        assert explorer.js("document.querySelector('#story [aria-pressed=true]').dataset.step") == str(step)
        said.add(explorer.text("said"))
        y = explorer.js("khot.solve(khot.problem()).y")
        state = explorer.js("({...khot.state(), uniform: null})")
        match step:
            case 1:
                assert y == pytest.approx([1, 1, 1, 0, 0, 0, 0, 0], abs=1e-6)
            case 2:
                assert y == pytest.approx([3 / 8] * 8, abs=0.06)  # at once, since no motion is wanted
            case 3:
                slopes = explorer.js("khot.gradient(khot.problem(), khot.state().selected)")
                assert state["selected"] not in sorted(range(8), key=lambda i: -y[i])[:3]
                assert all(abs(v) > 1e-4 for v in slopes)
            case 4:
                assert sum(y) == pytest.approx(2.5)
            case 5:
                assert y.count(0) >= 2
                assert y.count(1) >= 1
            case 6:
                assert state["counts"]["draws"] == 5000
    assert len(said) == 6
    assert all(said)


def test_an_address_may_start_the_story(explorer):
    explorer.show(URL + "#step=5&theme=dark")
    assert explorer.js("document.querySelector('#story [aria-pressed=true]').dataset.step") == "5"
    assert explorer.js("khot.state().member") == "euclidean"
    assert explorer.js("document.documentElement.dataset.theme") == "dark"


def test_melting_takes_time_unless_no_motion_is_wanted(explorer):
    explorer.prefer(color_scheme="light", reduced_motion="no-preference")
    explorer.js("document.querySelector('[data-step=\"2\"]').click()")
    seen = []
    for _ in range(60):
        seen.append(explorer.js("khot.state().T"))
        if seen[-1] == 10:
            break
        explorer.rest(100)
    assert seen[-1] == 10
    assert seen == sorted(seen)
    assert len(set(seen)) > 5
