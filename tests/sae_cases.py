"""Small sparse autoencoders to test: what `tests/nn/sae` shares."""

import torch

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, selectors

KINDS = ("topk", "batch", "feature")
SELECTORS = (selectors.hard, selectors.straight_through, selectors.soft, selectors.sampled)
D, N, K, TOKENS = 12, 40, 3, 30


def data(tokens=TOKENS, seed=0):
    return 3 * torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed)) + 1


def make(selector=selectors.hard, **changes):
    config = SparseAutoencoderConfig(**{"d_in": D, "latents": N, "k": K, **changes})
    return SparseAutoencoder(config, selector=selector, generator=torch.Generator().manual_seed(1)).start(data(200))


def train(sae, steps=40, lr=1e-2):
    adam = torch.optim.Adam(sae.parameters(), lr=lr)
    for step in range(steps):
        out = sae(data(100, step), generator=torch.Generator().manual_seed(step))
        adam.zero_grad()
        out.loss.backward()
        sae.remove_parallel_gradient()
        adam.step()
        sae.normalize_decoder()
    return sae.eval()
