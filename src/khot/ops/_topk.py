"""The threshold ops: the short cut around the dispatcher, the derivatives, and the table of backends."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from .. import _torch
from .._math import cdfs, implicit, select, threshold
from .._math.cdfs import Cdf, cdf_by_name
from .._shape import Costs, Mask, PerRow, per_row
from .._torch import dispatch_keys, dispatch_modes, forward_level, function_modes, is_tracing, transforms_active
from ..kernels import cpu as _native
from ..kernels import cpu_costs
from ._library import LIBRARY, define, like

HAS_NATIVE = _native.LIBRARY is not None
# How `_TopK` is called on ordinary tensors: with y if it is solved, or with an empty tuple. None if they are not plain.
Plain = tuple[Tensor] | tuple[()] | None

# ── the short cut ────────────────────────────────────────────────────────────────────────────────────────────────────
_PLAIN = {dispatch_keys(torch.empty(0, device="cpu")).raw_repr()}
with torch.inference_mode():
    _PLAIN.add(dispatch_keys(torch.empty(0, device="cpu")).raw_repr())


def is_watched() -> bool:
    """Return whether a tracer or a transform must see each op."""
    return is_compiling() or transforms_active() or is_tracing()


def is_plain(*values: Any) -> bool:
    """Return whether a kernel may be called on these tensors, floats and Nones without the dispatcher.

    It may for ordinary ones, as `is_ordinary` has it, while no mode is active.
    """
    return is_ordinary(*values) and not dispatch_modes() and not function_modes()


def is_ordinary(*values: Any) -> bool:
    """Return whether these are dense CPU tensors, floats and Nones, and no tracer, transform or tangent is at work.

    Then a node that calls a kernel may stand in the graph; under a mode, it must call torch's functions instead.
    """
    if is_watched() or forward_level(forward_ad) >= 0:
        return False
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if dispatch_keys(value).raw_repr() not in _PLAIN:
                return False
        elif kind is not float and value is not None:  # a subclass; and isinstance of a tensor is slow
            return False
    return True


def constant(value: PerRow) -> PerRow:
    """Return the number in an ordinary CPU tensor of one element that needs no gradient; else the value as it is."""
    if type(value) is float or type(value) is int or not isinstance(value, Tensor):
        return value
    is_number = not value.requires_grad and value.numel() == 1 and is_plain(value)
    return float(value.item()) if is_number else value


def _law(cdf: Cdf | str) -> Cdf:
    """Return the cdf that an op was given by name."""
    return cdf_by_name(cdf) if isinstance(cdf, str) else cdf


def _differentiates(*values: Any) -> bool:
    if torch.is_grad_enabled():
        for value in values:
            if type(value) is not float and value is not None and value.requires_grad:
                return True
    return forward_level(forward_ad) >= 0


# ── what khot calls ──────────────────────────────────────────────────────────────────────────────────────────────────
def topk(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf) -> Tensor:
    """Return y = F((x − τ)/T) along the last dim, differentiable in x, k and T; the cdf has a `slope_at`.

    x is (…, n) float32 or float64, or half precision if `takes_halves`; k and T are numbers or (…) float64; the mask is
    (…, n) or None.
    """
    if x.dtype in _native.HALVES:  # `takes_halves` said so
        if not _differentiates(x):
            return _half_topk(x, k, temperature, mask, cdf)
        return cast(Tensor, _apply_half(x, k, temperature, mask, cdf))
    if is_plain(x, k, temperature, mask):
        if not _differentiates(x, k, temperature):
            return _cpu_topk(x, k, temperature, mask, cdf)
        return cast(Tensor, _apply_plain(x, k, temperature, mask, cdf, ()))
    if is_watched():
        return _topk(x, per_row(k, x), per_row(temperature, x), mask, cdf.name)
    if not _differentiates(x, k, temperature):
        return _solve(x, k, temperature, mask, cdf)
    return cast(Tensor, _TopK.apply(x, k, temperature, mask, cdf))


def takes_halves(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf) -> bool:
    """Return whether `topk` takes these scores as they are, in half precision: a kernel does, for ordinary tensors.

    Other calls are computed on a copy in float32.
    """
    if x.dtype not in _native.HALVES or not _native.has_kernel(cdf.name, torch.float32):
        return False
    numbers = [t for t in (k, temperature) if isinstance(t, Tensor)]
    return is_ordinary(x, mask, *numbers) and not any(t.requires_grad for t in numbers)


def _half_topk(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf, roots: Tensor | None = None) -> Tensor:
    """Return y of scores in half precision by the kernel; by way of float32 if a mode watches, with roots of NaN."""
    if is_plain(x, mask):
        return _native.half_topk(x, k, temperature, mask, cdf.name, roots=roots)
    if roots is not None:
        roots.fill_(torch.nan)
    return _solve(x.float(), k, temperature, mask, cdf).to(x.dtype)


def topk_into(out: Tensor, x: Tensor, k: float, temperature: float, cdf: Cdf) -> None:
    """Write y = F((x − τ)/T) of x (…, n) to `out`, a contiguous tensor like x, without a gradient.

    A large result in memory that is used again is twice as fast as one in new memory.
    """
    if _native.has_kernel(cdf.name, x.dtype) and is_plain(x, out):
        _native.native_topk(x, k, temperature, None, cdf.name, out=out)
    else:
        out.copy_(_solve(x, k, temperature, None, cdf))


def margin(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Costs, cdf: Cdf) -> Tensor:
    """Return z = (x − τ)/T along the last dim, differentiable in x, k, T and costs; ±inf where y is exactly 1 or 0.

    Arguments are those of `topk`, for any cdf; the costs are (…, n) or None.
    """
    if is_watched():
        return _margin(x, per_row(k, x), per_row(temperature, x), mask, costs, cdf.name)
    if not _differentiates(x, k, temperature, costs):
        return _solve_margin(x, k, temperature, mask, costs, cdf)
    apply = _apply_plain_margin if is_plain(x, k, temperature, mask, costs) else _Margin.apply
    return cast(Tensor, apply(x, k, temperature, mask, costs, cdf))


def sigmoid_margins(theta: Tensor, k: Tensor) -> Tensor:
    """Return the z = θ + λ with Σσ(z) = k, without a gradient; θ (…, n) float64, k (…) float64."""
    return margin(theta.detach(), k, 1.0, None, None, cdfs.SIGMOID)


def hard_topk(x: Tensor, k: PerRow, mask: Mask) -> Tensor:
    """Return ones at the k largest scores of each row (…, n), without a gradient; k is a number or (…) float64."""
    if HAS_NATIVE and is_plain(x, k, mask):
        return _native.hard_topk(x, k, mask)
    return _hard_topk(x, per_row(k, x), mask)


def _solve(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf) -> Tensor:
    """Return y by the op below autograd."""
    k, temperature = per_row(k, x), per_row(temperature, x)
    with _torch.next_level():
        return _topk(x, k, temperature, mask, cdf.name)


def _solve_margin(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Costs, cdf: Cdf) -> Tensor:
    """Return z by the CPU's kernel, or by the op below autograd."""
    if is_plain(x, k, temperature, mask, costs):
        return _cpu_margin(x, k, temperature, mask, costs, cdf)
    k, temperature = per_row(k, x), per_row(temperature, x)
    with _torch.next_level():
        return _margin(x, k, temperature, mask, costs, cdf.name)


