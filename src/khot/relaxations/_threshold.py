"""Functions of the threshold of σ_k: the logarithm of σ_k, the threshold itself, and losses."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from .. import _check, _shape, ops
from .._math import cdfs
from .._shape import Group, Mask, PerRow
from ._family import margins, sigmoid_topk


def log_sigmoid_topk(
    x: Tensor, k: PerRow, *, dim: int = -1, temperature: PerRow = 1.0, mask: Mask = None, group: Group = None
) -> Tensor:
    """Return the logarithm of `sigmoid_topk`, accurate where the probability underflows.

    `log σ_k(x) = −log(1 + e^{−(x − τ)/T})`, computed with more digits than x has.

    Args:
        x, k, dim, temperature, mask, group: as for `sigmoid_topk`; x is (…, n).

    Returns:
        A tensor like `x`, ≤ 0, −inf at masked entries, with a relative error of a few roundings of x's dtype whatever
        the size of the probability. Gradients as `sigmoid_topk`, but exact in saturated rows too; the entries that are
        exactly −inf or 0 (masked, k = 0, k = n) have gradient 0.

    Examples:
        >>> log_sigmoid_topk(torch.tensor([1000.0, 0.0, -10.0]), 1)[1:]
        tensor([-500.0000, -510.0000])
    """
    if _check.is_dtensor(x):
        _check.no_group(group)
        return _on_parts(log_sigmoid_topk, x, k, dim, temperature, mask, gives_rows=False)
    _check.call(x, k, dim, temperature, mask, is_part=group is not None)
    y = _quickly(ops.logs.log_sigmoid, _log_rows, x, k, dim, temperature, mask, group)
    if y is None:
        z, _, _ = margins(cdfs.SIGMOID, x, k, dim, temperature, mask, None, torch.float64, group)
        y = logsigmoid(z)
    return _shape.from_rows(y, dim, x.dtype)


def threshold(
    x: Tensor, k: PerRow, *, dim: int = -1, temperature: PerRow = 1.0, mask: Mask = None, group: Group = None
) -> Tensor:
    """Return the threshold τ of `sigmoid_topk`: the score that would be chosen with probability one half.

    `Σ σ((x − τ)/T) = k`.

    Args:
        x, k, dim, temperature, mask, group: as for `sigmoid_topk`; x is (…, n).

    Returns:
        τ, of the shape of `x` without `dim`, within a few roundings of max(|τ|, T); +inf where k = 0, −inf where
        k = n, NaN where the row cannot be satisfied. Differentiable in `x`, `k` and `temperature`:
        `∂τ/∂x = v/Σv`, `∂τ/∂k = −T/Σv`, `∂τ/∂T = −Σ(v z)/Σv`, with `z = (x − τ)/T` and `v = σ(z)(1 − σ(z))`.

    Examples:
        >>> threshold(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor(0.5000)
    """
    if _check.is_dtensor(x):
        _check.no_group(group)
        return _on_parts(threshold, x, k, dim, temperature, mask, gives_rows=True)
    _check.call(x, k, dim, temperature, mask, is_part=group is not None)
    tau = _quickly(ops.logs.threshold, _threshold_of_rows, x, k, dim, temperature, mask, group)
    return (_threshold_of_rows(x, k, temperature, mask, dim, group) if tau is None else tau).to(x.dtype)


def _threshold_of_rows(
    x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, dim: int = -1, group: Group = None
) -> Tensor:
    """Return τ in float64."""
    z, rows, _ = margins(cdfs.SIGMOID, x, k, dim, temperature, mask, None, torch.float64, group)
    if z.shape[-1] == 0 and group is None:
        return _shape.per_row(rows.k, z) + torch.inf
    if group is not None:
        z, rows = _shape.with_one_more(z, rows, -torch.inf)  # a part may be empty
    # τ = x_i − T·z_i for any i; the smallest |z| rounds least. Entries of which both are infinite come last.
    scores = rows.x if rows.mask is None else rows.x.masked_fill(~rows.mask, -torch.inf)
    rank = z.abs().clamp(max=torch.finfo(z.dtype).max).masked_fill(z.isinf() & scores.isinf(), torch.inf)
    index = rank.argmin(-1, keepdim=True)
    z, score = z.gather(-1, index).squeeze(-1), scores.gather(-1, index).squeeze(-1)
    is_infinite, heat = z.isinf(), rows.temperature
    if group is not None:
        from .. import distributed

        heat = distributed.spread(_shape.per_row(heat, rows.x), group)
    value = torch.where(is_infinite, 0.0, score) - heat * torch.where(is_infinite, 0.0, z)
    value = torch.where(is_infinite, -z.detach(), value)
    if group is not None:
        value = distributed.of_best_part(value, rank.gather(-1, index).squeeze(-1), group)
    return value


def _log_rows(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask) -> Tensor:
    z, _, _ = margins(cdfs.SIGMOID, x, k, -1, temperature, mask, None, torch.float64)
    return logsigmoid(z)


def _quickly(
    fn: Callable[..., Tensor | None],
    exact: Callable[..., Tensor],
    x: Tensor,
    k: PerRow,
    dim: int,
    temperature: PerRow,
    mask: Mask,
    group: Group,
) -> Tensor | None:
    """Return what a float32 kernel computes, with `dim` last, or None if none serves the call."""
    dtype = _shape.compute_dtype(x.dtype)
    if group is not None or dtype == torch.float64 or ops.is_watched():
        return None
    rows = _shape.to_rows(x, ops.constant(k), ops.constant(temperature), mask, dim, dtype, torch.float64)
    return fn(*rows, exact)


def khot_cross_entropy(
    x: Tensor,
    target: Tensor,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    reduction: str = "mean",
    group: Group = None,
) -> Tensor:
    """Return the cross-entropy for k-hot targets: per row, the loss with the gradient `sigmoid_topk(x, k) − target`.

    The Fenchel–Young loss of σ_k, `T·Σ KL(y_i ‖ σ_k(x)_i)` with binary KL and `k = Σ y`, one k per row.

    Args:
        x: scores, (…, n) with n at `dim`.
        target: like `x`, of any real dtype; k-hot, or soft with entries in [0, 1]. Its sum along `dim` is k.
        dim, temperature, mask, group: as for `sigmoid_topk`; `target` is in the same parts as `x`.
        reduction: "mean" (over rows), "sum", or "none" (the shape of `x` without `dim`).

    Returns:
        The loss, ≥ 0, and 0 exactly when σ_k(x) = target. Convex in `x`. +inf where the target puts weight on an
        entry that cannot be chosen (masked or −inf) or less than 1 on a forced one (+inf); NaN where the target is
        outside [0, 1], or sums to more than may be chosen.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> loss = khot_cross_entropy(x, torch.tensor([1, 0, 1, 0]))
        >>> loss
        tensor(2.3510, grad_fn=<ToCopyBackward0>)
        >>> torch.autograd.grad(loss, x)
        (tensor([-0.1824,  0.6225, -0.6225,  0.1824]),)

    Reference: Blondel, Martins and Niculae, "Learning with Fenchel–Young losses" (2020).
    """
    if _check.is_dtensor(x):
        from .. import distributed

        _check.no_group(group)

        def part(x: Tensor, heat: PerRow, target: Tensor, mask: Mask, group: Group) -> Tensor:
            return khot_cross_entropy(x, target, dim=dim, temperature=heat, mask=mask, reduction="none", group=group)

        rowwise = distributed.on_parts(part, x, dim, per_row=(temperature,), per_entry=(target, mask), gives_rows=True)
        return _reduced(rowwise, reduction, x.dtype)
    _check.call(x, 0, dim, temperature, mask)  # k is a sum of values, which are not read
    _check.same_shape("target", target, x, "x")
    y = _shape.last(target, dim)
    loss = _quickly(
        lambda x, _, heat, mask, exact: ops.logs.cross_entropy(x, y, heat, mask, exact),
        _loss_of_rows, x, 0.0, dim, temperature, mask, group,
    )  # fmt: skip
    if loss is None:
        loss = _loss_of_rows(x, y, temperature, mask, dim, group)
    return _reduced(loss, reduction, x.dtype)


def _loss_of_rows(
    x: Tensor, target: Tensor, temperature: PerRow, mask: Mask, dim: int = -1, group: Group = None
) -> Tensor:
    """Return the cross-entropy in float64, one number per row; the target has `dim` last."""
    total, y = _total(group), target.to(torch.float64)
    z, rows, _ = margins(cdfs.SIGMOID, x, total(y.sum(-1)), dim, temperature, mask, None, torch.float64, group)
    # T·KL(y ‖ σ(z)) is a binary cross-entropy less the entropy of y; a margin of ±inf is right or infinitely wrong.
    is_certain = z.isinf()
    terms = binary_cross_entropy_with_logits(torch.where(is_certain, 0.0, z), y, reduction="none")
    if target.is_floating_point():
        terms = terms - torch.special.entr(y) - torch.special.entr(1 - y)
    terms = torch.where(is_certain, torch.where(y == (z > 0), 0.0, torch.inf), terms)
    loss: Tensor = rows.temperature * total(terms.sum(-1))
    loss = loss - loss.detach().clamp(max=0)  # rounding may leave −1e-17
    is_wrong = ((y < 0) | (y > 1)).any(-1)
    return torch.where(is_wrong if group is None else total(is_wrong.to(torch.float64)) > 0, torch.nan, loss)


def precision_at_k_loss(
    x: Tensor,
    target: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    reduction: str = "mean",
) -> Tensor:
    """Return 1 − the share of relevant entries among the k chosen, softly.

    `1 − Σ y·σ_k(x)/k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        target: like `x`, of any real dtype; 1 where relevant, 0 elsewhere, or between.
        k: how many are chosen, > 0.
        dim, temperature, mask: as for `sigmoid_topk`.
        reduction: "mean" (over rows), "sum", or "none" (the shape of `x` without `dim`).

    Returns:
        The loss, in [0, 1]; it tends to 1 − precision@k as T → 0.

    Examples:
        >>> precision_at_k_loss(torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([1, 0, 1, 0]), 2, temperature=0.1)
        tensor(0.4967)
    """
    if not isinstance(k, Tensor):
        _check.above("k", k, 0)
    hits, count, _ = _hits(x, target, k, dim, temperature, mask)
    return _reduced(1 - hits / count, reduction, x.dtype)


def recall_at_k_loss(
    x: Tensor,
    target: Tensor,
    k: PerRow,
    *,
    dim: int = -1,
    temperature: PerRow = 1.0,
    mask: Mask = None,
    reduction: str = "mean",
) -> Tensor:
    """Return 1 − the share of the relevant entries that are among the k chosen, softly.

    `1 − Σ y·σ_k(x)/Σ y`.

    Args:
        x, target, k, dim, temperature, mask, reduction: as for `precision_at_k_loss`; x is (…, n).

    Returns:
        The loss, in [0, 1]; it tends to 1 − recall@k as T → 0. A row with nothing relevant has loss 0.

    Examples:
        >>> recall_at_k_loss(torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([1, 0, 1, 1]), 2, temperature=0.1)
        tensor(0.6644)
    """
    hits, _, relevant = _hits(x, target, k, dim, temperature, mask)
    loss = 1 - hits / torch.where(relevant == 0, 1.0, relevant)
    return _reduced(torch.where(relevant == 0, 0.0, loss), reduction, x.dtype)


def _hits(
    x: Tensor, target: Tensor, k: PerRow, dim: int, temperature: PerRow, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ y·σ_k, k and Σ y by row."""
    _check.call(x, k, dim, temperature, mask)
    _check.same_shape("target", target, x, "x")
    y = target.to(torch.float64) if mask is None else torch.where(mask, target.to(torch.float64), 0.0)
    hits = (y * sigmoid_topk(x, k, dim=dim, temperature=temperature, mask=mask)).sum(dim)
    return hits, torch.as_tensor(k, dtype=torch.float64, device=x.device), y.sum(dim)


def _total(group: Group) -> Callable[[Tensor], Tensor]:
    """Return what sums the parts of rows."""
    if group is None:
        return lambda t: t
    from .. import distributed

    return lambda t: distributed.total(t, group)


def _on_parts(
    fn: Callable[..., Tensor], x: Tensor, k: PerRow, dim: int, temperature: PerRow, mask: Mask, *, gives_rows: bool
) -> Tensor:
    """Call one of the functions above on this process's part of a DTensor."""
    from .. import distributed

    def part(x: Tensor, k: PerRow, heat: PerRow, mask: Mask, group: Group) -> Tensor:
        return fn(x, k, dim=dim, temperature=heat, mask=mask, group=group)

    y: Tensor = distributed.on_parts(part, x, dim, per_row=(k, temperature), per_entry=(mask,), gives_rows=gives_rows)
    return y


def _reduced(loss: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    _check.one_of("reduction", reduction, ("mean", "sum", "none"))
    return (loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()).to(dtype)
