"""Train a search model for recall@10 itself, beside two cross-entropies.

There are 400 documents on 40 topics, and the ten documents of a query's topic are relevant. Queries and documents are
mapped to vectors of length 8, whose products are the scores. Training labels are clean at first. In the second column
one document in a hundred is called relevant by mistake. It takes about ten seconds.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import khot

k, size, topics = 10, 32, 40


def softmax_cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return torch's loss, with equal shares for all relevant documents."""
    return nn.functional.cross_entropy(scores, y / y.sum(-1, keepdim=True))


def recall_loss(scores: Tensor, y: Tensor) -> Tensor:
    """Return 1 − recall@10 of the soft top-10. It does not push what is far below the top."""
    return khot.recall_at_k_loss(scores, y, k)


def recall_after_training(loss_fn: Callable[[Tensor, Tensor], Tensor], mistakes: float, steps: int, seed: int) -> float:
    """Train on 800 queries, and return recall@10 for 800 others, with clean labels."""
    torch.manual_seed(seed)
    centers = torch.randn(topics, size)
    topic, asked = torch.arange(400) % topics, torch.randint(topics, (1600,))
    documents = centers[topic] + 0.5 * torch.randn(400, size)
    queries = centers[asked] @ torch.randn(size, size) / size**0.5 + 0.5 * torch.randn(1600, size)
    relevant = (asked[:, None] == topic).float()  # (1600, 400), ten ones in each row
    labels = torch.where(torch.rand(relevant.shape) < mistakes, 1.0, relevant)

    towers = nn.ModuleList([nn.Linear(size, 8, bias=False) for _ in range(2)])
    optimizer = torch.optim.Adam(towers.parameters(), lr=0.01)
    for _ in range(steps):
        rows = torch.randint(800, (128,))
        loss = loss_fn(towers[0](queries[rows]) @ towers[1](documents).T, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = khot.hard_topk(towers[0](queries[800:]) @ towers[1](documents).T, k)  # (800, 400), the ten best
    return ((found * relevant[800:]).sum(-1) / relevant[800:].sum(-1)).mean().item()


def mean(loss_fn: Callable[[Tensor, Tensor], Tensor], mistakes: float, steps: int = 300) -> float:
    """Return the mean of three seeds."""
    return sum(recall_after_training(loss_fn, mistakes, steps, seed) for seed in range(3)) / 3


print(f"recall@{k} of new queries  clean labels  1 % mistakes")
print(f"before training         {mean(recall_loss, 0, steps=0):12.3f}")
for loss_fn in (softmax_cross_entropy, khot.khot_cross_entropy, recall_loss):
    print(f"{loss_fn.__name__:24s}{mean(loss_fn, 0):12.3f}{mean(loss_fn, 0.01):14.3f}")
