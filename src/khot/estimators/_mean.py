"""What estimators of both kinds need of a design."""

import torch
from torch import Tensor

from ..designs import Design


def differentiable_mean(design: Design) -> Tensor:
    """Return the mean of a design; raise if it should have a gradient and has none: it would be lost unnoticed."""
    mean = design.mean
    if torch.is_grad_enabled() and design.parameter.requires_grad and not mean.requires_grad:
        name = type(design).__name__
        raise ValueError(
            f"`design.mean` must be differentiable in its parameter; that of `{name}` is not. `rloo` and "
            "`score_function` need its `log_prob` alone."
        )
    return mean
