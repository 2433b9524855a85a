"""Successive Halving: a tournament in which each pair is replaced by its weighted mean."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import select


def tournament(
    embeddings: Tensor, scores: Tensor, k: int, boost: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Halve embeddings (…, n, d) and scores (…, n) until k are left, after padding to k·2^r.

    Returns:
        The k embeddings, their scores, and for each the 2^r entries it was made of, (…, k, 2^r): their indices and
        their weights. Padding has weight 0.
    """
    n = scores.shape[-1]
    rounds = max(0, -(-n // k) - 1).bit_length()
    padding = k * 2**rounds - n
    scores = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    embeddings = torch.nn.functional.pad(embeddings, (0, 0, 0, padding))
    members = torch.arange(n + padding, device=scores.device).expand(scores.shape).unsqueeze(-1)
    shares = torch.ones_like(scores).unsqueeze(-1)
    for turn in range(rounds + 1):
        order = select.order(scores)
        scores = scores.gather(-1, order)
        embeddings, members, shares = (
            t.gather(-2, order.unsqueeze(-1).expand(*order.shape, t.shape[-1])) for t in (embeddings, members, shares)
        )
        if turn == rounds:
            break
        half = scores.shape[-1] // 2
        best, worst = scores[..., :half], scores[..., half:].flip(-1)
        is_void = worst.isneginf()  # padding, or a score of −inf: it weighs nothing
        inner = torch.where(best.isneginf(), 0.0, best)  # numbers that harm no derivative
        worst = torch.where(is_void, inner, worst)
        weight = torch.where(is_void, 1.0, boost(inner, worst).sigmoid())
        scores = torch.where(is_void, best, weight * inner + (1 - weight) * worst)
        first, second = weight.unsqueeze(-1), (1 - weight).unsqueeze(-1)
        embeddings = first * embeddings[..., :half, :] + second * embeddings[..., half:, :].flip(-2)
        shares = torch.cat((first * shares[..., :half, :], second * shares[..., half:, :].flip(-2)), -1)
        members = torch.cat((members[..., :half, :], members[..., half:, :].flip(-2)), -1)
    return embeddings, scores, members, shares
