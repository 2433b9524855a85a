"""What torch is doing to the code that runs; yes, for all we know, where a version does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
"""Whether a transform of torch.func is on."""


def forward_mode_active() -> bool:
    """Whether dual numbers are about."""
    return bool(getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0)


def nested_forward_mode() -> bool:
    """Whether torch.func takes forward mode over forward mode."""
    stack: list[Any] = getattr(torch._C._functorch, "get_interpreter_stack", list)() or []
    return len([level for level in stack if level.key() == torch._C._functorch.TransformType.Jvp]) > 1
