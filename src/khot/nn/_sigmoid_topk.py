"""`sigmoid_topk` as a Module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _check
from ..relaxations import hard_topk, sigmoid_topk, straight_through


class SigmoidTopK(nn.Module):
    """`khot.sigmoid_topk` as a layer; with `hard=True` its forward is `khot.hard_topk` and its gradient stays σ_k's.

    Args:
        k: how many to choose; a number, a tensor (kept as a buffer) or a Parameter (learned).
        dim: the dimension to choose along.
        temperature: kept as a buffer, so that it moves, saves and loads with the model; schedules write to it:
            `layer.temperature.fill_(0.5)`. A Parameter is learned.
        hard: choose exactly k, straight through.

    Examples:
        >>> layer = SigmoidTopK(2, temperature=0.5)
        >>> layer(torch.tensor([[2.0, 1.0, 0.0]]))
        tensor([[0.9573, 0.7519, 0.2909]])
    """

    temperature: Tensor

    def __init__(
        self, k: float | Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, hard: bool = False
    ) -> None:
        super().__init__()
        _check.positive("temperature", temperature)
        _check.not_negative("k", k)
        if isinstance(k, Tensor) and not isinstance(k, nn.Parameter):
            self.register_buffer("k", k)
        else:
            self.k = k
        if isinstance(temperature, nn.Parameter):
            self.temperature = temperature
        else:
            self.register_buffer("temperature", torch.as_tensor(temperature, dtype=torch.get_default_dtype()))
        self.dim = dim
        self.hard = hard

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores (…, n) → k-hot (…, n); `mask` as for `khot.sigmoid_topk`."""
        soft = sigmoid_topk(x, self.k, dim=self.dim, temperature=self.temperature, mask=mask)
        if not self.hard:
            return soft
        return straight_through(hard_topk(x, self.k, dim=self.dim, mask=mask), soft)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}, temperature={self.temperature.tolist()}, hard={self.hard}"
