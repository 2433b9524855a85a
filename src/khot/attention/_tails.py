"""What attention loses if it keeps the k largest scores of a row: the identities, and bounds on the output's error.

P = softmax(s), H are the k largest scores and T the rest, τ = P(T) is the tail mass, and P̂ is P on H, normalised.
"""

import math

import torch
from torch import Tensor

from .. import _check, _shape
from .._math import tails
from .._shape import Mask, PerRow


def tail_mass(scores: Tensor, k: PerRow | None = None, *, dim: int = -1, mask: Mask = None) -> Tensor:
    """Return the softmax mass outside the k largest scores, which is the total variation distance that dropping costs.

    `τ = Σ_T e^s / Σ e^s = TV(P, P̂) = 1 − exp(−KL(P̂‖P))`.

    Args:
        scores: (…, n).
        k: the size of the head; an integer, a tensor that broadcasts to the rows, or None for all of 1, …, n.
        dim: the dimension of the keys.
        mask: boolean, broadcasts to `scores`; True = may be attended to.

    Returns:
        float64 (…), or (…, n) along `dim` for k = None. 0 where a row has at most k keys. A row is NaN if it holds NaN
        or +inf, if its mask leaves nothing, or if a tensor k is no integer in [0, n].

    Examples:
        >>> khot.attention.tail_mass(torch.tensor([3.0, 2.0, 1.0, 0.0]), 2)
        tensor(0.1192, dtype=torch.float64)
    """
    s, _, count = sorted_rows(scores, k, dim, mask)
    return at(tails.bounds(s, count, None), k, dim)


def truncation_kl(scores: Tensor, k: PerRow, *, dim: int = -1, mask: Mask = None) -> Tensor:
    """Return KL(P̂‖P) of the kept and normalised head from the whole softmax; the other direction is infinite.

    `KL(P̂‖P) = log Σ e^s − log Σ_H e^s = −log(1 − τ)`.

    Args and Returns:
        As for `tail_mass`; +inf for k = 0.

    Examples:
        >>> khot.attention.truncation_kl(torch.tensor([3.0, 2.0, 1.0, 0.0]), 2)
        tensor(0.1269, dtype=torch.float64)
    """
    s, _, _ = sorted_rows(scores, k, dim, mask)
    return at(s.logsumexp(-1, keepdim=True) - s.logcumsumexp(-1), k, dim, none=math.inf)


def smallest_k(scores: Tensor, epsilon: PerRow, *, dim: int = -1, mask: Mask = None) -> Tensor:
    """Return the smallest k ≥ 1 of each row whose tail mass is at most ε, exactly.

    Args:
        scores: (…, n).
        epsilon: in (0, 1); a number, or a tensor that broadcasts to the rows.
        dim, mask: as for `tail_mass`.

    Returns:
        int64 (…). −1 for a row that holds NaN or +inf; 0 for a row whose mask leaves nothing.

    Examples:
        >>> khot.attention.smallest_k(torch.tensor([[3.0, 2.0, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]]), 0.2)
        tensor([2, 1])
    """
    s, _, count = sorted_rows(scores, None, dim, mask)
    check_epsilon("epsilon", epsilon)
    if isinstance(epsilon, Tensor):
        _check.broadcasts("epsilon", epsilon, tuple(s.shape[:-1]), "the rows")
    k = tails.first_within(tails.bounds(s, count, None), _shape.per_row(epsilon, s), count)
    return torch.where(s[..., 0].isnan() & (count > 0), -1, k)


