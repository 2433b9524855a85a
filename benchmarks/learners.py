"""The estimators that the learning problems compare, each with the design it draws from and settings to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from khot import estimators
from khot.designs import ConditionalPoisson, Design, Pivotal, PlackettLuce

Objective = Callable[[Tensor], Tensor]
Make = Callable[[Tensor, int], Design]


class Learner(NamedTuple):
    """An estimator with what it needs."""

    make: Make
    """The design, from natural parameters of conditional Poisson (…, n), and k."""
    estimator: Callable[[float], Callable[..., Tensor]]
    """It, at a setting of its own knob; made anew for each run."""
    knobs: tuple[float, ...] = (0.0,)
    """To choose from; the first is taken where nothing is tuned."""
    at_mean: int = 0
    """How many evaluations are not at samples."""
    takes_objective: bool = False
    """Whether the estimator is `(design, fn, …)` → a loss, rather than `(design, …)` → samples."""


class MovingAverage:
    """`score_function` with the mean loss of earlier steps, one for each model, as the baseline; at first, `rloo`."""

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._mean: Tensor | None = None

    def __call__(self, design: Design, fn: Objective, *, num_samples: int, generator: torch.Generator) -> Tensor:
        """As `score_function`."""
        seen: list[Tensor] = []

        def watched(x: Tensor) -> Tensor:
            losses = fn(x)  # (samples, models, …)
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
    """With the variance of a Gumbel variable; the sum of gamma variables has 1/k of it, far less than the design."""
    scale = float(design.k) ** 0.5
    return estimators.imle(design, sample_shape, step=step, noise_temperature=scale, generator=generator)


def _relaxed(temperature: float) -> Callable[..., Tensor]:
    return partial(estimators.relaxed, temperature=temperature)


def _xie_ermon(temperature: float) -> Callable[..., Tensor]:
    return partial(estimators.xie_ermon, temperature=temperature)


LEARNERS: dict[str, Learner] = {
    "straight_through": Learner(_pivotal, lambda _: estimators.straight_through_sample),
    "simple": Learner(poisson, lambda _: estimators.simple),
    "imle": Learner(poisson, lambda step: partial(_imle, step=step), (0.1, 0.01, 1.0)),
    "relaxed": Learner(_gumbel, _relaxed, (0.25, 0.1, 0.5)),
    "xie_ermon": Learner(_gumbel, _xie_ermon, (0.25, 0.1, 0.5)),
    "score": Learner(poisson, lambda _: MovingAverage(), takes_objective=True),
    "rloo": Learner(poisson, lambda _: estimators.rloo, takes_objective=True),
    "taylor": Learner(poisson, lambda _: estimators.taylor_control_variate, at_mean=1, takes_objective=True),
    "reinmax": Learner(poisson, lambda _: estimators.reinmax, takes_objective=True),
}
"""By name. The baseline of `taylor` and `reinmax` is the mean over the other samples, as in `rloo`."""
