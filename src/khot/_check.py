"""General argument checks: shapes, dtypes, counts and ranges. Each raises, or returns nothing.

A check that only one function needs is beside that function. Values of tensors are not read: bad rows become NaN.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ._torch import is_shape_only, is_traced_number

FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


# ── the arguments of a relaxation ────────────────────────────────────────────────────────────────────────────────────
def call(x: Any, k: Any, dim: int, heat: Any, allowed: Any = None, price: Any = None, *, is_part: bool = False) -> None:
    """Raise unless the arguments of a relaxation are legal: scores, k, `dim`, temperature, mask and costs.

    If `x` is a part of each row, k may be more than its length.
    """
    scores(x, dim)
    if price is not None:
        floating("costs", price, "a floating torch.Tensor or None")
        _like_x("costs", price, x)
        count(k, x, dim, is_budget=True)
    elif type(k) is not int or not 0 <= k <= x.shape[dim]:  # the common case is quick
        count(k, x, dim, is_part=is_part)
    if type(heat) is not float or not heat > 0:
        temperature(heat, x, dim)
    if allowed is not None:
        mask(allowed, x)


def scores(x: Any, dim: int = -1, name: str = "x") -> None:
    """Raise unless `x` is a dense floating tensor that has the dimension `dim`."""
    if type(x) is not Tensor and type(x) is not Parameter:
        _supported(x, name)
    if x.dtype not in FLOATS:
        wrong = f"`{name}` must be float16, bfloat16, float32 or float64; got {x.dtype}."
        raise TypeError(f"{wrong} Convert it first, for example with `{name}.float()`.")
    if x.is_nested:
        raise TypeError(f"`{name}` must not be nested; pad it to one length, and give the padding as `mask`.")
    if x.layout is not torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor; got the layout {x.layout}. Use `{name}.to_dense()`.")
    ndim = x.ndim
    if ndim == 0:
        raise ValueError(f"`{name}` must have at least one dimension; got a 0-dimensional tensor.")
    if type(dim) is not int and (isinstance(dim, bool) or not isinstance(dim, Integral)):
        raise TypeError(f"`dim` must be an int; got {type(dim).__name__}.")
    if not -ndim <= dim < ndim:
        raise IndexError(f"`dim` must satisfy {-ndim} ≤ dim < {ndim} (`{name}` has {ndim} dimensions); got {dim}.")


def is_dtensor(x: Any) -> bool:
    """Return whether `x` is a DTensor, without importing it."""
    return type(x) is not Tensor and type(x).__name__ == "DTensor" and isinstance(x, Tensor)


def plain_order(x: Any, dim: int) -> None:
    """Raise if the parts of a DTensor along `dim` are not in the order of the processes."""
    for place in x.placements:
        if place.is_shard(dim % x.ndim) and type(place).__name__ != "Shard":
            raise NotImplementedError(f"The parts of `x` must be in the order of the processes; got {place}.")


def no_group(group: Any) -> None:
    """Raise if a group is given beside a DTensor."""
    if group is not None:
        raise TypeError("`group` must be None for a DTensor, which has its own; got one.")


def _supported(x: Any, name: str) -> None:
    """Raise unless `x` is a tensor, of a class that khot can compute with."""
    kind = type(x)
    if kind.__module__.startswith("torch.fx"):
        wrong = f"`{name}` must be a torch.Tensor; got a {kind.__name__} of torch.fx, which cannot trace khot."
        raise TypeError(f"{wrong} Use torch.export.export instead of torch.fx.symbolic_trace.")
    instance(name, x, Tensor)
    if kind.__name__ == "DTensor":
        fix = f"use `{name}.full_tensor()`, or `{name}.to_local()` for whole rows"
        raise TypeError(f"`{name}` must not be a DTensor here; {fix}.")
    if kind.__name__ == "MaskedTensor":
        raise TypeError(f"`{name}` must not be a MaskedTensor; give its data as `{name}` and its mask as `mask`.")


def count(
    k: Any, x: Tensor, dim: int, *, integral: bool = False, is_budget: bool = False, is_part: bool = False
) -> None:
    """Raise unless `k` is a number in [0, n] or a real tensor that broadcasts to the rows.

    If it is a budget, or if `x` is a part of each row, a number must be ≥ 0.
    """
    if isinstance(k, Tensor):
        if k.dtype == torch.bool or k.is_complex():
            raise TypeError(f"`k` must be an integer or floating tensor; got {k.dtype}.")
        _per_row("k", k, x, dim)
        return
    number("k", k)
    if is_traced_number(k):
        return
    n = x.shape[dim]
    if is_budget and not k >= 0:
        raise ValueError(f"`k`, the budget, must be ≥ 0; got {k}.")
    if is_part and not k >= 0:
        raise ValueError(f"`k` must be ≥ 0; got {k}.")
    if not is_budget and not is_part and not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (size of dim {dim}); got {k}.")
    if integral and int(k) != k:
        raise ValueError(f"`k` must be an integer, because a hard selection has no fractions; got {k}.")


def temperature(value: Any, x: Tensor, dim: int, name: str = "temperature") -> None:
    """Raise unless `value` is a positive number or a floating tensor that broadcasts to the rows of `x`."""
    if not isinstance(value, Tensor):
        positive(name, value, " For the limit 0, use `khot.hard_topk`." if name == "temperature" else "")
        return
    if not value.is_floating_point():
        raise TypeError(f"`{name}` must be a floating tensor; got {value.dtype}.")
    _per_row(name, value, x, dim)


def mask(value: Any, x: Tensor) -> None:
    """Raise unless `value` is None or a boolean tensor that broadcasts to the shape of `x`."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"`mask` must be a boolean torch.Tensor or None; got {type(value).__name__}.")
    if value.dtype != torch.bool:
        additive = " for 0 and 1, or `mask == 0` for an additive mask (0 = allowed, −inf = not)"
        fix = f"Use `mask.bool()`{additive if value.is_floating_point() else ''}."
        raise TypeError(f"`mask` must be boolean (True = may be chosen); got {value.dtype}. {fix}")
    _like_x("mask", value, x)