def output_error(scores: Tensor, values: Tensor, k: PerRow, *, mask: Mask = None) -> Tensor:
    """Return how far the output moves if only the k largest scores are kept, exactly.

    `‖Σ P_i v_i − Σ_H P̂_i v_i‖ = τ ‖μ_T − μ_H‖`, with the means of the values over the tail and over the head.

    Args:
        scores: (…, n).
        values: (…, n, e).
        k, mask: as for `tail_mass`.

    Returns:
        float64 (…).

    Examples:
        >>> khot.attention.output_error(torch.tensor([3.0, 2.0, 1.0]), torch.eye(3), 1)
        tensor(0.4243, dtype=torch.float64)
    """
    _check.scores(scores, -1, "scores")
    _check.count(k, scores, -1, integral=True)
    s, order, _ = sorted_rows(scores, k, -1, mask)
    _check_values(values, scores)
    p = s.softmax(-1)
    v = values.to(torch.float64).expand(*s.shape, -1).gather(-2, order.unsqueeze(-1).expand(*s.shape, values.shape[-1]))
    size = _shape.per_row(k, s).unsqueeze(-1)
    is_head = torch.arange(s.shape[-1], device=s.device) < size
    tail = tail_mass(scores, k, mask=mask)
    head = torch.where(is_head, p, 0.0) / (1 - tail).unsqueeze(-1)
    moved: Tensor = ((p - head).unsqueeze(-2) @ v).squeeze(-2)
    distance: Tensor = torch.linalg.vector_norm(moved, dim=-1)
    return distance + 0 * tail


def norm_bound(tail: Tensor, values: Tensor, *, mask: Mask = None) -> Tensor:
    """Bound the output's error by the tail mass and the longest value: `2 C τ`, where ‖v‖ ≤ C.

    Args:
        tail: (…), the tail mass τ, or an upper bound on it.
        values: (…, n, e).
        mask: boolean, broadcasts to (…, n): the keys that may be attended to.

    Returns:
        float64 (…), ≥ `output_error`.

    Examples:
        >>> khot.attention.norm_bound(torch.tensor(0.1), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor(1.0000, dtype=torch.float64)
    """
    _check_bound(tail, values, mask=mask)
    norms = values.to(torch.float64).norm(dim=-1)
    return 2 * tail * (norms if mask is None else torch.where(mask, norms, 0.0)).amax(-1)


def diameter_bound(tail: Tensor, values: Tensor, head: Tensor, *, mask: Mask = None) -> Tensor:
    """Bound the output's error by the tail mass and the distances across the cut: `τ · max ‖v_i − v_j‖`, i ∈ H, j ∈ T.

    It computes all n² distances.

    Args:
        tail: (…), the tail mass τ, or an upper bound on it.
        values: (…, n, e).
        head: boolean (…, n), True for the keys that are kept.
        mask: boolean, broadcasts to (…, n): the keys that may be attended to.

    Returns:
        float64 (…), ≥ `output_error`, ≤ `norm_bound`; 0 if nothing is dropped.

    Examples:
        >>> khot.attention.diameter_bound(torch.tensor(0.1), torch.eye(3), torch.tensor([True, False, False]))
        tensor(0.1414, dtype=torch.float64)
    """
    if not isinstance(head, Tensor) or head.dtype != torch.bool:
        got = head.dtype if isinstance(head, Tensor) else type(head).__name__
        raise TypeError(f"`head` must be a boolean tensor (…, n), True for the keys that are kept; got {got}.")
    _check_bound(tail, values, head=head, mask=mask)
    v = values.to(torch.float64)
    rest = ~head if mask is None else mask & ~head
    squares = (v.unsqueeze(-2) - v.unsqueeze(-3)).square().sum(-1)  # (…, n, n), without the rounding of a product
    across = head.unsqueeze(-1) & rest.unsqueeze(-2)
    return tail * torch.where(across, squares, 0.0).amax((-2, -1)).sqrt()


