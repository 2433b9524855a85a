"""σ_k, its logarithm, its threshold and its loss: y = σ((x − τ)/T) with τ such that Σ y = k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .. import _check, _shape, kernels
from .._math import cdfs, implicit
from ._implicit import Margins, check_call, margins, reduced, relax


def sigmoid_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """Soft top-k: a point of [0, 1]ⁿ that sums to k, and is large where the scores are.

    `σ_k(x) = σ((x − τ)/T)` with τ such that `Σ σ_k(x) = k`; equally `argmax_{π ∈ Δ_k} ⟨x, π⟩ + T·H(π)`, where H is
    the sum of binary entropies.

    Args:
        x: scores, (…, n) with n at `dim`. −inf is never chosen; +inf always is (more than k of them share k equally).
        k: how many to choose, 0 ≤ k ≤ n, whole or fractional: a number, or a tensor that broadcasts to the shape of
            `x` without `dim`.
        dim: the dimension to choose along.
        temperature: T > 0, larger is softer: a number, or a tensor that broadcasts like `k`.
        mask: boolean, broadcasts to `x`; True = may be chosen. n becomes the number of allowed entries.
        costs: positive, broadcasts to `x`: then `k` is a budget, `Σ c·y = k` and `y = σ(x/(c·T) − τ)`.

    Returns:
        A tensor like `x`, with entries in [0, 1] that sum to k along `dim` within 1e-6·max(k, 1) (float32) or
        1e-12·max(k, 1) (float64; 1e-9 where |x|/T > 100). Masked and −inf entries are exactly 0. Half precision is
        computed in float32 and rounded once. Smooth, with gradients of every order to `x`, `k` and `temperature`; a
        saturated row has gradient 0. Forward mode once: not over itself. O(n) time, without sorting; on the CPU, with
        the native kernel, the same bits at any number of threads.

        Tensor values are not read on the host, so a row that cannot be satisfied (k out of range, fewer allowed
        entries than k, a temperature that is not positive, NaN in `x`) is NaN, and that row only; on accelerators
        also one that 64 steps do not solve (scores that span some ten decades of T).

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0])
        >>> sigmoid_topk(x, 2)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])
        >>> sigmoid_topk(x, 2, temperature=0.1)
        tensor([1.0000e+00, 9.9331e-01, 6.6929e-03, 3.0590e-07])
        >>> sigmoid_topk(x, 2, mask=torch.tensor([True, False, True, True]))
        tensor([0.9335, 0.0000, 0.6551, 0.4114])

    Reference: Wijk et al., "Differentiable Top-k: From One-Hot to k-Hot" (2025); the same operator is the LML layer of
    Amos et al. (2019).
    """
    check_call(x, k, dim, temperature, mask, costs)
    if (
        mask is costs is None
        and not isinstance(k, Tensor)
        and not isinstance(temperature, Tensor)
        and _is_direct(x, dim)
    ):
        return _direct(x, float(k), _shape.normal(temperature, x.dtype))
    return relax(cdfs.SIGMOID_PLACE, x, k, dim, temperature, mask, costs)


def log_sigmoid_topk(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """The logarithm of `sigmoid_topk`, accurate where the probability underflows.

    `log σ_k(x) = −log(1 + e^{−(x − τ)/T})`, computed in float64.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask: as for `sigmoid_topk`.

    Returns:
        A tensor like `x`, ≤ 0, −inf at masked entries, with a relative error of a rounding of x's dtype whatever the
        size of the probability. Gradients as `sigmoid_topk`, but exact in saturated rows too; the entries that are
        exactly −inf or 0 (masked, k = 0, k = n) have gradient 0.

    Examples:
        >>> log_sigmoid_topk(torch.tensor([1000.0, 0.0, -10.0]), 1)[1:]
        tensor([-500.0000, -510.0000])
    """
    check_call(x, k, dim, temperature, mask)
    return _shape.from_rows(logsigmoid(_margins(x, k, dim, temperature, mask).z), dim, x.dtype)


def threshold(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """The threshold τ of `sigmoid_topk`: the score that would be chosen with probability one half.

    `Σ σ((x − τ)/T) = k`.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, temperature, mask: as for `sigmoid_topk`.

    Returns:
        τ, of the shape of `x` without `dim`, computed in float64 and rounded to x's dtype; +inf where k = 0, −inf where
        k = n, NaN where the row cannot be satisfied. Differentiable in `x`, `k` and `temperature`:
        `∂τ/∂x = v/Σv`, `∂τ/∂k = −T/Σv`, `∂τ/∂T = −Σ(v z)/Σv`, with `z = (x − τ)/T` and `v = σ(z)(1 − σ(z))`.

    Examples:
        >>> threshold(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor(0.5000)
    """
    check_call(x, k, dim, temperature, mask)
    z, rows, _ = _margins(x, k, dim, temperature, mask)
    if z.shape[-1] == 0:
        return (rows.k + torch.inf).to(x.dtype)
    # τ = x_i − T·z_i for whichever i; the smallest |z| rounds least. Scores that can tell nothing come last.
    scores = rows.x if rows.mask is None else rows.x.masked_fill(~rows.mask, -torch.inf)
    rank = z.abs().clamp(max=torch.finfo(z.dtype).max).masked_fill(z.isinf() & scores.isinf(), torch.inf)
    index = rank.argmin(-1, keepdim=True)
    z, score = z.gather(-1, index).squeeze(-1), scores.gather(-1, index).squeeze(-1)
    is_infinite = z.isinf()
    limit = -z.detach()
    value = torch.where(is_infinite, 0.0, score) - rows.temperature * torch.where(is_infinite, 0.0, z)
    return torch.where(is_infinite, limit, value).to(x.dtype)


def khot_cross_entropy(
    x: Tensor,
    target: Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy for k-hot targets: per row, the loss whose gradient is `sigmoid_topk(x, k) − target`.

    The Fenchel–Young loss of σ_k, `T·Σ KL(y_i ‖ σ_k(x)_i)` with binary KL and `k = Σ y`, one k per row.

    Args:
        x: scores, (…, n) with n at `dim`.
        target: like `x`, of any real dtype; k-hot, or soft with entries in [0, 1]. Its sum along `dim` is k.
        dim, temperature, mask: as for `sigmoid_topk`.
        reduction: "mean" (over rows), "sum", or "none" (the shape of `x` without `dim`).

    Returns:
        The loss, ≥ 0, and 0 exactly when σ_k(x) = target. Convex in `x`. +inf where the target puts weight on an
        entry that cannot be chosen (masked or −inf) or less than 1 on a forced one (+inf); NaN where the target is
        outside [0, 1], or sums to more than may be chosen.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> loss = khot_cross_entropy(x, torch.tensor([1, 0, 1, 0]))
        >>> loss
        tensor(2.3510, grad_fn=<ToCopyBackward0>)
        >>> torch.autograd.grad(loss, x)
        (tensor([-0.1824,  0.6225, -0.6225,  0.1824]),)

    Reference: Blondel, Martins and Niculae, "Learning with Fenchel–Young losses" (2020).
    """
    _check.scores(x, dim)
    _check.same_shape("target", target, x, "x")
    _check.temperature(temperature, x, dim)
    _check.mask(mask, x)
    _check.reduction(reduction)
    y = _shape.per_entry(target, x, dim, torch.float64)
    z, rows, _ = _margins(x, y.sum(-1), dim, temperature, mask)
    entropy = torch.special.entr(y) + torch.special.entr(1 - y)
    cross = _times(y, logsigmoid(z)) + _times(1 - y, logsigmoid(-z))
    loss: Tensor = rows.temperature * -(entropy + cross).sum(-1)
    loss = loss - loss.detach().clamp(max=0)  # rounding may leave −1e-17
    loss = torch.where(((y < 0) | (y > 1)).any(-1), torch.nan, loss)
    return reduced(loss, reduction, x.dtype)


def _times(weight: Tensor, log: Tensor) -> Tensor:
    """weight·log with 0·(−inf) = 0, also in the gradient."""
    return weight * torch.where(weight == 0, 0.0, log)


def _margins(x: Tensor, k: float | Tensor, dim: int, temperature: float | Tensor, mask: Tensor | None) -> Margins:
    return margins(cdfs.SIGMOID_PLACE, x, k, dim, temperature, mask, None, torch.float64)


class _Direct(torch.autograd.Function):
    """`_Value` of a plain tensor and two numbers: less to pack, and nothing for the dispatcher to choose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float, temperature: float) -> Tensor:
        p = kernels.native_topk(x, k, temperature, None)
        ctx.save_for_backward(p)
        ctx.temperature = temperature
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = ctx.saved_tensors
        if kernels.is_plain(g, p) and not torch.is_grad_enabled():
            return kernels.native_pull(g, p, ctx.temperature), None, None
        v, at = implicit.value(p, p.new_tensor(ctx.temperature, dtype=torch.float64), cdfs.SIGMOID)
        return implicit.pull(v * g, at)[0], None, None


def _is_direct(x: Tensor, dim: int) -> bool:
    is_last = dim in (-1, x.ndim - 1)
    return is_last and x.dtype in (torch.float32, torch.float64) and kernels.is_plain(x)


def _direct(x: Tensor, k: float, temperature: float) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return kernels.native_topk(x, k, temperature, None)
    result: Tensor = super(torch.autograd.Function, _Direct).apply(x, k, temperature)
    return result