def _pull(g: Tensor, y: Tensor, temperature: PerRow, cdf: Cdf) -> Tensor:
    """Return the cotangent of x for that of y: all that most training steps need, so a kernel fuses it."""
    if not is_compiling() and (dx := _direct_pull(g, y, temperature, cdf)) is not None:
        return cast(Tensor, dx)
    if is_plain(g, y, temperature):
        return _cpu_pull(g, y, temperature, cdf)
    return _topk_pull(g, y, per_row(temperature, y), cdf.name)


def _pull_value(g: Tensor, y: Tensor, temperature: PerRow, cdf: Cdf) -> Tensor:
    """Return what `_pull` does, and differentiable if gradients or tangents are on."""
    is_on = torch.is_grad_enabled() or forward_level(forward_ad) >= 0
    return implicit.pull_value(g, implicit.at_value(y, temperature, cdf))[0] if is_on else _pull(g, y, temperature, cdf)


# ── derivatives ──────────────────────────────────────────────────────────────────────────────────────────────────────
class _TopK(torch.autograd.Function):
    """Differentiate (x, k, T, mask, cdf) → y. It saves y, which autograd tracks, so backward has a derivative too.

    From y alone the derivative in k is lost where an entry rounds to 1 and its counterpart does not round to 0, so it
    is taken from the margins, which are solved for again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf | str, plain: Plain = None
    ) -> Tensor:
        if plain:  # k and T are numbers
            ctx.cdf, ctx.temperature, y = cdf, temperature, plain[0]
            ctx.save_for_backward(y, None)
            return y
        ctx.cdf, needs = _law(cdf), ctx.needs_input_grad
        y = (_solve if plain is None else _cpu_topk)(x, k, temperature, mask, ctx.cdf)
        ctx.temperature = None if needs[2] else temperature  # a number, or a tensor of khot's own that nobody changes
        rest = (x, k, mask) if needs[1] else ()
        ctx.save_for_backward(y, temperature if needs[2] else None, *rest)
        if plain is None and (transforms_active() or forward_level(forward_ad) >= 0):
            ctx.set_materialize_grads(False)  # `jvp` asks for the margins only if k has a tangent
            ctx.save_for_forward(y, *(t if isinstance(t, Tensor) else None for t in (temperature, x, k, mask)))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, saved: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        if g is None:
            return None, None, None, None, None, None
        y, heat, *rest = ctx.saved_tensors if saved is None else saved
        temperature = ctx.temperature if heat is None else heat
        if heat is None and not rest:
            return _pull_value(g, y, temperature, ctx.cdf), None, None, None, None, None
        dx, dk, dt = implicit.pull_value(g, _at_value(y, temperature, ctx.cdf, *rest))
        return dx, dk if rest else None, None if heat is None else dt, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: Tensor | None, dt: Tensor | None, *_: None) -> Tensor:
        y, heat, *rest = _torch.primals(ctx.saved_tensors)
        with _torch.next_tangents():
            at = _at_value(y, ctx.temperature if heat is None else heat, ctx.cdf, *(() if dk is None else rest))
            return implicit.push_value(*_tangents(y, dx, dk, dt), at)


class _HalfTopK(torch.autograd.Function):
    """Differentiate (x, k, T, mask, cdf) → y in x, in half precision.

    It saves x and the threshold of each row: y in half precision has too few digits for a derivative, and in float32 it
    would be a copy of the whole tensor in twice the memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf) -> Tensor:
        ctx.cdf, ctx.numbers = cdf, tuple(None if isinstance(t, Tensor) else t for t in (k, temperature))
        roots = x.new_empty(x.shape[:-1].numel(), 2, dtype=torch.float64)
        y = _half_topk(x, k, temperature, mask, cdf, roots)
        ctx.save_for_backward(x, roots, mask, *(t if isinstance(t, Tensor) else None for t in (k, temperature)))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, roots, mask, *given = ctx.saved_tensors
        k, temperature = (t if number is None else number for t, number in zip(given, ctx.numbers, strict=True))
        if is_plain(g, x, mask) and not torch.is_grad_enabled():
            return _native.half_pull(g, x, roots, k, temperature, mask, ctx.cdf.name), None, None, None, None
        y = topk(x.float(), k, temperature, mask, ctx.cdf)
        dx = implicit.pull_value(g.float(), implicit.at_value(y, temperature, ctx.cdf))[0]
        return dx.to(x.dtype), None, None, None, None


