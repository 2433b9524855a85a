"""A soft top-k with costs, by native kernels; the rows that they leave, and other derivatives, go by the margins."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .._math.cdfs import Cdf
from .._shape import Mask, PerRow
from ..kernels import cpu, cpu_costs
from ._topk import is_ordinary, is_plain

# (x, k, T, mask, costs) → y, differentiable in all of them but the mask.
Exact = Callable[..., Tensor]


def topk(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Tensor, cdf: Cdf, exact: Exact) -> Tensor | None:
    """Return y = F((x/c − τ)/T) of rows (…, n) with Σ c·y = k, differentiable; None if no kernel serves the call.

    Arguments are those of `margin`, with scores that are not divided by the costs yet. `exact` computes the same by the
    margins.
    """
    arguments = (x, k, temperature, mask, costs)
    if x.numel() == 0 or not cpu.has_kernel(cdf.name, x.dtype) or not is_ordinary(*arguments):
        return None
    return cast(Tensor, _CostTopK.apply(*arguments, cdf, exact))


class _CostTopK(torch.autograd.Function):
    """Differentiate (x, k, T, mask, costs, cdf, exact) → y. In x alone, backward needs y and the costs.

    If a mode watches the call, no kernel is called, and the same is saved, as torch.utils.checkpoint needs it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, costs: Tensor, cdf: Cdf, exact: Exact
    ) -> Tensor:
        arguments, ctx.infinite = (x, k, temperature, mask, costs), None
        if is_plain(*arguments):
            y, is_left = cpu_costs.topk(*arguments, cdf.name)
            is_exact = bool(is_left.any())
            if is_exact:
                y.view(-1, x.shape[-1])[is_left] = exact(*cpu_costs.some(arguments, is_left))
        else:
            y, is_exact = exact(*arguments), True
        if is_exact:
            # A score of +inf has no derivative: where such scores share the budget, no score of the row has one.
            is_split = (x == torch.inf) & (y > 0) & (y < 1)
            ctx.infinite = is_split.any(-1, keepdim=True) if bool(is_split.any()) else None
        ctx.rest = cdf, exact, [None if isinstance(t, Tensor) else t for t in (k, temperature)]
        ctx.save_for_backward(y, x, *(t if isinstance(t, Tensor) else None for t in (k, temperature)), mask, costs)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (cdf, exact, numbers), (y, x, *given, mask, costs) = ctx.rest, ctx.saved_tensors
        k, temperature = (t if number is None else number for t, number in zip(given, numbers, strict=True))
        needs, is_double = ctx.needs_input_grad, torch.is_grad_enabled()
        if not (needs[1] or needs[2] or needs[4] or is_double) and is_plain(g, y, costs):
            dx = cpu_costs.pull(g, y, temperature, costs, cdf.name)
            return dx if ctx.infinite is None else dx.masked_fill_(ctx.infinite, 0.0), *(None,) * 6
        with torch.enable_grad():
            arguments = [x, k, temperature, mask, costs]
            for place, needed in enumerate(needs[:5]):
                if needed and not is_double:
                    arguments[place] = arguments[place].detach().requires_grad_()
            wanted = [t for t, needed in zip(arguments, needs, strict=False) if needed]
            found = iter(torch.autograd.grad(exact(*arguments), wanted, g, create_graph=is_double))
        return *(next(found) if needed else None for needed in needs[:5]), None, None
