"""The torch.library ops around the solvers: opaque to autograd, vmap and compile; the dispatcher chooses the kernel.

The kernels given here are eager torch that never reads a value on the host, and serve every device; `khot.kernels`
takes the CPU over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._math import cdfs, high_entropy, implicit, natural, noise, select, threshold
from ._math import pivotal as _pivotal
from ._math import systematic as _systematic

LIBRARY = torch.library.Library("khot", "DEF")


def _define(name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define an op whose tensors all have the batch dimensions first; other arguments are numbers or None."""
    LIBRARY.define(name + signature)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    op: Callable[..., Any] = getattr(torch.ops.khot, name).default
    torch.library.register_fake(f"khot::{name}", fake, lib=LIBRARY)

    def batched(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        def lead(t: Any, dim: int | None) -> Any:
            if not isinstance(t, Tensor):
                return t
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        result = op(*(lead(t, dim) for t, dim in zip(arguments, dims, strict=True)))
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    torch.library.register_vmap(f"khot::{name}", batched, lib=LIBRARY)
    return op


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


# x (…, n), k (…) float64, T (…) float64, mask (…, n) or None, and the name of the cdf → y (…, n)
topk = _define(
    "topk",
    "(Tensor x, Tensor k, Tensor temperature, Tensor? mask, int cdf, float p) -> Tensor",
    partial(threshold.topk, early_stop=False),
    lambda x, k, temperature, mask, cdf, p: _empty(x),
)
# g (…, n), y (…, n), T (…) float64, and the name of the cdf → (…, n), (…) float64
topk_pull = _define(
    "topk_pull",
    "(Tensor g, Tensor y, Tensor temperature, int cdf, float p) -> (Tensor, Tensor)",
    implicit.topk_pull,
    lambda g, y, temperature, cdf, p: (_empty(y), _empty(temperature, torch.float64)),
)
# as topk, with costs (…, n) or None → z (…, n)
margin = _define(
    "margin",
    "(Tensor x, Tensor k, Tensor temperature, Tensor? mask, Tensor? costs, int cdf, float p) -> Tensor",
    partial(threshold.margin, early_stop=False),
    lambda x, k, temperature, mask, costs, cdf, p: _empty(x),
)
# (x (…, n), k (…) float64, mask (…, n) or None) → (…, n)
hard_topk = _define(
    "hard_topk", "(Tensor x, Tensor k, Tensor? mask) -> Tensor", select.k_hot, lambda x, k, mask: _empty(x)
)


def sigmoid_margins(theta: Tensor, k: Tensor) -> Tensor:
    """Return the z = θ + λ with Σσ(z) = k, without a gradient; θ (…, n) float64, k (…) float64."""
    z: Tensor = margin(theta, k, torch.ones_like(k), None, None, cdfs.SIGMOID_PLACE, 0.0)
    return z


def _define_sampler(
    name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an op that draws from a seed (), with one row per draw.

    Under vmap each entry draws by itself, from its own seed where the seed is batched (`randomness="different"`), and
    from the one seed where it is not (`randomness="same"`).
    """
    LIBRARY.define(name + signature)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    op: Callable[..., Any] = getattr(torch.ops.khot, name).default
    torch.library.register_fake(f"khot::{name}", fake, lib=LIBRARY)

    def batched(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        def entry(i: int) -> list[Any]:
            return [a if dim is None else a.select(dim, i) for a, dim in zip(arguments, dims, strict=True)]

        return torch.stack([op(*entry(i)) for i in range(info.batch_size)]), 0

    torch.library.register_vmap(f"khot::{name}", batched, lib=LIBRARY)
    return op


# keys (…) → (…, n)
order = _define(
    "order", "(Tensor keys, SymInt n) -> Tensor", noise.order, lambda keys, n: keys.new_empty((*keys.shape, n))
)
# seed () → (count,) float64
uniform = _define_sampler(
    "uniform",
    "(Tensor seed, int stream, SymInt count) -> Tensor",
    noise.uniform,
    lambda seed, stream, count: seed.new_empty((count,), dtype=torch.float64),
)
# p (rows, n) float32 or float64, whether the size is an integer (rows), seed (), order (rows or 1, n) or None
# → (draws · rows, n)
pivotal = _define_sampler(
    "pivotal",
    "(Tensor p, Tensor is_integer, Tensor seed, Tensor? order, bool is_random, SymInt draws, bool is_paired) -> Tensor",
    _pivotal.draw,
    lambda p, is_integer, seed, order, is_random, draws, is_paired: p.new_empty((draws * p.shape[0], p.shape[1])),
)
# p (rows, n) float32 or float64, k (rows), seed () → (draws · rows, n)
systematic = _define_sampler(
    "systematic",
    "(Tensor p, Tensor k, Tensor seed, SymInt draws, bool is_paired) -> Tensor",
    _systematic.draw,
    lambda p, k, seed, draws, is_paired: p.new_empty((draws * p.shape[0], p.shape[1])),
)
# p (rows, n) float64, or tilted z for `rejective`, k (rows) float64, seed () → (draws, rows, n)
_SAMPLES = "(Tensor p, Tensor k, Tensor seed, SymInt draws) -> Tensor"
rejective = _define_sampler(
    "rejective",
    _SAMPLES,
    partial(natural.draw, uniform=uniform),
    lambda p, k, seed, draws: p.new_empty((draws, *p.shape)),
)
sampford = _define_sampler(
    "sampford",
    _SAMPLES,
    partial(high_entropy.draw_sampford, uniform=uniform, hard_topk=hard_topk, margins=sigmoid_margins),
    lambda p, k, seed, draws: p.new_empty((draws, *p.shape)),
)
brewer = _define_sampler(
    "brewer",
    _SAMPLES,
    partial(high_entropy.draw_brewer, uniform=uniform),
    lambda p, k, seed, draws: p.new_empty((draws, *p.shape)),
)
# marginals (…, n) float64, k (…) float64 → natural parameters (…, n)
natural_parameters = _define(
    "natural_parameters",
    "(Tensor p, Tensor k) -> Tensor",
    partial(natural.solve, margins=sigmoid_margins),
    lambda p, k: _empty(p),
)
