"""The two learning problems: regression by subset selection, and a k-subset autoencoder."""

import csv
import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import learners, learning, learning_report, regression, vae
from benchmarks.learners import LEARNERS
from benchmarks.learning import BUDGET, TUNING_SEED, Effort, run, train
from benchmarks.vae import Digits, digits

pytestmark = pytest.mark.slow

TINY = Effort(seeds=(0, 1), steps=4, points=2, rates=(0.1,), tuning_seeds=0, tuning_steps=0)
STUDIES = [regression.STUDY, vae.STUDY]
studies = pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)


@pytest.fixture(autouse=True)
def _few_held_out(monkeypatch):
    """Plackett–Luce's probabilities take a millisecond each."""
    few = Digits(*(part[:size] for part, size in zip(digits(), (1197, 20, 20), strict=True)))
    monkeypatch.setattr(vae, "digits", lambda: few)


@pytest.mark.slow
@studies
def test_rows_for_every_estimator_seed_and_point(study):
    rows = run(study, settings=TINY)
    expected = list(itertools.product(LEARNERS, (0, 2, 4), (0, 1)))
    assert [(row.estimator, row.step, row.seed) for row in rows] == expected
    assert all(row.evaluations == BUDGET * row.step for row in rows)
    assert all(torch.tensor([row.test]).isfinite() for row in rows)
    start = {(row.seed, row.test) for row in rows if row.step == 0 and "relaxed" not in row.estimator}
    if study is regression.STUDY:
        assert len(start) == 2  # all begin alike
    lines = learning_report.ranking(study, rows)
    assert [line.rank for line in lines] == list(range(1, len(LEARNERS) + 1))
    assert {line.evaluations for line in lines} == {4 * BUDGET}
    assert lines[0].behind == 0
    assert sum(line.wins for line in lines) >= 2


@pytest.mark.slow
@studies
def test_the_same_call_gives_the_same_rows(study):
    names = ("straight_through", "imle", "relaxed", "score", "taylor")
    state = torch.random.get_rng_state()
    first = run(study, names, TINY)
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's own generator is left alone
    torch.manual_seed(7)
    assert run(study, names, TINY) == first
    assert run(study, names, replace(TINY, seeds=(2, 3))) != first


@pytest.mark.parametrize("name", LEARNERS)
@studies
def test_every_estimator_evaluates_the_objective_as_often(study, name):
    """Counted by a wrapper around the objective itself, beside the count of the rows."""
    models = study.problem((0, 1, 2))
    seen = []

    def step(parameters):
        theta, fn, extra = models.step(parameters)
        rows = theta.shape[:-1]

        def counted(x):
            assert x.shape[-len(theta.shape) :] == theta.shape
            seen.append(x.shape[:-1].numel() / rows.numel())
            return fn(x)

        return theta, counted, extra

    learner = LEARNERS[name]
    runs = train(models._replace(step=step), learner, [0.1] * 3, learner.knobs[0], 3, {3})
    ((_, evaluations, _),) = runs
    assert sum(seen) == evaluations == 3 * BUDGET


def test_a_greedy_estimator_is_found_out(monkeypatch):
    """A negative control: one sample more, and the rows say so."""
    more = LEARNERS["taylor"]._replace(at_mean=0)
    monkeypatch.setitem(learning.LEARNERS, "taylor", more)
    assert run(regression.STUDY, ("taylor",), TINY)[-1].evaluations == 4 * (BUDGET + 1)


@pytest.mark.parametrize("name", ["straight_through", "simple", "rloo"])
def test_regression_is_learned(name):
    rows = run(regression.STUDY, (name,), replace(TINY, seeds=(0, 1, 2, 3), steps=80, points=1))
    first, last = (
        {
            key: sum(getattr(row, key) for row in rows if row.step == step) / 4
            for key in ("test", "expected", "recovery")
        }
        for step in (0, 80)
    )
    assert last["test"] < 0.7 * first["test"]
    assert last["expected"] < 0.7 * first["expected"]
    assert last["recovery"] > first["recovery"] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["straight_through", "simple", "rloo"])
