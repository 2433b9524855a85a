"""σ_k and its siblings: y = F((x − τ)/T) with τ such that Σ y = k, one function for each cdf F."""

from typing import Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import _check, _shape, ops
from .._math import cdfs, threshold
from .._math.cdfs import Cdf
from .._shape import Costs, Group, Mask, PerRow

MOST_P = 20.0  # for larger p, y = 2e-16 has a margin below the smallest float64, and some rows have no solution


class Relaxation(Protocol):
    """A function like `sigmoid_topk`."""

    def __call__(
        self, x: Tensor, k: PerRow, *, dim: int = -1, temperature: PerRow = 1.0, mask: Mask = None, costs: Costs = None
    ) -> Tensor:
        """Return a soft k-hot tensor like `x`."""


def sigmoid_topk(
    x: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    costs: Costs = None,
    group: Group = None,
) -> Tensor:
    """Return soft top-k: numbers in [0, 1] that sum to k and are large where the scores are large.

    `σ_k(x) = σ((x − τ)/T)` with τ such that `Σ σ_k(x) = k`; equally `argmax_{π ∈ Δ_k} ⟨x, π⟩ + T·H(π)`, where H is
    the sum of binary entropies.

    Args:
        x: scores, (…, n) with n at `dim`. −inf is never chosen; +inf always is (more than k of them share k equally).
        k: how many to choose, 0 ≤ k ≤ n, integer or fractional: a number, or a tensor that broadcasts to the shape of
            `x` without `dim`.
        dim: the dimension to choose along.
        temperature: T > 0, larger is softer: a number, or a tensor that broadcasts like `k`.
        mask: boolean, broadcasts to `x`; True = may be chosen. n becomes the number of allowed entries.
        costs: positive, broadcasts to `x`: then `k` is a budget, `Σ c·y = k` and `y = σ(x/(c·T) − τ)`.
        group: the process group (or a list of groups, outermost first) of a row in parts; then `x` is this process's
            part of each row, of any length. A DTensor needs none.

    Returns:
        A tensor like `x`, with entries in [0, 1] that sum to k along `dim` within 1e-6·max(k, 1) (float32) or
        1e-12·max(k, 1) (float64; 1e-9 where |x|/T > 100). Masked and −inf entries are exactly 0. Half precision is
        computed in float32 and rounded once. Smooth, with gradients of every order to `x`, `k` and `temperature`; a
        saturated row has gradient 0 in `x`. Scores of +inf have no derivative; more than k of them are treated as equal
        scores. O(n) time, without sorting; on the CPU, with the native kernel, the same bits at any number of threads.

        Tensor values are not read on the host, so a row that cannot be satisfied (k out of range, fewer allowed entries
        than k, a temperature that is not positive, NaN in `x`) is NaN, and that row only. On accelerators, so is a row
        that a fixed number of steps does not solve.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0])
        >>> sigmoid_topk(x, 2)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])
        >>> sigmoid_topk(x, 2, temperature=0.1)
        tensor([1.0000e+00, 9.9331e-01, 6.6929e-03, 3.0590e-07])
        >>> sigmoid_topk(x, 2, mask=torch.tensor([True, False, True, True]))
        tensor([0.9335, 0.0000, 0.6551, 0.4114])

    Reference: Wijk et al., "Differentiable Top-k: From One-Hot to k-Hot" (2025); also the LML of Amos et al. (2019).
    """
    return relax(cdfs.SIGMOID, x, k, dim, temperature, mask, costs, group)


def laplace_topk(
    x: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    costs: Costs = None,
    group: Group = None,
) -> Tensor:
    """Return soft top-k with the Laplace cdf, the relaxation of LapSum.

    `F(z) = ½e^z` for z ≤ 0, `1 − ½e^{−z}` above; `τ` such that `Σ F((x − τ)/T) = k`.

    Args:
        x, k, dim, temperature, mask, costs, group: as for `sigmoid_topk`; x is (…, n).

    Returns:
        As `sigmoid_topk`. Exponential tails, as σ_k's; F′ has a corner at the threshold, so second derivatives jump
        where a score crosses it.

    Examples:
        >>> laplace_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8884, 0.6967, 0.3033, 0.1116])

    Reference: Struski et al., "LapSum: one method to differentiate them all" (2025).
    """
    return relax(cdfs.LAPLACE, x, k, dim, temperature, mask, costs, group)


