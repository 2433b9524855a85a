"""The native kernels of functions of the threshold of σ_k, for float32 rows."""

import torch
from torch import Tensor

from .._shape import Mask, PerRow
from ._native import WIDE, call


def log_sigmoid(
    x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, *, only_roots: bool = False, path: int = WIDE
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return log σ_k of float32 rows, or None, their thresholds (2, rows), and which rows are left to another method.

    x is (rows, n), contiguous and not empty; a threshold is an anchor and a shift. Rows that are left are junk.
    """
    out, roots = torch.empty_like(x), torch.empty(2, len(x), dtype=torch.float64, device="cpu")
    is_left = torch.empty(len(x), dtype=torch.bool, device="cpu")
    to = (None, out.data_ptr()) if only_roots else (out.data_ptr(), None)
    outputs = (*to, roots[0].data_ptr(), roots[1].data_ptr(), is_left.data_ptr())
    call("khot_log_sigmoid", x, k, temperature, mask, path, "sigmoid", *outputs)
    return None if only_roots else out, roots, is_left


def log_sigmoid_pull(
    g: Tensor, x: Tensor, roots: Tensor, temperature: PerRow, mask: Mask, *, path: int = WIDE
) -> tuple[Tensor, Tensor]:
    """Return the cotangent of x for that of the logarithm (rows, n) or of the thresholds (rows), and the rows left."""
    dx, is_left = torch.empty_like(x), torch.empty(len(x), dtype=torch.bool, device="cpu")
    is_log = g.dim() == 2
    g = g.to(x.dtype if is_log else torch.float64).contiguous()
    ends = (g.data_ptr(), None) if is_log else (None, g.data_ptr())
    rest = (roots[0].data_ptr(), roots[1].data_ptr(), *ends, dx.data_ptr(), is_left.data_ptr())
    call("khot_log_sigmoid_pull", x, 0.0, temperature, mask, path, "sigmoid", *rest)
    return dx, is_left


def cross_entropy(
    x: Tensor, target: Tensor, temperature: PerRow, mask: Mask, *, path: int = WIDE
) -> tuple[Tensor, Tensor, Tensor]:
    """Return T·Σ KL(y ‖ σ_k) (rows) float64, its derivative in x (rows, n), and the rows left; all contiguous."""
    loss, dx = torch.empty(len(x), dtype=torch.float64, device="cpu"), torch.empty_like(x)
    is_left = torch.empty(len(x), dtype=torch.bool, device="cpu")
    rest = (target.data_ptr(), loss.data_ptr(), dx.data_ptr(), is_left.data_ptr())
    call("khot_cross_entropy", x, 0.0, temperature, mask, path, "sigmoid", *rest)
    return loss, dx, is_left
