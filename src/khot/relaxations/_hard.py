"""Hard top-k, and the estimator that gives it a gradient."""

from torch import Tensor

from .. import _check, _shape, ops
from .._shape import Group, Mask, PerRow


def hard_topk(x: Tensor, k: PerRow, *, dim: int = -1, mask: Mask = None, group: Group = None) -> Tensor:
    """Return hard top-k: exactly k ones at the largest scores, ties by lowest index.

    `argmax_{y ∈ {0,1}ⁿ, Σy = k} ⟨x, y⟩`.

    Args:
        x: scores, (…, n) with n at `dim`. −inf is never chosen.
        k: how many, an integer 0 ≤ k ≤ n, or a tensor that broadcasts to the shape of `x` without `dim`.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to `x`; True = may be chosen.
        group: as for `sigmoid_topk`; ties then go to the lowest part first.

    Returns:
        A tensor like `x` of zeros and ones, without a gradient (see `straight_through`). Tensor values are not read on
        the host: a row that cannot be satisfied (k out of range or no integer, too few allowed entries, NaN in `x`) is
        NaN, and that row only. O(n) on the CPU with the native kernel, which selects and does not sort.

    Examples:
        >>> hard_topk(torch.tensor([0.3, 0.9, 0.3, 0.1]), 2)
        tensor([1., 1., 0., 0.])
    """
    if _check.is_dtensor(x):
        from .. import distributed

        _check.no_group(group)
        _check.plain_order(x, dim)
        y: Tensor = distributed.on_parts(
            lambda x, k, mask, group: hard_topk(x, k, dim=dim, mask=mask, group=group),
            x.detach(),
            dim,
            per_row=(k,),
            per_entry=(mask,),
        )
        return y
    _check.scores(x, dim)
    _check.count(k, x, dim, integral=True, is_part=group is not None)
    _check.mask(mask, x)
    k = k.detach() if isinstance(k, Tensor) else k
    rows = _shape.to_rows(x.detach(), ops.constant(k), 1.0, mask, dim, _shape.compute_dtype(x.dtype))
    if group is not None:
        from .. import distributed

        return _shape.from_rows(distributed.hard_topk(rows, group), dim, x.dtype)
    return _shape.from_rows(ops.hard_topk(rows.x, rows.k, rows.mask), dim, x.dtype)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return the value of `hard` with the gradient of `soft`.

    Args:
        hard: any shape; its own gradient is dropped.
        soft: like `hard`.

    Returns:
        A tensor equal to `hard` to the last bit, whose derivatives are those of `soft`.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> straight_through(hard_topk(x, 1), sigmoid_topk(x, 1))
        tensor([1., 0., 0.], grad_fn=<AddBackward0>)
    """
    _check.scores(soft, -1, "soft")
    _check.same_shape("hard", hard, soft, "soft")
    return hard.detach().to(soft.dtype) + (soft - soft.detach())
