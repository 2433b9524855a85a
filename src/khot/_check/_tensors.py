"""Scores, and tensors beside them: dtypes and shapes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ._values import number, positive, whole

FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def scores(x: Any, dim: int, name: str = "x") -> None:
    """Raise unless `x` is a floating tensor that has the dimension `dim`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(x).__name__}.")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"`{name}` must be float16, bfloat16, float32 or float64; got {x.dtype}. "
            f"Convert it first, for example with `{name}.float()`."
        )
    if x.ndim == 0:
        raise ValueError(f"`{name}` must have at least one dimension; got a 0-dimensional tensor.")
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise TypeError(f"`dim` must be an int; got {type(dim).__name__}.")
    ndim = x.ndim
    if not -ndim <= dim < ndim:
        raise IndexError(f"`dim` must satisfy {-ndim} ≤ dim < {ndim} (`{name}` has {ndim} dimensions); got {dim}.")


def count(k: Any, x: Tensor, dim: int, *, integral: bool = False, is_budget: bool = False) -> None:
    """Raise unless `k` is a number in [0, n] or a real tensor that broadcasts to the rows of `x`.

    `integral` asks for a whole number too; a budget may exceed n, as costs are not read. What a tensor holds is not
    read: its bad rows become NaN.
    """
    n = x.shape[dim]
    if isinstance(k, Tensor):
        if k.dtype == torch.bool or k.is_complex():
            raise TypeError(f"`k` must be an integer or floating tensor; got {k.dtype}.")
        _per_row("k", k, x, dim)
        return
    number("k", k)
    if is_budget:
        if not k >= 0:
            raise ValueError(f"`k`, the budget, must be ≥ 0; got {k}.")
        return
    if not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (size of dim {dim}); got {k}.")
    if integral and int(k) != k:
        raise ValueError(f"`k` must be a whole number, because a hard selection has no fractions; got {k}.")


def call(x: Any, k: Any, dim: int, heat: Any, allowed: Any = None, price: Any = None) -> None:
    """Raise unless the arguments of a relaxation are legal: scores, k, `dim`, temperature, mask and costs."""
    scores(x, dim)
    if price is not None:
        costs(price, x)
        count(k, x, dim, is_budget=True)
    elif type(k) is not int or not 0 <= k <= x.shape[dim]:  # what is common is quick
        count(k, x, dim)
    if type(heat) is not float or not heat > 0:
        temperature(heat, x, dim)
    if allowed is not None:
        mask(allowed, x)


def temperature(value: Any, x: Tensor, dim: int) -> None:
    """Raise unless `value` is a positive number or a floating tensor that broadcasts to the rows of `x`."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"`temperature` must be a floating tensor; got {value.dtype}.")
        _per_row("temperature", value, x, dim)
        return
    positive("temperature", value)


def sharpness(value: Any, scores: Tensor) -> None:
    """Raise unless `value` is a positive number or a floating tensor that broadcasts to the rows of `scores`."""
    positive("alpha", value, hint="")
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"`alpha` must be a floating tensor; got {value.dtype}.")
        _per_row("alpha", value, scores, -1)


def vectors(name: str, value: Any) -> None:
    """Raise unless `value` is a floating tensor (…, m, d) with m, d ≥ 1."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`{name}` must be a floating torch.Tensor; got {got}.")
    if value.ndim < 2 or 0 in value.shape[-2:]:
        raise ValueError(f"`{name}` must have the shape (…, m, d) with m, d ≥ 1; got {tuple(value.shape)}.")


def selection(embeddings: Any, scores: Any, k: Any) -> None:
    """Raise unless (…, n, d) embeddings, (…, n) scores and 1 ≤ k ≤ n go together."""
    vectors("embeddings", embeddings)
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"`scores` must be a floating torch.Tensor; got {type(scores).__name__}.")
    if scores.shape != embeddings.shape[:-1]:
        want, got = tuple(embeddings.shape[:-1]), tuple(scores.shape)
        raise ValueError(f"`scores` must have the shape of `embeddings` without its last dim, {want}; got {got}.")
    if scores.dtype != embeddings.dtype:
        raise TypeError(f"`scores` must have the dtype of `embeddings`, {embeddings.dtype}; got {scores.dtype}.")
    same_device("scores", scores, embeddings, "embeddings")
    whole("k", k, scores.shape[-1], "number of embeddings")
    if k == 0:
        raise ValueError("`k` must be ≥ 1; got 0.")


def mask(value: Any, x: Tensor) -> None:
    """Raise unless `value` is None or a boolean tensor that broadcasts to the shape of `x`."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"`mask` must be a boolean torch.Tensor or None; got {type(value).__name__}.")
    if value.dtype != torch.bool:
        raise TypeError(f"`mask` must be boolean (True = may be chosen); got {value.dtype}. Use `mask.bool()`.")
    broadcasts("mask", value, tuple(x.shape), "the shape of `x`")
    same_device("mask", value, x)


def costs(value: Any, x: Tensor) -> None:
    """Raise unless `value` is None or a floating tensor that broadcasts to the shape of `x`."""
    if value is None:
        return
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`costs` must be a floating torch.Tensor or None; got {got}.")
    broadcasts("costs", value, tuple(x.shape), "the shape of `x`")
    same_device("costs", value, x)


def same_shape(name: str, value: Any, x: Tensor, x_name: str) -> None:
    """Raise unless `value` is a tensor with the shape and device of `x`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(value).__name__}.")
    if value.is_complex():
        raise TypeError(f"`{name}` must be real; got {value.dtype}.")
    if value.shape != x.shape:
        raise ValueError(f"`{name}` must have the shape of `{x_name}`, {tuple(x.shape)}; got {tuple(value.shape)}.")
    same_device(name, value, x, x_name)


def same_device(name: str, value: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless `value` lies where `x` lies."""
    if value.device != x.device:
        raise ValueError(
            f"`{name}` must be on the device of `{x_name}`, {x.device}; got {value.device}. "
            f"Use `{name}.to({x_name}.device)`."
        )


def last_dim(name: str, value: Tensor, n: int) -> None:
    """Raise unless `value` is a tensor whose last dimension has n entries."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(value).__name__}.")
    if value.ndim == 0 or value.shape[-1] != n:
        raise ValueError(f"`{name}` must have {n} features in its last dimension; got {tuple(value.shape)}.")


def _per_row(name: str, value: Tensor, x: Tensor, dim: int) -> None:
    dim %= x.ndim
    rows = tuple(x.shape[:dim]) + tuple(x.shape[dim + 1 :])
    broadcasts(name, value, rows, f"the batch shape (the shape of `x` without dim {dim})")
    same_device(name, value, x)


def broadcasts(name: str, value: Tensor, shape: tuple[int, ...], what: str) -> None:
    got = tuple(value.shape)
    fits = len(got) <= len(shape) and all(a == 1 or a == b for a, b in zip(got[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"`{name}` must broadcast to {what}, {shape}; got {got}.")
