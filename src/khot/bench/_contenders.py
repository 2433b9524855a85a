"""The contenders of `khot bench`: khot's functions, torch's operators, installed packages."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import relaxations as r
from .._math import cdfs, threshold
from .._shape import compute_dtype
from ..designs import sample_khot, sample_relaxed_khot

BASELINE = "sigmoid_topk"
"""The contender that ratios refer to."""
Quantity = Literal["n", "rows·n", "rows·n·k"]


class Limit(NamedTuple):
    """Hold a size beyond which a contender is skipped, and the reason."""

    of: Quantity
    most: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Hold a function to measure, and what it promises.

    Args:
        fn: (x (…, n), k) → a tensor, along the last dim; `None` if its package is not installed.
        what: the method, in a few words.
        kind: ours, a published soft k-hot, or a yardstick that is neither and whose sum and range say nothing.
        sums_to_k: whether it is meant to sum to k.
        integer_k: whether it needs an integer k.
        inner_k: whether it needs 0 < k < n.
        limits: sizes beyond which it is skipped.
        python_steps: (n, k) → the length of its Python loop, which torch.compile unrolls; `None` if there is none.
        package: the third-party package that it comes from, if any.
    """

    fn: Callable[[Tensor, float], Tensor] | None
    what: str
    kind: Literal["khot", "relaxation", "reference"] = "relaxation"
    sums_to_k: bool = True
    integer_k: bool = False
    inner_k: bool = True
    limits: tuple[Limit, ...] = ()
    python_steps: Callable[[int, float], float] | None = None
    package: str = ""

    def refusal(self, rows: int, n: int, k: float) -> str:
        """Say why it cannot be measured at this size; empty if it can."""
        if self.fn is None:
            return f"{self.package} is not installed (pip install {self.package})"
        is_khot = self.kind != "reference"
        if is_khot and self.integer_k and k != int(k):
            return f"needs an integer k; got {k:g}"
        if is_khot and self.inner_k and not 0 < k < n:
            return f"needs 0 < k < n = {n}; got {k:g}"
        sizes: dict[Quantity, float] = {"n": n, "rows·n": rows * n, "rows·n·k": rows * n * k}
        for limit in self.limits:
            if sizes[limit.of] > limit.most:
                return f"{limit.of} = {sizes[limit.of]:.3g} > {limit.most:.3g}: {limit.why}"
        return ""


@torch.no_grad()
def eager(x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0, *, steps: int | None = None) -> Tensor:
    """Compute σ_k without the native library, forward only; `steps` limits the solver's, solved or not."""
    one = torch.ones(x.shape[:-1], dtype=torch.float64, device=x.device)
    scores = x.to(compute_dtype(x.dtype))
    if steps is None:
        return threshold.topk(scores, k * one, temperature * one, None, cdfs.SIGMOID, early_stop=True).to(x.dtype)
    rows = (scores, k * one, temperature * one, None, None, cdfs.SIGMOID)
    return threshold.margin(*rows, early_stop=True, steps=steps).sigmoid().to(x.dtype)


def _ours(fn: Callable[..., Tensor], what: str, **options: Any) -> Contender:
    return Contender(fn=fn, what=f"khot's {what}", kind="khot", inner_k=False, **options)


def _torch(fn: Callable[[Tensor, float], Tensor], what: str) -> Contender:
    return Contender(fn=fn, what=what, kind="reference")


def _installed(package: str, call: Callable[[Any, Tensor, float], Tensor], what: str, **options: Any) -> Contender:
    try:
        module = import_module(package)
    except ImportError:
        return Contender(fn=None, what=what, package=package, **options)
    return Contender(fn=lambda x, k: call(module, x, k), what=what, package=package, **options)


CONTENDERS: dict[str, Contender] = {
    BASELINE: _ours(r.sigmoid_topk, "σ_k"),
    "eager": _ours(eager, "σ_k without the native library", python_steps=lambda n, k: threshold.MAX_STEPS),
    "laplace_topk": _ours(r.laplace_topk, "Laplace top-k, as LapSum"),
    "normal_topk": _ours(r.normal_topk, "normal top-k"),
    "cauchy_topk": _ours(r.cauchy_topk, "Cauchy top-k"),
    "euclidean_topk": _ours(r.euclidean_topk, "Euclidean projection, sparse"),
    "power_topk": _ours(r.power_topk, "p-norm top-k, sparse"),
    "hard_topk": _ours(r.hard_topk, "hard k-hot, no gradient", integer_k=True),
    "sample_khot": _ours(sample_khot, "k-hot sample, pivotal"),
    "sample_relaxed_khot": _ours(sample_relaxed_khot, "relaxed sample"),
    "torch.sigmoid": _torch(lambda x, k: torch.sigmoid(x), "element by element, no constraint"),
    "torch.softmax": _torch(lambda x, k: torch.softmax(x, -1), "sums to 1"),
    "torch.topk": _torch(lambda x, k: torch.topk(x, int(k), -1).values, "hard: values and indices"),
    "torch.sort": _torch(lambda x, k: torch.sort(x, -1).values, "hard: values and indices"),
    "entmax.entmax15": _installed(
        "entmax", lambda m, x, k: m.entmax15(x, dim=-1), "1.5-entmax, sparse, sums to 1", kind="reference"
    ),
    "entmax.budget_bisect": _installed(
        "entmax", lambda m, x, k: m.budget_bisect(x, budget=k, dim=-1), "Euclidean projection, sparse, by bisection"
    ),
    "torchsort.soft_rank": _installed(
        "torchsort",
        lambda m, x, k: m.soft_rank(x.reshape(-1, x.shape[-1])).reshape(x.shape),  # it takes two dimensions only
        "soft ranks by isotonic regression",
        kind="reference",
    ),
}
"""By name. `measure` takes any such mapping: add to it with `CONTENDERS | {"mine": Contender(…)}`."""