# ── tensors beside others ────────────────────────────────────────────────────────────────────────────────────────────
def floating(name: str, value: Any, what: str = "a floating torch.Tensor") -> None:
    """Raise unless `value` is a floating tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`{name}` must be {what}; got {got}.")


def real(name: str, value: Any) -> None:
    """Raise unless `value` is a tensor that is not complex."""
    instance(name, value, Tensor)
    if value.is_complex():
        raise TypeError(f"`{name}` must be real; got {value.dtype}.")


def vectors(name: str, value: Any) -> None:
    """Raise unless `value` is a floating tensor (…, m, d) with m, d ≥ 1."""
    floating(name, value)
    if value.ndim < 2 or 0 in value.shape[-2:]:
        raise ValueError(f"`{name}` must have the shape (…, m, d) with m, d ≥ 1; got {tuple(value.shape)}.")


def same_shape(name: str, value: Any, x: Tensor, x_name: str) -> None:
    """Raise unless `value` is a real tensor with the shape and device of `x`."""
    real(name, value)
    if value.shape != x.shape:
        raise ValueError(f"`{name}` must have the shape of `{x_name}`, {tuple(x.shape)}; got {tuple(value.shape)}.")
    same_device(name, value, x, x_name)


def same_device(name: str, value: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless `value` is on the device of `x`."""
    if value.device != x.device:
        wrong = f"`{name}` must be on the device of `{x_name}`, {x.device}; got {value.device}."
        raise ValueError(f"{wrong} Use `{name}.to({x_name}.device)`.")


def last_dim(name: str, value: Any, n: int) -> None:
    """Raise unless `value` is a tensor whose last dimension has n entries."""
    instance(name, value, Tensor)
    if value.ndim == 0 or value.shape[-1] != n:
        raise ValueError(f"`{name}` must have {n} features in its last dimension; got {tuple(value.shape)}.")


