"""Measure the time and memory of contenders at one shape, interleaved. No printing.

Every round calls each contender that is due, in an order shuffled anew, so that a disturbance of the machine hits all
alike. A sample is the mean of as many calls as fill `TICK`; fast contenders are called once before it, untimed. With
one thread on the CPU the clock is process CPU time, which other processes hardly lengthen; otherwise it is wall time.

glibc returns large blocks to the system, so a large output pays page faults at each call, which can be most of the time
of a light operator. To take that out, for all alike, start Python with MALLOC_MMAP_THRESHOLD_=4294967296
MALLOC_TRIM_THRESHOLD_=8589934592. Reports say if that was done.
"""

import ctypes
import gc
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ..kernels import status
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
    """Hold what to measure, and how; the scores are standard normal."""

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
        """Return the length of a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return math.prod(self.shape[:-1])

    @property
    def clock(self) -> str:
        """Return which clock is used."""
        return "process CPU time" if self.threads == 1 and self.device == "cpu" else "wall time"


def threads(count: int) -> str:
    """Return the number with its noun."""
    return f"{count} thread{'s' * (count != 1)}"


def environment() -> dict[str, str]:
    """Return what the figures depend on besides the settings."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    malloc = " ".join(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("MALLOC_"))
    return {
        "kernel": status().get("cpu", "unknown"),
        "malloc": malloc or "default",
        "torch": torch.__version__,
        "cpu": f"{cpu}, {os.cpu_count()} cores",
    }


class Timing(NamedTuple):
    """Seconds per call: percentiles over the samples."""

    median: float
    p20: float
    p80: float
    samples: int


@dataclass(kw_only=True)
class Result:
    """Hold the figures of one contender; `None` where there is none."""

    name: str
    contender: Contender
    forward: Timing | None = None
    both: Timing | None = None  # forward and backward together
    allocated: float | None = None  # peak of torch's own allocations in a forward call, in units of the input
    resident: float | None = None  # peak growth of the process, in the same units: sees C libraries' memory, too
    sum_error: float | None = None  # max over rows of |Σ − k|/max(k, 1); not for references
    out_of_range: int | None = None  # entries outside [0, 1] by more than a rounding; not for references
    nans: int | None = None
    flags: tuple[str, ...] = ()  # broken promises, in words
    note: str = ""
    skipped: str = ""  # why it has no figures; empty if it has


@dataclass(kw_only=True)
class Report:
    """Hold the figures of all contenders at one shape."""

    settings: Settings
    results: list[Result]
    interrupted: bool = False


class _Call:
    """A function to time: what a warm call costs, how many calls make a sample, and the samples."""

    def __init__(self, fn: Callable[[], object], settings: Settings) -> None:
        self.fn = fn
        self.wait = torch.cuda.synchronize if settings.device.startswith("cuda") else lambda: None
        self.clock = time.process_time if settings.clock == "process CPU time" else time.perf_counter
        self.cost = self.time(1)
        if self.cost <= TICK:
            self.cost = min(self.cost, self.time(5))
        self.inner = max(1, math.ceil(TICK / max(self.cost, 1e-7)))
        self.samples: list[float] = []

    def time(self, inner: int) -> float:
        self.wait()
        start = self.clock()
        for _ in range(inner):
            self.fn()
        self.wait()
        return (self.clock() - start) / inner

    def sample(self) -> None:
        if self.cost < QUICK:
            self.fn()
        self.samples.append(self.time(self.inner))

    def timing(self) -> Timing:
        samples = self.samples or [self.cost]
        p20, median, p80 = np.percentile(samples, [20, 50, 80]).tolist()
        return Timing(median, p20, p80, len(samples))


def measure(
    contenders: Mapping[str, Contender], settings: Settings, on_progress: Progress = lambda label, done, total: None
) -> Report:
    """Measure each contender, or say why not; an interruption (Ctrl-C) ends it early and keeps what there is.

    Args:
        contenders: by name; ratios need `BASELINE` among them.
        settings: shape, k, and how.
        on_progress: called with a label, steps done and steps in all of the present stage.
    """
    results = [Result(name=name, contender=contender) for name, contender in contenders.items()]
    running: list[tuple[Result, list[_Call]]] = []
    interrupted = False
    with _quiet(settings.threads):
        try:
            generator = torch.Generator().manual_seed(settings.seed)
            x = torch.randn(settings.shape, generator=generator).to(settings.device, settings.dtype)
            for done, result in enumerate(results):
                on_progress(f"warming up {result.name}", done, len(results))
                if calls := _prepare(result, x, settings):
                    running.append((result, calls))
            _run(running, settings, on_progress)
        except KeyboardInterrupt:
            interrupted = True
    for result, calls in running:
        if not result.skipped:  # it did not fail on the way
            if not calls[-1].samples:
                result.note = "; ".join(filter(None, (result.note, "from the warm-up, not interleaved")))
            result.forward, result.both = (*(call.timing() for call in calls), None)[:2]
    for result in results:
        if not result.skipped and result.forward is None:
            result.skipped = "interrupted before it was measured"
    return Report(settings=settings, results=results, interrupted=interrupted)