def variance_bound(tail: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Bound the output's error by the variance of the values under the attention: `√(τ/(1 − τ) · Σ P_i ‖v_i − Attn‖²)`.

    By the law of total variance, that between head and tail, τ(1 − τ)‖μ_T − μ_H‖², is at most the whole.

    Args:
        tail: (…), the tail mass τ, or an upper bound on it.
        values: (…, n, e).
        weights: (…, n), the softmax P.

    Returns:
        float64 (…), ≥ `output_error`.

    Examples:
        >>> khot.attention.variance_bound(torch.tensor(0.1), torch.eye(2), torch.tensor([0.9, 0.1]))
        tensor(0.1414, dtype=torch.float64)
    """
    _check.floating("weights", weights)
    _check_bound(tail, values, weights=weights)
    p, v = weights.to(torch.float64), values.to(torch.float64)
    mean = p.unsqueeze(-2) @ v
    return (tail / (1 - tail) * (p * (v - mean).square().sum(-1)).sum(-1)).sqrt()


def gaussian_share(spread: float, epsilon: float) -> float:
    """Return k/n that Gaussian scores of a standard deviation need for the tail mass ε, as n → ∞: `1 − Φ(σ + Φ⁻¹(ε))`.

    For a finite n it is close while σ is well below √(2 log n), and too small above.

    Examples:
        >>> round(khot.attention.gaussian_share(2.0, 0.01), 3)
        0.628
    """
    _check.not_negative("spread", spread)
    check_epsilon("epsilon", epsilon)
    quantile = torch.special.ndtri(torch.tensor(epsilon, dtype=torch.float64))
    return float(torch.special.ndtr(-(spread + quantile)))


def check_epsilon(name: str, value: PerRow) -> None:
    """Raise unless `value` is a tensor or a number in (0, 1)."""
    if isinstance(value, Tensor):
        _check.floating(name, value)
        return
    _check.number(name, value)
    if not 0 < value < 1:
        raise ValueError(f"`{name}` must satisfy 0 < {name} < 1: a share of the attention; got {value}.")


def sorted_rows(scores: Tensor, k: PerRow | None, dim: int, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments, and return scores in falling order, their indices, and the allowed counts, keys last."""
    _check.scores(scores, dim, "scores")
    _check.mask(mask, scores)
    if k is not None:
        _check.count(k, scores, dim, integral=True)
    if scores.shape[dim] == 0:
        raise ValueError("`scores` must have at least one key; got 0.")
    rows = _shape.last(scores, dim)
    return tails.falling(rows, None if mask is None else _shape.last(mask.expand(scores.shape), dim))


def at(bounds: Tensor, k: PerRow | None, dim: int, none: float = 1.0) -> Tensor:
    """Return the entries of bounds (…, n), for heads of 1, …, n, that belong to k; `none` for k = 0."""
    if k is None:
        return _shape.from_rows(bounds, dim, bounds.dtype)
    size = _shape.per_row(k, bounds)
    place = size.clamp(1, bounds.shape[-1]).nan_to_num(1.0).long()
    found = bounds.gather(-1, place.unsqueeze(-1) - 1).squeeze(-1)
    found = torch.where(size == 0, none + 0 * found, found)
    return torch.where(size == place.where(size != 0, 0), found, torch.nan)


def _check_bound(tail: Tensor, values: Tensor, **per_key: Tensor | None) -> None:
    """Raise unless a tail (…), values (…, n, e) and what is given of each key, (…, n), fit."""
    _check.floating("tail", tail)
    _check.vectors("values", values)
    shapes = {"tail": tail.shape, "values": values.shape[:-2]}
    for name, value in per_key.items():
        if value is not None:
            _check.instance(name, value, Tensor)
            if value.ndim == 0 or (value.shape[-1] != 1 and value.shape[-1] != values.shape[-2]):
                want = f"(…, {values.shape[-2]}), a number for each key"
                raise ValueError(f"`{name}` must have the shape {want}; got {tuple(value.shape)}.")
            shapes[name] = value.shape[:-1]
    _check.batch(**shapes)


def _check_values(values: Tensor, scores: Tensor) -> None:
    _check.vectors("values", values)
    if values.shape[-2] != scores.shape[-1]:
        want = f"(…, {scores.shape[-1]}, e), a row for each key"
        raise ValueError(f"`values` must have the shape {want}; got {tuple(values.shape)}.")