def broadcasts(name: str, value: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Raise unless `value` broadcasts to a shape."""
    got = tuple(value.shape)
    last = shape[len(shape) - len(got) :] if len(got) <= len(shape) else ()
    if len(got) > len(shape) or any(a != 1 and a != b for a, b in zip(got, last, strict=True)):
        raise ValueError(f"`{name}` must broadcast to {what}, {shape}; got {got}.")


def _like_x(name: str, value: Tensor, x: Tensor) -> None:
    if value.ndim != x.ndim or value.shape != x.shape:  # else a graph's batch size would have to differ from n
        broadcasts(name, value, tuple(x.shape), "the shape of `x`")
    same_device(name, value, x)


def _per_row(name: str, value: Tensor, x: Tensor, dim: int) -> None:
    if value.ndim:
        dim %= x.ndim
        rows = tuple(x.shape[:dim]) + tuple(x.shape[dim + 1 :])
        broadcasts(name, value, rows, f"the batch shape (the shape of `x` without dim {dim})")
    same_device(name, value, x)


# ── numbers and other values ─────────────────────────────────────────────────────────────────────────────────────────
def number(name: str, value: Any, what: str = "a number or a torch.Tensor") -> None:
    """Raise unless `value` is a number; numpy's scalars are, and bool is not, because k=True is always a mistake."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or _is_numpy_number(value)):
        raise TypeError(f"`{name}` must be {what}; got {type(value).__name__}.")


def positive(name: str, value: Any, hint: str = "") -> None:
    """Raise if `value` is neither a tensor nor a number > 0."""
    if not isinstance(value, Tensor):
        number(name, value)
        if not is_traced_number(value) and not value > 0:
            raise ValueError(f"`{name}` must be > 0; got {value}.{hint}")


def not_negative(name: str, value: Any) -> None:
    """Raise if `value` is neither a tensor nor a number ≥ 0."""
    if not isinstance(value, Tensor):
        number(name, value)
        if not value >= 0:
            raise ValueError(f"`{name}` must be ≥ 0; got {value}.")


def finite(name: str, value: Tensor) -> None:
    """Raise unless all entries of a tensor are finite; tensors on meta and fake ones have none to look at."""
    # a finite sum is quick to see, and has finite terms
    if not is_shape_only(value) and not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
        raise ValueError(f"`{name}` must be finite; got {int((~value.isfinite()).sum())} NaN or infinite entries.")


def batch(**shapes: tuple[int, ...]) -> torch.Size:
    """Return the shape that batch shapes, by the names of their arguments, broadcast to; raise unless they do."""
    try:
        return torch.Size(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        got = ", ".join(f"{tuple(shape)}" for shape in shapes.values())
        names = ", ".join(f"`{name}`" for name in shapes)
        raise ValueError(f"The batch shapes of {names} must broadcast to each other; got {got}.") from None


def sizes(name: str, value: Tensor) -> None:
    """Raise unless all entries of a tensor are finite and ≥ 0."""
    if not bool(((value >= 0) & value.isfinite()).all()):
        raise ValueError(f"`{name}` must be finite and ≥ 0; got a negative or missing number, NaN or inf.")


def above(name: str, value: Any, bound: float) -> None:
    """Raise unless `value` is a finite number > bound."""
    number(name, value, "a number")
    if not bound < value < float("inf"):
        raise ValueError(f"`{name}` must be > {bound} and finite; got {value}.")


def fraction(name: str, value: Any, *, is_open: bool = False) -> None:
    """Raise unless `value` is a number in [0, 1], or in [0, 1) if `is_open`."""
    number(name, value, "a number")
    if not 0 <= value <= 1 or (is_open and value == 1):
        raise ValueError(f"`{name}` must satisfy 0 ≤ {name} {'<' if is_open else '≤'} 1; got {value}.")


def at_least(name: str, value: Any, least: int) -> None:
    """Raise unless `value` is an int ≥ least."""
    integer(name, value)
    if value < least:
        raise ValueError(f"`{name}` must be ≥ {least}; got {value}.")


def integer_at_most(name: str, value: Any, most: int, what: str) -> None:
    """Raise unless `value` is an int in [0, most]."""
    integer(name, value)
    if not 0 <= value <= most:
        raise ValueError(f"`{name}` must satisfy 0 ≤ {name} ≤ {most} ({what}); got {value}.")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def instance(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is of that class."""
    if not isinstance(value, kind):
        wanted = "torch.Tensor" if kind is Tensor else kind.__name__
        raise TypeError(f"`{name}` must be a {wanted}; got {type(value).__name__}.")


def function(name: str, value: Any) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be callable, such as a function or a class; got {type(value).__name__}.")


def modules(name: str, values: Any) -> list[nn.Module]:
    """Return Modules as a list; raise unless all are."""
    found: list[nn.Module] = list(values) if isinstance(values, Iterable) else [values]
    for value in found:
        if not isinstance(value, nn.Module):
            raise TypeError(f"`{name}` must be Modules in a list; got {type(value).__name__}.")
    return found


def generator(value: Any) -> None:
    """Raise unless `value` is a generator or None; a seed alone is not."""
    if value is not None and not isinstance(value, torch.Generator):
        got = f"got {type(value).__name__}. From a seed, make one by `torch.Generator().manual_seed(seed)`."
        raise TypeError(f"`generator` must be a torch.Generator or None; {got}")


def sample_shape(value: Any) -> torch.Size:
    """Return the shape of independent samples; raise unless it is a sequence of ints ≥ 0."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        fix = " For one number of samples, write `(number,)`." if isinstance(value, Integral) else ""
        raise TypeError(f"`sample_shape` must be a tuple of ints; got {type(value).__name__}.{fix}")
    for size in value:
        if not isinstance(size, torch.SymInt):
            at_least("sample_shape", size, 0)
    return torch.Size(value)


def integer(name: str, value: Any) -> None:
    """Raise unless `value` is an int."""
    if is_traced_number(value):
        raise TypeError(f"`{name}` must be an int inside torch.compile, which takes numpy's for arrays; use `int()`.")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an int; got {type(value).__name__}.")


def _is_numpy_number(value: Any) -> bool:
    if is_traced_number(value):
        return True
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind in ("i", "u", "f") and getattr(value, "ndim", None) == 0
