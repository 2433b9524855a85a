"""Bias, variance and error of gradient estimators for k-subsets against the exact gradient, n = 10, k = 5.

The protocol is that of SIMPLE and SFESS: ten seeds, each with scores and an objective. Expectations are exact, over all
252 subsets, for estimators of one sample, and over their pairs for two; they are means over draws for the rest.

bias = 1 − cos(E ĝ, ∇F); variance = Var cos(ĝ, E ĝ); error = E[1 − cos(ĝ, ∇F)]; and, since the cosine hides the scale,
‖E ĝ − ∇F‖/‖∇F‖ and E‖ĝ − E ĝ‖²/‖∇F‖². Writes results/estimators.csv, docs/tables/study-estimators.md and
docs/img/study-estimators.svg; ten minutes. Ctrl-C ends early and keeps what was measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, logsigmoid

from benchmarks import common
from benchmarks.common import Progress
from benchmarks.estimators_report import OBJECTIVES, figure, to_markdown
from khot import estimators
from khot.designs import ConditionalPoisson, Design, Pivotal, PlackettLuce

N, K = 10, 5
SEEDS = (1234, 1067, 9198, 9453, 6240, 7044, 1755, 7898, 3131, 1277)
BUDGET = 32
QUICK_DRAWS = 1000

Objective = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one estimator does on one objective, the mean over seeds; the keys of `--json`."""

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
    error_se: float
    """The standard error of `error` over seeds."""


class Case(NamedTuple):
    """Natural parameters θ, and an objective of k-hot vectors."""

    theta: Tensor
    fn: Objective


class Entrant(NamedTuple):
    """An estimator in the study."""

    make: Callable[[Tensor], Design]
    """The design, from natural parameters of conditional Poisson (…, n)."""
    estimator: Callable[[Case], Callable[..., Tensor]]
    """It, for a problem; baselines are exact."""
    samples: int
    evaluations: int
    takes_objective: bool = False
    """Whether the estimator is `(design, fn, …)` → a loss, rather than `(design, …)` → samples."""


def case(objective: str, seed: int) -> Case:
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
    return Case(theta, fns[objective])


def _poisson(theta: Tensor) -> Design:
    return ConditionalPoisson(logits=theta, k=K, validate_args=False)


def _tree(theta: Tensor) -> Design:
    """Pivotal, in the given order, with the same inclusion probabilities."""
    return Pivotal(_poisson(theta).mean, float(K), order="given", validate_args=False)


def _gumbel(theta: Tensor) -> Design:
    return PlackettLuce(logits=logsigmoid(theta), k=K, validate_args=False)


def _race(theta: Tensor) -> Design:
    """Gumbel top-k of θ itself, whose own expectation is estimated."""
    return PlackettLuce(logits=theta, k=K, validate_args=False)


def _expectation(p: Case, of: Callable[[Design, Tensor], Tensor]) -> Tensor:
    """E of a function of the design and its subsets (S, n) → (S) or (S, n), under conditional Poisson."""
    design = _poisson(p.theta)
    x = design.enumerate_support()
    chance, value = design.log_prob(x).exp(), of(design, x)
    return (chance.view(-1, *(1,) * (value.ndim - 1)) * value).sum(0)


