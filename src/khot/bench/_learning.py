"""What the learning problems share: contenders at one budget, their tuning and training, a summary and a figure.

Every contender gets `BUDGET` evaluations of the objective for each row of scores and step; a value with its gradient is
one evaluation. All seeds of a run are trained at once, as rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import estimators
from ..designs import ConditionalPoisson, Design, Pivotal, PlackettLuce
from ..estimators._exact import takes_objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 8
TUNING_SEED = 1000
"""The first seed of those that settings are chosen on; results are of other seeds."""

Objective = Callable[[Tensor], Tensor]
Progress = Callable[[str, int, int], None]
Estimator = Callable[..., Tensor]
Measures = dict[str, Tensor]


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

    make: Callable[[Tensor, int], Design]
    """The design, from natural parameters of conditional Poisson (…, n), and k."""
    estimator: Callable[[float], Estimator]
    """It, at a setting of its own knob; made anew for each run."""
    knobs: tuple[float, ...] = (0.0,)
    """To choose from; the first is the default."""
    at_mean: int = 0
    """How many evaluations are not at samples."""


class Problem(NamedTuple):
    """A learning problem for a batch of models: m of them, each with its own parameters."""

    start: list[Tensor]
    """The parameters at first, (m, …) each."""
    step: Callable[[list[Tensor]], tuple[Tensor, Objective, Tensor]]
    """Parameters to scores (m, …, n), the objective of k-hot vectors, and a loss (m, …) that is added to its mean."""
    measure: Callable[[list[Tensor]], Measures]
    """Parameters to what is reported, (m) each; "choose" is what settings are chosen by, less is better."""
    k: int


class MovingAverage:
    """`score_function` with the mean loss of earlier steps, one for each model, as the baseline; at first, `rloo`."""

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._mean: Tensor | None = None

    def __call__(
        self, design: Design, fn: Objective, *, num_samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """As `score_function`."""
        seen: list[Tensor] = []

        def watched(x: Tensor) -> Tensor:
            losses = fn(x)
            seen.append(losses.detach())
            return losses

        if self._mean is None:
            loss = estimators.rloo(design, watched, num_samples=num_samples, generator=generator)
            self._mean = _model_mean(seen[0])
            return loss
        loss = estimators.score_function(
            design, watched, num_samples=num_samples, baseline=self._mean, generator=generator
        )
        self._mean = self._decay * self._mean + (1 - self._decay) * _model_mean(seen[0])
        return loss


def _model_mean(losses: Tensor) -> Tensor:
    """(samples, m, …) → (m, 1, …)."""
    return losses.mean([i for i in range(losses.ndim) if i != 1], keepdim=True)[0]


def poisson(theta: Tensor, k: int) -> ConditionalPoisson:
    """Conditional Poisson with natural parameters θ."""
    return ConditionalPoisson(logits=theta, k=k, validate_args=False)


def _pivotal(theta: Tensor, k: int) -> Design:
    """With the same inclusion probabilities."""
    return Pivotal(poisson(theta, k).mean, float(k), validate_args=False)


def _gumbel(theta: Tensor, k: int) -> Design:
    return PlackettLuce(logits=theta, k=k, validate_args=False)


CONTENDERS: dict[str, Contender] = {
    "straight_through": Contender(_pivotal, lambda _: estimators.straight_through_sample),
    "simple": Contender(poisson, lambda _: estimators.simple),
    "imle": Contender(poisson, lambda knob: partial(estimators.imle, step=knob), (10.0, 1.0, 100.0)),
    "relaxed": Contender(_gumbel, lambda knob: partial(estimators.relaxed, temperature=knob), (0.5, 0.25, 1.0)),
    "xie_ermon": Contender(_gumbel, lambda knob: partial(estimators.xie_ermon, temperature=knob), (0.5, 0.25, 1.0)),
    "score": Contender(poisson, lambda _: MovingAverage()),
    "rloo": Contender(poisson, lambda _: estimators.rloo),
    "taylor": Contender(poisson, lambda _: estimators.taylor_control_variate, at_mean=1),
    "reinmax": Contender(poisson, lambda _: estimators.reinmax),
}


def train(
    problem: Problem, contender: Contender, *, rates: Sequence[float], knob: float, steps: int, points: int
) -> Iterator[tuple[int, int, Measures]]:
    """Adam, one learning rate for each model: step, evaluations so far and measures, before, at `points` and after.

    Losses are summed, not averaged, over samples and rows, so that I-MLE's λ refers to the gradient of one of them;
    Adam does not mind. It moves q, where the parameters are start + rate · q, which is Adam at that rate.
    """
    generator = torch.Generator().manual_seed(0)
    moved = [torch.zeros_like(p).requires_grad_() for p in problem.start]
    adam = torch.optim.Adam(moved, lr=1.0)
    estimator = contender.estimator(knob)
    when = {round(steps * i / points) for i in range(points + 1)}
    evaluations = 0

    def parameters() -> list[Tensor]:
        rate = torch.tensor(rates)
        return [
            p + rate.to(p.dtype).view(-1, *(1,) * (p.ndim - 1)) * q for p, q in zip(problem.start, moved, strict=True)
        ]

    for step in range(steps + 1):
        if step in when:
            with torch.no_grad():
                measures = problem.measure(parameters())
            yield step, evaluations, measures
        if step < steps:
            theta, fn, extra = problem.step(parameters())
            counted = _Counted(fn, theta.shape[:-1].numel())
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


class _Counted:
    """The objective, and how often it was evaluated for each of the rows."""

    def __init__(self, fn: Objective, rows: int) -> None:
        self.fn, self._rows, self.evaluations = fn, rows, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.evaluations += x.shape[:-1].numel() // self._rows
        return self.fn(x)