def _prepare(result: Result, x: Tensor, settings: Settings) -> list[_Call]:
    """Check the output, take the memory, and time a call; if it cannot be measured, say so in the result."""
    contender, k = result.contender, int(settings.k) if settings.k == int(settings.k) else settings.k
    result.skipped = contender.refusal(settings.rows, settings.n, settings.k)
    steps = contender.python_steps(settings.n, settings.k) if settings.compile and contender.python_steps else 0
    if steps > MOST_UNROLLED and not result.skipped:
        result.skipped = f"torch.compile would unroll {steps:g} > {MOST_UNROLLED} steps"
    if result.skipped:
        return []
    assert contender.fn is not None  # a refusal came first
    fn = torch.compile(contender.fn) if settings.compile else contender.fn
    try:
        y = fn(x, k)
        _judge(result, y, settings)
        calls: list[Callable[[], object]] = [lambda: fn(x, k)]
        if settings.backward:
            leaf = x.clone().requires_grad_()
            upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(settings.seed + 1)).to(y)
            backward = lambda: torch.autograd.grad(fn(leaf, k), leaf, upstream)  # noqa: E731 (as the one above)
            try:
                result.note = "" if fn(leaf, k).requires_grad else "no gradient"
                if not result.note:
                    backward()
                    calls.append(backward)
            except Exception as error:
                result.note = f"no backward: {_first_line(error)}"
        del y
        result.allocated, result.resident = peak_memory(calls[0], x)
        return [_Call(call, settings) for call in calls]
    except Exception as error:
        result.skipped = _first_line(error)
        return []


def _judge(result: Result, y: Tensor, settings: Settings) -> None:
    """Hold an output against the contract of a k-hot, or only count NaN for a reference."""
    result.nans = int(y.isnan().sum())
    flags = ["NaN"] if result.nans else []
    if result.contender.kind != "reference":
        eps = torch.finfo(y.dtype).eps
        result.sum_error = float((y.sum(-1, dtype=torch.float64) - settings.k).abs().max()) / max(settings.k, 1)
        result.out_of_range = int(((y < -eps) | (y > 1 + eps)).sum())
        if result.contender.sums_to_k and not result.sum_error <= max(SUM_TOLERANCE, eps):
            flags.append("does not sum to k")
        if result.out_of_range:
            flags.append("leaves [0, 1]")
    result.flags = tuple(flags)


def _run(running: list[tuple[Result, list[_Call]]], settings: Settings, on_progress: Progress) -> None:
    """Run the rounds. A contender that can afford fewer samples than another has them spread evenly over all rounds."""
    once = [sum(call.cost * (call.inner + (call.cost < QUICK)) for call in calls) for _, calls in running]
    plans = [int(min(max(settings.budget / seconds, 1), MOST_SAMPLES)) for seconds in once]
    rounds, shuffle, done = max(plans, default=0), random.Random(settings.seed).shuffle, 0
    for turn in range(rounds):
        planned = zip(running, plans, strict=True)
        due = [one for one, plan in planned if not turn or turn * plan // rounds != (turn - 1) * plan // rounds]
        shuffle(due)
        for result, calls in due:
            on_progress(f"measuring {result.name}", done, sum(plans))
            done += 1
            try:
                for call in calls if not result.skipped else ():
                    call.sample()
            except Exception as error:
                result.skipped = f"failed while measured: {_first_line(error)}"


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
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / size, None
    if x.device.type != "cpu":
        return None, None
    # What else the process allocates or frees at the same time counts too: it does not in most of three calls.
    growths = [growth for _ in range(3 if size >= SMALLEST else 0) if (growth := _peak_resident(call)) is not None]
    resident = median(growths) if growths else None
    return _peak_allocated(call) / size, None if resident is None else resident / size


def _peak_allocated(call: Callable[[], object]) -> int:
    """Sum the profiler's record of every allocation and release."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr each time
    with profile(profile_memory=True) as record:
        call()
    events = record.kineto_results.events()
    held: Iterator[int] = accumulate((e.nbytes() for e in events if e.name() == "[memory]"), initial=0)
    return max(held)


def _peak_resident(call: Callable[[], object]) -> int | None:
    """Read the kernel's high-water mark, reset before the call; None where there is no such thing."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)[key].split()[0]) * 1024

    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed blocks that the heap still holds would hide the call's
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        call()
        return max(status("VmHWM") - before, 0)
    except (OSError, AttributeError, KeyError, TypeError):  # TypeError: CDLL(None) on Windows
        return None
