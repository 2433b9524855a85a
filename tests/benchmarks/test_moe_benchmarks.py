"""The mixture-of-experts benchmarks measure what they say."""

import math
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from benchmarks import common, moe, moe_speed
from benchmarks import moe_problems as problems
from benchmarks import moe_text as language
from benchmarks import moe_theory as theory
from benchmarks.common import ROOT
from khot.bench import Settings, measure
from khot.nn import MoE, Router, routing

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Theory --------------------------------------------------------------------------------------------------------------


def test_the_voronoi_loss_of_known_cases():
    true = theory.truth()
    assert theory.voronoi_loss(true, true, 2) == 0
    swapped = theory.Model(*(value.flip(-1) for value in true))
    assert theory.voronoi_loss(swapped, true, 2) == 0  # the order of experts does not matter
    shifted = true._replace(a=true.a + torch.tensor([0.5, 0.25]))
    first, second = 0.5 * math.exp(-8), 0.25
    assert float(theory.voronoi_loss(shifted, true, 2)) == pytest.approx(first + second)
    assert float(theory.voronoi_loss(shifted, true, 1)) == pytest.approx(second)  # K = 1: the greatest cell
    heavier = true._replace(intercept=true.intercept + torch.tensor([0.0, 0.1]))
    assert float(theory.voronoi_loss(heavier, true, 2)) == pytest.approx(math.exp(0.1) - 1)


def test_two_fitted_experts_in_one_cell_leave_the_other_empty():
    true = theory.truth()
    both = theory.Model(*(value[1:].expand(2) for value in true))
    assert float(theory.voronoi_loss(both, true, 2)) == pytest.approx(1 + math.exp(-8))


@pytest.mark.parametrize("active", theory.ACTIVE)
def test_the_truth_is_found_in_much_data(active):
    true, generator = theory.truth(), seeded()
    x, y = theory.sample(true, active, (3, 50_000), generator)
    fitted, steps = theory.fit(x, y, theory.start(true, 3, 50_000, generator), active)
    assert steps < 100
    assert theory.voronoi_loss(fitted, true, active).max() < 0.1
    torch.testing.assert_close(fitted.a, true.a.expand(3, 2), rtol=0, atol=0.1)
    torch.testing.assert_close(fitted.variance, true.variance.expand(3, 2), rtol=0.05, atol=0)
    if active == 2:  # with one expert a point, the gate's slope is not identified
        assert (fitted.slope[:, 0] - 25).abs().max() < 2


def test_the_likelihood_never_falls():
    true, generator = theory.truth(), seeded(3)
    x, y = theory.sample(true, 1, (4, 500), generator)
    model, before = theory.start(true, 4, 500, generator), -torch.inf
    for _ in range(5):
        model, value = theory.hard_step(model, x, y)
        assert (value >= before - 1e-12).all()
        before = value


def test_the_slope_is_that_of_the_theory():
    rows = [row for found in theory.run((200, 800, 3200, 12_800), 10) for row in found]
    for active in theory.ACTIVE:
        assert theory.slope([row for row in rows if row.active == active])[0] == pytest.approx(-0.5, abs=0.15)
    assert "<svg" in common.svg(theory.figure(rows))


def test_a_wrong_gate_does_not_converge():
    """A negative control: samples of a softmax gate, fit with one expert for each point."""
    true, losses = theory.truth(), []
    for size in (1000, 16_000):
        x, y = theory.sample(true, 2, (5, size), seeded(size))
        fitted, _ = theory.fit(x, y, theory.start(true, 5, size, seeded(1)), 1)
        losses.append(float(theory.voronoi_loss(fitted, true, 1).mean()))
    assert losses[1] > 0.5 * losses[0] > 0.5


def test_the_slopes_in_the_repository():
    lines = (ROOT / "benchmarks" / "results" / "moe_theory.csv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [
        theory.Row(*(kind(v) for kind, v in zip((int, int, int, float, float, int), line.split(","), strict=True)))
        for line in lines
    ]
    assert len(rows) == len(theory.ACTIVE) * len(theory.SIZES) * theory.REPETITIONS
    for active in theory.ACTIVE:
        assert theory.slope([row for row in rows if row.active == active])[0] == pytest.approx(-0.5, abs=0.1)


