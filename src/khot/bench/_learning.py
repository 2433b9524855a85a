"""What the learning problems share: estimators at one budget, the choice of their settings, and training.

Every estimator gets `BUDGET` evaluations of the objective for each row of scores and step; a value with its gradient is
one evaluation. All seeds are trained at once, as models in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import estimators
from ..designs import ConditionalPoisson, Design, Pivotal, PlackettLuce
from ..estimators._exact import takes_objective

BUDGET = 8
TUNING_SEED = 1000
"""The first of the seeds that settings are chosen on; results are of other seeds."""

Objective = Callable[[Tensor], Tensor]
Progress = Callable[[str, int, int], None]
Estimator = Callable[..., Tensor]
Make = Callable[[Tensor, int], Design]
Measures = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to do."""

    seeds: tuple[int, ...]
    steps: int
    rates: tuple[float, ...]
    """Learning rates to choose from; the first is taken where nothing is tuned."""
    tuning_seeds: int
    """How many other seeds settings are chosen on; with 0, they are the first of each list."""
    points: int
    """How many times a run is measured, after its beginning."""


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


class Contender(NamedTuple):
    """An estimator with what it needs."""

    make: Make
    """The design, from natural parameters of conditional Poisson (…, n), and k."""
    estimator: Callable[[float], Estimator]
    """It, at a setting of its own knob; made anew for each run."""
    knobs: tuple[float, ...] = (0.0,)
    """To choose from; the first is taken where nothing is tuned."""
    at_mean: int = 0
    """How many evaluations are not at samples."""


class Problem(NamedTuple):
    """A learning problem for a batch of m models, each with its own parameters."""

    k: int
    start: list[Tensor]
    """The parameters at first, (m, …) each."""
    step: Callable[[list[Tensor]], tuple[Tensor, Objective, Tensor]]
    """Parameters to scores (m, …, n), the objective of k-hot vectors, and a loss (m, …) that is added to its mean."""
    measure: Callable[[list[Tensor], Make], Measures]
    """Parameters and the design to what is reported, (m) each. Settings are chosen for the least "choose"."""


class MovingAverage:
    """`score_function` with the mean loss of earlier steps, one for each model, as the baseline; at first, `rloo`."""

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._mean: Tensor | None = None

    def __call__(self, design: Design, fn: Objective, *, num_samples: int, generator: torch.Generator) -> Tensor:
        """As `score_function`."""
        seen: list[Tensor] = []

        def watched(x: Tensor) -> Tensor:
            losses = fn(x)  # (samples, m, …)
            seen.append(losses.detach().mean([i for i in range(losses.ndim) if i != 1], keepdim=True)[0])
            return losses

        if self._mean is None:
            loss = estimators.rloo(design, watched, num_samples=num_samples, generator=generator)
            self._mean = seen[0]
            return loss
        loss = estimators.score_function(
            design, watched, num_samples=num_samples, baseline=self._mean, generator=generator
        )
        self._mean = self._decay * self._mean + (1 - self._decay) * seen[0]
        return loss


def poisson(theta: Tensor, k: int) -> ConditionalPoisson:
    """Conditional Poisson with natural parameters θ."""
    return ConditionalPoisson(logits=theta, k=k, validate_args=False)


def _pivotal(theta: Tensor, k: int) -> Design:
    """With the same inclusion probabilities."""
    return Pivotal(poisson(theta, k).mean, float(k), validate_args=False)


def _gumbel(theta: Tensor, k: int) -> Design:
    return PlackettLuce(logits=theta, k=k, validate_args=False)


def _imle(design: Design, sample_shape: Sequence[int], *, step: float, generator: torch.Generator) -> Tensor:
    """With noise of the variance of a Gumbel variable: that of a sum of gamma variables is 1/k of it, at scale 1."""
    return estimators.imle(
        design, sample_shape, step=step, noise_temperature=design._one_size() ** 0.5, generator=generator
    )


CONTENDERS: dict[str, Contender] = {
    "straight_through": Contender(_pivotal, lambda _: estimators.straight_through_sample),
    "simple": Contender(poisson, lambda _: estimators.simple),
    "imle": Contender(poisson, lambda knob: partial(_imle, step=knob), (1.0, 0.01, 0.1, 10.0)),
    "relaxed": Contender(_gumbel, lambda knob: partial(estimators.relaxed, temperature=knob), (0.25, 0.1, 0.5, 1.0)),
    "xie_ermon": Contender(
        _gumbel, lambda knob: partial(estimators.xie_ermon, temperature=knob), (0.25, 0.1, 0.5, 1.0)
    ),
    "score": Contender(poisson, lambda _: MovingAverage()),
    "rloo": Contender(poisson, lambda _: estimators.rloo),
    "taylor": Contender(poisson, lambda _: estimators.taylor_control_variate, at_mean=1),
    "reinmax": Contender(poisson, lambda _: estimators.reinmax),
}
"""By name; `score` has a moving average as its baseline, `rloo`, `taylor` and `reinmax` the mean of the other samples."""

