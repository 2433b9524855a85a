"""What the learning problems share: one budget for all estimators, the choice of their settings, and training.

Every estimator gets `BUDGET` evaluations of the objective for each row of scores and step; a value with its gradient is
one evaluation. All seeds are trained at once, as models in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Progress
from benchmarks.learners import LEARNERS, Learner, Make, Objective

BUDGET = 8
TUNING_SEED = 1000
"""The first of the seeds that settings are chosen on; results are of other seeds."""

Measures = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to do."""

    seeds: tuple[int, ...]
    steps: int
    points: int
    """How many times a run is measured, after its beginning."""
    rates: tuple[float, ...]
    """Learning rates to choose from; the first is taken where nothing is tuned."""
    tuning_seeds: int
    """How many other seeds settings are chosen on; with 0, they are the first of each list."""
    tuning_steps: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One estimator, seed and step; problems add their measures."""

    estimator: str
    seed: int
    step: int
    evaluations: int
    """Of the objective up to here, for each row of scores; counted."""
    rate: float
    """The learning rate chosen."""
    knob: float
    """The estimator's own setting chosen: λ, or a temperature; 0 if it has none."""


class Problem(NamedTuple):
    """A learning problem for a batch of m models, each with its own parameters."""

    k: int
    start: list[Tensor]
    """The parameters at first, (m, …) each."""
    step: Callable[[list[Tensor]], tuple[Tensor, Objective, Tensor]]
    """Parameters to scores (m, …, n), the objective of k-hot vectors, and a loss (m, …) that is added to its mean."""
    measure: Callable[[list[Tensor], Make], Measures]
    """Parameters and the design to what is reported, (m) each."""
    choose: Callable[[list[Tensor], Make], Tensor]
    """To what settings are chosen by, (m): less is better."""


Problems = Callable[[Sequence[int]], Problem]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A learning problem, how much of it to do, and what to say of it."""

    name: str
    row: type[Row]
    problem: Problems
    """For these seeds."""
    full: Effort
    quick: Effort
    panels: dict[str, str]
    """What is plotted, with the labels of the axes; estimators are ranked by the first, the least first."""
    ranked: str
    """What that first one is called in the table."""
    columns: dict[str, tuple[str, str]]
    """The others there: a measure and its format."""
    references: Callable[[Sequence[int]], dict[str, Measures]] = lambda seeds: {}
    """What to compare with, (m) each."""
    tuned: str
    """How the settings are chosen."""
    notes: str
    """On what the columns are."""


def run(
    study: Study,
    names: Sequence[str] = tuple(LEARNERS),
    settings: Effort | None = None,
    on_progress: Progress = lambda label, done, total: None,
) -> list[Row]:
    """Choose the settings of each estimator, then train it on all seeds; an interruption keeps what there is.

    Effort are the best of all learning rates and knobs, at the end of runs on other seeds. One thread, since rows are
    short and many.
    """
    s, problem = settings or study.full, study.problem
    when = {round(s.steps * i / s.points) for i in range(s.points + 1)}
    total = sum(s.steps + len(LEARNERS[name].knobs) * s.tuning_steps * bool(s.tuning_seeds) for name in names)
    rows: list[Row] = []
    label, done = "", 0

    def on_step() -> None:
        nonlocal done
        on_progress(label, done, total)
        done += 1

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            learner, models = LEARNERS[name], problem(s.seeds)
            label = f"{name}, its settings"
            rate, knob = _tune(problem, learner, s, on_step)
            label = name
            runs = train(models, learner, [rate] * len(s.seeds), knob, s.steps, when, on_step)
            for step, evaluations, parameters in runs:
                measures = models.measure(parameters, learner.make)
                rows += [
                    study.row(
                        estimator=name,
                        seed=seed,
                        step=step,
                        evaluations=evaluations,
                        rate=rate,
                        knob=knob,
                        **{key: float(value[i]) for key, value in measures.items()},
                    )
                    for i, seed in enumerate(s.seeds)
                ]
    except KeyboardInterrupt:
        pass
    finally:
        torch.set_num_threads(threads)
    return rows


def _tune(problem: Problems, learner: Learner, s: Effort, on_step: Callable[[], None]) -> tuple[float, float]:
    """The learning rate and the knob that are best in the mean over the tuning seeds."""
    best, result = math.inf, (s.rates[0], learner.knobs[0])
    pairs = list(product(s.rates, range(TUNING_SEED, TUNING_SEED + s.tuning_seeds)))
    for knob in learner.knobs if pairs else ():
        models = problem([seed for _, seed in pairs])
        runs = train(models, learner, [r for r, _ in pairs], knob, s.tuning_steps, {s.tuning_steps}, on_step)
        for *_, parameters in runs:
            losses = models.choose(parameters, learner.make).view(len(s.rates), -1).mean(1)
            for rate, loss in zip(s.rates, losses.tolist(), strict=True):
                if loss < best:
                    best, result = loss, (rate, knob)
    return result


def train(
    problem: Problem,
    learner: Learner,
    rates: Sequence[float],
    knob: float,
    steps: int,
    when: Collection[int],
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Adam with a learning rate for each model: `when` asked for, the step, the evaluations so far, the parameters.

    Losses are summed, not averaged, over samples and rows, so that I-MLE's λ refers to the gradient of one of them;
    Adam does not mind. It moves q, where the parameters are start + rate · q: that is Adam at that rate, with ε/rate.
    """
    generator = torch.Generator().manual_seed(0)
    moved = [torch.zeros_like(p).requires_grad_() for p in problem.start]
    scales = [torch.tensor(rates, dtype=p.dtype).view(-1, *(1,) * (p.ndim - 1)) for p in problem.start]
    adam = torch.optim.Adam(moved, lr=1.0, eps=1e-12)
    estimator = learner.estimator(knob)
    evaluations = 0
    for step in range(steps + 1):
        parameters = [p + rate * q for p, rate, q in zip(problem.start, scales, moved, strict=True)]
        if step in when:
            yield step, evaluations, [p.detach() for p in parameters]
        if step < steps:
            on_step()
            theta, fn, extra = problem.step(parameters)
            counted = Counted(fn, theta.shape[:-1].numel())
            loss = _total(estimator, learner, theta, problem.k, counted, generator) + BUDGET * extra.sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            evaluations += counted.evaluations


def _total(
    estimator: Callable[..., Tensor],
    learner: Learner,
    theta: Tensor,
    k: int,
    fn: Objective,
    generator: torch.Generator,
) -> Tensor:
    """The sum over `BUDGET` samples and the rows of θ, whose gradient is the estimate."""
    design, samples = learner.make(theta, k), BUDGET - learner.at_mean
    if learner.takes_objective:
        mean = estimator(design, fn, num_samples=samples, generator=generator)
        return mean * BUDGET * theta.shape[:-1].numel()
    return fn(estimator(design, (samples,), generator=generator)).sum()


class Counted:
    """An objective that counts its evaluations for each of the rows."""

    def __init__(self, fn: Objective, rows: int) -> None:
        self._fn, self._rows, self.evaluations = fn, rows, 0

    def __call__(self, x: Tensor) -> Tensor:
        """As the objective."""
        self.evaluations += x.shape[:-1].numel() // self._rows
        return self._fn(x)