_apply_plain = _torch.apply_plain(_TopK)
_apply_half = _torch.apply_plain(_HalfTopK)
direct_topk, _direct_pull, _method_of = _native.direct(
    tensor=Tensor,
    parameter=Parameter,
    empty_like=torch.empty_like,
    get_num_threads=torch.get_num_threads,
    is_grad_enabled=torch.is_grad_enabled,
    watchers=(transforms_active, is_tracing, dispatch_modes, function_modes),
    forward_level=forward_level,
    forward_ad=forward_ad,
    oddities=_torch.ODDITIES,
    cdfs=tuple(cdf_by_name(name) for name in _native.IN_EVERY_DTYPE),
    apply=_apply_plain,
    backward=_TopK.backward,
    pull=_pull_value,
)
_torch.call_from_nodes(_TopK, _method_of)


def _at_value(y: Tensor, temperature: PerRow, cdf: Cdf, *solved: Any) -> implicit.Linear:
    """Return what the derivative at y needs, from y, or from the margins of the rows (x, k, mask) if they are given."""
    if not solved:
        return implicit.at_value(y, temperature, cdf)
    x, k, mask = solved
    return implicit.at_margin(margin(x, k, temperature, mask, None, cdf), temperature, None, cdf)


class _Margin(torch.autograd.Function):
    """Differentiate (x, k, T, mask, costs, cdf) → z."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Costs, cdf: Cdf | str
    ) -> Tensor:
        ctx.cdf = _law(cdf)
        z = _solve_margin(x, k, temperature, mask, costs, ctx.cdf)
        ctx.temperature = temperature if type(temperature) is float else None
        saved = (z, None if type(temperature) is float else temperature, costs)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (z, heat, costs), needs = ctx.saved_tensors, ctx.needs_input_grad
        at = implicit.at_margin(z, ctx.temperature if heat is None else heat, costs, ctx.cdf)
        dx, dk, dt = implicit.pull(torch.where(z.isinf(), 0.0, g), at)
        dc = None if costs is None else -dk.unsqueeze(-1) * cdfs.value(ctx.cdf, z)
        return dx, dk if needs[1] else None, dt if needs[2] else None, None, dc, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: Tensor | None, dt: Tensor | None, *others: Any) -> Tensor:
        z, heat, costs = _torch.primals(ctx.saved_tensors)
        temperature = ctx.temperature if heat is None else heat
        with _torch.next_tangents():
            dx, dk, dt = _tangents(z, dx, dk, dt)
            if others[1] is not None:
                dk = dk - (cdfs.value(ctx.cdf, z) * others[1]).sum(-1, keepdim=True)
            dz = implicit.push(dx, dk, dt, implicit.at_margin(z, temperature, costs, ctx.cdf))
            return torch.where(z.isinf(), 0.0, dz)


_apply_plain_margin = _torch.apply_plain(_Margin)


def _tangents(like: Tensor, dx: Tensor | None, dk: Tensor | None, dt: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tangents in the shapes that `implicit.push` takes; 0 for none."""
    zero = like.new_zeros(())
    dk, dt = (zero if t is None else t.to(like.dtype).unsqueeze(-1) for t in (dk, dt))
    return zero if dx is None else dx, dk, dt


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _eager_pull(g: Tensor, y: Tensor, temperature: PerRow, cdf: Cdf | str) -> Tensor:
    return implicit.pull_value(g, implicit.at_value(y, temperature, _law(cdf)))[0].contiguous()


