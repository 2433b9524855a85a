"""How an op is defined: its schema, its fake, its rule for vmap, its derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _torch

LIBRARY = torch.library.Library("khot", "DEF")
Op = Callable[..., Tensor]


def define(
    name: str, signature: str, kernel: Op, fake: Op, derivative: type[torch.autograd.Function] | None = None
) -> Op:
    """Define an op whose tensors all have the batch dimensions first; other arguments are numbers, strings or None."""
    op = _declare(name, signature, kernel, fake)

    def differentiated(*arguments: Any) -> Any:
        if derivative is not None:
            return _torch.derive(derivative, *arguments)
        with _torch.next_level():  # a constant
            return op(*arguments)

    def batched(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        def lead(t: Any, dim: int | None) -> Any:
            if not isinstance(t, Tensor):
                return t
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        return op(*(lead(t, dim) for t, dim in zip(arguments, dims, strict=True))), 0

    LIBRARY.impl(name, differentiated, "Autograd")
    torch.library.register_vmap(f"khot::{name}", batched, lib=LIBRARY)
    return op


def define_sampler(name: str, signature: str, kernel: Op, fake: Op) -> Op:
    """Define an op that draws from a seed (), with one row per draw.

    Under vmap each entry draws by itself, from its own seed where the seed is batched (`randomness="different"`), and
    from the one seed where it is not (`randomness="same"`).
    """
    op = _declare(name, signature, kernel, fake)

    def batched(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        def entry(i: int) -> list[Any]:
            return [a if dim is None else a.select(dim, i) for a, dim in zip(arguments, dims, strict=True)]

        return torch.stack([op(*entry(i)) for i in range(info.batch_size)]), 0

    torch.library.register_vmap(f"khot::{name}", batched, lib=LIBRARY)
    return op


def _declare(name: str, signature: str, kernel: Op, fake: Op) -> Op:
    LIBRARY.define(name + signature)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"khot::{name}", fake, lib=LIBRARY)
    op: Op = getattr(torch.ops.khot, name).default
    return op


def like(x: Tensor, *_: Any) -> Tensor:
    """Return the fake of an op whose result has the shape of its first argument."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
