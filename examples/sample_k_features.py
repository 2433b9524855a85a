"""Sample k features at a time, and learn with which probability each one should be drawn.

`sample_khot` draws exactly k of n. Feature i is drawn with probability sigmoid_topk(scores, k)[i] exactly, and has the
gradient of this probability. Gumbel top-k with the same scores draws with other probabilities.
It takes a few seconds.
"""

import torch

import khot

n, k = 10, 3
draw = torch.Generator().manual_seed(0)
x = torch.randn(4000, n, generator=draw)
y = 3 * x[:, 1] - 2 * x[:, 4] + x[:, 7] + 0.5 * x[:, 8] + 0.5 * torch.randn(4000, generator=draw)

scores = torch.zeros(n, requires_grad=True)
weights = torch.zeros(n, requires_grad=True)  # of a linear model that sees three features at a time
optimizer = torch.optim.Adam([scores, weights], lr=0.03)
for _ in range(400):
    rows = torch.randint(len(x), (256,), generator=draw)
    chosen = khot.sample_khot(scores.expand(256, n), k, generator=draw)  # (256, n), another sample for each row
    loss = ((x[rows] * chosen) @ weights - y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

scores = scores.detach() / 4  # a higher temperature, so that there is something left to compare
probs = khot.sigmoid_topk(scores, k)  # the probability that was asked for
many = scores.expand(100_000, n)
exact = khot.sample_khot(many, k, generator=draw).mean(0)
gumbel = khot.sample_relaxed_khot(many, k, hard=True, generator=draw).mean(0)

print("feature  asked for  sample_khot  Gumbel top-k")
for i in probs.argsort(descending=True)[:5].tolist():
    print(f"{i:7d}{probs[i]:11.3f}{exact[i]:13.3f}{gumbel[i]:14.3f}")
print(f"largest error: {(exact - probs).abs().max():15.3f}{(gumbel - probs).abs().max():14.3f}")
