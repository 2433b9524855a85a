"""Measure the time and memory of contenders at one shape, interleaved. No printing.

Every round calls each contender that is due, in an order shuffled anew, so that a disturbance of the machine hits all
alike and none always runs in the caches that the same other one left. A sample is the mean of as many calls as fill
`TICK`. Fast contenders are called once, untimed, before each sample. With one thread on the CPU the clock is process
CPU time, which other processes hardly lengthen; otherwise it is wall time, which means little on a busy machine, where
threads wait for one another. Making the inputs is never timed.

Left as it is, for all alike: glibc returns large blocks to the system, so a large output pays page faults at each call.
That can be most of the time of a light operator and hides the differences between them; to take it out, for all alike,
start Python with MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592. Reports say if that was done.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ._contenders import Contender

TICK = 2e-3  # seconds that a sample lasts at the least: thousands of times the clock's resolution
QUICK = 2e-2  # calls shorter than this are warmed up before each sample
MOST_SAMPLES = 100
MOST_UNROLLED = 64  # torch.compile needs minutes for longer Python loops
SUM_TOLERANCE = 1e-3  # relative; no method that means to sum to k is coarser

SMALLEST = 2**20  # bytes of input from which a call's share of the process's memory can be told from noise

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, and how; the scores are standard normal."""

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
        """The number of rows."""
        return math.prod(self.shape[:-1])

    @property
    def clock(self) -> str:
        """Which clock is used."""
        return "process CPU time" if self.threads == 1 and self.device == "cpu" else "wall time"


class Timing(NamedTuple):
    """Seconds per call: percentiles over the samples."""

    median: float
    p20: float
    p80: float
    samples: int


@dataclass(kw_only=True)
class Result:
    """The figures of one contender; `None` where there is none."""

    name: str
    contender: Contender
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
    """The figures of all contenders at one shape."""

    settings: Settings
    results: list[Result]
    interrupted: bool = False


@dataclass(kw_only=True)
class _Entrant:
    """A contender in the running: its calls (forward, and both if it has a gradient) and their samples."""

    result: Result
    calls: list[Callable[[], object]]
    cost: list[float]
    inner: list[int] = field(init=False)
    samples: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.inner = [max(1, math.ceil(TICK / max(cost, 1e-7))) for cost in self.cost]
        self.samples = [[] for _ in self.calls]

    def planned(self, budget: float) -> int:
        """Return how many samples the budget allows, at least one."""
        once = sum(inner * cost + cost * (cost < QUICK) for inner, cost in zip(self.inner, self.cost, strict=True))
        return int(min(max(budget / once, 1), MOST_SAMPLES))

    def finish(self) -> None:
        """Put the times into the result; after an early interruption, those of the warm-up."""
        if self.result.skipped:  # it failed on the way
            return
        if not self.samples[-1]:
            self.samples = [[cost] for cost in self.cost]
            self.result.note = "; ".join(filter(None, (self.result.note, "from the warm-up, not interleaved")))
        self.result.forward, self.result.both = (*map(_timing, self.samples), None)[:2]


def measure(
    contenders: Mapping[str, Contender], settings: Settings, on_progress: Progress = lambda label, done, total: None
) -> Report:
    """Measure each contender, or say why not; an interruption (Ctrl-C) ends it early and keeps what there is.

    Args:
        contenders: by name; ratios need `BASELINE` among them.
        settings: shape, k, and how.
        on_progress: called with a label, steps done and steps in all of the present stage.
    """
    results = {name: Result(name=name, contender=contender) for name, contender in contenders.items()}
    entrants: list[_Entrant] = []
    interrupted = False
    with _quiet(settings.threads):
        try:
            generator = torch.Generator().manual_seed(settings.seed)
            x = torch.randn(settings.shape, generator=generator).to(settings.device, settings.dtype)
            for done, result in enumerate(results.values()):
                on_progress(f"warming up {result.name}", done, len(results))
                result.skipped = result.contender.refusal(settings.rows, settings.n, settings.k)
                if not result.skipped and (entrant := _prepare(result, x, settings)):
                    entrants.append(entrant)
            _run(entrants, settings, on_progress)
        except KeyboardInterrupt:
            interrupted = True
    for entrant in entrants:
        entrant.finish()
    for result in results.values():
        if not result.skipped and result.forward is None:
            result.skipped = "interrupted before it was measured"
    return Report(settings=settings, results=list(results.values()), interrupted=interrupted)


