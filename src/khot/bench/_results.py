"""What is measured and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .rivals import Rival

BASELINE = "sigmoid_topk"
"""The contender that ratios refer to."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; scores are standard normal."""

    shape: tuple[int, ...]
    k: float
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    threads: int = 1
    compile: bool = False
    backward: bool = True
    budget: float = 1.0
    """Seconds of samples per contender; warming up and memory cost about six calls more."""
    seed: int = 0

    @property
    def n(self) -> int:
        """The length of a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """How many rows."""
        return math.prod(self.shape[:-1])

    @property
    def clock(self) -> str:
        """Which time is taken."""
        return "process CPU time" if self.threads == 1 and self.device == "cpu" else "wall time"


class Timing(NamedTuple):
    """Seconds per call over the samples."""

    median: float
    p20: float
    p80: float
    samples: int


@dataclass(kw_only=True)
class Result:
    """One contender's figures; `None` where there is none."""

    name: str
    rival: Rival
    forward: Timing | None = None
    both: Timing | None = None
    """Forward and backward together."""
    allocated: float | None = None
    """Peak of torch's own allocations in a forward call, output included, in units of the input."""
    resident: float | None = None
    """Peak growth of the process in a forward call, in units of the input: sees what C libraries allocate, too."""
    sum_error: float | None = None
    """max over rows of |Σ − k|/max(k, 1); not for references."""
    out_of_range: int | None = None
    """Entries outside [0, 1] by more than a rounding; not for references."""
    nans: int | None = None
    flags: tuple[str, ...] = ()
    """Broken promises, in words."""
    note: str = ""
    skipped: str = ""
    """Why it has no figures; empty if it has."""


@dataclass(kw_only=True)
class Report:
    """All contenders at one shape."""

    settings: Settings
    results: list[Result]
    interrupted: bool = False
