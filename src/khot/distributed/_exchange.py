"""Rows sent from every process to every other one; and what the first process does for all."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._math.across import Over
from .._shape import Group
from ._layout import names_of

T = TypeVar("T")
ON_ALL = "This error was raised on all processes."


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


def on_first(fn: Callable[[], T], group: Group) -> T:
    """Call a function on the first process of a group alone; return its result, or raise its error, on all of them.

    Results and errors are pickled, and an error gets the note `ON_ALL`. Without a group, just call it.
    """
    if not group:
        return fn()
    over = Over(names_of(group))
    answer: list[Any] = [None]
    if over.rank == 0:
        try:
            answer = [(fn(), None)]
        except Exception as error:
            answer = [(None, error)]
    for each in over.groups:
        dist.broadcast_object_list(answer, dist.get_global_rank(each, 0), group=each)
    result: T
    result, failed = answer[0]
    if failed is not None:
        failed.add_note(ON_ALL)
        raise failed
    return result


def together(fn: Callable[[], T], group: Group) -> T:
    """Call a function on all processes of a group; if it fails on some, raise the first one's error on all of them."""
    if not group:
        return fn()
    over, result = Over(names_of(group)), None
    errors: list[Any] = [None]
    try:
        result = fn()
    except Exception as error:
        errors = [error]
    for each in reversed(over.groups):
        parts: list[Any] = [None] * dist.get_world_size(each)
        dist.all_gather_object(parts, errors, group=each)
        errors = [error for part in parts for error in part]
    for failed in errors:
        if failed is not None:
            failed.add_note(ON_ALL)
            raise failed
    return cast(T, result)