def normal_topk(
    x: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    costs: Costs = None,
    group: Group = None,
) -> Tensor:
    """Return soft top-k with the normal cdf, "probit top-k".

    `F = Φ`; `τ` such that `Σ Φ((x − τ)/T) = k`.

    Args:
        x, k, dim, temperature, mask, costs, group: as for `sigmoid_topk`; x is (…, n).

    Returns:
        As `sigmoid_topk`. Smooth; light tails, so that scores far from the threshold get no gradient. A row whose
        scores span more than the range of its dtype in units of T may be NaN.

    Examples:
        >>> normal_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.9332, 0.6915, 0.3085, 0.0668])
    """
    return relax(cdfs.NORMAL, x, k, dim, temperature, mask, costs, group)


def cauchy_topk(
    x: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    costs: Costs = None,
    group: Group = None,
) -> Tensor:
    """Return soft top-k with the Cauchy cdf, which has heavy tails and gradients that reach far.

    `F(z) = ½ + atan(z)/π`; `τ` such that `Σ F((x − τ)/T) = k`.

    Args:
        x, k, dim, temperature, mask, costs, group: as for `sigmoid_topk`; x is (…, n).

    Returns:
        As `sigmoid_topk`. Smooth; y falls as 1/|z| and its gradient as 1/z², so that a hard result needs a far smaller
        temperature. The gradient is 0 only where y rounds to 0 or 1. A row whose scores span more than the range of
        its dtype in units of T may be NaN.

    Examples:
        >>> cauchy_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8128, 0.6476, 0.3524, 0.1872])
    """
    return relax(cdfs.CAUCHY, x, k, dim, temperature, mask, costs, group)


def euclidean_topk(
    x: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    costs: Costs = None,
    group: Group = None,
) -> Tensor:
    """Return the Euclidean projection of x/T on the capped simplex: sparse, with exact zeros and ones.

    `argmin_{y ∈ Δ_k} ‖y − x/T‖²`, which is `clip((x − τ)/T, 0, 1)` with `Σ y = k`.

    Args:
        x, k, dim, temperature, mask, costs, group: as for `sigmoid_topk`; x is (…, n).

    Returns:
        As `sigmoid_topk`, but piecewise linear. Differentiable where no entry is at a corner, z = 0 or 1; there the
        gradient is the element of the generalised Jacobian that counts the entry as fixed. Entries that are exactly 0
        or 1 get no gradient; where all are, the gradient is 0.

    Examples:
        >>> euclidean_topk(torch.tensor([2.0, 1.2, 1.0, -1.0]), 2)
        tensor([1.0000, 0.6000, 0.4000, 0.0000])

    Reference: Wang and Lu, "Projection onto the capped simplex" (2015); it is also the budget layer of entmax.
    """
    return relax(cdfs.EUCLIDEAN, x, k, dim, temperature, mask, costs, group)


def power_topk(
    x: Tensor,
    k: PerRow,
    *,
    p: float = 4 / 3,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    costs: Costs = None,
    group: Group = None,
) -> Tensor:
    """Return soft top-k regularised with the p-norm: sparse, and for p < 2 smooth where it meets 0.

    `argmax_{y ∈ Δ_k} ⟨x, y⟩ − (T/p)·Σ y^p`, which is `clip((x − τ)/T, 0, 1)^{1/(p−1)}` with `Σ y = k`.

    Args:
        x, k, dim, temperature, mask, costs, group: as for `sigmoid_topk`; x is (…, n).
        p: the norm, 1 < p ≤ 20; 2 is `euclidean_topk`.

    Returns:
        As `euclidean_topk`, with a corner at z = 1, and at z = 0 if p ≥ 2 (a vertical one if p > 2, computed in
        float64). A row whose scores span more than the range of its dtype in units of T may be NaN.

    Examples:
        >>> power_topk(torch.tensor([2.0, 1.2, 1.0, -1.0]), 2)
        tensor([1.0000, 0.6840, 0.3160, 0.0000])

    Reference: Sander et al., "Fast, differentiable and sparse top-k: a convex analysis perspective" (2023).
    """
    _check.above("p", p, 1)
    if p > MOST_P:
        raise ValueError(f"`p` must satisfy 1 < p ≤ {MOST_P:g}, because y jumps for larger p; got {p}.")
    return relax(cdfs.EUCLIDEAN if p == 2 else cdfs.power(float(p)), x, k, dim, temperature, mask, costs, group)


