"""Numbers and other Python values."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def positive(name: str, value: Any, hint: str = " For the limit 0, use `khot.hard_topk`.") -> None:
    """Raise if `value` is neither a tensor nor a number > 0."""
    if isinstance(value, Tensor):
        return
    number(name, value)
    if not value > 0:
        raise ValueError(f"`{name}` must be > 0; got {value}.{hint}")


def one_number(name: str, value: Any) -> None:
    """Raise if `value` is a tensor of more than one."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"`{name}` must be one number; got a tensor of shape {tuple(value.shape)}.")


def all_positive(name: str, value: Any) -> None:
    """Raise unless what a tensor holds is positive."""
    if isinstance(value, Tensor) and not (value > 0).all():
        raise ValueError(f"`{name}` must be > 0; got {extremes(value)}.")


def not_negative(name: str, value: Any) -> None:
    """Raise if `value` is neither a tensor nor a number ≥ 0."""
    if isinstance(value, Tensor):
        return
    number(name, value)
    if not value >= 0:
        raise ValueError(f"`{name}` must be ≥ 0; got {value}.")


def above(name: str, value: Any, bound: float) -> None:
    """Raise unless `value` is a finite number > bound."""
    number(name, value, "a number")
    if not bound < value < float("inf"):
        raise ValueError(f"`{name}` must be > {bound} and finite; got {value}.")


def is_cdf(values: Tensor) -> None:
    """Raise unless the values at rising points are those of a cdf."""
    ends = torch.tensor([0.0, 1.0], dtype=values.dtype)
    if not (values.diff() >= 0).all() or not torch.allclose(values[[0, -1]], ends, rtol=0, atol=1e-3):
        raise ValueError(
            "`cdf` must rise from 0 to 1, elementwise; "
            f"at −1e30, −1e3, −10, −1, 0, 1, 10, 1e3, 1e30 got {values.tolist()}."
        )


def whole(name: str, value: Any, most: int, what: str) -> None:
    """Raise unless `value` is an int in [0, most]."""
    _whole_number(name, value)
    if not 0 <= value <= most:
        raise ValueError(f"`{name}` must satisfy 0 ≤ {name} ≤ {most} ({what}); got {value}.")


def reduction(value: Any) -> None:
    """Raise unless `value` names a reduction of a loss."""
    one_of("reduction", value, ("mean", "sum", "none"))


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def at_least(name: str, value: Any, least: int) -> None:
    """Raise unless `value` is an int ≥ least."""
    _whole_number(name, value)
    if value < least:
        raise ValueError(f"`{name}` must be ≥ {least}; got {value}.")


def even(what: str, value: int) -> None:
    """Raise unless `value` is even, as pairs are."""
    if value % 2:
        raise ValueError(f"With `antithetic`, {what} must be even; got {value}.")


def instance(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is of that class."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be a {kind.__name__}; got {type(value).__name__}.")


def is_file(path: Path) -> None:
    """Raise unless there is such a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file; there is none.")


def fraction(name: str, value: Any, *, is_open: bool = False) -> None:
    """Raise unless `value` is a number in [0, 1], or in [0, 1) if that is asked for."""
    number(name, value, "a number")
    if not 0 <= value <= 1 or (is_open and value == 1):
        raise ValueError(f"`{name}` must satisfy 0 ≤ {name} {'<' if is_open else '≤'} 1; got {value}.")


def share_of(name: str, value: Any, n: int) -> None:
    """Raise unless `value` is an int in [1, n], a float in (0, 1], or None."""
    if value is None:
        return
    number(name, value, "an int, a float or None")
    if isinstance(value, Integral):
        if not 1 <= int(value) <= n:
            raise ValueError(f"`{name}` must satisfy 1 ≤ k ≤ {n} (number of features); got {value}.")
    elif not 0 < value <= 1:
        raise ValueError(f"`{name}`, a fraction, must satisfy 0 < fraction ≤ 1; got {value}.")


def sizes_of_layers(name: str, value: Any) -> None:
    """Raise unless `value` is a tuple or list of ints ≥ 1."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"`{name}` must be a tuple of ints, such as (64, 64); got {type(value).__name__}.")
    for size in value:
        at_least(f"{name}, each of it,", size, 1)


def extremes(values: Tensor) -> str:
    least, most = values.min().item(), values.max().item()
    return f"{least:g}" if least == most else f"values from {least:g} to {most:g}"


def number(name: str, value: Any, what: str = "a number or a torch.Tensor") -> None:
    # bool is an int to Python, but k=True is always a mistake; numpy's scalars count as numbers.
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or _numpy_number(value)):
        raise TypeError(f"`{name}` must be {what}; got {type(value).__name__}.")


def _whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an int; got {type(value).__name__}.")


def _numpy_number(value: Any) -> bool:
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind in ("i", "u", "f") and getattr(value, "ndim", None) == 0
