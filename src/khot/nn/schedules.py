"""Schedules: change a number of a module, such as a temperature or a budget, over the steps of training."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import _check

__all__ = ["Schedule", "between", "cubic", "geometric", "linear"]

Shape = Callable[[float, float, float], float]  # start, end and the fraction of the way to a value


def __dir__() -> list[str]:
    return __all__


def geometric(start: float, end: float, fraction: float) -> float:
    """Return `start · (end/start)^fraction`: steps of equal ratio.

    Args:
        start, end: the value at first and at last, > 0; from or to 0, take `linear`.
        fraction: of the way, in [0, 1].

    Examples:
        >>> geometric(10.0, 0.1, 0.5)
        1.0
    """
    _check.positive("start", start)
    _check.positive("end", end)
    return float(start * (end / start) ** fraction)


def linear(start: float, end: float, fraction: float) -> float:
    """Return `start + (end − start)·fraction`: steps of equal difference; arguments as for `geometric`.

    Examples:
        >>> linear(10.0, 0.0, 0.5)
        5.0
    """
    return start + (end - start) * fraction


def cubic(start: float, end: float, fraction: float) -> float:
    """Return `end + (start − end)·(1 − fraction)³`: fast at first, as in gradual pruning; arguments as for `geometric`.

    Examples:
        >>> round(cubic(1.0, 0.2, 0.5), 12)
        0.3
    """
    return end + (start - end) * (1 - fraction) ** 3


def between(shape: Shape, begin: float, end: float) -> Shape:
    """Return a shape that stays at the start until `begin`, goes the way of `shape`, and is at the end from `end` on.

    Args:
        shape: the way between.
        begin, end: fractions of all steps, 0 ≤ begin ≤ end ≤ 1.

    Examples:
        >>> late = between(linear, 0.5, 0.75)
        >>> [late(10.0, 0.0, fraction) for fraction in (0.25, 0.625, 0.8)]
        [10.0, 5.0, 0.0]
    """
    _check.fraction("begin", begin)
    _check.fraction("end", end)
    if begin > end:
        raise ValueError(f"`begin` must be ≤ `end`; got {begin} and {end}.")
    return _Between(shape, float(begin), float(end))


@dataclass(frozen=True)
class _Between:
    """Follow a shape on a part of the way; a class, so that it can be copied and pickled."""

    shape: Shape
    begin: float
    end: float

    def __call__(self, start: float, end: float, fraction: float) -> float:
        if fraction >= self.end:
            return end
        if fraction <= self.begin:
            return start
        return self.shape(start, end, (fraction - self.begin) / (self.end - self.begin))


class Schedule:
    """Move a buffer of a module, such as a temperature or a budget, from `start` to `end` in a number of steps.

    Call `step()` after each step of the optimiser. The buffer holds `start` at once.

    Args:
        module: the module that owns the buffer.
        name: of the buffer; an integer buffer gets the nearest integer.
        start: the value at first, > 0; or 0 if it is no temperature and the shape is not geometric.
        end: the value after `steps` steps and from then on; 0 as for `start`.
        steps: how many steps it takes; 0 is at the end at once.
        shape: the way between, a function of start, end and the fraction of the way in [0, 1]:
            `khot.nn.schedules.geometric`, `khot.nn.schedules.linear` or one of your own.

    Examples:
        >>> layer = khot.nn.SigmoidTopK(2, temperature=10.0)
        >>> schedule = Schedule(layer, "temperature", 10.0, 0.1, steps=4)
        >>> for _ in range(4):
        ...     schedule.step()
        ...     print(f"{layer.temperature:.3f}", end=" ")
        3.162 1.000 0.316 0.100
    """

    def __init__(
        self, module: nn.Module, name: str, start: float, end: float, *, steps: int, shape: Shape = geometric
    ) -> None:
        _check.instance("module", module, nn.Module)
        buffers = [key for key, value in module.named_buffers(recurse=False) if value.dtype != torch.bool]
        if name not in buffers:
            known = ", ".join(map(repr, buffers)) or "it has none"
            raise ValueError(f"`name` must be a buffer of {type(module).__name__} ({known}); got {name!r}.")
        check = _check.positive if name == "temperature" else _check.not_negative
        check("start", start)
        check("end", end)
        _check.at_least("steps", steps, 0)
        self._module, self._name, self._shape = module, name, shape
        self._start, self._end, self._steps = float(start), float(end), int(steps)
        self.load_state_dict({"done": 0})

    @property
    def value(self) -> float:
        """Return the current value."""
        fraction = min(1.0, self._done / self._steps) if self._steps else 1.0
        return self._end if fraction == 1 else self._shape(self._start, self._end, fraction)

    def step(self) -> None:
        """Advance by one step."""
        self.load_state_dict({"done": self._done + 1})

    def state_dict(self) -> dict[str, int]:
        """Return what to save: how many steps were taken."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved state."""
        self._done = state["done"]
        buffer: Tensor = getattr(self._module, self._name)  # looked up each time: moving a module replaces its buffers
        buffer.fill_(self.value if buffer.is_floating_point() else round(self.value))
