"""SIMPLE's marginals, re-implemented for comparison."""

from __future__ import annotations

import torch
from torch import Tensor

IMPOSSIBLE = -1e30  # stands for log 0; with −inf the gradient of logaddexp would be NaN


def simple(x: Tensor, k: float) -> Tensor:
    """Inclusion probabilities of the conditional Poisson design with logits x, given that k are chosen.

    Our re-implementation of the marginals of Ahmed et al., "SIMPLE: a gradient estimator for k-subset sampling" (2023):
    the dynamic programme over elementary symmetric sums in log space, from both ends at once. With E(j) and S(j) the
    logarithms of the sums of degree j over the items before i and after i, `π_i = Σ_j e^{x_i + E(j) + S(k−1−j)} / e_k`.
    O(nk) time and memory; n steps, which nothing but the rows and the degrees can share; differentiated by autograd.

    Args:
        x: (…, n) scores.
        k: a whole number, 1 ≤ k ≤ n.
    """
    k, n, dtype = int(k), x.shape[-1], x.dtype
    x = x.float() if dtype in (torch.float16, torch.bfloat16) else x  # n sums in half precision would be noise
    ends = torch.stack((x, x.flip(-1))).movedim(-1, 0).unsqueeze(-1)  # (n, 2, …, 1)
    state = x.new_full((2, *x.shape[:-1], k + 1), IMPOSSIBLE)
    state[..., 0] = 0  # the empty product
    before = [state]
    for item in ends:
        state = torch.cat((state[..., :1], torch.logaddexp(state[..., 1:], state[..., :-1] + item)), -1)
        before.append(state)
    log_total = state[0, ..., k]
    sums = torch.stack(before[:n])[..., :k]  # (n, 2, …, k)
    del before  # a second copy of the table, unless autograd needs it
    left, right = sums[:, 0], sums[:, 1].flip(0, -1)  # after i, seen from the end, and degree k − 1 − j
    return (x + (left + right).logsumexp(-1).movedim(0, -1) - log_total.unsqueeze(-1)).exp().to(dtype)