def _prepare(result: Result, x: Tensor, settings: Settings) -> _Entrant | None:
    """Check the output, take the memory, and time a call; on failure say so in the result."""
    fn, k = result.contender.fn, int(settings.k) if settings.k == int(settings.k) else settings.k
    assert fn is not None  # a refusal came first
    if settings.compile:
        steps = result.contender.python_steps
        if steps and steps(settings.n, settings.k) > MOST_UNROLLED:
            result.skipped = f"torch.compile would unroll {steps(settings.n, settings.k):g} > {MOST_UNROLLED} steps"
            return None
        fn = torch.compile(fn)
    call = fn

    def forward() -> Tensor:
        return call(x, k)

    try:
        y = forward()
        _judge(result, y, settings)
        calls: list[Callable[[], object]] = [forward]
        if settings.backward:
            upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(settings.seed + 1)).to(y)
            calls += _with_backward(result, lambda leaf: call(leaf, k), x, upstream)
        del y
        result.allocated, result.resident = peak_memory(forward, x)
        return _Entrant(result=result, calls=calls, cost=[_cost(c, settings) for c in calls])
    except Exception as error:
        result.skipped = _first_line(error)
        return None


def _with_backward(
    result: Result, fn: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor
) -> list[Callable[[], object]]:
    """Return the call of forward and backward, or none and leave a note if there is no gradient."""
    leaf = x.clone().requires_grad_()

    def both() -> object:
        return torch.autograd.grad(fn(leaf), leaf, upstream)

    try:
        if not fn(leaf).requires_grad:
            result.note = "no gradient"
            return []
        both()
    except Exception as error:
        result.note = f"no backward: {_first_line(error)}"
        return []
    return [both]


def _judge(result: Result, y: Tensor, settings: Settings) -> None:
    """Hold an output against the contract of a k-hot, or only count NaN for a reference."""
    flags = []
    result.nans = int(y.isnan().sum())
    if result.nans:
        flags.append("NaN")
    if result.contender.kind != "reference":
        eps, scale = torch.finfo(y.dtype).eps, max(settings.k, 1)
        error = (y.sum(-1, dtype=torch.float64) - settings.k).abs().max()
        result.sum_error = float(error) / scale
        result.out_of_range = int(((y < -eps) | (y > 1 + eps)).sum())
        if result.contender.sums_to_k and not result.sum_error <= max(SUM_TOLERANCE, eps):
            flags.append("does not sum to k")
        if result.out_of_range:
            flags.append("leaves [0, 1]")
    result.flags = tuple(flags)


def _run(entrants: list[_Entrant], settings: Settings, on_progress: Progress) -> None:
    """Run the rounds. A contender that can afford fewer samples than another has them spread evenly over all rounds."""
    plans = [entrant.planned(settings.budget) for entrant in entrants]
    rounds, shuffle, done = max(plans, default=0), random.Random(settings.seed).shuffle, 0
    for turn in range(rounds):
        due = [
            entrant
            for entrant, plan in zip(entrants, plans, strict=True)
            if turn == 0 or turn * plan // rounds != (turn - 1) * plan // rounds
        ]
        shuffle(due)
        for entrant in due:
            on_progress(f"measuring {entrant.result.name}", done, sum(plans))
            done += 1
            if not entrant.result.skipped:
                _sample(entrant, settings)


def _sample(entrant: _Entrant, settings: Settings) -> None:
    try:
        for call, cost, inner, samples in zip(entrant.calls, entrant.cost, entrant.inner, entrant.samples, strict=True):
            if cost < QUICK:
                call()
            samples.append(_time(call, inner, settings))
    except Exception as error:
        entrant.result.skipped = f"failed while measured: {_first_line(error)}"


def _time(call: Callable[[], object], inner: int, settings: Settings) -> float:
    clock = time.process_time if settings.clock == "process CPU time" else time.perf_counter
    _wait(settings.device)
    start = clock()
    for _ in range(inner):
        call()
    _wait(settings.device)
    return (clock() - start) / inner


def _cost(call: Callable[[], object], settings: Settings) -> float:
    """Estimate how long a warm call takes."""
    first = _time(call, 1, settings)
    return first if first > TICK else min(first, _time(call, 5, settings))


def _timing(samples: list[float]) -> Timing:
    p20, median, p80 = np.percentile(samples, [20, 50, 80]).tolist()
    return Timing(median, p20, p80, len(samples))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _first_line(error: Exception) -> str:
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"[:160]


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """Set the number of threads and switch garbage collection off."""
    before, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collects:
            gc.enable()


def peak_memory(call: Callable[[], object], x: Tensor) -> tuple[float | None, float | None]:
    """Measure the peak memory of a call beyond its input x, the output included.

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
    """Sum the profiler's record of every allocation and release."""
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
    """Read the kernel's high-water mark, reset before the call; None where there is no such thing."""
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