# Routers -------------------------------------------------------------------------------------------------------------


def final(name, make, k, steps, setting, seed=0):
    ((_, (found,)),) = problems.train(name, make, k, [(seed, setting)], steps=steps, when=[steps])
    return found


@pytest.mark.parametrize("problem", problems.PROBLEMS)
@pytest.mark.parametrize("router", problems.ROUTERS)
def test_mixtures_at_once_are_those_of_the_layer(router, problem):
    """Outputs, losses of the load and all gradients of two members, beside `khot.nn.MoE` for each."""
    contender, p, k = problems.ROUTERS[router], problems.PROBLEMS[problem](0), 2
    models = problems.Mixtures(contender, k, p, [3, 4], [0.5, 0.2]).eval()  # without noise
    x = torch.stack([p.x[:40], p.x[40:80]])
    output, found = models(x)
    routings = [routing.Routing(*parts) for parts in zip(*found, strict=True)] if contender.cure else found
    output.square().sum().backward()
    for i, temperature in enumerate([0.5, 0.2]):
        router = Router(p.x.shape[-1], 8, k, route=contender.route(k), biased=contender.biased)
        linear = [torch.nn.Linear(p.x.shape[-1], p.hidden or p.outputs) for _ in range(8)]
        more = [torch.nn.Linear(p.hidden, p.outputs) for _ in range(8)] if p.hidden else []
        experts = [torch.nn.Sequential(a, torch.nn.ReLU(), b) for a, b in zip(linear, more, strict=False)] or linear
        with torch.no_grad():
            router.weight.copy_(models.weight[i].mT / temperature)
            for j, layer in enumerate(more or linear):
                layer.weight.copy_(models.experts.w2[i, j].mT)
                layer.bias.copy_(models.experts.b2[i, j])
            for j, layer in enumerate(linear if more else ()):
                layer.weight.copy_(models.experts.w1[i].unflatten(-1, (8, -1))[:, j].mT)
                layer.bias.copy_(models.experts.b1[i, 0].unflatten(-1, (8, -1))[j])
        layer = MoE(router, experts).eval()
        expected = layer(x[i])
        torch.testing.assert_close(output[i], expected.output, rtol=1e-4, atol=1e-5)
        assert torch.equal(routing.load(routings[i]), routing.load(expected.routing))
        expected.output.square().sum().backward()
        torch.testing.assert_close(models.weight.grad[i].mT * temperature, router.weight.grad, rtol=1e-3, atol=1e-4)
        slopes = torch.stack(
            [torch.zeros_like(e.weight) if e.weight.grad is None else e.weight.grad for e in more or linear]
        )
        torch.testing.assert_close(models.experts.w2.grad[i].mT, slopes, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2])
def test_balanced_members_in_training_are_those_of_the_route(k):
    """Their prices are found together, and from those of the batch before."""
    p = problems.regression(0)
    models = problems.Mixtures(problems.ROUTERS["balanced_sigma_topk"], k, p, [3, 4], [0.3, 0.1])
    for start in (0, 256):
        found = models(torch.stack([p.x[start : start + 256]] * 2))[1]
        for i, logits in enumerate(found.logits):
            expected = routing.balanced_sigma_topk(logits, k, normalize=k > 1)
            torch.testing.assert_close(found.probs[i], expected.probs, rtol=0, atol=2e-3)
            mine, theirs = (problems._dense(each) for each in (routing.Routing(*(v[i] for v in found)), expected))
            same = (mine > 0).eq(theirs > 0).all(-1)  # a tie within the tolerance may be decided the other way
            assert same.float().mean() > 0.98
            torch.testing.assert_close(mine[same], theirs[same], rtol=0, atol=5e-3)
            slopes = [
                torch.autograd.grad(each.square().sum(), found.logits, retain_graph=True)[0][i]
                for each in (mine, theirs)
            ]
            torch.testing.assert_close(slopes[0][same], slopes[1][same], rtol=0.02, atol=0.02)


