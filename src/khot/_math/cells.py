"""Cells of near points."""

import math

import torch
from torch import Tensor


def bisect(x: Tensor, halvings: int, least: int) -> Tensor:
    """Return points x (B, n, d) in 2^halvings cells of near ones, as indices (B, cells, size); n stands for none.

    One cell alone has room for at least so many.
    """
    n, many = x.shape[1], 2**halvings
    size = math.ceil(n / many) if halvings else max(n, least)
    index = torch.arange(many * size, device=x.device).clamp(max=n).expand(len(x), 1, -1)
    x = torch.cat((x, torch.zeros_like(x[:, :1])), 1)
    for _ in range(halvings):
        flat = index.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
        part = x.gather(1, flat).view(*index.shape, -1)
        has = (index < n).unsqueeze(-1)
        part = (part - part.sum(-2, keepdim=True) / has.sum(-2, keepdim=True).clamp(min=1)) * has
        along = part[..., :1, :] + part.abs().amax(-2, keepdim=True)
        for _ in range(3):  # towards the direction of the largest variance; any direction is sound
            along = (part @ along.mT).mT @ part
            along = along / along.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        place = (part @ along.mT).squeeze(-1).masked_fill(~has.squeeze(-1), torch.inf).argsort(-1)
        index = index.gather(-1, place).view(len(x), 2 * index.shape[1], -1)
    return index