def _slope(fn: Objective, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(fn(leaf).sum(), leaf)[0]


def _mean(p: Case) -> Tensor:
    return _expectation(p, lambda _, x: p.fn(x))


def _best_baseline(p: Case) -> Tensor:
    """E[s² f]/E[s²] for each coordinate of the score s = ∇log p(x), which is x − π."""
    above = _expectation(p, lambda d, x: (x - d.mean).square() * p.fn(x)[:, None])
    return above / _expectation(p, lambda d, x: (x - d.mean).square())


def _taylor_residual(p: Case) -> Tensor:
    """The mean of what the expansion about π leaves; the linear term has mean 0."""
    return _mean(p) - p.fn(_poisson(p.theta).mean)


def _along(p: Case) -> Tensor:
    """E[∇f(x)·(x − π)]."""
    return _expectation(p, lambda d, x: (_slope(p.fn, x) * (x - d.mean)).sum(-1))


def _taylor(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.taylor_control_variate, baseline=_taylor_residual(p))


def _reinmax(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.reinmax, baseline=_along(p))


def _score(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.score_function, baseline=_mean(p))


def _score_per_coordinate(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.score_function, coordinate_baseline=_best_baseline(p))


def _distinct(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.distinct_subsets, baseline=_mean(p))


def _imle(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.imle, step=2.5, terms=10)


def _xie_ermon(p: Case) -> Callable[..., Tensor]:
    return partial(estimators.xie_ermon, temperature=2.0)


ENTRANTS: dict[str, Entrant] = {
    "straight_through": Entrant(_tree, lambda p: estimators.straight_through_sample, 1, 1),
    "simple": Entrant(_poisson, lambda p: estimators.simple, 1, 1),
    "reinmax": Entrant(_poisson, _reinmax, 1, 1, True),
    "taylor": Entrant(_poisson, _taylor, 1, 2, True),
    "imle": Entrant(_poisson, _imle, 1, 1),
    "relaxed": Entrant(_gumbel, lambda p: estimators.relaxed, 1, 1),
    "xie_ermon": Entrant(_gumbel, _xie_ermon, 1, 1),
    "stochastic_times_smooth": Entrant(_poisson, lambda p: estimators.stochastic_times_smooth, 1, 1),
    "score": Entrant(_poisson, lambda p: estimators.score_function, 1, 1, True),
    "score_baseline": Entrant(_poisson, _score, 1, 1, True),
    "score_per_coordinate": Entrant(_poisson, _score_per_coordinate, 1, 1, True),
    "rloo_2": Entrant(_poisson, lambda p: estimators.rloo, 2, 2, True),
    "rloo_8": Entrant(_poisson, lambda p: estimators.rloo, 8, 8, True),
    "rloo_32": Entrant(_poisson, lambda p: estimators.rloo, BUDGET, BUDGET, True),
    "straight_through_32": Entrant(_tree, lambda p: estimators.straight_through_sample, BUDGET, BUDGET),
    "simple_32": Entrant(_poisson, lambda p: estimators.simple, BUDGET, BUDGET),
    "reinmax_32": Entrant(_poisson, lambda p: estimators.reinmax, BUDGET, BUDGET, True),
    "taylor_32": Entrant(_poisson, lambda p: estimators.taylor_control_variate, BUDGET - 1, BUDGET, True),
    "imle_32": Entrant(_poisson, _imle, BUDGET, BUDGET),
    "relaxed_32": Entrant(_gumbel, lambda p: estimators.relaxed, BUDGET, BUDGET),
    "xie_ermon_32": Entrant(_gumbel, _xie_ermon, BUDGET, BUDGET),
    "rebar": Entrant(_race, lambda p: estimators.rebar, 1, 3, True),
    "rebar_30": Entrant(_race, lambda p: estimators.rebar, BUDGET // 3, BUDGET // 3 * 3, True),
    "score_race": Entrant(_race, lambda p: estimators.score_function, 1, 1, True),
    "distinct_subsets_32": Entrant(_poisson, _distinct, BUDGET, BUDGET, True),
    "unordered_set_32": Entrant(_poisson, lambda p: estimators.unordered_set, BUDGET, BUDGET, True),
}
"""By name. `relaxed` has T = 1, `xie_ermon` τ = 2; both take log σ(θ), as published. Baselines with one sample are
exact means, as in the protocol; with 32 they are those of the other samples, but exact for `distinct_subsets_32`. The
law of `rebar` and of those named `race` is Plackett–Luce, and so is the gradient that they are compared with."""


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
            rows = [_figures(ENTRANTS[name], case(objective, seed), draws) for seed in seeds]
            bias, variance, error, rel_bias, rel_variance = np.mean(rows, 0).tolist()
            error_se = float(np.std([row[2] for row in rows], ddof=1) / len(rows) ** 0.5) if len(rows) > 1 else math.nan
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
                    error_se=error_se,
                )
            )
    except KeyboardInterrupt:
        pass
    return result


