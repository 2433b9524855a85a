"""Train on few items of an imbalanced data set without a bias: oversample the rare class, and weight by 1/π.

One item of a hundred is positive. Both samplers draw 1000 of 20,000 items an epoch, a positive one twenty times as
often as another. `DesignSampler` says with which probability π each item was drawn, so a loss weighted by 1/π is that
of all items on average. It takes a few seconds.
"""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from khot.data import DesignSampler

n, k = 20_000, 1000
draw = torch.Generator().manual_seed(0)
x = torch.randn(n, 8, generator=draw)
chance = torch.sigmoid(x @ torch.tensor([2.0, -1.0, 1.0, 0.5, 0, 0, 0, 0]) - 7)
y = (torch.rand(n, generator=draw) < chance).float()
sizes = torch.where(y == 1, 20.0, 1.0)


def train(sampler: Sampler, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit a logistic regression to the items that a sampler draws; return the mean probability and the loss on all."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    loader = DataLoader(TensorDataset(x, y, weights), batch_size=250, sampler=sampler)
    for epoch in range(60):
        for group in optimizer.param_groups:
            group["lr"] = 0.3 * (1 - epoch / 60)
        for rows, labels, weight in loader:
            loss = (weight * cross_entropy(model(rows)[:, 0], labels, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        logits = model(x)[:, 0]
        return logits.sigmoid().mean(), cross_entropy(logits, y)


ours, rival = DesignSampler(sizes, k), WeightedRandomSampler(sizes, k, replacement=False)
print(f"positive items: {y.mean():.4f}")
print("sampler                  mean prediction   loss on all items")
for name, sampler, weights in (
    ("DesignSampler, 1/π", ours, ours.weights * k / n),
    ("WeightedRandomSampler", rival, torch.ones(n)),
    ("uniform", DesignSampler(torch.ones(n), k), torch.ones(n)),
):
    mean, loss = train(sampler, weights)
    print(f"{name:<24}{mean:16.4f}{loss:20.4f}")

loss = torch.nn.functional.softplus(x[:, 0])  # any loss of the items: its mean over all of them from k of them
means = torch.tensor([float((ours.weights[i] * loss[i]).sum() / n) for i in (list(ours) for _ in range(300))])
print(f"mean loss: {loss.mean():.4f}; from 300 epochs: {means.mean():.4f} ± {means.std() / 300**0.5:.4f}")
