"""The mixture-of-experts benchmarks measure what they say."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import common, moe, moe_speed
from benchmarks import moe_problems as problems
from benchmarks import moe_theory as theory
from benchmarks.common import ROOT
from khot.bench import Settings, measure

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


def final(name, problem, k, steps, setting, seed=0):
    ((_, found),) = problems.train(name, problem, k, setting, seed=seed, steps=steps, when=[steps])
    return found


@pytest.mark.parametrize(("name", "steps"), [("regression", 120), ("digits", 150)])
def test_sigma_topk_soon_beats_the_linear_model(name, steps):
    problem = problems.PROBLEMS[name](0)
    ours = final("sigma_topk", problem, 2, steps, problems.Setting(0.03, 0.3, 0.01))
    linear = final("linear", problem, 2, steps, problems.Setting(0.03))
    assert ours.error < 0.9 * linear.error
    assert ours.active == 2
    assert ours.dead == 0


def test_a_router_that_sees_nothing_is_no_better_than_a_linear_model():
    """A negative control: all scores are 0, so that all tokens go to the same two experts."""
    problem = problems.regression(0)
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
    size = sum(w.numel() for w in problems.dense(p, 2).parameters())
    meets = 64 * 8 + 2 * sum(w.numel() for w in p.expert().parameters())
    assert size == pytest.approx(meets, rel=0.02)


def a_row(**changes):
    row = moe.Row(
        problem="regression",
        k=1,
        router="sigma_topk",
        seed=0,
        step=10,
        rate=0.03,
        temperature=0.3,
        balance=0.0,
        error=0.25,
        violation=0.5,
        dead=1,
        entropy=1.5,
        active=1.0,
    )
    return replace(row, **changes)


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
    lines = sum(contender.least <= k for _, k in moe.CASES for contender in moe.ROUTERS.values())
    assert len(rows) == (lines + len(moe.CASES) * len(moe.DENSE)) * len(moe.FULL.seeds)
    assert (ROOT / "docs" / "tables" / "moe.md").read_text(encoding="utf-8") == moe.table(rows)


def test_a_short_run(monkeypatch):
    monkeypatch.setattr(moe, "CASES", (("regression", 2),))
    plan = moe.Plan(seeds=(0,), steps=2, points=1, tuning_steps=0)
    rows = list(moe.run(plan))
    assert {row.router for row in rows} == {*moe.ROUTERS, *moe.DENSE}
    assert "<svg" in common.svg(moe.figure(rows))


# Speed ---------------------------------------------------------------------------------------------------------------


def test_the_contenders_of_the_speed_table_agree(monkeypatch):
    for name, value in {"DIM": 8, "HIDDEN": 12, "TOKENS": 40}.items():
        monkeypatch.setattr(moe_speed, name, value)
    x = torch.randn(40, 8)
    outputs = [call(x) for _, call in moe_speed.models().values()]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=0, atol=1e-5)
    report = measure(moe_speed.contenders(), Settings(shape=(40, 8), k=2, backward=False, budget=0.01))
    assert not [r.skipped for r in report.results if r.skipped]
    assert moe_speed.table([report]).count("\n| ") == 6
