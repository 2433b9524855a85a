"""A number of a module, moved from one value to another over training."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .. import _check

Shape = Callable[[float, float, float], float]
"""Start, end and the fraction of the way, in [0, 1], to the value there."""


def geometric(start: float, end: float, fraction: float) -> float:
    """Equal factors: `start · (end/start)^fraction`."""
    return float(start * (end / start) ** fraction)


def linear(start: float, end: float, fraction: float) -> float:
    """Equal differences."""
    return start + (end - start) * fraction


class Schedule:
    """Moves a buffer of a module, a temperature or a budget, from `start` to `end` in so many steps.

    Call `step()` after each step of the optimiser. The buffer holds `start` at once.

    Args:
        module: whose buffer it is.
        name: of the buffer.
        start: the value at first.
        end: the value after `steps` steps and from then on.
        steps: how many steps it takes; 0 is at the end at once.
        shape: the way between: `khot.nn.geometric`, `khot.nn.linear` or a function like them.

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
        _check.buffer(module, name)
        _check.positive("start", start, hint="")
        _check.positive("end", end, hint="")
        _check.at_least("steps", steps, 0)
        self._module, self._name = module, name
        self._start, self._end, self._steps, self._shape = start, end, steps, shape
        self._done = 0
        self._write()

    @property
    def value(self) -> float:
        """Where it is now."""
        fraction = min(1.0, self._done / self._steps) if self._steps else 1.0
        return self._end if fraction == 1 else self._shape(self._start, self._end, fraction)

    def step(self) -> None:
        """Go one step on."""
        self._done += 1
        self._write()

    def state_dict(self) -> dict[str, int]:
        """What to save: how many steps were taken."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved state."""
        self._done = state["done"]
        self._write()

    def _write(self) -> None:
        buffer: Tensor = getattr(self._module, self._name)  # looked up each time: moving a module replaces its buffers
        buffer.fill_(self.value)