def test_the_autoencoder_learns(name):
    rows = run(vae.STUDY, (name,), replace(TINY, seeds=(0,), steps=60, points=1, rates=(0.01,)))
    assert rows[1].test < 0.7 * rows[0].test
    assert rows[1].test == pytest.approx(rows[1].reconstruction + rows[1].divergence)
    assert rows[1].divergence >= 0


@studies
def test_an_interruption_keeps_what_there_is(study):
    def stop(label, done, total):
        assert total == 8
        if done == 6:
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    rows = run(study, ("simple", "rloo"), TINY, on_progress=stop)
    assert [(row.estimator, row.step) for row in rows[::2]] == [
        *(("simple", step) for step in (0, 2, 4)),
        *(("rloo", step) for step in (0, 2)),
    ]
    assert torch.get_num_threads() == threads
    ranked = [line.estimator for line in learning_report.ranking(study, rows)]
    assert ranked == ["simple"]  # only what got to the end is ranked
    assert learning_report.ranking(study, []) == []


def test_settings_are_the_best_on_other_seeds():
    asked = []

    def problem(seeds):
        asked.append(tuple(seeds))
        return regression.problem(seeds)

    settings = Effort(seeds=(0,), steps=20, points=1, rates=(1e-6, 0.1), tuning_seeds=2, tuning_steps=20)
    labels = []
    study = replace(regression.STUDY, problem=problem)
    rows = run(study, ("relaxed",), settings, lambda label, done, total: labels.append((label, done)))
    assert asked == [(0,), *[(TUNING_SEED, TUNING_SEED + 1) * 2] * 3]
    assert {row.rate for row in rows} == {0.1}
    assert rows[0].knob in LEARNERS["relaxed"].knobs
    assert [done for _, done in labels] == list(range(80))
    assert [labels[0][0], labels[-1][0]] == ["relaxed, its settings", "relaxed"]


def test_training_is_that_of_adam():
    """A learning rate for each model is that of torch's Adam for it alone."""
    fixed = learners.Learner(learners.poisson, lambda _: lambda design, shape, *, generator: design.mean[None])
    models = regression.problem((0, 1))
    ((*_, (theta,)),) = train(models, fixed, [0.1, 0.02], 0.0, 10, {10})
    for i, rate in enumerate((0.1, 0.02)):
        alone, x = regression.problem((i,)), torch.zeros(1, regression.N, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([x], lr=rate, eps=1e-12 / rate)
        for _ in range(10):
            _, fn, _ = alone.step([x])
            adam.zero_grad()
            fn(learners.poisson(x, regression.K).mean).sum().backward()
            adam.step()
        torch.testing.assert_close(theta[i], x[0].detach(), rtol=1e-9, atol=1e-12)


def test_the_baseline_is_the_mean_of_earlier_losses():
    seen = []

    def spy(design, fn, *, baseline, **options):
        seen.append(baseline)
        return fn(design.sample((2,), generator=options["generator"])).mean()

    score = learners.MovingAverage(decay=0.5)
    design = learners.poisson(torch.zeros(3, 7, 4, requires_grad=True), 2)
    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners.estimators, "score_function", spy)
        for value in (4.0, 2.0, 0.0):
            score(design, lambda x, v=value: x.sum(-1) * 0 + v, num_samples=2, generator=generator)
    assert [b.shape for b in seen] == [(3, 1), (3, 1)]
    assert [float(b[0, 0]) for b in seen] == [4.0, 3.0]


