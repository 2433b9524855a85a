"""Gradients of E[f(x)] in the parameters of a design: samples with a gradient, and losses with one."""

from ._control import rebar
from ._loss import (
    minimum_variance_baseline,
    over_samples,
    reinmax,
    rloo,
    score_function,
    taylor_control_variate,
)
from ._loss import takes_objective as takes_objective
from ._subsets import distinct_subsets, unordered_set
from ._surrogate import AdaptiveStep, imle, relaxed, simple, stochastic_times_smooth, straight_through_sample, xie_ermon

__all__ = ["minimum_variance_baseline", "reinmax", "rloo", "score_function", "taylor_control_variate"]
__all__ += ["AdaptiveStep", "imle", "relaxed", "simple", "xie_ermon"]
__all__ += ["stochastic_times_smooth", "straight_through_sample"]
__all__ += ["distinct_subsets", "over_samples", "rebar", "unordered_set"]


def __dir__() -> list[str]:
    return __all__
