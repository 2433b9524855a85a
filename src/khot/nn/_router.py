"""A router: tokens to experts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import _check
from .routing import Routing, dselect_k, noisy_topk, sigma_topk
from .routing._dselect import dselect_bits
from .routing._routing import scores

Route = Callable[..., Routing]
"""Scores (tokens, n) and k to a `Routing`: a function of `khot.nn.routing`, or a `functools.partial` of one."""


class Router(nn.Module):
    """Sends each token to k of n experts: a linear map to scores, and a function of `khot.nn.routing`.

    Scores are float32 whatever the tokens are.

    Args:
        dim: of the tokens.
        num_experts: n.
        k: experts for each token.
        route: how scores become a routing.
        biased: keep a `bias` buffer and choose by it (`sigmoid_gates`, `sigma_topk`); call
            `khot.nn.routing.update_bias(router.bias, routing)` after each step of the optimiser.

    Examples:
        >>> router = Router(16, 8, 2)
        >>> routing = router(torch.randn(4, 10, 16))
        >>> routing.weights.shape, routing.probs.sum(-1).allclose(torch.tensor(2.0))
        (torch.Size([4, 10, 2]), True)
    """

    bias: Tensor

    def __init__(self, dim: int, num_experts: int, k: int, *, route: Route = sigma_topk, biased: bool = False) -> None:
        super().__init__()
        _check.at_least("dim", dim, 1)
        _check.at_least("num_experts", num_experts, 1)
        _check.at_least("k", k, 1)
        _check.whole("k", k, num_experts, "number of experts")
        self.num_experts, self.k, self.route = num_experts, int(k), route
        self._takes = set(inspect.signature(route).parameters)
        _check.takes_bias(biased, "bias" in self._takes)
        rows = width(route, num_experts, k)
        self.weight = nn.Parameter(torch.empty(rows, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim)))
        self.register_buffer("bias", torch.zeros(num_experts) if biased else None)

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> Routing:
        """Tokens (…, dim) → a routing (…, k). Noise and samples are for training alone."""
        _check.last_dim("x", x, self.weight.shape[1])
        given = {
            "bias": self.bias,
            "generator": generator,
            "num_experts": self.num_experts,
            "training": self.training,
            "sample": None if self.training else False,
        }
        options = {name: value for name, value in given.items() if name in self._takes and value is not None}
        with torch.autocast(x.device.type, enabled=False):
            weight = scores(self.weight)
            return self.route(linear(x.to(weight.dtype), weight), self.k, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As a Module, but the bias keeps its precision: its steps are small."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = bias.to(self.bias.device)
        return self

    def extra_repr(self) -> str:
        route = getattr(self.route, "__name__", repr(self.route))
        return f"dim={self.weight.shape[1]}, num_experts={self.num_experts}, k={self.k}, route={route}"


def width(route: Route, n: int, k: int) -> int:
    """How many numbers a route wants of each token."""
    while isinstance(route, partial):
        route = route.func
    if route is noisy_topk:
        return 2 * n
    return k * dselect_bits(n) + k if route is dselect_k else n
