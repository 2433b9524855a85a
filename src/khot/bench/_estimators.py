"""The study of gradient estimators: bias, variance and error against the exact gradient, at n = 10, k = 5.

The protocol is that of SIMPLE and SFESS: ten seeds, each with scores and an objective. Expectations are exact, over all
252 subsets, for estimators of one sample, and over their pairs for two; they are means over draws for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, logsigmoid

from .. import estimators
from ..designs import ConditionalPoisson, Design, Pivotal, PlackettLuce
from ..estimators._loss import score_vectors
from ..testing._estimator import estimates, exact_gradient, prescribe

N, K = 10, 5
SEEDS = (1234, 1067, 9198, 9453, 6240, 7044, 1755, 7898, 3131, 1277)
BUDGET = 32

Objective = Callable[[Tensor], Tensor]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one estimator does on one objective, the mean over seeds; the keys of `khot study estimators --json`."""

    estimator: str
    objective: str
    bias: float
    """1 − cos(E ĝ, ∇F)"""
    variance: float
    """Var cos(ĝ, E ĝ)"""
    error: float
    """E[1 − cos(ĝ, ∇F)]"""
    rel_bias: float
    """‖E ĝ − ∇F‖/‖∇F‖"""
    rel_variance: float
    """E‖ĝ − E ĝ‖²/‖∇F‖²"""
    evaluations: int
    """Of the objective, for one estimate."""

    def record(self) -> dict[str, str | float]:
        """As a dictionary."""
        return asdict(self)


class Problem(NamedTuple):
    """Scores, and an objective of k-hot vectors with its exact means."""

    theta: Tensor
    fn: Objective


class Entrant(NamedTuple):
    """An estimator in the study."""

    make: Callable[[Tensor], Design]
    """The design, from natural parameters of conditional Poisson (…, n)."""
    estimator: Callable[[Problem], Callable[..., Tensor]]
    """It, for a problem; baselines are exact."""
    samples: int
    evaluations: int


def problem(objective: str, seed: int) -> Problem:
    """The scores and targets of the published protocol; the other objectives draw on from there."""
    rng = np.random.RandomState(seed)
    theta, b = torch.from_numpy(rng.randn(N)), torch.from_numpy(np.abs(rng.randn(N)))
    square = torch.from_numpy(rng.randn(N, N))
    square = (square + square.mT).fill_diagonal_(0) / 2
    first, second = torch.from_numpy(rng.randn(N, 16)), torch.from_numpy(rng.randn(16))
    fns: dict[str, Objective] = {
        "paper": lambda x: (x - b).square().sum(-1),
        "quadratic": lambda x: ((x @ square) * x).sum(-1) / 2 + x @ b,
        "mlp": lambda x: torch.tanh(x @ first / N**0.5 - 0.5) @ second,
    }
    return Problem(theta, fns[objective])


OBJECTIVES = ("paper", "quadratic", "mlp")


def _poisson(theta: Tensor) -> Design:
    return ConditionalPoisson(logits=theta, k=K, validate_args=False)


def _tree(theta: Tensor) -> Design:
    """Pivotal, in the given order, with the same inclusion probabilities."""
    return Pivotal(_poisson(theta).mean, float(K), order="given", validate_args=False)


def _gumbel(theta: Tensor) -> Design:
    return PlackettLuce(logits=logsigmoid(theta), k=K, validate_args=False)


def _expectation(p: Problem, of: Callable[[Design, Tensor], Tensor]) -> Tensor:
    """E of a function of the design and its subsets (S, n) → (S) or (S, n), under conditional Poisson."""
    design = _poisson(p.theta)
    x = design.enumerate_support()
    chance, value = design.log_prob(x).exp(), of(design, x)
    return (chance.view(-1, *(1,) * (value.ndim - 1)) * value).sum(0)