R = TypeVar("R", bound=Row)


def run(
    row: type[R],
    problem: Callable[[Sequence[int]], Problem],
    names: Sequence[str],
    settings: Settings,
    on_progress: Progress,
) -> list[R]:
    """Choose the settings of each estimator, then train it on all seeds; an interruption keeps what there is.

    Settings are the best of all learning rates and knobs, at the end of a run of the same length on seeds of their own.
    """
    s = settings
    runs = {name: 1 + (len(CONTENDERS[name].knobs) if s.tuning_seeds else 0) for name in names}
    total, done = s.steps * sum(runs.values()), 0
    when = {round(s.steps * i / s.points) for i in range(s.points + 1)}
    rows: list[R] = []
    try:
        for name in names:
            contender = CONTENDERS[name]
            tuning = partial(on_progress, f"{name}, its settings")
            rate, knob = _tune(problem, contender, s, lambda at, tuning=tuning, done=done: tuning(done + at, total))
            done += s.steps * (runs[name] - 1)
            for step, evaluations, measures in train(
                problem(s.seeds),
                contender,
                rates=[rate] * len(s.seeds),
                knob=knob,
                steps=s.steps,
                when=when,
                on_step=lambda at, name=name, done=done: on_progress(name, done + at, total),
            ):
                chosen = {key: value.tolist() for key, value in measures.items() if key != "choose"}
                rows += [
                    row(
                        estimator=name,
                        seed=seed,
                        step=step,
                        evaluations=evaluations,
                        rate=rate,
                        knob=knob,
                        **{key: values[i] for key, values in chosen.items()},
                    )
                    for i, seed in enumerate(s.seeds)
                ]
            done += s.steps
    except KeyboardInterrupt:
        pass
    return rows


def _tune(
    problem: Callable[[Sequence[int]], Problem], contender: Contender, s: Settings, on_step: Callable[[int], None]
) -> tuple[float, float]:
    """The learning rate and the knob with the least "choose" at the end, the mean over the tuning seeds."""
    best, result = math.inf, (s.rates[0], contender.knobs[0])
    if not s.tuning_seeds:
        return result
    pairs = list(product(s.rates, range(TUNING_SEED, TUNING_SEED + s.tuning_seeds)))
    for i, knob in enumerate(contender.knobs):
        models = problem([seed for _, seed in pairs])
        ((*_, measures),) = train(
            models,
            contender,
            rates=[rate for rate, _ in pairs],
            knob=knob,
            steps=s.steps,
            when={s.steps},
            on_step=lambda at, i=i: on_step(i * s.steps + at),
        )
        for rate, value in zip(s.rates, measures["choose"].view(len(s.rates), -1).mean(1).tolist(), strict=True):
            if value < best:
                best, result = value, (rate, knob)
    return result


def train(
    problem: Problem,
    contender: Contender,
    *,
    rates: Sequence[float],
    knob: float,
    steps: int,
    when: Collection[int],
    on_step: Callable[[int], None] = lambda step: None,
) -> Iterator[tuple[int, int, Measures]]:
    """Adam, with a learning rate for each model; gives step, evaluations so far and measures, `when` they are asked for.

    Losses are summed, not averaged, over samples and rows, so that I-MLE's λ refers to the gradient of one of them;
    Adam does not mind. It moves q, where the parameters are start + rate · q: that is Adam at that rate.
    """
    generator = torch.Generator().manual_seed(0)
    moved = [torch.zeros_like(p).requires_grad_() for p in problem.start]
    scales = [torch.tensor(rates, dtype=p.dtype).view(-1, *(1,) * (p.ndim - 1)) for p in problem.start]
    adam = torch.optim.Adam(moved, lr=1.0)
    estimator = contender.estimator(knob)
    evaluations = 0
    for step in range(steps + 1):
        on_step(step)
        parameters = [p + rate * q for p, rate, q in zip(problem.start, scales, moved, strict=True)]
        if step in when:
            with torch.no_grad():
                measures = problem.measure(parameters, contender.make)
            yield step, evaluations, measures
        if step < steps:
            theta, fn, extra = problem.step(parameters)
            counted = Counted(fn, theta.shape[:-1].numel())
            loss = _total(estimator, contender, theta, problem.k, counted, generator) + BUDGET * extra.sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            evaluations += counted.evaluations


def _total(
    estimator: Estimator, contender: Contender, theta: Tensor, k: int, fn: Objective, generator: torch.Generator
) -> Tensor:
    """The sum over `BUDGET` samples and the rows of θ, whose gradient is the estimate."""
    design, samples = contender.make(theta, k), BUDGET - contender.at_mean
    if takes_objective(estimator):
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
