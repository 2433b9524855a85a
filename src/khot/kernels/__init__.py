"""Faster twins of `_math`.

Importing this gives the CPU to the native library, or to eager torch that stops early where there is none.
"""

from __future__ import annotations

from functools import partial

from .._math import threshold
from ..ops import LIBRARY
from . import _native
from ._native import is_plain as is_plain
from ._native import native_pull as native_pull
from ._native import native_topk as native_topk

__all__ = ["status"]


def status() -> dict[str, str]:
    """Which kernels serve which device, and why.

    Examples:
        >>> sorted(khot.kernels.status())
        ['cpu', 'other devices']
    """
    return {"cpu": _native.REASON, "other devices": "eager torch, a fixed number of steps, nothing read on the host"}


if _native.LIBRARY is None:
    LIBRARY.impl("topk", partial(threshold.topk, early_stop=True), "CPU")
    LIBRARY.impl("margin", partial(threshold.margin, early_stop=True), "CPU")
else:
    LIBRARY.impl("hard_topk", _native.hard_topk, "CPU")
    LIBRARY.impl("topk", _native.topk, "CPU")
    LIBRARY.impl("topk_pull", _native.topk_pull, "CPU")
    LIBRARY.impl("margin", _native.margin, "CPU")
    LIBRARY.impl("pivotal", _native.pivotal, "CPU")
    LIBRARY.impl("systematic", _native.systematic, "CPU")
    LIBRARY.impl("uniform", _native.uniform, "CPU")
    LIBRARY.impl("order", _native.order, "CPU")
