"""How good a selection is."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check
from ._shape import compute_dtype


def chamfer_cosine(selected: Tensor, target: Tensor) -> Tensor:
    """The normalised Chamfer cosine similarity: how well each wanted vector is found among the selected ones.

    `mean_j max_i cos(selected_i, target_j)`.

    Args:
        selected: (…, m, d), the vectors that were produced; m ≥ 1.
        target: (…, k, d), those that were wanted; k ≥ 1.

    Returns:
        (…), at most 1; 1 if every target is a positive multiple of something selected. A zero vector has cosine 0.

    Examples:
        >>> chamfer_cosine(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        tensor(0.8536)
    """
    _check.vectors("selected", selected)
    _check.vectors("target", target)
    _check.same_length(selected, target)
    unit = [_unit(t.to(compute_dtype(t.dtype))) for t in (selected, target)]
    return (unit[0] @ unit[1].mT).amax(-2).mean(-1).to(selected.dtype)


def _unit(vectors: Tensor) -> Tensor:
    """Of length 1, or 0; scaled first, so that no square overflows or underflows."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    scaled = vectors / torch.where(largest == 0, 1.0, largest)
    length = scaled.square().sum(-1, keepdim=True)
    return scaled / torch.where(length == 0, 1.0, length).sqrt()
