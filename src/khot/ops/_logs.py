"""Functions of the threshold of σ_k in float32, by native kernels; what they leave is computed in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._shape import Mask, PerRow, per_row
from ..kernels import cpu_logs as _native
from ._topk import HAS_NATIVE, is_ordinary, is_plain

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
    if target.requires_grad or not is_ordinary(target) or target.dtype == torch.float64:
        return None
    return _served(_cross_entropy, x, (target, temperature, mask), exact)


class _Kernel(NamedTuple):
    """A kernel, its derivative, and what they are to look like where neither may be called."""

    run: Callable[..., tuple[Tensor, Tensor, Tensor]]  # (x, *others) → y, which rows are left, and a state
    pull: Callable[..., tuple[Tensor, Tensor]]  # (g, state, x, *others) → dx, and which rows are left
    dtype: torch.dtype  # of y
    state: Callable[[Tensor], Tensor]  # x → a state that tells nothing


def _served(kernel: _Kernel, x: Tensor, others: tuple[Any, ...], exact: Exact) -> Tensor | None:
    tensors = [t for t in others if isinstance(t, Tensor)]
    if not HAS_NATIVE or x.dtype != torch.float32 or x.numel() == 0 or any(t.requires_grad for t in tensors):
        return None
    if not is_ordinary(x, *others):
        return None
    n = x.shape[-1]
    flat = tuple(_flat(t, x, n) for t in others)
    y = cast(Tensor, _Quick.apply(x.reshape(-1, n).contiguous(), flat, kernel, exact))
    return y.view(x.shape) if y.dim() == 2 else y.view(x.shape[:-1])


def _flat(value: Any, x: Tensor, n: int) -> Any:
    """Return an argument of rows (…) or (…, n) as one of (rows) or (rows, n)."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(-1, n) if value.dim() == x.dim() else per_row(value, x).reshape(-1)


def _run_log(x: Tensor, k: Any, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    y, roots, is_left = _native.log_sigmoid(x, k, temperature, mask)
    assert y is not None
    return y, is_left, roots


def _run_threshold(x: Tensor, k: Any, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    _, roots, is_left = _native.log_sigmoid(x, k, temperature, mask, only_roots=True)
    anchor, shift = roots
    return anchor + temperature * shift, is_left, roots


def _run_cross_entropy(x: Tensor, target: Tensor, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    loss, dx, is_left = _native.cross_entropy(x, target.to(torch.float32).contiguous(), temperature, mask)
    return loss, is_left, dx


def _pull_log(g: Tensor, roots: Tensor, x: Tensor, k: Any, temperature: Any, mask: Mask) -> tuple[Tensor, Tensor]:
    return _native.log_sigmoid_pull(g, x, roots, temperature, mask)


def _pull_cross_entropy(g: Tensor, dx: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return dx * g.to(dx.dtype).unsqueeze(-1), torch.zeros(len(dx), dtype=torch.bool, device="cpu")


def _no_roots(x: Tensor) -> Tensor:
    return x.new_full((2, len(x)), torch.nan, dtype=torch.float64)


_log = _Kernel(_run_log, _pull_log, torch.float32, _no_roots)
_threshold = _Kernel(_run_threshold, _pull_log, torch.float64, _no_roots)
_cross_entropy = _Kernel(
    _run_cross_entropy, _pull_cross_entropy, torch.float64, lambda x: torch.full_like(x, torch.nan)
)


class _Quick(torch.autograd.Function):
    """Differentiate x (rows, n) → what a kernel computes; the rows that it leaves, and other derivatives, are exact.

    If a mode watches the call, all rows are left. What is saved looks the same then, so that torch.utils.checkpoint may
    compute it again with or without the mode.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: tuple[Any, ...], kernel: _Kernel, exact: Exact) -> Tensor:
        if is_plain(x, *others):
            y, is_left, state = kernel.run(x.detach(), *others)
            if bool(is_left.any()):
                y[is_left] = exact(*_some(x.detach(), others, is_left)).to(y.dtype)
        else:
            y, state = exact(x.detach(), *others).to(kernel.dtype), kernel.state(x)
            is_left = torch.ones(len(x), dtype=torch.bool, device="cpu")
        ctx.save_for_backward(x, state, is_left, *(t for t in others if isinstance(t, Tensor)))
        ctx.rest = kernel, exact, [None if isinstance(t, Tensor) else (t,) for t in others]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        (kernel, exact, numbers), (x, state, is_left, *tensors) = ctx.rest, ctx.saved_tensors
        given = iter(tensors)
        others = tuple(next(given) if number is None else number[0] for number in numbers)
        if torch.is_grad_enabled():
            (dx,) = torch.autograd.grad(exact(x, *others).to(g.dtype), x, g, create_graph=True)
            return dx, None, None, None
        if not is_plain(g):  # many cotangents at once
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = exact(x, *others).to(g.dtype)
            return *torch.autograd.grad(y, x, g), None, None, None
        dx, is_faint = kernel.pull(g, state, x, *others)
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
