"""Where to look for the threshold of a hard row: near its k-th score.

As T → 0 the threshold tends to the k-th score. For any T, an edge e with the counts (or costs) M of the scores at or
above it, of N in all, bounds the root of Σ c·F((x − τ)/T) = k from both sides:

    M > k:  τ ≥ e − T·F⁻¹(k/M),            because each of those M has F ≥ k/M at this τ;
    M < k:  τ ≤ e − T·F⁻¹((k − M)/(N − M)), for an e with M scores above it, because all others have at most that F.

Edges that are powers of two places away from the k-th leave a bracket whose width depends little on the spread of the
scores.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import cdfs
from .cdfs import Cdf

SLACK = 0.01  # in units of T: a root that is at a bound, as for ties, must not round to the outside


class Edges(NamedTuple):
    """Bounds of the threshold, before the best are chosen."""

    low: Tensor  # (rows, m) edges with more than k at or above
    low_count: Tensor  # (rows, m) float64, how many (or the costs)
    high: Tensor  # (rows, m) edges with less than k above
    high_count: Tensor  # (rows, m) float64
    middle: Tensor  # (rows, 1) the k-th score, or between it and the next


class Bracket(NamedTuple):
    """Two points `anchor + T·shift` around the threshold, and where to begin; all (rows, 1) float64."""

    low: Tensor
    low_shift: Tensor
    high: Tensor
    high_shift: Tensor
    start: Tensor


def sorted_edges(x: Tensor, costs: Tensor | None, k: Tensor) -> Edges:
    """Return the edges 0, 1, 3, 7, … places from the k-th of the finite scores; x (rows, n), k (rows, 1) float64."""
    finite, n = x.isfinite(), x.shape[-1]
    scores, order = torch.where(finite, x, -torch.inf).sort(-1, descending=True)
    leaps = (1 << torch.arange((n - 1).bit_length() + 1, device=x.device)) - 1
    last = (finite.sum(-1, keepdim=True) - 1).clamp(min=0)
    if costs is None:
        first, below = k.nan_to_num(0.0).floor().long(), k.nan_to_num(0.0).ceil().long() - 1
        low, high = (first + leaps).clamp(min=0).minimum(last), (below - leaps).clamp(min=0).minimum(last)
        low_count, high_count = (low + 1).to(k.dtype), high.to(k.dtype)
    else:
        running = torch.where(finite, costs, 0.0).gather(-1, order).to(k.dtype).cumsum(-1)
        first, below = (running <= k).sum(-1, keepdim=True), (running < k).sum(-1, keepdim=True)
        low, high = (first + leaps).minimum(last), (below - leaps).clamp(min=0).minimum(last)
        low_count = running.gather(-1, low)
        high_count = torch.where(high > 0, running.gather(-1, (high - 1).clamp(min=0)), 0.0)
    lows, highs = (scores.gather(-1, place).to(k.dtype) for place in (low, high))
    return Edges(lows, low_count, highs, high_count, lows[:, :1] / 2 + highs[:, :1] / 2)


def bracket(cdf: Cdf, edges: Edges, k: Tensor, total: Tensor, temperature: Tensor) -> Bracket:
    """Return the tightest bracket that the edges give; `total` (rows, 1) is N."""
    m = edges.low.shape[-1]
    shares = torch.cat((k / edges.low_count, (k - edges.high_count) / (total - edges.high_count)), -1)
    quantiles = cdfs.quantile(cdf, shares)
    low, low_shift = _best(edges.low, -quantiles[:, :m], temperature, edges.low_count > k, 1)
    high, high_shift = _best(edges.high, -quantiles[:, m:], temperature, edges.high_count < k, -1)
    return Bracket(low, low_shift, high, high_shift, edges.middle)


def _best(edge: Tensor, shift: Tensor, temperature: Tensor, is_valid: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return the highest of the points (sign 1), or the lowest (sign −1)."""
    place = (sign * (edge + temperature * shift)).masked_fill(~is_valid, -torch.inf).argmax(-1, keepdim=True)
    shift = shift.gather(-1, place)
    return edge.gather(-1, place), shift - sign * SLACK * shift.abs().clamp(min=1)
