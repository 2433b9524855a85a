"""Statistical top-k: about k entries of n, by the mean and the deviation alone, as Spark Transformers do."""

import torch
from torch import Tensor

from .. import _check, _shape, ops
from .._math import statistical
from .._shape import Mask, PerRow
from .._torch import is_traced_number


def statistical_topk(
    x: Tensor, k: PerRow, *, dim: int = -1, mask: Mask = None, exact: bool = False, smooth: float = 0.0
) -> Tensor:
    """Return what exceeds the threshold that about k of n scores would exceed if they were normal.

    `max(x − θ, 0)` with `θ = mean(x) + std(x)·Φ⁻¹(1 − k/n)`: two passes, no sort, no iteration. It is no k-hot tensor:
    the values are shifted scores, to be given to an activation.

    Args:
        x: scores, (…, n) with n at `dim`. −inf counts as masked.
        k: how many to keep, 0 ≤ k < n: a number, or a tensor that broadcasts to the shape of `x` without `dim`; an
            integer if `exact`.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to `x`; True = may be chosen. Masked entries leave mean, deviation and n, and become
            0.
        exact: use the (k + 1)-th largest score as θ, so that exactly k entries are positive (fewer if scores are
            tied), whatever the distribution. It takes a few times longer.
        smooth: δ ≥ 0, in the units of x. If δ > 0, `u²/2δ` replaces `u = x − θ` for 0 < u < δ, and `u − δ/2` above it:
            then the map is C¹ in x.

    Returns:
        A tensor like `x`, ≥ 0. For normal scores the number of positive entries is k ± about √k; heavy tails give
        fewer (use `exact`). Gradients flow to `x`, through mean and deviation too (if `exact`, through the score that
        is θ), and to a tensor `k`, unless `exact`. The deviation is that of the population. Half precision is computed
        in float32. Tensor values are not read on the host: a row that cannot be satisfied (k out of range, no more
        allowed entries than k, NaN or +inf in `x`) is NaN, and that row only.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0])
        >>> statistical_topk(x, 2)
        tensor([1.5000, 0.5000, 0.0000, 0.0000])
        >>> statistical_topk(x, 1, exact=True)
        tensor([1., 0., 0., 0.])

    Reference: You et al., "Spark Transformer: reactivating sparsity in FFN and attention" (2025).
    """
    rows = _rows(x, k, dim, mask, exact)
    if isinstance(rows.k, float) and not isinstance(k, Tensor) and k >= (n := x.shape[dim]):
        raise ValueError(f"`k` must satisfy 0 ≤ k < {n} (size of dim {dim}), because all exceed no threshold; got {k}.")
    _check.number("smooth", smooth, "a number")
    _check.not_negative("smooth", smooth)
    y = ops.statistical_topk(rows.x, rows.k, rows.mask, exact=exact, smooth=float(smooth))
    return _shape.from_rows(y, dim, x.dtype)


def statistical_threshold(x: Tensor, k: PerRow, *, dim: int = -1, mask: Mask = None, exact: bool = False) -> Tensor:
    """Return the threshold of `statistical_topk`.

    `θ = mean(x) + std(x)·Φ⁻¹(1 − k/n)`, or the (k + 1)-th largest score if `exact`.

    Args:
        x, k, dim, mask, exact: as for `statistical_topk`; x is (…, n).

    Returns:
        θ, of the shape of `x` without `dim`, in x's dtype; +inf for k = 0 (if `exact`, the largest score), NaN where
        the row cannot be satisfied. Differentiable.

    Examples:
        >>> statistical_threshold(torch.tensor([2.0, 1.0, 0.0, -1.0]), 1)
        tensor(1.2541)
    """
    rows = _rows(x, k, dim, mask, exact)
    return ops.statistical_cutoff(rows.x, rows.k, rows.mask, exact=exact).squeeze(-1).to(x.dtype)


def statistical_logits(x: Tensor, k: PerRow, *, dim: int = -1, mask: Mask = None, exact: bool = False) -> Tensor:
    """Return the scores that reach the threshold of `statistical_topk`, and −inf for the others: logits for softmax.

    `x` where `x ≥ θ`, else −∞. Attention over the result is over about k keys. Softmax does not see a shift, so x
    stands here for `x − θ`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k: how many to keep, > 0; a row with no more than k allowed entries keeps all of them, as the first queries of
            causal attention do.
        dim, mask: as for `statistical_topk`.
        exact: keep exactly k, ties by lowest index.

    Returns:
        A tensor like `x`. A row keeps its largest entry at least, so softmax is a distribution; a row that is wholly
        masked is −inf. NaN and +inf make a row NaN. The gradient to `x` is that of the entries kept.

    Examples:
        >>> statistical_logits(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([2., 1., -inf, -inf])
    """
    _check.scores(x, dim)
    _check.positive("k", k)
    if x.shape[dim] == 0:
        return x.clone()  # there is nothing to keep
    is_number = not isinstance(k, Tensor) and not is_traced_number(k)
    rows = _rows(x, min(k, x.shape[dim]) if is_number else k, dim, mask, exact)
    scores = rows.x.detach()
    theta = None if exact else ops.quick_cutoff(scores, rows.k, rows.mask)
    if theta is not None:
        bound = torch.minimum(theta, scores.amax(-1, keepdim=True))
        return _shape.from_rows(torch.where(scores >= bound, rows.x, -torch.inf), dim, x.dtype)
    valid = statistical.allowed(scores, rows.mask)
    count = valid.sum(-1).double()
    k = _shape.per_row(rows.k, scores).detach()
    if exact:
        kept = ops.hard_topk(scores, torch.minimum(k, count), rows.mask)
        is_kept, is_bad = kept == 1, kept.isnan()
    else:
        theta = ops.statistical_cutoff(scores, torch.minimum(k, count - 1), rows.mask, exact=False)
        top = torch.where(valid, scores, -torch.inf).amax(-1, keepdim=True)
        is_kept = valid & ((scores >= torch.minimum(theta, top)) | (k >= count).unsqueeze(-1))
        is_bad = ~(theta > -torch.inf) & (count > 1).unsqueeze(-1)
    is_bad = is_bad | ~(k > 0).unsqueeze(-1) | (valid & ~(scores < torch.inf)).any(-1, keepdim=True)
    y = torch.where(is_kept, rows.x, -torch.inf)
    return _shape.from_rows(torch.where(is_bad, torch.nan, y), dim, x.dtype)


def _rows(x: Tensor, k: PerRow, dim: int, mask: Mask, exact: bool) -> _shape.Rows:
    """Check the arguments, and put `dim` last."""
    _check.scores(x, dim)
    _check.instance("exact", exact, bool)
    _check.count(k, x, dim, integral=exact)
    _check.mask(mask, x)
    return _shape.to_rows(x, ops.constant(k), 1.0, mask, dim, _shape.compute_dtype(x.dtype))