def test_members_do_not_touch_each_other():
    setting = problems.Setting(0.03, 0.3, 0.01)
    ((_, both),) = problems.train(
        "sigma_topk", problems.regression, 2, [(0, setting), (1, setting)], steps=30, when=[30]
    )
    assert [final("sigma_topk", problems.regression, 2, 30, setting, seed).error for seed in (0, 1)] == pytest.approx(
        [each.error for each in both], rel=1e-3
    )
    assert both[0].error != pytest.approx(both[1].error, rel=1e-3)


@pytest.mark.parametrize(("name", "steps"), [("regression", 120), ("digits", 150)])
def test_sigma_topk_soon_beats_the_linear_model(name, steps):
    problem = problems.PROBLEMS[name]
    ours = final("sigma_topk", problem, 2, steps, problems.Setting(0.03, 0.3, 0.01))
    linear = final("linear", problem, 2, steps, problems.Setting(0.03))
    assert ours.error < 0.9 * linear.error
    assert ours.active == 2
    assert ours.dead == 0


def test_a_router_that_sees_nothing_is_no_better_than_a_linear_model():
    """A negative control: all scores are 0, so that all tokens go to the same two experts."""
    problem = problems.regression
    blind = final("sigma_topk", problem, 2, 120, problems.Setting(0.03, math.inf))
    linear = final("linear", problem, 2, 120, problems.Setting(0.03))
    assert blind.error == pytest.approx(linear.error, rel=0.05)
    assert blind.dead == 6
    assert blind.violation == pytest.approx(3)
    assert blind.entropy == pytest.approx(math.log(8))


def test_test_data_is_apart():
    for make in problems.PROBLEMS.values():
        p = make(0)
        assert not (p.x[:, None] == p.test_x[None, :50]).all(-1).any()
    scored = {tuple(row) for row in (16 * problems.digits(0).test_x + 16 * _mean(0)).round().int().tolist()}
    chosen = {tuple(row) for row in (16 * problems.digits(1000).test_x + 16 * _mean(1000)).round().int().tolist()}
    assert not scored & chosen  # settings are not chosen on what is scored


