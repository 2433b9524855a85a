"""The torch.library ops around the solvers: opaque to autograd, vmap and compile; the dispatcher chooses the kernel.

The eager kernels below serve every device. A faster twin in `khot.kernels` takes a device key over with `LIBRARY.impl`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import sigmoid

LIBRARY = torch.library.Library("khot", "DEF")


def _like(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _register(name: str, kernel: Callable[..., Tensor]) -> None:
    """An op (x (…, n), k (…), temperature (…), mask (…, n) or None) -> (…, n)."""
    LIBRARY.define(f"{name}(Tensor x, Tensor k, Tensor temperature, Tensor? mask) -> Tensor")
    LIBRARY.impl(name, partial(kernel, early_stop=False), "CompositeExplicitAutograd")
    LIBRARY.impl(name, partial(kernel, early_stop=True), "CPU")  # reading a result there costs no synchronisation
    qualified = f"khot::{name}"
    torch.library.register_fake(qualified, _like, lib=LIBRARY)

    def batched(info: Any, dims: tuple[int | None, ...], *tensors: Tensor | None) -> tuple[Tensor, int]:
        def lead(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None:
                return None
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        op = getattr(torch.ops.khot, name).default
        return op(*(lead(t, dim) for t, dim in zip(tensors, dims, strict=True))), 0

    torch.library.register_vmap(qualified, batched, lib=LIBRARY)


_register("sigmoid_topk", sigmoid.topk)
_register("sigmoid_margin", sigmoid.margin)

sigmoid_topk: Callable[..., Tensor] = torch.ops.khot.sigmoid_topk.default
sigmoid_margin: Callable[..., Tensor] = torch.ops.khot.sigmoid_margin.default
