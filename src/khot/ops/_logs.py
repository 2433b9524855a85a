"""Functions of the threshold of σ_k in float32, by native kernels; what they leave is computed in float64."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .._shape import Mask, PerRow, per_row
from ..kernels import cpu_logs as _native
from ._topk import HAS_NATIVE, is_plain

# (x, *others of those rows) → the same in float64, differentiable: x is (rows, n), the others (rows) or (rows, n).
Exact = Callable[..., Tensor]


def log_sigmoid(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, exact: Exact) -> Tensor | None:
    """Return log σ_k of float32 rows (…, n), differentiable in x; None if no kernel serves the call.

    `exact` (x, k, T, mask) computes rows in float64: those that the kernels leave, and second derivatives.
    """
    return _served(_log, x, (k, temperature, mask), exact)


def threshold(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, exact: Exact) -> Tensor | None:
    """Return τ of float32 rows (…, n), (…) float64; as `log_sigmoid`."""
    return _served(_threshold, x, (k, temperature, mask), exact)


def cross_entropy(x: Tensor, target: Tensor, temperature: PerRow, mask: Mask, exact: Exact) -> Tensor | None:
    """Return the loss of float32 rows (…, n), (…) float64; `exact` gets (x, target, T, mask). As `log_sigmoid`.

    The target is like x, of a dtype whose zeros and ones float32 has; others are rows that the kernel leaves.
    """
    if target.requires_grad or not is_plain(target) or target.dtype == torch.float64:
        return None
    return _served(_cross_entropy, x, (target, temperature, mask), exact)


def _served(run: Any, x: Tensor, others: tuple[Any, ...], exact: Exact) -> Tensor | None:
    tensors = [t for t in others if isinstance(t, Tensor)]
    if not HAS_NATIVE or x.dtype != torch.float32 or x.numel() == 0 or any(t.requires_grad for t in tensors):
        return None
    if not is_plain(x, *others):
        return None
    n = x.shape[-1]
    flat = tuple(_flat(t, x, n) for t in others)
    y = cast(Tensor, _Quick.apply(x.reshape(-1, n).contiguous(), flat, run, exact))
    return y.view(x.shape) if y.dim() == 2 else y.view(x.shape[:-1])


def _flat(value: Any, x: Tensor, n: int) -> Any:
    """Return an argument of rows (…) or (…, n) as one of (rows) or (rows, n)."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(-1, n) if value.dim() == x.dim() else per_row(value, x).reshape(-1)


def _log(x: Tensor, k: Any, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor, Any]:
    y, roots, is_left = _native.log_sigmoid(x, k, temperature, mask)
    assert y is not None
    return y, is_left, lambda g: _native.log_sigmoid_pull(g, x, roots, temperature, mask)


def _threshold(x: Tensor, k: Any, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor, Any]:
    _, roots, is_left = _native.log_sigmoid(x, k, temperature, mask, only_roots=True)
    anchor, shift = roots
    return anchor + temperature * shift, is_left, lambda g: _native.log_sigmoid_pull(g, x, roots, temperature, mask)


def _cross_entropy(x: Tensor, target: Tensor, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor, Any]:
    loss, dx, is_left = _native.cross_entropy(x, target.to(torch.float32).contiguous(), temperature, mask)
    return loss, is_left, lambda g: (dx * g.to(dx.dtype).unsqueeze(-1), torch.zeros_like(is_left))


class _Quick(torch.autograd.Function):
    """Differentiate x (rows, n) → what a kernel computes; the rows that it leaves, and other derivatives, are exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: tuple[Any, ...], run: Any, exact: Exact) -> Tensor:
        y, is_left, pull = run(x.detach(), *others)
        if bool(is_left.any()):
            y[is_left] = exact(*_some(x.detach(), others, is_left)).to(y.dtype)
        ctx.save_for_backward(x)
        ctx.rest = others, is_left, pull, exact
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), (others, is_left, pull, exact) = ctx.saved_tensors, ctx.rest
        if torch.is_grad_enabled():
            (dx,) = torch.autograd.grad(exact(x, *others).to(g.dtype), x, g, create_graph=True)
            return dx, None, None, None
        if not is_plain(g):  # many cotangents at once
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = exact(x, *others).to(g.dtype)
            return *torch.autograd.grad(y, x, g), None, None, None
        dx, is_faint = pull(g)
        is_left = is_left | is_faint
        if bool(is_left.any()):
            dx[is_left] = _exact_pull(g, x, others, is_left, exact)
        return dx, None, None, None


def _exact_pull(g: Tensor, x: Tensor, others: tuple[Any, ...], which: Tensor, exact: Exact) -> Tensor:
    with torch.enable_grad():
        x, *rest = _some(x, others, which)
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(exact(x, *rest), x, g[which].to(torch.float64))
    return dx


def _some(x: Tensor, others: tuple[Any, ...], which: Tensor) -> tuple[Any, ...]:
    """Return the arguments of some rows."""
    return x[which], *(t[which] if isinstance(t, Tensor) else t for t in others)
