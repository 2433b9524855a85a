"""The ops that draw samples, and that solve for the law to draw from; and the prices of balanced routes."""

from functools import partial

import torch
from torch import Tensor

from .._math import balanced, cdfs, high_entropy, natural, noise, subsets
from .._math import pivotal as _pivotal
from .._math import prices as _prices
from .._math import systematic as _systematic
from ..kernels import cpu, cpu_samplers
from ._library import LIBRARY, Op, define, define_sampler, like
from ._topk import hard_topk, sigmoid_margins, topk

# keys (…) → (…, n)
order = define(
    "order", "(Tensor keys, SymInt n) -> Tensor", noise.order, lambda keys, n: keys.new_empty((*keys.shape, n))
)
# seed () → (count,) float64
uniform = define_sampler(
    "uniform",
    "(Tensor seed, int stream, SymInt count) -> Tensor",
    noise.uniform,
    lambda seed, stream, count: seed.new_empty((count,), dtype=torch.float64),
)
# p (rows, n) float32 or float64, whether the size is an integer (rows), seed (), order (rows or 1, n) or None
# → (draws · rows, n)
pivotal = define_sampler(
    "pivotal",
    "(Tensor p, Tensor is_integer, Tensor seed, Tensor? order, bool is_random, SymInt draws, bool is_paired) -> Tensor",
    _pivotal.draw,
    lambda p, is_integer, seed, order, is_random, draws, is_paired: p.new_empty((draws * p.shape[0], p.shape[1])),
)
# p (rows, n) float32 or float64, k (rows), seed () → (draws · rows, n)
systematic = define_sampler(
    "systematic",
    "(Tensor p, Tensor k, Tensor seed, SymInt draws, bool is_paired) -> Tensor",
    _systematic.draw,
    lambda p, k, seed, draws, is_paired: p.new_empty((draws * p.shape[0], p.shape[1])),
)
# p (rows, n), variables (rows, q, n), whether the size is an integer (rows), seed () → (draws · rows, n) float64
cube = define_sampler(
    "cube",
    "(Tensor p, Tensor z, Tensor is_integer, Tensor seed, bool is_random, SymInt draws) -> Tensor",
    balanced.cube,
    lambda p, z, is_integer, seed, is_random, draws: p.new_empty((draws * p.shape[0], p.shape[1]), dtype=torch.float64),
)
# p (rows, n), places (rows, n, d), whether the size is an integer (rows), seed () → (draws · rows, n) float64
local_pivotal = define_sampler(
    "local_pivotal",
    "(Tensor p, Tensor places, Tensor is_integer, Tensor seed, SymInt draws) -> Tensor",
    balanced.local_pivotal,
    lambda p, places, is_integer, seed, draws: p.new_empty((draws * p.shape[0], p.shape[1]), dtype=torch.float64),
)


def _define_law(name: str, kernel: Op) -> Op:
    """Define a sampler of p (rows, n) float64 (or tilted z), k (rows) float64, seed () → (draws, rows, n)."""
    signature = "(Tensor p, Tensor k, Tensor seed, SymInt draws) -> Tensor"
    return define_sampler(name, signature, kernel, lambda p, k, seed, draws: p.new_empty((draws, *p.shape)))


# p (…, n) float64, step (…, T) complex, scale (…, T) → (…, T) complex
_count_products = define(
    "count_products",
    "(Tensor p, Tensor step, Tensor scale) -> Tensor",
    subsets.HERE.product,
    lambda p, step, scale: torch.empty_like(step),
)
# p (…, n) float64, step and weight (…, T) complex → (…, 2, n)
_count_rests = define(
    "count_rests",
    "(Tensor p, Tensor step, Tensor weight) -> Tensor",
    lambda p, step, weight: torch.stack(subsets.HERE.rests(subsets.Counts(p, step, weight)), -2),
    lambda p, step, weight: p.new_empty((*p.shape[:-1], 2, p.shape[-1])),
)


class Whole(subsets.Whole):
    """The same sums by ops, which have no derivatives."""

    def product(self, p: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        """As in `_math.subsets`."""
        return _count_products(p, step, scale)

    def rests(self, c: subsets.Counts) -> tuple[Tensor, Tensor]:
        """As in `_math.subsets`."""
        batch = torch.broadcast_shapes(*(t.shape[:-1] for t in c))
        less, same = _count_rests(*(t.expand(*batch, t.shape[-1]) for t in c)).unbind(-2)
        return less, same


WHOLE = Whole()
# p (rows, n) float64, k (rows) float64, seed () → (draws, rows, n)
_along_tree = define_sampler(
    "along_tree",
    "(Tensor p, Tensor k, Tensor seed, int stream, SymInt draws, SymInt group) -> Tensor",
    partial(natural.along_tree, uniform=uniform),
    lambda p, k, seed, stream, draws, group: p.new_empty((draws, *p.shape)),
)
rejective = _define_law("rejective", partial(natural.draw, uniform=uniform, along_tree=_along_tree))
# logits (…, n) float64, k (…) float64 → (…, n)
_pareto_constants = define(
    "pareto_constants", "(Tensor logits, Tensor k) -> Tensor", high_entropy.pareto_constants, like
)
brewer = _define_law("brewer", partial(high_entropy.draw_brewer, uniform=uniform))
_sampford = partial(
    high_entropy.draw_sampford,
    uniform=uniform,
    hard_topk=hard_topk,
    margins=sigmoid_margins,
    constants_of=_pareto_constants,
    rejective=rejective,
)
sampford = _define_law("sampford", _sampford)
# marginals (…, n) float64, k (…) float64 → natural parameters (…, n)
natural_parameters = define(
    "natural_parameters",
    "(Tensor p, Tensor k) -> Tensor",
    partial(natural.solve, margins=sigmoid_margins, whole=WHOLE),
    like,
)


def _sigmoid_topk(x: Tensor, k: int, *, temperature: float) -> Tensor:
    return topk(x, float(k), temperature, None, cdfs.SIGMOID)


def prices(x: Tensor, k: int, capacity: float | None, temperature: Tensor, total: _prices.Total) -> Tensor:
    """Return the (n) prices of `_math.prices` for x (rows, n) float64, temperature (); None is the least capacity."""
    with torch.no_grad():
        if total is _prices.HERE:
            return _price(x, temperature, k, capacity)
        return _prices.prices(_sigmoid_topk, x, k, capacity, float(temperature), total)


def _price_here(x: Tensor, temperature: Tensor, k: int, capacity: float | None) -> Tensor:
    return _prices.prices(_sigmoid_topk, x, k, capacity, float(temperature))


# opaque, because it reads values on the way
_price = define_sampler(
    "prices",
    "(Tensor x, Tensor temperature, int k, float? capacity) -> Tensor",
    _price_here,
    lambda x, temperature, k, capacity: x.new_empty(x.shape[-1:]),
)

if cpu.LIBRARY is not None:
    for _name in (
        "pivotal",
        "systematic",
        "uniform",
        "order",
        "along_tree",
        "pareto_constants",
        "count_products",
        "count_rests",
    ):
        LIBRARY.impl(_name, getattr(cpu_samplers, _name), "CPU")
