"""The native samplers: twins of `_math.pivotal`, `systematic` and `noise`, to the last bit, and of `high_entropy`."""

from typing import Any

import torch
from torch import Tensor

from .._math import high_entropy
from ._native import DTYPES, LIBRARY, WIDE, Draws


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


def along_tree(p: Tensor, k: Tensor, seed: Tensor, stream: int, draws: int, group: int, *, path: int = WIDE) -> Tensor:
    """Draw what `_math.natural.along_tree` does, up to coins that rounding decides."""
    p, k = p.contiguous(), k.to(torch.float64).contiguous()
    out = p.new_empty(draws, *p.shape)
    ways = (int(seed), stream, draws, group, path, torch.get_num_threads())
    if out.numel() and LIBRARY.khot_sample_tree(p.data_ptr(), *p.shape, k.data_ptr(), *ways, out.data_ptr()):
        raise MemoryError(f"no memory for the tree of {p.shape[1]} items; use fewer threads")
    return out


def pareto_constants(logits: Tensor, k: Tensor, *, path: int = WIDE) -> Tensor:
    """Return what `_math.high_entropy.pareto_constants` does, which takes the rows that the kernel leaves."""
    n = logits.shape[-1]
    rows, size = logits.reshape(-1, n).contiguous(), k.expand(logits.shape[:-1]).reshape(-1).contiguous()
    out, is_left = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.bool, device="cpu")
    if out.numel():
        ways = (size.data_ptr(), path, torch.get_num_threads(), out.data_ptr(), is_left.data_ptr())
        LIBRARY.khot_pareto_constants(rows.data_ptr(), *rows.shape, *ways)
        if bool(is_left.any()):
            out[is_left] = high_entropy.pareto_constants(rows[is_left], size[is_left])
    return out.view(logits.shape)


def count_products(p: Tensor, step: Tensor, scale: Tensor, *, path: int = WIDE) -> Tensor:
    """Return what `_math.subsets.Whole.product` does, 1 where the scale is 0."""
    p, step, scale = p.contiguous(), step.contiguous(), scale.contiguous()
    out, n, points = torch.ones_like(step), p.shape[-1], step.shape[-1]
    if p.numel() and points:
        ways = (points, path, torch.get_num_threads(), out.data_ptr())
        addresses = (step.data_ptr(), scale.data_ptr())
        LIBRARY.khot_count_products(p.data_ptr(), p.numel() // n, n, *addresses, *ways)
    return out


def count_rests(p: Tensor, step: Tensor, weight: Tensor, *, path: int = WIDE) -> Tensor:
    """Return what `_math.subsets.Whole.rests` does, (…, 2, n)."""
    p, step, weight = p.contiguous(), step.contiguous(), weight.contiguous()
    less, same, n = torch.empty_like(p), torch.empty_like(p), p.shape[-1]
    if p.numel():
        ways = (step.shape[-1], path, torch.get_num_threads(), same.data_ptr(), less.data_ptr())
        LIBRARY.khot_count_rests(p.data_ptr(), p.numel() // n, n, step.data_ptr(), weight.data_ptr(), *ways)
    return torch.stack((less, same), -2)


def _draws(p: Tensor, seed: Tensor, draws: int, is_paired: bool) -> Any:
    return Draws(p.data_ptr(), *p.shape, int(seed), draws, is_paired, DTYPES[p.dtype], torch.get_num_threads())


def _sampled(p: Tensor) -> Tensor:
    """Return contiguous rows of a dtype that has a kernel."""
    return (p if p.dtype in DTYPES else p.to(torch.float32)).contiguous()
