"""Weights that reproduce known totals and stay close to the design weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check
from .._torch import require_values
from ._estimates import Estimate, Variance, sample_tensors, variance_by
from ._variance import double, hajek, known_from

STEPS = 100
TOLERANCE = 1e-10


class Distance(NamedTuple):
    """Say how far weights may go from the design weights: new = old · g(u), with u a linear predictor."""

    factor: Callable[[Tensor], Tensor]
    """g, with g(0) = g′(0) = 1."""
    slope: Callable[[Tensor], Tensor]
    """g′ > 0."""


linear = Distance(lambda u: 1 + u, torch.ones_like)
"""The least squares of changes, Σ (w − d)²/d: the regression estimator. Weights may become negative."""

raking = Distance(torch.exp, torch.exp)
"""The least entropy of changes, Σ w log(w/d) − w + d: weights stay positive. Iterative proportional fitting."""


def calibrate(weights: Any, known: Any, totals: Any, *, distance: Distance = linear) -> Tensor:
    """Return weights that reproduce known totals, as close to the design weights as may be.

    `w = d · g(x·λ)` with `Σ_{sample} w x = X`. Reference: Deville and Särndal, "Calibration estimators in survey
    sampling" (1992).

    Args:
        weights: design weights d = 1/π of the sample, (k).
        known: variables x of the sample whose totals are known, (k, q). A column of ones for the number of items.
        totals: X, (q), over all items.
        distance: `linear` or `raking`.

    Returns:
        New weights, (k) float64. Raises ValueError if no weights of this kind reproduce the totals.

    Examples:
        >>> x = [[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]]
        >>> calibrate([2.0, 2.0, 2.0], x, [6.0, 15.0], distance=raking)
        tensor([1.7237, 1.9145, 2.3618], dtype=torch.float64)
    """
    (d,) = sample_tensors(weights=weights)
    x, wanted = double(known, "known"), double(totals, "totals")
    require_values("A calibration", d, x, wanted)
    if d.ndim != 1 or x.ndim != 2 or len(x) != len(d) or wanted.shape != x.shape[1:]:
        got = f"{tuple(d.shape)}, {tuple(x.shape)} and {tuple(wanted.shape)}"
        raise ValueError(f"`weights`, `known` and `totals` must have the shapes (k), (k, q) and (q); got {got}.")
    if not bool(x.isfinite().all() & wanted.isfinite().all()):
        raise ValueError("`known` and `totals` must be finite; got NaN or inf.")
    _check.instance("distance", distance, Distance)
    scale = x.abs().amax(0).clamp(min=1e-300)
    x, wanted = x / scale, wanted / scale
    rate = torch.zeros_like(wanted)
    new, size = d * distance.factor(x @ rate), (d @ x.abs()).clamp(min=1e-300)
    for _ in range(STEPS):
        off = wanted - new @ x
        if bool((off.abs() <= TOLERANCE * size).all()):
            return new
        information = x.mT @ ((d * distance.slope(x @ rate))[:, None] * x)
        step = torch.linalg.lstsq(information, off[:, None], driver="gelsd").solution[:, 0]
        for _ in range(30):  # halve a step that overshoots
            moved = d * distance.factor(x @ (rate + step))
            if bool(moved.isfinite().all()) and (wanted - moved @ x).norm() < off.norm():
                break
            step = step / 2
        rate, new = rate + step, d * distance.factor(x @ (rate + step))
    wrong = ((wanted - new @ x) / size).abs().max()
    raise ValueError(f"No weights of this kind reproduce `totals`; the best are off by {float(wrong):.3g} of them.")


def calibrated_total(
    values: Any, weights: Any, known: Any, totals: Any, *, distance: Distance = linear, variance: Variance = hajek
) -> Estimate:
    """Estimate the total of y with calibrated weights; its variance is that of what x does not explain of y.

    `Σ w y`, with the weights w of `calibrate`, and the variance of the total of (y − x·b) w/d, b the fit of y on x
    weighted by the design weights d. Reference: Särndal, Swensson and Wretman (1989), for the factor w/d.

    Args:
        values: y of the sample, (k).
        weights, known, totals, distance: as for `calibrate`.
        variance: as for `total`. It is NaN if x explains any y whatever, with as many variables as items.

    Examples:
        >>> x = [[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]]
        >>> calibrated_total([3.0, 5.0, 9.0], [2.0, 2.0, 2.0], x, [6.0, 15.0]).value  # y = 1 + 2x
        tensor(36., dtype=torch.float64)
    """
    y, d = sample_tensors(values=values, weights=weights)
    w = calibrate(d, known, totals, distance=distance)
    x = double(known, "known")
    root = d.sqrt()[:, None]
    fit, _, rank, _ = torch.linalg.lstsq(root * x, root * y[:, None], driver="gelsd")
    spread = variance_by(variance, (y - (x @ fit)[:, 0]) * w / d, d)
    return Estimate(w @ y, known_from(spread, 1 / d, rank) if len(d) <= rank else spread)
