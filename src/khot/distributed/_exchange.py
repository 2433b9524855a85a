"""Rows sent from every process to every other one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._shape import Group


class _Exchange(torch.autograd.Function):
    """Send the first rows to the first process, and so on; backward sends the cotangents back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        back: Tensor = _Exchange.apply(g, received, sent, ctx.group)
        return back, None, None, None


def exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Return the rows (Σ received, …) that the processes of a group sent to this one, in the order of the processes.

    `sent` says how many rows of `x` go to each process, `received` how many come; differentiable, any number of times.
    """
    y: Tensor = _Exchange.apply(x, sent, received, group)
    return y


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """Return what each process of a group has for this one; counts (processes, m) → (processes, m) int64."""
    result = torch.empty_like(counts)
    dist.all_to_all_single(result, counts.contiguous(), group=group)
    return result
