"""What the members of the family share: rows in, σ_k or margins out, with implicit derivatives through the solver."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check, _modes, _shape, ops
from .._math import cdfs, implicit, threshold


class Margins(NamedTuple):
    """A solved call."""

    z: Tensor
    """(…, n) margins (x − τ)/T, ±inf where y is exactly 1 or 0."""
    rows: _shape.Rows
    """What they belong to; with costs c, the scores are x/c."""
    costs: Tensor | None
    """(…, n), if there are any."""


def check_call(
    x: Tensor,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    costs: Tensor | None = None,
) -> None:
    """Raise unless the arguments of a relaxation are legal."""
    _check.scores(x, dim)
    _check.count(k, x, dim, is_budget=costs is not None)
    _check.temperature(temperature, x, dim)
    _check.mask(mask, x)
    _check.costs(costs, x)


def relax(
    cdf: int,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    costs: Tensor | None,
    p: float = 0.0,
) -> Tensor:
    """y = F(z) like `x`; `cdf` and `p` name F, as `cdfs.find` takes them."""
    made, dtype = cdfs.find(cdf, p), _shape.compute_dtype(x.dtype)
    if costs is None and made.slope_at is not None:
        rows = _shape.to_rows(x, k, temperature, mask, dim, dtype)
        return _shape.from_rows(apply(_Value, _ForwardValue, *rows, cdf, p), dim, x.dtype)
    z, rows, costs = margins(cdf, x, k, dim, temperature, mask, costs, dtype, p)
    return _shape.from_rows(threshold.smooth_value(made, z, rows.k, costs), dim, x.dtype)


def margins(
    cdf: int,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    costs: Tensor | None,
    dtype: torch.dtype,
    p: float = 0.0,
) -> Margins:
    """z on the last dim, computed in `dtype`."""
    rows = _shape.to_rows(x, k, temperature, mask, dim, dtype)
    if costs is not None:
        costs = _shape.per_entry(costs, x, dim, dtype)
        if rows.mask is not None:
            costs = torch.where(rows.mask, costs, 1.0)  # what cannot be chosen costs nothing, whatever is written there
        infinite = rows.x.isinf()
        per_cost = torch.where(infinite, 0.0, rows.x) / costs
        rows = rows._replace(x=torch.where(infinite, rows.x.detach(), per_cost))
    return Margins(apply(_Margin, _ForwardMargin, *rows, costs, cdf, p), rows, costs)


def apply(plain: type[Implicit], forward: type[Implicit], *arguments: Any) -> Tensor:
    """`forward.apply(*arguments)`, or a cheaper equivalent.

    torch.compile needs the plain one. Outside of torch.func's transforms `apply` only adds a look at signatures, and
    care for tensors that leaked out of a transform; where nothing will be differentiated, the op alone does.
    """
    result: Tensor
    if torch.compiler.is_compiling():
        result = plain.apply(*arguments)
    elif _modes.transforms_active():
        _check.forward_mode(_modes.nested_forward_mode())
        result = forward.apply(*arguments)
    elif _is_constant(arguments):
        result = forward.forward(*arguments)
    else:
        result = super(torch.autograd.Function, forward).apply(*arguments)  # type: ignore[misc]
    return result


def _is_constant(arguments: tuple[Any, ...]) -> bool:
    """Whether nothing will be differentiated."""
    if _modes.forward_mode_active():
        return False
    return not (torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments))


def reduced(loss: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    """A loss by row, reduced as `_check.reduction` allows."""
    return (loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()).to(dtype)


class Implicit(torch.autograd.Function):
    """A Function that saves its output, which autograd tracks: backward has a derivative too."""

    generate_vmap_rule = True


class _Value(Implicit):
    """(x, k, T, mask, cdf, p) → y."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, cdf: int, p: float) -> Tensor:
        y: Tensor = ops.topk(x, k, temperature, mask, cdf, p)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, temperature, _, *ctx.name = inputs
        ctx.save_for_backward(output, temperature)
        ctx.save_for_forward(output, temperature)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, temperature = ctx.saved_tensors
        if not (ctx.needs_input_grad[2] or torch.is_grad_enabled()):  # no dT and no second derivative are asked for
            return *ops.topk_pull(g, y, temperature, *ctx.name), None, None, None, None
        v, at = implicit.value(y, temperature, cdfs.find(*ctx.name))
        return *implicit.pull(v * g, at), None, None, None


class _ForwardValue(_Value):
    """With forward mode, which torch.compile refuses."""

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: Tensor | None, dt: Tensor | None, *_: None) -> Tensor:
        y, temperature = ctx.saved_tensors
        v, at = implicit.value(y, temperature, cdfs.find(*ctx.name))
        return v * implicit.push(*tangents(y, dx, dk, dt), at)


class _Margin(Implicit):
    """(x, k, T, mask, costs, cdf, p) → z."""

    @staticmethod
    def forward(
        x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, costs: Tensor | None, cdf: int, p: float
    ) -> Tensor:
        z: Tensor = ops.margin(x, k, temperature, mask, costs, cdf, p)
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, temperature, _, costs, cdf, p = inputs
        ctx.save_for_backward(output, temperature, costs)
        ctx.save_for_forward(output, temperature, costs)
        ctx.cdf = cdfs.find(cdf, p)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, temperature, costs = ctx.saved_tensors
        at = implicit.margin(z, temperature, costs, ctx.cdf)
        dx, dk, dt = implicit.pull(torch.where(z.isinf(), 0.0, g), at)
        dc = None if costs is None else -dk.unsqueeze(-1) * cdfs.value(ctx.cdf, z)
        return dx, dk, dt, None, dc, None, None


class _ForwardMargin(_Margin):
    """With forward mode, which torch.compile refuses."""

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: Tensor | None, dt: Tensor | None, *others: Any) -> Tensor:
        z, temperature, costs = ctx.saved_tensors
        dc = others[1]
        dx, dk, dt = tangents(z, dx, dk, dt)
        if dc is not None:
            dk = dk - (cdfs.value(ctx.cdf, z) * dc).sum(-1, keepdim=True)
        dz = implicit.push(dx, dk, dt, implicit.margin(z, temperature, costs, ctx.cdf))
        return torch.where(z.isinf(), 0.0, dz)


def tangents(like: Tensor, dx: Tensor | None, dk: Tensor | None, dt: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The tangents in the shapes that `implicit.push` takes; 0 for none."""
    zero = like.new_zeros(())
    dk, dt = (zero if t is None else t.to(like.dtype).unsqueeze(-1) for t in (dk, dt))
    return zero if dx is None else dx, dk, dt
