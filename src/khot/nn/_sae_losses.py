"""Losses of sparse autoencoders."""

from __future__ import annotations

import torch
from torch import Tensor

from ._sae_axes import Encoder, by_token
from ._sae_budgets import zipf
from ._sparse_code import chosen, weighted_rows


def fraction_unexplained(error: Tensor, target: Tensor) -> Tensor:
    """‖error‖² / ‖target − its mean‖², over all tokens (FVU); 0 if the target does not vary."""
    variance = (target - target.mean(0)).square().sum()
    return torch.where(variance == 0, 0.0, error.square().sum() / variance.clamp(min=torch.finfo(error.dtype).tiny))


def aux_k_loss(x: Tensor, residual: Tensor, of: Tensor, weights: tuple[Tensor, Tensor, Tensor], most: int) -> Tensor:
    """How far the latents `of`, each token's `most` greatest of them, are from explaining what the others left.

    `‖e − W_dec·TopK(W_enc·x + b_enc)‖² / ‖e − ē‖²`, over those latents alone.

    Args:
        x: what the encoder sees, (tokens, d).
        residual: e, (tokens, d); taken as constant.
        of: the dead latents, (m,), rising.
        weights: W_enc (d, n), b_enc (n,) and W_dec (n, d); each gets a gradient.
        most: how many of them for a token.

    Returns:
        A scalar; 0 if there is no such latent.

    Reference: Gao et al., "Scaling and evaluating sparse autoencoders" (2024).
    """
    residual = residual.detach()
    if not len(of):
        return residual.new_zeros(())
    w_enc, b_enc, w_dec = weights[0].t()[of].t(), weights[1][of], weights[2][of]
    with torch.no_grad():
        block = by_token(Encoder(x, w_enc, b_enc), min(most, len(of)), 1.0)[0]
    tokens, latents = block.tokens.flatten(), block.latents.flatten()
    values = chosen(x, w_enc, b_enc, block.values.flatten(), tokens, latents).relu()
    return fraction_unexplained(residual - weighted_rows(values, tokens, latents, w_dec, len(x)), residual)


def aux_zipf_loss(
    x: Tensor,
    residual: Tensor,
    density: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    most: int,
    *,
    k: float,
    exponent: float = 1.0,
    fraction: float = 0.5,
) -> Tensor:
    """`aux_k_loss` of the underused latents: those active less than `fraction` of what Zipf's law gives their rank.

    Args:
        x, residual, weights, most: as for `aux_k_loss`.
        density: how often each latent is active, (n,).
        k: what the densities of the law sum to.
        exponent: of the law, r^−exponent.
        fraction: 0 leaves none; a tiny one the latents that are never active, which is AuxK.

    Reference: Ayonrinde, "Adaptive sparse allocation with mutual choice and feature choice" (2024).
    """
    law = zipf(density, exponent) * k
    return aux_k_loss(x, residual, (density < fraction * law).nonzero().squeeze(1), weights, most)
