"""Masks of weights that FSDP2 divides: each process has its shard of every weight, and its part of every mask.

FSDP2 gathers weights for a forward pass and averages their gradients into shards. So a mask is gathered too, the
gradient of the product passes whole, and its way through mask and scores is taken on the shards, before an optimiser's
step.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._budgets import local_parts, wrapped
from ._pools import Pool
from ._units import shards
from ._weights import Answer, Mask, pulled_back


class Shards:
    """Hold the shards of all weights that are chosen among.

    Args:
        pools: their groups become groups of shards.
        masks: of their tensors, in the order of the pools.
        has_gradient: whether scores get a gradient through the mask.
    """

    def __init__(self, pools: list[Pool], masks: dict[str, Mask], has_gradient: bool) -> None:
        self.masked = [masked for pool in pools for masked in pool.masked]
        self.masks, self.has_gradient = list(masks.values()), has_gradient
        _, names = local_parts([masked.tensor for masked in self.masked])
        for pool in pools:
            pool.group, pool.groups = names, [shards(group) for group in pool.groups]
            pool.values = pool.problem = None
        self.answer: Answer | None = None
        self.leaves: list[Tensor] = []
        self.is_due = False  # whether gradients are those of the products
        handle = register_optimizer_step_pre_hook(partial(_before_step, weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def refresh(self, answer: Callable[..., Answer]) -> None:
        """Compute the masks of the shards of now."""
        self.leaves = [masked.part().detach().requires_grad_(masked.tensor.requires_grad) for masked in self.masked]
        with torch.enable_grad():
            self.answer = answer(*self.leaves)
        self.is_due = True
        for mask, value, masked in zip(self.masks, self.answer.masks, self.masked, strict=True):
            mask.mask, mask.product, mask.flow, mask.is_plain = wrapped(value, masked.tensor), None, None, False

    def hold(self) -> None:
        """Let the masks be constants until they are computed anew."""
        if self.answer is not None:
            for mask, flow, masked in zip(self.masks, self.answer.flows, self.masked, strict=True):
                mask.flow = None if flow is None else wrapped(flow, masked.tensor)
        self.answer = None

    def pull_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the gradients of the products into those of the weights, if an optimiser is about to use them."""
        mine = {id(masked.tensor) for masked in self.masked}
        if self.answer is None or not mine & {id(p) for group in optimizer.param_groups for p in group["params"]}:
            return
        if not self.is_due:
            raise RuntimeError("Call `sparsifier.step()` after each step of the optimiser.")
        given: list[Any] = [masked.tensor.grad for masked in self.masked]
        gradients = [None if g is None else g.to_local() for g in given]
        for own, found in zip(gradients, pulled_back(self.answer, self.leaves, gradients), strict=True):
            if own is not None and found is not None:
                own.copy_(found)
        self.is_due = False


def _before_step(shards: "weakref.ref[Shards]", optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (alive := shards()) is not None:
        alive.pull_back(optimizer)