def _figures(entrant: Entrant, p: Case, draws: int) -> tuple[float, ...]:
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


def _distribution(entrant: Entrant, p: Case, draws: int) -> tuple[Tensor, Tensor]:
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
            gradient = estimates(entrant, estimator, design, p.fn, theta, generator)
            if design.was_used:
                return gradient, law.log_prob(x).exp()[tuples].prod(-1)
    theta = p.theta.expand(draws, N).clone().requires_grad_()
    gradient = estimates(entrant, estimator, entrant.make(theta), p.fn, theta, generator)
    return gradient, torch.full((draws,), 1 / draws, dtype=torch.float64)


def prescribe(design: Design, samples: Tensor) -> Any:
    """Return the design with prescribed samples (N, *batch, n); `was_used` tells whether they were asked for."""

    def sample(self: Any, sample_shape: Sequence[int] = (), **options: Any) -> Tensor:
        self.was_used = True
        return samples.view(*sample_shape, *samples.shape[1:])

    kind = type(design)
    made: Any = object.__new__(type(kind.__name__, (kind,), {"sample": sample}))
    made.__dict__.update(design.__dict__)
    made.was_used = False
    return made


def estimates(
    entrant: Entrant,
    estimator: Callable[..., Tensor],
    design: Design,
    fn: Objective,
    theta: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Return one estimate for each row of θ (rows, n), from which the design was made; (rows, n)."""
    if entrant.takes_objective:  # its loss is the mean over rows
        value = estimator(design, fn, num_samples=entrant.samples, generator=generator) * len(theta)
    else:
        shape = (entrant.samples,) if entrant.samples > 1 else ()
        value = fn(estimator(design, shape, generator=generator)).sum()
    gradient: Tensor = torch.autograd.grad(value, theta)[0]
    return gradient if entrant.takes_objective else gradient / entrant.samples  # `imle` is not linear in the slope


def exact_gradient(design: Design, fn: Objective, theta: Tensor) -> Tensor:
    """Return ∇E[f(x)] over all subsets, in the θ that the design was made from."""
    x = design.enumerate_support()
    (gradient,) = torch.autograd.grad((design.log_prob(x).exp() * fn(x)).sum(), theta)
    return gradient


def main() -> int:
    parser = common.parser(__doc__, "three seeds and 1000 draws: half a minute")
    common.add_study_options(parser, ENTRANTS)
    parser.add_argument(
        "--objective",
        action="append",
        choices=OBJECTIVES,
        metavar="NAME",
        help=f"{', '.join(OBJECTIVES)}; default: all",
    )
    parser.add_argument("--draws", type=int, default=10_000, help="estimates for each mean that cannot be had exactly")
    args = parser.parse_args()
    if args.draws < 2:
        parser.error(f"--draws must be ≥ 2; got {args.draws}")
    files = common.study_files(parser, args, "estimators", is_partial=bool(args.objective))
    names = tuple(dict.fromkeys(args.estimator)) if args.estimator else tuple(ENTRANTS)
    objectives = tuple(dict.fromkeys(args.objective)) if args.objective else OBJECTIVES
    draws, seeds = (min(args.draws, QUICK_DRAWS), SEEDS[:3]) if args.quick else (args.draws, SEEDS)
    rows = study(names, objectives, draws=draws, seeds=seeds, on_progress=common.say)
    if not rows:
        return 130
    common.write_if(files.csv, lambda: common.to_csv(rows))
    common.write_if(files.markdown, lambda: to_markdown(rows))
    if files.plot:
        common.write_picture(files.plot, figure(rows))
    common.show(args, rows, to_markdown(rows))
    return 130 if len(rows) < len(names) * len(objectives) else 0


if __name__ == "__main__":
    sys.exit(main())
