"""How likely a set is that was drawn one by one, without replacement, and how likely it is without one or two of it.

P(S) = ∫ W t e^(−W t) Π_{i∈S} (1 − e^(−p_i t)) dy, t = e^−y, with W the probability outside S: all of S ring before the
others do. If an item is no longer there, its factor is left out, and W stays. All sets are summed at the same nodes.
"""

import math

import torch
from torch import Tensor

FAR = 36.0  # e^−FAR of the mass may be lost
STEP = math.pi**2 / FAR  # as in order_sampling
AT_ONCE = 1 << 20


def ratios(log_p: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(S without i, i not there)/P(S), (r, m), and that of S without i and j, over that without i, (r, m, m).

    `log_p` (r, m) holds log p of the items of S, −inf where there is none; `rest` (r) is W. In the diagonal of the
    second there is 1; both are 1 where nothing is left outside.
    """
    m = log_p.shape[-1]
    end = m + 1 + math.sqrt(2 * FAR * (m + 1)) + FAR  # of W t
    step = min(STEP, 0.6 * math.pi * math.sqrt(2 / (FAR * (m + 1))))
    y = torch.arange(-math.log(end), FAR, step, dtype=log_p.dtype, device=log_p.device)  # of W t again
    rows = max(AT_ONCE // (m * len(y)), 1)
    parts = [_ratios(p, w, y) for p, w in zip(log_p.split(rows), rest.split(rows), strict=True)]
    one, two = (torch.cat(t) for t in zip(*parts, strict=True))
    return one, two


def _ratios(log_p: Tensor, rest: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_u = (log_p - torch.where(rest > 0, rest, 1.0).log()[:, None])[..., None] - y  # of p t, (r, m, nodes)
    factor = torch.where(log_u > -30, torch.log(-torch.expm1(-log_u.exp())), log_u)
    factor = torch.where(log_p[..., None] > -torch.inf, factor, 0.0)
    whole = factor.sum(1) - y - y.neg().exp()  # (r, nodes)
    whole = whole - whole.amax(-1, keepdim=True)
    without = (whole[:, None] / 2 - factor).exp()  # the root of what is left if it is left out twice
    both = without @ without.mT
    single = (without * (whole / 2).exp()[:, None]).sum(-1)
    one = single / whole.exp().sum(-1, keepdim=True)
    two = both / single[..., None]
    two.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    is_all = rest <= 0
    return one.masked_fill(is_all[:, None], 1.0), two.masked_fill(is_all[:, None, None], 1.0)
