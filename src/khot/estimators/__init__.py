"""Gradients of E[f(x)] in the parameters of a design: samples with a gradient, and losses with one."""

from ._loss import minimum_variance_baseline, reinmax, rloo, score_function, taylor_control_variate
from ._loss import takes_objective as takes_objective
from ._surrogate import AdaptiveStep, imle, relaxed, simple, stochastic_times_smooth, straight_through_sample, xie_ermon

__all__ = [
    "AdaptiveStep",
    "imle",
    "minimum_variance_baseline",
    "reinmax",
    "relaxed",
    "rloo",
    "score_function",
    "simple",
    "stochastic_times_smooth",
    "straight_through_sample",
    "taylor_control_variate",
    "xie_ermon",
]
