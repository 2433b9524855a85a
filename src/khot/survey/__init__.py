"""Estimates from one sample of a survey, with their variances, and weights that are calibrated to known totals."""

from ._calibration import Distance, calibrate, calibrated_total, linear, raking
from ._estimates import Estimate, Variance, mean, ratio, total
from ._variance import Balanced, deville, hajek, successive_differences

__all__ = ["Balanced", "Distance", "Estimate", "Variance", "calibrate", "calibrated_total", "deville", "hajek"]
__all__ += ["linear", "mean", "raking", "ratio", "successive_differences", "total"]