def relax(
    cdf: Cdf,
    x: Tensor,
    k: PerRow,
    dim: int,
    temperature: PerRow,
    mask: Mask,
    costs: Costs,
    group: Group = None,
) -> Tensor:
    """Check the arguments of a relaxation, and return y = F(z) like `x`."""
    if costs is None and group is None and not is_compiling():
        y: Tensor | None = ops.direct_topk(x, k, temperature, dim, cdf, mask)
        if y is not None:
            return y
    if group is not None or (type(x) is not Tensor and _check.is_dtensor(x)):
        return _relax_parts(cdf, x, k, dim, temperature, mask, costs, group)
    _check.call(x, k, dim, temperature, mask, costs)
    dtype = torch.float64 if cdf.is_vertical else _shape.compute_dtype(x.dtype)
    if costs is None and cdf.slope_at is not None:
        if x.dtype != dtype and ops.takes_halves(x, k, temperature, mask, cdf):
            dtype = x.dtype
        rows = _shape.to_rows(x, ops.constant(k), ops.constant(temperature), mask, dim, dtype)
        return _shape.from_rows(ops.topk(*rows, cdf), dim, x.dtype)

    def by_margins(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Costs, dim: int = -1) -> Tensor:
        z, rows, costs = margins(cdf, x, k, dim, temperature, mask, costs, dtype)
        return threshold.smooth_value(cdf, z, _shape.per_row(rows.k, z), costs)

    y = None
    if costs is not None and not ops.is_watched():
        rows = _shape.to_rows(x, ops.constant(k), ops.constant(temperature), mask, dim, dtype)
        y = ops.costs.topk(*rows, _shape.per_entry(costs, x, dim, dtype), cdf, by_margins)
    return _shape.from_rows(by_margins(x, k, temperature, mask, costs, dim) if y is None else y, dim, x.dtype)


def _relax_parts(
    cdf: Cdf, x: Tensor, k: PerRow, dim: int, temperature: PerRow, mask: Mask, costs: Costs, group: Group
) -> Tensor:
    """Return the same if a row is in parts."""
    from .. import distributed  # it imports torch.distributed

    if _check.is_dtensor(x):
        _check.no_group(group)

        def part(x: Tensor, k: PerRow, heat: PerRow, mask: Mask, costs: Costs, group: Group) -> Tensor:
            return relax(cdf, x, k, dim, heat, mask, costs, group)

        whole: Tensor = distributed.on_parts(part, x, dim, per_row=(k, temperature), per_entry=(mask, costs))
        return whole
    _check.call(x, k, dim, temperature, mask, costs, is_part=True)
    dtype = torch.float64 if cdf.is_vertical else _shape.compute_dtype(x.dtype)
    if costs is None and cdf.slope_at is not None:
        rows = _shape.to_rows(x, k, temperature, mask, dim, dtype)
        return _shape.from_rows(distributed.topk(rows, cdf, group), dim, x.dtype)
    z, rows, costs = margins(cdf, x, k, dim, temperature, mask, costs, dtype, group)
    y = distributed.smooth_value(cdf, z, _shape.per_row(rows.k, z), costs, group)
    return _shape.from_rows(y, dim, x.dtype)


def margins(
    cdf: Cdf,
    x: Tensor,
    k: PerRow,
    dim: int,
    temperature: PerRow,
    mask: Mask,
    costs: Costs,
    dtype: torch.dtype,
    group: Group = None,
) -> tuple[Tensor, _shape.Rows, Costs]:
    """Solve a call in `dtype`, along the last dim.

    Returns:
        The margins z = (x − τ)/T (…, n), ±inf where y is exactly 1 or 0; the rows they belong to, in which costs c make
        the scores x/c; and the costs (…, n).
    """
    rows = _shape.to_rows(x, k, temperature, mask, dim, dtype)
    if costs is not None:
        costs = _shape.per_entry(costs, x, dim, dtype)
        if rows.mask is not None:
            costs = torch.where(rows.mask, costs, 1.0)  # a masked cost may be anything, and counts for nothing
        infinite = rows.x.isinf()
        per_cost = torch.where(infinite, 0.0, rows.x) / costs
        rows = _shape.Rows(torch.where(infinite, rows.x.detach(), per_cost), rows.k, rows.temperature, rows.mask)
    if group is not None:
        from .. import distributed

        return distributed.margin(rows, costs, cdf, group), rows, costs
    return ops.margin(rows.x, rows.k, rows.temperature, rows.mask, costs, cdf), rows, costs
