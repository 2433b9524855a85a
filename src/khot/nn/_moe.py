"""A mixture of experts: tokens are sorted by expert, and each expert sees its own alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _check
from ._router import Router
from .routing import Routing


class MoEOutput(NamedTuple):
    """What a mixture of experts gives."""

    output: Tensor
    """(…, d)"""
    routing: Routing
    """For losses and measures of the load."""
    dropped: int
    """Assignments of tokens to experts that had no place."""


class MoE(nn.Module):
    """`y = Σ_i w_i E_i(x)` over the experts that the router chose; no other expert is computed.

    Assignments are sorted by expert, so that each expert runs once, on a contiguous block.

    Args:
        router: a `Router`, or a Module like it: `num_experts`, `k`, `forward(x, *, generator)` → `Routing`.
        experts: Modules (tokens, dim) → (tokens, d), one for each of the router's.
        capacity_factor: an expert takes at most ⌈factor·assignments/n⌉ tokens, those with the greatest weights; None
            for as many as come. Raises where so few places cannot hold all tokens; with 1 or more they can.

    Examples:
        >>> experts = [torch.nn.Linear(16, 16) for _ in range(8)]
        >>> y, routing, dropped = MoE(khot.nn.Router(16, 8, 2), experts)(torch.randn(4, 10, 16))
        >>> y.shape, dropped
        (torch.Size([4, 10, 16]), 0)
    """

    def __init__(self, router: Router, experts: Iterable[nn.Module], *, capacity_factor: float | None = None) -> None:
        super().__init__()
        _check.capacity_factor(capacity_factor)
        self.router, self.experts = router, nn.ModuleList(experts)
        _check.as_many_experts(len(self.experts), router.num_experts)
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> MoEOutput:
        """Tokens (…, dim) → (…, d), in the dtype of the experts' outputs."""
        flat = x.reshape(-1, x.shape[-1])
        routing = self.router(flat, generator=generator)
        _check.can_dispatch(routing.logits)
        capacity = self._capacity(len(flat))
        order, counts, dropped = sort_by_expert(routing, len(self.experts), capacity)
        slots = routing.indices.shape[-1]
        token = order // slots
        blocks = flat[token].split(counts)
        outputs = [expert(block) for expert, block in zip(self.experts, blocks, strict=True) if len(block)]
        if not outputs:
            outputs = [self.experts[0](flat[:0])]
        computed = torch.cat(outputs)
        weights = routing.weights.reshape(-1)[order].to(computed.dtype)
        result = computed.new_zeros(len(flat), computed.shape[-1])
        result = result.index_add(0, token, computed * weights[:, None])
        shaped = Routing(*(part.reshape(*x.shape[:-1], part.shape[-1]) for part in routing))
        return MoEOutput(result.reshape(*x.shape[:-1], result.shape[-1]), shaped, dropped)

    def _capacity(self, tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        n, k = self.router.num_experts, self.router.k
        limit = math.ceil(self.capacity_factor * tokens * k / n)
        _check.capacity(limit, tokens * k / n, tokens, n, k)
        return limit

    def extra_repr(self) -> str:
        return f"capacity_factor={self.capacity_factor}"


@torch.no_grad()
def sort_by_expert(routing: Routing, n: int, capacity: int | None) -> tuple[Tensor, list[int], int]:
    """Assignments (flat places in `indices`) by expert, how many each has, and how many were dropped."""
    expert = routing.indices.reshape(-1)
    counts = torch.bincount(expert, minlength=n + 1)[:n]
    total = int(counts.sum())
    if capacity is None or int(counts.max()) <= capacity:
        return expert.argsort(stable=True)[:total], counts.tolist(), 0
    heavy = routing.weights.reshape(-1).argsort(descending=True, stable=True)
    order = heavy[expert[heavy].argsort(stable=True)][:total]  # by expert, the greatest weights first
    first = counts.cumsum(0) - counts
    place = torch.arange(total, device=expert.device) - first.repeat_interleave(counts)
    kept = counts.clamp(max=capacity)
    return order[place < capacity], kept.tolist(), total - int(kept.sum())
