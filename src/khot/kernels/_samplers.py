"""The native samplers: twins of `_math.pivotal`, `systematic` and `noise`, to the last bit."""

from typing import Any

import torch
from torch import Tensor

from ._native import DTYPES, LIBRARY, Draws


def pivotal(
    p: Tensor, is_integer: Tensor, seed: Tensor, order: Tensor | None, is_random: bool, draws: int, is_paired: bool
) -> Tensor:
    """Draw what `_math.pivotal.draw` does."""
    p, is_integer = _sampled(p), is_integer.contiguous()
    out = p.new_empty(draws * p.shape[0], p.shape[1])
    order = None if order is None else order.contiguous()
    address, stride = (None, 0) if order is None else (order.data_ptr(), 0 if len(order) == 1 else p.shape[1])
    request = _draws(p, seed, draws, is_paired)
    LIBRARY.khot_pivotal(request, is_integer.data_ptr(), address, stride, is_random, out.data_ptr())
    return out


def systematic(p: Tensor, k: Tensor, seed: Tensor, draws: int, is_paired: bool) -> Tensor:
    """Draw what `_math.systematic.draw` does."""
    p, k = _sampled(p), k.contiguous()
    out = p.new_empty(draws * p.shape[0], p.shape[1])
    LIBRARY.khot_systematic(_draws(p, seed, draws, is_paired), k.data_ptr(), out.data_ptr())
    return out


def uniform(seed: Tensor, stream: int, count: int) -> Tensor:
    """Return what `_math.noise.uniform` does."""
    out = torch.empty(count, dtype=torch.float64, device="cpu")
    LIBRARY.khot_uniform(int(seed), stream, count, torch.get_num_threads(), out.data_ptr())
    return out


def order(keys: Tensor, n: int) -> Tensor:
    """Return what `_math.noise.order` does."""
    keys = keys.contiguous()
    out = torch.empty(*keys.shape, n, dtype=torch.int64, device="cpu")
    LIBRARY.khot_order(keys.data_ptr(), keys.numel(), n, torch.get_num_threads(), out.data_ptr())
    return out


def _draws(p: Tensor, seed: Tensor, draws: int, is_paired: bool) -> Any:
    return Draws(p.data_ptr(), *p.shape, int(seed), draws, is_paired, DTYPES[p.dtype], torch.get_num_threads())


def _sampled(p: Tensor) -> Tensor:
    """Return contiguous rows of a dtype that has a kernel."""
    return (p if p.dtype in DTYPES else p.to(torch.float32)).contiguous()