def _slope(fn: Objective, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(fn(leaf).sum(), leaf)[0]


def _mean(p: Problem) -> Tensor:
    return _expectation(p, lambda _, x: p.fn(x))


def _best_baseline(p: Problem) -> Tensor:
    """E[s² f]/E[s²] for each coordinate."""
    above = _expectation(p, lambda d, x: score_vectors(d, x).square() * p.fn(x)[:, None])
    return above / _expectation(p, lambda d, x: score_vectors(d, x).square())


def _taylor_residual(p: Problem) -> Tensor:
    """The mean of what the expansion about π leaves; the linear term has mean 0."""
    return _mean(p) - p.fn(_poisson(p.theta).mean)


def _along(p: Problem) -> Tensor:
    """E[∇f(x)·(x − π)]."""
    return _expectation(p, lambda d, x: (_slope(p.fn, x) * (x - d.mean)).sum(-1))


def _taylor(p: Problem) -> Callable[..., Tensor]:
    return partial(estimators.taylor_control_variate, baseline=_taylor_residual(p))


def _reinmax(p: Problem) -> Callable[..., Tensor]:
    return partial(estimators.reinmax, baseline=_along(p))


def _score(p: Problem) -> Callable[..., Tensor]:
    return partial(estimators.score_function, baseline=_mean(p))


def _score_per_coordinate(p: Problem) -> Callable[..., Tensor]:
    return partial(estimators.score_function, coordinate_baseline=_best_baseline(p))


def _imle(p: Problem) -> Callable[..., Tensor]:
    return partial(estimators.imle, step=2.5, terms=10)


def _xie_ermon(p: Problem) -> Callable[..., Tensor]:
    return partial(estimators.xie_ermon, temperature=2.0)


ENTRANTS: dict[str, Entrant] = {
    "straight_through": Entrant(_tree, lambda p: estimators.straight_through_sample, 1, 1),
    "simple": Entrant(_poisson, lambda p: estimators.simple, 1, 1),
    "reinmax": Entrant(_poisson, _reinmax, 1, 1),
    "taylor": Entrant(_poisson, _taylor, 1, 2),
    "imle": Entrant(_poisson, _imle, 1, 1),
    "relaxed": Entrant(_gumbel, lambda p: estimators.relaxed, 1, 1),
    "xie_ermon": Entrant(_gumbel, _xie_ermon, 1, 1),
    "stochastic_times_smooth": Entrant(_poisson, lambda p: estimators.stochastic_times_smooth, 1, 1),
    "score": Entrant(_poisson, lambda p: estimators.score_function, 1, 1),
    "score_baseline": Entrant(_poisson, _score, 1, 1),
    "score_per_coordinate": Entrant(_poisson, _score_per_coordinate, 1, 1),
    "rloo_2": Entrant(_poisson, lambda p: estimators.rloo, 2, 2),
    "rloo_8": Entrant(_poisson, lambda p: estimators.rloo, 8, 8),
    "rloo_32": Entrant(_poisson, lambda p: estimators.rloo, BUDGET, BUDGET),
    "straight_through_32": Entrant(_tree, lambda p: estimators.straight_through_sample, BUDGET, BUDGET),
    "simple_32": Entrant(_poisson, lambda p: estimators.simple, BUDGET, BUDGET),
    "reinmax_32": Entrant(_poisson, lambda p: estimators.reinmax, BUDGET, BUDGET),
    "taylor_32": Entrant(_poisson, lambda p: estimators.taylor_control_variate, BUDGET - 1, BUDGET),
    "imle_32": Entrant(_poisson, _imle, BUDGET, BUDGET),
    "relaxed_32": Entrant(_gumbel, lambda p: estimators.relaxed, BUDGET, BUDGET),
    "xie_ermon_32": Entrant(_gumbel, _xie_ermon, BUDGET, BUDGET),
}
"""By name. `relaxed` has T = 1, `xie_ermon` τ = 2; both take log σ(θ), as published. Baselines with one sample are
exact means, as in the protocol; with 32 they are those of the other samples."""


def study(
    names: Sequence[str] = tuple(ENTRANTS),
    objectives: Sequence[str] = OBJECTIVES,
    *,
    draws: int = 10_000,
    seeds: Sequence[int] = SEEDS,
    on_progress: Progress = lambda label, done, total: None,
) -> list[Figures]:
    """The figures of each estimator on each objective, the mean over seeds; an interruption keeps what there is."""
    result: list[Figures] = []
    try:
        for done, (objective, name) in enumerate((o, n) for o in objectives for n in names):
            on_progress(f"{name} on {objective}", done, len(objectives) * len(names))
            rows = [_figures(ENTRANTS[name], problem(objective, seed), draws) for seed in seeds]
            bias, variance, error, rel_bias, rel_variance = np.mean(rows, 0).tolist()
            result.append(
                Figures(
                    estimator=name,
                    objective=objective,
                    bias=bias,
                    variance=variance,
                    error=error,
                    rel_bias=rel_bias,
                    rel_variance=rel_variance,
                    evaluations=ENTRANTS[name].evaluations,
                )
            )
    except KeyboardInterrupt:
        pass
    return result


def _figures(entrant: Entrant, p: Problem, draws: int) -> tuple[float, ...]:
    """Bias, variance, error, relative bias, relative variance."""
    gradient, chance = _distribution(entrant, p, draws)
    theta = p.theta.clone().requires_grad_()
    law = _poisson(theta) if entrant.make is _gumbel else entrant.make(theta)  # what is relaxed has no law of its own
    exact = exact_gradient(law, p.fn, theta)
    mean = (chance[:, None] * gradient).sum(0)
    along = cosine_similarity(gradient, mean[None])
    error = 1 - cosine_similarity(gradient, exact[None])
    average = (chance * along).sum()
    scale = exact.norm()
    return (
        float(1 - cosine_similarity(mean, exact, dim=0)),
        float((chance * (along - average).square()).sum()),
        float((chance * error).sum()),
        float((mean - exact).norm() / scale),
        float((chance * (gradient - mean).square().sum(-1)).sum() / scale.square()),
    )


def _distribution(entrant: Entrant, p: Problem, draws: int) -> tuple[Tensor, Tensor]:
    """Estimates (m, n) and their probabilities (m): all there are, or `draws` of them."""
    generator = torch.Generator().manual_seed(0)
    estimator = entrant.estimator(p)
    if entrant.samples <= 2:
        law = entrant.make(p.theta)
        if not isinstance(law, PlackettLuce):
            x = law.enumerate_support()
            tuples = torch.cartesian_prod(*[torch.arange(len(x))] * entrant.samples).view(-1, entrant.samples)
            theta = p.theta.expand(len(tuples), N).clone().requires_grad_()
            design = prescribe(entrant.make(theta), x[tuples].movedim(1, 0))
            gradient = estimates(estimator, design, p.fn, entrant.samples, theta, generator)
            if design.was_used:
                return gradient, law.log_prob(x).exp()[tuples].prod(-1)
    theta = p.theta.expand(draws, N).clone().requires_grad_()
    gradient = estimates(estimator, entrant.make(theta), p.fn, entrant.samples, theta, generator)
    return gradient, torch.full((draws,), 1 / draws, dtype=torch.float64)