# x (…, n), k (…) float64, T (…) float64, mask (…, n) or None, the name of the cdf → y (…, n)
_topk = define(
    "topk",
    "(Tensor x, Tensor k, Tensor temperature, Tensor? mask, str cdf) -> Tensor",
    lambda x, k, t, mask, cdf: threshold.topk(x, k, t, mask, cdf_by_name(cdf), early_stop=False),
    like,
    _TopK,
)
# as topk, with costs (…, n) or None → z (…, n)
_margin = define(
    "margin",
    "(Tensor x, Tensor k, Tensor temperature, Tensor? mask, Tensor? costs, str cdf) -> Tensor",
    lambda x, k, t, mask, costs, cdf: threshold.margin(x, k, t, mask, costs, cdf_by_name(cdf), early_stop=False),
    like,
    _Margin,
)
# g (…, n), y (…, n), T (…) float64, the name of the cdf → (…, n)
_topk_pull = define(
    "topk_pull", "(Tensor g, Tensor y, Tensor temperature, str cdf) -> Tensor", _eager_pull, lambda g, y, *_: like(y)
)
# x (…, n), k (…) float64, mask (…, n) or None → (…, n)
_hard_topk = define("hard_topk", "(Tensor x, Tensor k, Tensor? mask) -> Tensor", select.k_hot, like)


# ── the CPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _cpu_topk(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, cdf: Cdf | str) -> Tensor:
    law = _law(cdf)
    if _native.has_kernel(law.name, x.dtype):
        return _native.native_topk(x, k, temperature, mask, law.name)
    return threshold.topk(x, per_row(k, x), per_row(temperature, x), mask, law, early_stop=True)


def _cpu_margin(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Costs, cdf: Cdf | str) -> Tensor:
    law = _law(cdf)
    if HAS_NATIVE and costs is None and law is cdfs.SIGMOID:
        return _native.margin(x, k, temperature, mask)
    if costs is not None and x.numel() and _native.has_kernel(law.name, x.dtype):
        return cpu_costs.margin(x, k, temperature, mask, costs, law)
    return threshold.margin(x, per_row(k, x), per_row(temperature, x), mask, costs, law, early_stop=True)


def _cpu_pull(g: Tensor, y: Tensor, temperature: PerRow, cdf: Cdf | str) -> Tensor:
    name = cdf if isinstance(cdf, str) else cdf.name
    if _native.has_kernel(name, y.dtype):
        return _native.native_pull(g, y, temperature, None, name)
    return _eager_pull(g, y, temperature, cdf)


def _has_passes(cdf: Cdf, rows: threshold.Rows) -> bool:
    return rows.x.device.type == "cpu" and rows.costs is None and _native.has_kernel(cdf.name, rows.x.dtype)


def sums_at(cdf: Cdf, rows: threshold.Rows, point: threshold.Point) -> Tensor:
    """Return `_math.threshold.sums_at`, for parts of rows, by a kernel if there is one."""
    if _has_passes(cdf, rows):
        return _native.sums_at(rows.x, *point, rows.temperature, cdf.name)
    return threshold.sums_at(cdf, rows, point)


def value_at(cdf: Cdf, rows: threshold.Rows, point: threshold.Point, step: Tensor) -> Tensor:
    """Return `_math.threshold.value_at`, for parts of rows, by a kernel if there is one."""
    if _has_passes(cdf, rows):
        return _native.value_at(rows.x, *point, rows.temperature, step, cdf.name)
    return threshold.value_at(cdf, rows, point, step)


LIBRARY.impl("topk", _cpu_topk, "CPU")
LIBRARY.impl("margin", _cpu_margin, "CPU")
LIBRARY.impl("topk_pull", _cpu_pull, "CPU")
if HAS_NATIVE:
    LIBRARY.impl("hard_topk", _native.hard_topk, "CPU")
