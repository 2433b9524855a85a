"""Sparse codes: the entries of a matrix that are not 0, by row."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


class SparseCode(NamedTuple):
    """Hold the entries of a code that may differ from 0, by rising row; (entries,) each.

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
        """Return `rows`, as an autoencoder calls them."""
        return self.rows

    @property
    def latents(self) -> Tensor:
        """Return `columns`, as an autoencoder calls them."""
        return self.columns

    @property
    def height(self) -> int:
        """Return the number of rows of the dense code."""
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