def test_the_objective_is_ridge_regression_on_the_subset():
    """Against the normal equations of the chosen columns, and the exact risk against new data."""
    d = regression.data((3,))
    x = torch.zeros(1, regression.N, dtype=torch.float64)
    chosen = [1, 7, 8, 20, 49]
    x[0, chosen] = 1
    gram = d.gram[0][chosen][:, chosen] + regression.RIDGE * torch.eye(5, dtype=torch.float64)
    w = torch.linalg.solve(gram, d.cross[0, chosen])
    torch.testing.assert_close(regression.weights(d, x)[0, chosen], w)
    value = (d.power[0] - d.cross[0, chosen] @ w) / regression.EXAMPLES
    torch.testing.assert_close(regression.objective(d)(x)[0], value)
    leaf = torch.rand(1, regression.N, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(regression.objective(d), leaf)
    middle = (x + leaf.detach()) / 2
    ends = (regression.objective(d)(x) + regression.objective(d)(leaf.detach())) / 2
    assert regression.objective(d)(middle) < ends  # convex
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(400_000, regression.N, dtype=torch.float64, generator=generator)
    new = new @ torch.linalg.cholesky(regression._covariance()).mT
    error = new @ (regression.weights(d, x) - d.beta)[0]
    assert float(regression.risk(d, x)) == pytest.approx(1 + float(error.square().mean()), rel=0.02)


def test_references_are_better_than_chance():
    of = regression.references(range(5))
    assert set(of) == {"true features", "greedy"}
    assert (of["true features"]["recovery"] == 1).all()
    assert of["greedy"]["recovery"].mean() > 0.6
    assert (of["true features"]["test"] < 1.3).all()


def test_the_bound_is_that_of_the_law():
    """The exact divergence, and that of Plackett–Luce by samples, are 0 for equal scores."""
    parameters = [p[None] for p in vae._start(0)]
    parameters[2].zero_(), parameters[3].zero_()
    for name in ("simple", "relaxed"):
        loss, law = vae.bound(digits().test[:5], parameters, LEARNERS[name].make)
        assert loss.shape == law.shape == (1,)
        assert abs(float(law)) < 1e-4


def test_the_digits():
    assert [part.shape for part in digits()] == [(1197, 64), (200, 64), (400, 64)]
    assert set(digits().train.unique().tolist()) == {0.0, 1.0}


@pytest.fixture
def command(monkeypatch, capsys):
    def run(study, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{study.name}.py", *map(str, arguments)])
        return learning_report.main(study, study.name), capsys.readouterr().out

    return run


@pytest.mark.slow
@studies
def test_the_command(study, command, tmp_path):
    study = replace(study, quick=TINY)
    files = {name: tmp_path / f"curves.{name}" for name in ("csv", "md", "png", "svg")}
    which = ("--quick", "--estimator", "simple", "--estimator", "rloo")
    code, printed = command(
        study, *which, "--csv", files["csv"], "--markdown", files["md"], "--plot", files["png"], "--json"
    )
    assert code == 0
    places = json.loads(printed)
    assert [place["rank"] for place in places] == [1, 2]
    assert {"estimator", "mean", "behind", "evaluations"} <= set(places[0])
    assert "others" not in places[0]
    assert len(list(csv.DictReader(files["csv"].read_text().splitlines()))) == 12
    assert "| `rloo` |" in files["md"].read_text()
    assert files["png"].read_bytes()[:4] == b"\x89PNG"
    pictures = []
    for _ in range(2):
        _, shown = command(study, *which, "--plot", files["svg"])
        pictures.append(files["svg"].read_bytes())
    assert "First is" in shown
    assert "not tuned" in shown
    assert pictures[0] == pictures[1]


def test_bad_options_and_interruptions_of_the_command(command, capsys, monkeypatch):
    for option, value, says in (
        ("--estimator", "nosuch", "invalid choice: 'nosuch' (choose from 'straight_through', 'simple'"),
        ("--plot", "x.foo", "must end in .svg"),
        ("--csv", f"{__file__}/x.csv", "cannot be made"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command(regression.STUDY, option, value)
        assert says in capsys.readouterr().err
    monkeypatch.setattr(learning, "_tune", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert command(regression.STUDY, "--quick")[0] == 130


def test_one_estimator_is_no_comparison():
    rows = run(regression.STUDY, ("simple",), TINY)
    assert learning_report.verdict(regression.STUDY, rows).startswith("Nothing to compare")


def test_a_style_for_every_estimator():
    assert set(learning_report.STYLE) == set(LEARNERS)
