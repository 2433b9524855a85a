"""Sparse codes: the entries of a matrix that are not 0, by row."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from ._torch import entry_products


class SparseCode(NamedTuple):
    """The entries of a code that may differ from 0, by rising row; (entries,) each.

    The one sparse result of khot: rows are tokens and columns are latents in `khot.nn.SparseAutoencoder`; rows are
    signals and columns are atoms in `khot.coding`.

    Examples:
        >>> code = khot.coding.omp(torch.tensor([[2.0, 0.0, 1.0]]), torch.eye(3), 2)
        >>> code.columns, code.values
        (tensor([0, 2]), tensor([2., 1.]))
        >>> code.dense()
        tensor([[2., 0., 1.]])
    """

    values: Tensor
    """In the units of the input. An autoencoder's are ≥ 0; in training there are zeros too, that have a gradient."""
    rows: Tensor
    """Along the flattened leading dims of the input."""
    columns: Tensor
    shape: tuple[int, ...]
    """(…, columns), of the dense code."""
    undo: tuple[Tensor, Tensor] | None = None
    """Of an autoencoder with `layer_norm`: the mean and the deviation of each row, (rows, 1)."""

    @property
    def tokens(self) -> Tensor:
        """`rows`, as an autoencoder calls them."""
        return self.rows

    @property
    def latents(self) -> Tensor:
        """`columns`, as an autoencoder calls them."""
        return self.columns

    @property
    def height(self) -> int:
        """The number of rows of the dense code."""
        return torch.Size(self.shape[:-1]).numel()

    def dense(self) -> Tensor:
        """Return the code as a matrix, (…, columns)."""
        zeros = self.values.new_zeros(self.height, self.shape[-1])
        return zeros.index_put((self.rows, self.columns), self.values, accumulate=True).view(self.shape)

    def decode(self, dictionary: Tensor) -> Tensor:
        """Return code · dictionary, (…, d), for a dictionary (columns, d), without the dense code; differentiable."""
        sums = weighted_rows(self.rows, self.columns, self.values, dictionary, self.height)
        return sums.view(*self.shape[:-1], dictionary.shape[-1])


def weighted_rows(rows: Tensor, columns: Tensor, values: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return Σ value·weight[column] for each row, (count, d); rows rise. Differentiable in values and weight."""
    starts = torch.searchsorted(rows, torch.arange(count, device=rows.device))
    return embedding_bag(columns, weight, starts, mode="sum", per_sample_weights=values.to(weight.dtype))


def by_rising(places: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return all sorted by `places`, stably."""
    order = _rising(places)
    return places[order], *(other[order] for other in others)


def _rising(places: Tensor) -> Tensor:
    """Return the stable order of integers below 2³¹; those of fewer bits are sorted faster."""
    return places.to(torch.int32).argsort(stable=True)


class _Decoded(torch.autograd.Function):
    """`weighted_rows` where many values are 0: those cost nothing but the products of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, values: Tensor, weight: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows, columns, values, weight)
        used = values.nonzero().squeeze(1)
        return weighted_rows(rows[used], columns[used], values[used], weight, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, values, weight = ctx.saved_tensors
        _, _, needs_values, needs_weight, _ = ctx.needs_input_grad
        order = _rising(columns)  # each row of the weight is then read once
        rows, columns, values = rows[order], columns[order], values[order]
        grad_values = grad_weight = None
        if needs_values:
            products = entry_products(g, weight, rows, columns)
            grad_values = torch.empty_like(products).index_copy_(0, order, products)
        if needs_weight:
            used = values.nonzero().squeeze(1)
            grad_weight = weighted_rows(columns[used], rows[used], values[used], g, len(weight))
        return None, None, grad_values, grad_weight, None


def decoded(rows: Tensor, columns: Tensor, values: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return `weighted_rows`, faster where many values are 0 and have a gradient; once differentiable."""
    y: Tensor = _Decoded.apply(rows, columns, values.to(weight.dtype), weight, count)
    return y
