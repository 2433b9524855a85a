"""Certificates: upper bounds on the tail mass from some of the scores, rounded to the safe side.

Each takes the largest scores that are known, and may be given to `certified_attention`. One of your own is a function
`(scores, k=None, *, mask=None)` → bounds for k, or for heads of 1, …, n if k is None, as (…, n).
"""

import torch
from torch import Tensor

from .. import _check
from .._math import tails
from .._shape import Mask, PerRow
from ._tails import at, sorted_rows


def single_gap(
    scores: Tensor, k: PerRow | None = None, *, n: int | None = None, dim: int = -1, mask: Mask = None
) -> Tensor:
    """Bound the tail mass by one number, the gap Δ between the k-th score and the next: `(n − k)/(n − k + k e^Δ)`.

    Every score of the head is at least s_(k), and every other at most s_(k) − Δ. Seldom of use: see `known_head`.

    Args:
        scores: (…, m), all n scores or the largest m of them; with m = k, Δ = 0 is all that is known.
        k, dim, mask: as for `tail_mass`.
        n: how many keys there are in all; if omitted, those in `scores` that may be attended to.

    Returns:
        float64, as `tail_mass` and never below it.

    Examples:
        >>> khot.attention.single_gap(torch.tensor([9.0, 3.0]), 1, n=100)
        tensor(0.1970, dtype=torch.float64)
    """
    return _bounded(scores, k, n, dim, mask, None)


def known_head(
    scores: Tensor, k: PerRow | None = None, *, n: int | None = None, dim: int = -1, mask: Mask = None
) -> Tensor:
    """Bound the tail mass by the k scores of the head and the next one: `(n − k) e^{s_(k+1)}/(Σ_H e^s + …)`.

    Args:
        scores: (…, m), all n scores or the largest m of them; with m = k, s_(k) takes the place of s_(k+1).
        k, n, dim, mask: as for `single_gap`.

    Returns:
        float64, as `tail_mass` and never below it; at most `single_gap`.

    Examples:
        >>> khot.attention.known_head(torch.tensor([9.0, 8.0, 3.0]), 2, n=100)
        tensor(0.1508, dtype=torch.float64)
    """
    return _bounded(scores, k, n, dim, mask, 1)


def multi_gap(
    scores: Tensor,
    k: PerRow | None = None,
    *,
    further: int = 16,
    n: int | None = None,
    dim: int = -1,
    mask: Mask = None,
) -> Tensor:
    """Bound the tail mass by the head and r scores after it: `T ≤ Σ_{i=k+1}^{k+r} e^{s_(i)} + (n − k − r) e^{s_(k+r)}`.

    Args:
        scores: (…, m), all n scores or the largest m of them.
        further: r ≥ 0; 1 is `known_head`, and n − k is the tail mass itself.
        k, n, dim, mask: as for `single_gap`.

    Returns:
        float64, as `tail_mass` and never below it; falls with r.

    Examples:
        >>> khot.attention.multi_gap(torch.tensor([9.0, 8.0, 3.0, 0.0]), 2, n=100)
        tensor(0.0105, dtype=torch.float64)
    """
    _check.at_least("further", further, 0)
    return _bounded(scores, k, n, dim, mask, int(further))


def blockwise(head: Tensor, upper: Tensor, *, counts: Tensor, known: Tensor | None = None) -> Tensor:
    """Bound the tail mass if some keys are in blocks that were not read: `T ≤ Σ_known e^s + Σ_b n_b e^{u_b}`.

    Args:
        head: (…, k), scores of the head, or lower bounds on them.
        upper: (…, b), for each block that was not read, a number that none of its scores exceeds.
        counts: broadcasts to (…, b): the number of keys in each of them.
        known: (…, r), scores that are known and not in the head.

    Returns:
        float64 (…), never below the tail mass.

    Examples:
        >>> khot.attention.blockwise(torch.tensor([9.0, 8.0]), torch.tensor([2.0, 0.0]), counts=torch.tensor([64, 64]))
        tensor(0.0462, dtype=torch.float64)
    """
    _check.scores(head, -1, "head")
    _check.scores(upper, -1, "upper")
    _check.instance("counts", counts, Tensor)
    shapes = {"head": head.shape[:-1], "upper": upper.shape[:-1]}
    if known is not None:
        _check.scores(known, -1, "known")
        shapes["known"] = known.shape[:-1]
    shape = _check.batch(**shapes)
    head, upper = head.expand(*shape, -1), upper.expand(*shape, -1)
    _check.broadcasts("counts", counts, tuple(upper.shape), "the shape of `upper`")
    tail = upper.to(torch.float64) + counts.to(torch.float64).log()
    if known is not None:
        tail = torch.cat((tail, known.to(torch.float64).expand(*tail.shape[:-1], -1)), -1)
    top = torch.cat((head.to(torch.float64), tail), -1).amax(-1, keepdim=True)
    left, kept = (tail - top).exp().sum(-1), (head.to(torch.float64) - top).exp().sum(-1)
    return tails.rounded_up(left / (kept + left), head.shape[-1] + tail.shape[-1])


def _bounded(scores: Tensor, k: PerRow | None, n: int | None, dim: int, mask: Mask, further: int | None) -> Tensor:
    """Return the bound of a gap (`further` None), or that of the head and r further scores."""
    s, _, total = sorted_rows(scores, k, dim, mask)
    if n is not None:
        _check.at_least("n", n, scores.shape[dim])
        total = torch.full_like(total, n)
    bound = tails.gap_bounds(s, total) if further is None else tails.bounds(s, total, further)
    return at(tails.rounded_up(bound, s.shape[-1], total), k, dim)
