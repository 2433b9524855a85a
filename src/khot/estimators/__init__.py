"""Gradients of E[f(x)] in the parameters of a design: samples with a gradient, and losses with one."""

from ._imle import AdaptiveStep as AdaptiveStep
from ._imle import imle as imle
from ._loss import minimum_variance_baseline as minimum_variance_baseline
from ._loss import reinmax as reinmax
from ._loss import rloo as rloo
from ._loss import score_function as score_function
from ._loss import taylor_control_variate as taylor_control_variate
from ._shared import takes_objective as takes_objective
from ._surrogate import relaxed as relaxed
from ._surrogate import simple as simple
from ._surrogate import stochastic_times_smooth as stochastic_times_smooth
from ._surrogate import straight_through_sample as straight_through_sample
from ._surrogate import xie_ermon as xie_ermon

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
