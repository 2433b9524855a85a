"""One budget over many tensors: the k largest of all of them, wherever they are."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import _check
from ..relaxations import hard_topk, sigmoid_topk


def global_budget(
    scores: Iterable[Tensor], k: float | Tensor, *, temperature: float | Tensor | None = None
) -> list[Tensor]:
    """Return masks that choose k entries of all tensors together: one row, `σ_k` of their concatenation.

    Args:
        scores: tensors of any shapes and one dtype, such as `[p.abs() for p in model.parameters()]`; or DTensors of one
            mesh that are split over the same mesh dimensions, as FSDP2's parameters are.
        k: how many in all.
        temperature: T > 0 for soft masks with gradients to the scores; None for hard ones, without.

    Returns:
        A mask like each tensor, with entries in [0, 1] that sum to k over all of them. Parts of DTensors stay where
        they are: no rank holds the whole. Among equal scores, hard masks take those of the lowest rank first.

    Examples:
        >>> masks = global_budget([torch.tensor([3.0, 1.0]), torch.tensor([[2.0], [0.0]])], 2)
        >>> masks[0], masks[1].flatten()
        (tensor([1., 0.]), tensor([1., 0.]))
    """
    given = list(scores) if isinstance(scores, Iterable) else [scores]
    if not given:
        raise ValueError("`scores` must hold at least one tensor; got none.")
    for t in given:
        _check.floating("scores", t, "floating torch.Tensors")
    if len(kinds := {(t.dtype, _check.is_dtensor(t)) for t in given}) > 1:
        raise TypeError(f"`scores` must have one dtype, and all or none be DTensors; got {len(kinds)} kinds.")
    is_split = _check.is_dtensor(given[0])
    parts, group = local_parts(given) if is_split else (given, None)
    row = torch.cat([part.flatten() for part in parts])
    if temperature is None:
        chosen = hard_topk(row, k, group=group)
    else:
        chosen = sigmoid_topk(row, k, temperature=temperature, group=group)
    masks = [mask.view(part.shape) for mask, part in zip(chosen.split([p.numel() for p in parts]), parts, strict=True)]
    return [wrapped(mask, t) for mask, t in zip(masks, given, strict=True)] if is_split else masks


def local_parts(given: list[Any]) -> tuple[list[Tensor], list[str] | None]:
    """Return this process's parts of DTensors, and the groups over which they are split."""
    mesh, splits = given[0].device_mesh, {tuple(p.is_shard() for p in t.placements) for t in given}
    is_partial = any(p.is_partial() for t in given for p in t.placements)
    if is_partial or len(splits) > 1 or any(t.device_mesh != mesh for t in given):
        got = [t.placements for t in given]
        raise ValueError(f"`scores` must be split over the same dimensions of one mesh; got {got}.")
    names = [mesh.get_group(i).group_name for i, is_split in enumerate(splits.pop()) if is_split]
    return [t.to_local() for t in given], names or None


def wrapped(part: Tensor, like: Any) -> Any:
    """Return this process's part of something as a DTensor again, divided as `like` is."""
    from torch.distributed.tensor import DTensor

    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **layout)
