"""What the harness has to know of a contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Quantity = Literal["n", "rows·n", "rows·n·k"]


class Limit(NamedTuple):
    """A size beyond which a contender is skipped, and why."""

    of: Quantity
    most: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A contender: a function and what is claimed of it."""

    fn: Callable[[Tensor, float], Tensor] | None
    """(x (…, n), k) -> a tensor, along the last dim; `None` if its package is not installed."""
    what: str
    """The method, in a few words."""
    kind: Literal["khot", "relaxation", "reference"] = "relaxation"
    """Ours, a published soft k-hot, or a yardstick that is neither and whose sum and range say nothing."""
    sums_to_k: bool = True
    """Is it meant to sum to k?"""
    integer_k: bool = False
    """Does it need a whole k?"""
    inner_k: bool = True
    """Does it need 0 < k < n?"""
    limits: tuple[Limit, ...] = ()
    """Sizes beyond which it is skipped."""
    python_steps: Callable[[int, float], float] | None = None
    """(n, k) -> the length of its Python loop, which torch.compile unrolls; `None` if there is none to unroll."""
    package: str = ""
    """The third-party package that it comes from, if any."""

    def refusal(self, rows: int, n: int, k: float) -> str:
        """Why it cannot be measured at this size; empty if it can."""
        if self.fn is None:
            return f"{self.package} is not installed (pip install {self.package})"
        if self.kind != "reference" and self.integer_k and k != int(k):
            return f"needs a whole k; got {k:g}"
        if self.kind != "reference" and self.inner_k and not 0 < k < n:
            return f"needs 0 < k < n = {n}; got {k:g}"
        sizes: dict[Quantity, float] = {"n": n, "rows·n": rows * n, "rows·n·k": rows * n * k}
        for limit in self.limits:
            if sizes[limit.of] > limit.most:
                return f"{limit.of} = {sizes[limit.of]:.3g} > {limit.most:.3g}: {limit.why}"
        return ""
