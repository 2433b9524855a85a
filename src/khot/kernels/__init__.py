"""Faster twins of `_math`, which `khot.ops` registers."""

from . import _costs as cpu_costs
from . import _logs as cpu_logs
from . import _native as cpu
from . import _samplers as cpu_samplers

__all__ = ["cpu", "cpu_costs", "cpu_logs", "cpu_samplers", "status"]


def status() -> dict[str, str]:
    """Return which kernels serve which device, and why.

    Examples:
        >>> sorted(khot.kernels.status())
        ['cpu', 'other devices']
    """
    return {"cpu": cpu.REASON, "other devices": "eager torch, a fixed number of steps, nothing read on the host"}