def _mean(seed):
    from sklearn.datasets import load_digits

    order = torch.randperm(1797, generator=seeded())[: 1257 if seed == 1000 else 1797]
    images = torch.as_tensor(load_digits().data).float() / 16
    return images[order[: 1257 * len(order) // 1797]].mean(0)


def test_the_dense_network_is_as_large_as_what_a_token_meets():
    p = problems.digits(0)
    size = sum(w.numel() for w in problems.Plain(problems.units(p, 2), p, [0]).parameters())
    meets = 64 * 8 + 2 * (64 * 16 + 16 + 16 * 10 + 10)
    assert size == pytest.approx(meets, rel=0.02)


ABOUT = {"problem": "regression", "router": "sigma_topk", "rate": 0.03, "temperature": 0.3, "error": 0.25}
MEASURES = {"violation": 0.5, "dead": 1, "entropy": 1.5, "active": 1.0}


def a_row(**changes):
    return moe.Row(**{**ABOUT, **MEASURES, "k": 1, "seed": 0, "step": 10, "balance": 0.0, **changes})


def test_rows_survive_the_file():
    rows = [a_row(), a_row(router="sigma_topk, sampled", balance=0.01)]
    assert moe.from_csv(moe.to_csv(rows)) == rows


def test_the_table_says_who_is_behind():
    rows = [a_row(router=name, seed=s, error=e + 0.01 * s) for s in range(3) for name, e in ERRORS.items()]
    text = moe.table(rows)
    assert "The first router is `softmax_topk`." in text
    assert "`sigma_topk` is behind by more than two standard errors of the difference, 10.00 ± 0.00" in text
    assert "Behind the linear model: `noisy_topk`." in text
    near = [
        replace(row, error=row.error - 0.09 - 0.05 * row.seed) if row.router == "sigma_topk" else row for row in rows
    ]
    assert "`sigma_topk`" in moe.table(near)
    assert "behind by more" not in moe.table(near)


ERRORS = {"softmax_topk": 0.2, "sigma_topk": 0.3, "noisy_topk": 0.9, "linear": 0.7}


def test_the_table_is_that_of_the_results():
    rows = moe.from_csv((ROOT / "benchmarks" / "results" / "moe.csv").read_text(encoding="utf-8"))
    runs = Counter((row.problem, row.k, row.router) for row in rows)
    assert set(runs.values()) == {len(moe.FULL.seeds)}  # as many of each
    page = (ROOT / "docs" / "tables" / "moe.md").read_text(encoding="utf-8")
    assert page == moe.table(rows)
    for name, k in moe.CASES:
        for router, contender in moe.ROUTERS.items():  # each is in the table of its case, or named below it
            part = page.split(f"**{moe.TITLES[name]}, k = {k} of 8**")[1].split("**")[0]
            assert contender.least > k or f"`{router}`" in part


def a_trial(**changes):
    return moe.Trial(**{**ABOUT, "k": 2, "seed": 1003, "steps": 2, "balance": 0.01, **changes})


def test_the_best_setting_is_that_of_the_last_stage():
    few = [a_trial(seed=1000, temperature=t, error=e) for t, e in {1.0: 0.1, 0.3: 0.2}.items()]
    last = [
        a_trial(seed=s, temperature=t, error=e + s % 2) for t, e in {1.0: 0.3, 0.3: 0.2}.items() for s in (1003, 1004)
    ]
    found = moe.chosen(moe.FULL, [*few, *last])
    assert found["regression", 2, "sigma_topk"] == problems.Setting(0.03, 0.3, 0.01)
    assert [setting.temperature for setting in moe.ranked(few)] == [1.0, 0.3]
    assert moe.from_csv(moe.to_csv(few, moe.Trial), moe.Trial) == few


def test_no_stage_of_the_tuning_has_seeds_of_another_or_scored_ones():
    seeds = [*moe.FULL.seeds, *(seed for stage in moe.FULL.stages for seed in stage.seeds)]
    assert len(set(seeds)) == len(seeds)
    assert {seed for stage in moe.FULL.stages for seed in stage.seeds} == set(problems.TUNING)


def test_the_settings_of_the_results_are_those_of_the_tuning():
    results = ROOT / "benchmarks" / "results"
    trials = moe.from_csv((results / "moe_tuning.csv").read_text(encoding="utf-8"), moe.Trial)
    settings = moe.chosen(moe.FULL, trials)
    for row in moe.from_csv((results / "moe.csv").read_text(encoding="utf-8")):
        assert problems.Setting(row.rate, row.temperature, row.balance) == settings[row.problem, row.k, row.router]
    runs = Counter((trial.problem, trial.k, trial.router, trial.seed) for trial in trials)
    for case in moe.cases():  # the same tuning for each: all settings, then a few
        tried = len(problems.grid(case[2], problems.PROBLEMS[case[0]](0)))
        for stage in moe.FULL.stages:
            assert {runs[*case, seed] for seed in stage.seeds} == {min(tried, stage.settings or tried)}


def test_a_short_run(monkeypatch):
    monkeypatch.setattr(moe, "CASES", (("regression", 2),))
    few = {"sigma_topk, sampled late": problems.ROUTERS["sigma_topk, sampled late"]}
    with monkeypatch.context() as context:
        context.setattr(moe, "ROUTERS", few)
        stages = tuple(replace(stage, steps=2) for stage in moe.STAGES)
        plan = moe.Plan(seeds=(0,), steps=2, points=1, stages=stages)
        tried = list(moe.tune(plan))
        assert [len(trials) for trials in tried] == [36, 40, 12, 40, 12, 40]  # dense and linear have four settings
        known = [trial for trials in tried for trial in trials]
        assert not list(moe.tune(plan, known=known))
        assert [len(trials) for trials in moe.tune(plan, known=known[36:])] == [36]
    plan = moe.Plan(seeds=(0,), steps=2, points=1, stages=())
    rows = [row for found in moe.run(plan, moe.chosen(plan, [])) for row in found]
    assert {row.router for row in rows} == {*moe.ROUTERS, *moe.DENSE}
    assert "<svg" in common.svg(moe.figure(rows))


# Speed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [moe_speed.models, moe_speed.beside_transformers])
def test_the_contenders_of_the_speed_table_agree(make, monkeypatch):
    if make is moe_speed.beside_transformers:
        pytest.importorskip("transformers")
    for name, value in {"DIM": 8, "HIDDEN": 12, "TOKENS": 40}.items():
        monkeypatch.setattr(moe_speed, name, value)
    x, models = torch.randn(40, 8), make()
    outputs = [call(x) for _, call in models.values()]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=0, atol=1e-5)
    report = measure(moe_speed.contenders(models), Settings(shape=(40, 8), k=2, backward=False, budget=0.01))
    assert not [r.skipped for r in report.results if r.skipped]
    assert moe_speed.table([report], models, "").count("\n| ") == len(models) + 2


# Text ----------------------------------------------------------------------------------------------------------------


def first_scores(route, later):
    torch.manual_seed(0)
    model = language.Characters(5, problems.Contender(lambda k: route), 2).eval()
    text = torch.randint(5, (8, language.CONTEXT), generator=seeded())
    text[:, 32:] = text[:, 32:] if later is None else later
    with torch.no_grad():
        return model(text)[0][:, :32]


def test_expert_choice_by_position_does_not_see_later_characters():
    for route, is_causal in (
        (language.by_position, True),
        (routing.softmax_topk, True),
        (routing.expert_choice, False),
    ):
        scores = [first_scores(route, later) for later in (None, 0)]
        assert torch.allclose(*scores, atol=1e-5) is is_causal


def test_experts_by_position_have_equal_loads():
    found = language.by_position(torch.randn(16 * language.CONTEXT, 8, generator=seeded()), 2)
    assert routing.load(found).tolist() == [4 * language.CONTEXT] * 8


def test_a_run_of_text_continues_and_its_table_is_paired():
    text = language.encode((ROOT / "examples" / "shakespeare.txt").read_text(encoding="utf-8")[:30_000])
    plan = language.Plan(seeds=(0,), steps=1)
    first = next(language.run(text, plan, ()))
    assert (first.router, first.k, first.dead) == ("dense", 2, 0)
    second = next(language.run(text, plan, (first,)))
    assert (second.router, second.k, second.active) == ("softmax_topk", 2, 2)
    assert math.log(20) < second.loss < math.log(200)
    assert language.from_csv(common.to_csv([second], [field.name for field in fields(second)], digits=17)) == [second]
    rows = [
        replace(second, router=name, seed=seed, loss=loss + seed)
        for name, loss in {"softmax_topk": 1.5, "sigma_topk": 1.25}.items()
        for seed in range(3)
    ]
    page = language.table(rows, len(text))
    assert page.index("sigma_topk") < page.index("softmax_topk")
    assert "0.250 ± 0.000" in page  # of pairs: the seeds differ by far more
    more = [replace(row, router="dselect_k", loss=row.loss - 1, active=3.0) for row in rows[:3]]
    assert "-0.750 ± 0.000" in language.table(rows + more, len(text)), "a router of more experts is no measure"


def test_a_run_of_little_text_and_of_some_routers():
    text = language.encode((ROOT / "examples" / "shakespeare.txt").read_text(encoding="utf-8")[:20_000])
    plan = language.Plan(seeds=(0,), steps=2)
    few, all_of_it = (
        list(language.run(text, plan, (), first=n, only=["sigma_topk", "sigma_topk, margin"])) for n in (100, None)
    )
    for rows in (few, all_of_it):
        assert [(row.router, row.k) for row in rows] == [
            (name, k) for k in (2, 1) for name in ("sigma_topk", "sigma_topk, margin")
        ]
    assert few[0].loss != all_of_it[0].loss
