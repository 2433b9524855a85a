"""Peak extra memory of a call, in units of its input, seen by torch's allocator and by the operating system."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.profiler import profile

SMALLEST = 2**20  # bytes of input from which a call's share of the process's memory can be told from noise


def peak_memory(call: Callable[[], object], x: Tensor) -> tuple[float | None, float | None]:
    """What a call needs at its worst moment beyond its input x, the output included.

    Returns:
        The peak of torch's own allocations, which misses what a C or C++ library allocates by itself (the queue of
        torch.topk, the buffers of a native kernel); and the peak growth of the process, which misses nothing but
        counts in pages and is taken on Linux only, for inputs of a megabyte and more. `None` where not taken.
    """
    size = x.numel() * x.element_size()
    if x.device.type == "cuda":
        return _peak_on_cuda(call) / size, None
    if x.device.type != "cpu":
        return None, None
    resident = _peak_resident(call) if size >= SMALLEST else None
    return _peak_allocated(call) / size, None if resident is None else resident / size


def _peak_allocated(call: Callable[[], object]) -> int:
    """By the profiler's record of every allocation and release."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr each time
    with profile(profile_memory=True) as record:
        call()
    held = peak = 0
    for event in record.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _peak_resident(call: Callable[[], object]) -> int | None:
    """By the kernel's high-water mark, reset before the call; None where there is no such thing."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed blocks that the heap still holds would hide the call's
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return max(_status("VmHWM") - before, 0)
    except (OSError, AttributeError, KeyError, TypeError):  # TypeError: CDLL(None) on Windows
        return None


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[key].split()[0]) * 1024


def _peak_on_cuda(call: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
