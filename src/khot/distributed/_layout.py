"""From a DTensor to this process's part of each row and back; and what `group=` may be."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._shape import Group


def names_of(group: Group) -> list[str]:
    """Return the names of the process groups that split a row, outermost first; raise if they are none."""
    if isinstance(group, str):
        return [group]
    if isinstance(group, Sequence):
        return [name for each in group for name in names_of(each)]
    if not isinstance(group, dist.ProcessGroup):
        wrong = f"`group` must be a torch.distributed.ProcessGroup, or a list of them; got {type(group).__name__}."
        raise TypeError(f"{wrong} For a DeviceMesh, use `mesh.get_group()`.")
    return [group.group_name]


def on_parts(
    fn: Callable[..., Tensor],
    x: Any,
    dim: int,
    *,
    per_row: Sequence[Any] = (),
    per_entry: Sequence[Any] = (),
    gives_rows: bool = False,
) -> Any:
    """Call `fn(part, *per_row, *per_entry, group)` on this process's part of each row; return a DTensor.

    Args:
        fn: takes local tensors, and the names of the groups that split the rows, or None if no row is split.
        x: the scores, a DTensor of any placements; partial sums are made whole first.
        dim: the dimension of the rows.
        per_row: numbers or tensors that broadcast to the batch shape; plain tensors are held alike by all processes.
        per_entry: None or tensors that broadcast to the shape of `x`.
        gives_rows: whether the result has the batch shape, not that of `x`.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    mesh, placements, dim = x.device_mesh, x.placements, dim % x.ndim
    names = [mesh.get_group(i).group_name for i, p in enumerate(placements) if p.is_shard(dim)]

    def local(value: Any, *, by_row: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        wanted: list[Any] = []
        cotangents: list[Any] = []
        for place in placements:
            at = place.dim if place.is_shard() else None  # the dimension of x that this mesh dimension splits
            if at is None or (by_row and at == dim):
                wanted.append(Replicate())
                cotangents.append(Replicate())
                continue
            ndim = x.ndim - 1 if by_row else x.ndim
            own = (at - (at > dim) if by_row else at) - ndim + value.ndim
            is_split = own >= 0 and value.shape[own] > 1
            wanted.append(_moved(place, own) if is_split else Replicate())
            cotangents.append(wanted[-1] if is_split else Partial())
        return value.redistribute(mesh, wanted).to_local(grad_placements=cotangents)

    rows, entries = [local(v, by_row=True) for v in per_row], [local(v, by_row=False) for v in per_entry]
    y = fn(x.to_local(), *rows, *entries, names or None)
    shape, kept = x.shape, list(placements)
    if gives_rows:
        shape = torch.Size([*x.shape[:dim], *x.shape[dim + 1 :]])
        kept = [
            Replicate() if p.is_shard(dim) else _moved(p, p.dim - (p.dim > dim)) if p.is_shard() else p for p in kept
        ]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, kept, run_check=False, shape=shape, stride=strides)


def _moved(place: Any, dim: int) -> Any:
    from torch.distributed.tensor import Shard

    if place.dim == dim:
        return place
    if type(place) is not Shard:
        raise NotImplementedError(f"A DTensor with the placement {place} needs arguments of its own shape; got others.")
    return Shard(dim)
