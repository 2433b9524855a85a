"""Measures of a selection."""

import torch
from torch import Tensor

from . import _check, _shape

__all__ = ["chamfer_cosine"]


def __dir__() -> list[str]:
    return __all__


def chamfer_cosine(selected: Tensor, target: Tensor) -> Tensor:
    """Return the normalised Chamfer cosine similarity: how well each wanted vector is found among the selected ones.

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
    _check.same_device("target", target, selected, "selected")
    if selected.dtype != target.dtype:
        raise TypeError(f"`selected` and `target` must have one dtype; got {selected.dtype} and {target.dtype}.")
    if selected.shape[-1] != target.shape[-1]:
        got = f"{selected.shape[-1]} and {target.shape[-1]}"
        raise ValueError(f"`selected` and `target` must have vectors of the same length; got {got}.")
    unit = [_unit(t.to(_shape.compute_dtype(t.dtype))) for t in (selected, target)]
    return (unit[0] @ unit[1].mT).amax(-2).mean(-1).to(selected.dtype)


def _unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1, zeros to 0; in two steps, so that no square overflows or underflows."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    scaled = vectors / torch.where(largest == 0, 1.0, largest)
    length = scaled.square().sum(-1, keepdim=True)
    return scaled / torch.where(length == 0, 1.0, length).sqrt()
