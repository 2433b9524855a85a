"""Two published relaxations of k nearest neighbours, as relaxations that `khot.sklearn.KHotNeighborhood` takes.

Both have the signature of `khot.sigmoid_topk`, so that the network, the loss and the steps around them are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAR = -1e9  # the score of what may not be chosen


def neural_sort(
    x: Tensor, k: float, *, dim: int = -1, temperature: float = 1.0, mask: Tensor | None = None, costs: None = None
) -> Tensor:
    """Sum the first k rows of NeuralSort's soft permutation matrix.

    Our re-implementation of the differentiable k-NN of Grover, Wang, Zweig and Ermon, "Stochastic optimization of
    sorting networks via continuous relaxations" (2019), without noise. Row i is `softmax(((n + 1 − 2i)·x − b)/τ)` with
    `b_j = Σ_l |x_j − x_l|`, here from a sort, O(n log n). Entries may exceed 1. τ is n times the temperature, so that
    the same temperatures serve all n.
    """
    n = torch.full(x.shape[:-1], x.shape[-1], device=x.device) if mask is None else mask.expand(x.shape).sum(-1)
    scores = x if mask is None else torch.where(mask, x, x.detach().amin(-1, keepdim=True) - 1)
    ordered, order = scores.sort(-1)
    first = x.shape[-1] - n.unsqueeze(-1)  # masked entries are smallest, and come first in the order
    rank = torch.arange(x.shape[-1], device=x.device) - first
    kept = torch.where(rank >= 0, ordered, 0.0)
    below = kept.cumsum(-1)
    total, count = below[..., -1:], n.unsqueeze(-1)
    apart = ordered * (2 * rank + 2 - count) + total - 2 * below  # Σ_l |x_j − x_l| over what is allowed
    apart = torch.zeros_like(x).scatter(-1, order, apart)
    result = torch.zeros_like(x)
    for i in range(1, int(k) + 1):
        logits = ((count + 1 - 2 * i) * scores - apart) / (temperature * count)
        result = result + (logits if mask is None else logits.masked_fill(~mask, FAR)).softmax(-1)
    return result


def gumbel_subset(
    x: Tensor, k: float, *, dim: int = -1, temperature: float = 1.0, mask: Tensor | None = None, costs: None = None
) -> Tensor:
    """Draw a relaxed subset: k successive softmaxes of scores with Gumbel noise.

    Our re-implementation of Xie and Ermon, "Reparameterizable subset sampling via continuous relaxations" (2019).
    Entries may exceed 1. The noise comes from torch's own generator.
    """
    noise = -torch.empty_like(x).exponential_().log()
    x = (x + noise if mask is None else (x + noise).masked_fill(~mask, FAR)) / temperature
    chosen = x.softmax(-1)
    result = chosen
    for _ in range(int(k) - 1):
        x = x + (1 - chosen).clamp(min=torch.finfo(x.dtype).eps).log()
        chosen = x.softmax(-1)
        result = result + chosen
    return result
