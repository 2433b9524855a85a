"""Selection on the last dim: hard, and by k successive softmaxes."""

import torch
from torch import Tensor


def order(x: Tensor) -> Tensor:
    """Return the indices by falling score, ties by lowest index; (…, n)."""
    return x.detach().argsort(dim=-1, descending=True, stable=True)


def ranks(order: Tensor) -> Tensor:
    """Return the place of each entry in that order, from 0; (…, n)."""
    places = torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    return torch.empty_like(order).scatter(-1, order, places)


def k_hot(x: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Return ones at the k largest scores of each row, ties by lowest index; (…, n) of x's dtype.

    A row is NaN if it holds NaN, if its k is not an integer, or if k is negative or more than the allowed scores.
    """
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    k = k.unsqueeze(-1)
    allowed = (x > -torch.inf).sum(-1, keepdim=True)
    possible = (k >= 0) & (k <= allowed) & (k == k.floor()) & ~x.isnan().any(-1, keepdim=True)
    return torch.where(possible, (ranks(order(x)) < k).to(x.dtype), torch.nan).contiguous()


def indices(x: Tensor) -> Tensor:
    """Return where the ones of k-hot rows are, rising, filled up with −1 to the largest k; (…, n) → (…, k) int64."""
    flat = x.reshape(-1, x.shape[-1])
    counts = flat.sum(-1, dtype=torch.int64)
    row, column = flat.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=x.device) - (counts.cumsum(0) - counts)[row]
    most = int(counts.max()) if len(counts) else 0
    result = torch.full((len(flat), most), -1, device=x.device)
    result[row, place] = column
    return result.view(*x.shape[:-1], most)


def softmaxes(x: Tensor, k: int, temperature: float) -> Tensor:
    """Sum k softmaxes of x/T, each without the share that was chosen before: x += log(1 − previous).

    An entry of +inf is 1, and leaves one softmax less for the others; one of −inf is 0.
    """
    tiny = torch.finfo(x.dtype).tiny
    is_forced, is_open = x == torch.inf, ~x.isinf()
    left = k - is_forced.sum(-1, keepdim=True)
    # A row without choice goes along as zeros.
    x = torch.where(is_open.any(-1, keepdim=True), torch.where(is_open, x, -torch.inf), 0.0)
    total = is_forced.to(x.dtype)
    for step in range(k):
        chosen = (x / temperature).softmax(-1)
        total = total + torch.where(step < left, chosen, 0.0)
        x = x + (1 - chosen).clamp(min=tiny).log()
    return total


def proportional(x: Tensor, k: Tensor, most: int) -> Tensor:
    """Return min(1, e^x/c) with the sum k ≤ most; (…, n) of x's dtype, NaN where k > the number of scores above −inf.

    The m largest are certain, for the least m at which the next one is not: c_m = Σ_{others} e^x/(k − m) ≥ its e^x.
    """
    top, at = x.topk(min(most + 1, x.shape[-1]))  # m ≤ k
    below = x.scatter(-1, at, -torch.inf).logsumexp(-1, keepdim=True)  # log Σ of all others
    rest = torch.cat((below, top.flip(-1)), -1).logcumsumexp(-1).flip(-1)[..., :-1]  # of this one and those after it
    place = torch.arange(top.shape[-1], device=x.device)
    left = (k[..., None] - place).clamp(min=0).to(x.dtype).log()  # log(k − m)
    is_certain = (top + left >= rest) & (top > -torch.inf)
    m = is_certain.cumprod(-1).sum(-1, keepdim=True)
    next_one = m.clamp(max=top.shape[-1] - 1)
    log_c = rest.gather(-1, next_one) - left.gather(-1, next_one)  # +inf if nothing is left of k
    p = (x - log_c.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)).exp()
    p = p.scatter(-1, at, torch.where(place < m, 1.0, p.gather(-1, at)))
    return p.masked_fill((x > -torch.inf).sum(-1, keepdim=True) < k[..., None], torch.nan)
