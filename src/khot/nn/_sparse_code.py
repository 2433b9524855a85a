"""Sparse codes, decoded by their indices; and pre-activations that are differentiated where they are used."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag


class SparseCode(NamedTuple):
    """The entries of a code that may differ from 0, by rising token; (entries,) each."""

    values: Tensor
    """≥ 0, in the units of the input; in training there are zeros too, that have a gradient."""
    tokens: Tensor
    """Along the flattened leading dims of the input."""
    latents: Tensor
    shape: tuple[int, ...]
    """(…, latents), of the dense code."""
    undo: tuple[Tensor, Tensor] | None = None
    """With `layer_norm`: the mean and the deviation of each token, (tokens, 1)."""

    def dense(self) -> Tensor:
        """(…, latents)."""
        zeros = self.values.new_zeros(self.rows, self.shape[-1])
        return zeros.index_put((self.tokens, self.latents), self.values, accumulate=True).view(self.shape)

    @property
    def rows(self) -> int:
        """How many tokens."""
        return torch.Size(self.shape[:-1]).numel()


def from_dense(code: Tensor) -> SparseCode:
    """The entries that are not 0."""
    rows = code.reshape(-1, code.shape[-1])
    tokens, latents = rows.detach().nonzero(as_tuple=True)
    return SparseCode(rows[tokens, latents], tokens, latents, tuple(code.shape))


def by_rising_token(values: Tensor, tokens: Tensor, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same entries, sorted if they are not."""
    if bool((tokens[1:] >= tokens[:-1]).all()):
        return values, tokens, latents
    order = tokens.argsort(stable=True)
    return values[order], tokens[order], latents[order]


def weighted_rows(values: Tensor, tokens: Tensor, latents: Tensor, weight: Tensor, count: int) -> Tensor:
    """Σ value·weight[latent] for each token, (count, d); tokens rise. Differentiable in values and weight."""
    sizes = torch.bincount(tokens, minlength=count)
    starts = sizes.cumsum(0) - sizes
    return embedding_bag(latents, weight, starts, mode="sum", per_sample_weights=values.to(weight.dtype))


class _Chosen(torch.autograd.Function):
    """Entries of x·W + b that are already computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, values: Tensor, tokens: Tensor, latents: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, tokens, latents)
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, tokens, latents = ctx.saved_tensors
        count = weight.shape[1]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = weighted_rows(*by_rising_token(g, tokens, latents), weight.t(), len(x))
        if ctx.needs_input_grad[1]:  # the same with tokens and latents exchanged
            grad_weight = weighted_rows(*by_rising_token(g, latents, tokens), x, count).t()
        if ctx.needs_input_grad[2]:
            grad_bias = torch.bincount(latents, g, count).to(g.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def chosen(x: Tensor, weight: Tensor, bias: Tensor, values: Tensor, tokens: Tensor, latents: Tensor) -> Tensor:
    """Entries of x·weight + bias, as given, with their gradient; neither pass makes a matrix (tokens, latents).

    Args:
        x: (tokens, d).
        weight: (d, latents), stored by latent: its transpose is contiguous, and so is that of its gradient.
        bias: (latents,).
        values, tokens, latents: (entries,).
    """
    result: Tensor = _Chosen.apply(x, weight, bias, values, tokens, latents)
    return result
