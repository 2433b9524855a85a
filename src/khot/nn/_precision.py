"""What every layer with numbers in buffers shares: their precision, and how they are printed."""

from collections.abc import Callable
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor, nn


class KeepsPrecision(nn.Module):
    """Keep a Module's own floating buffers in float32 or wider when it is cast to half precision.

    Counts, temperatures and running means lose their meaning in half precision: 1001 becomes 1000 in bfloat16, and 1e-8
    becomes 0 in float16. Parameters and submodules are cast as usual, and so are buffers to float32 and float64.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.is_floating_point() and new.dtype.itemsize < 4 and new.dtype != old.dtype:
                setattr(self, name, old.to(new.device, torch.float32))
        return self


def hold(module: nn.Module, k: float | Tensor, temperature: float | Tensor) -> None:
    """Keep a count and a temperature in a Module: Parameters as they are, tensors as buffers, a number as k."""
    if isinstance(k, Tensor) and not isinstance(k, nn.Parameter):
        module.register_buffer("k", k)
    else:
        count: Any = k if isinstance(k, nn.Parameter) else int(k) if isinstance(k, Integral) else float(k)
        module.k = count
    if isinstance(temperature, nn.Parameter):
        module.temperature = temperature
    else:
        module.register_buffer("temperature", torch.as_tensor(temperature, dtype=wide_dtype()))


def wide_dtype() -> torch.dtype:
    """Return the default dtype, or float32 if that is narrower."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def shown(value: Any) -> str:
    """Return how `extra_repr` prints a number or a tensor; a tensor without values (meta, fake) shows its device."""
    if not isinstance(value, Tensor):
        return str(value)
    try:
        return str(value.tolist())
    except RuntimeError:
        return f"<{value.device.type}>"
