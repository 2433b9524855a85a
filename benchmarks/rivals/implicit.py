"""The gradient that the threshold methods share, by implicit differentiation: each paper derives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def logistic_density(y: Tensor) -> Tensor:
    """Return F' as a function of y = F(z) for the logistic cdf."""
    return y * (1 - y)


def laplace_density(y: Tensor) -> Tensor:
    """Return F' as a function of y = F(z) for the Laplace cdf."""
    return torch.minimum(y, 1 - y)


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, solve: Callable[[Tensor], Tensor], density: Callable[[Tensor], Tensor]) -> Tensor:
        # Half precision is solved in float32 and rounded once, as khot does, so that none looks worse for its dtype.
        y = solve(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.density = density
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        v = ctx.density(ctx.saved_tensors[0])
        total = v.sum(-1, keepdim=True).clamp_(min=torch.finfo(v.dtype).tiny)  # a saturated row gets 0, not NaN
        mean = torch.linalg.vecdot(v, g).unsqueeze(-1) / total
        return (g - mean).mul_(v), None, None


def implicit(
    x: Tensor, solve: Callable[[Tensor], Tensor], density: Callable[[Tensor], Tensor] = logistic_density
) -> Tensor:
    """Return y = solve(x), entries F(x − τ) with Σ y = k, with the gradient v·(g − Σvg/Σv), v = F'(x − τ).

    Args:
        x: (…, n) scores, in units of the temperature.
        solve: computes y from x; autograd does not look inside.
        density: gives v from y.
    """
    y: Tensor = _Implicit.apply(x, solve, density)
    return y
