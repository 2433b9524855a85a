"""Learn how many to choose: k as a parameter that has a price, and a budget in milliseconds instead of k.

In the first half a linear model pays a price for each feature that it sees, and learns the scores and k together.
In the second half each block of a network takes some milliseconds, and `costs=` keeps the choice within a budget.
"""

import torch

import khot

n, draw = 20, torch.Generator().manual_seed(0)
coefficients = 0.8 ** torch.arange(n)  # each feature matters less than the one before
x = torch.randn(4000, n, generator=draw)
y = x @ coefficients

for price in (0.2, 0.05, 0.02):
    worth = int((coefficients.square() > price).sum())  # features that reduce the error by more than their price
    scores, weights = torch.zeros(n, requires_grad=True), torch.zeros(n, requires_grad=True)
    raw_k = torch.zeros((), requires_grad=True)  # k = n·sigmoid(raw_k) stays between 0 and n
    optimizer = torch.optim.Adam([scores, weights, raw_k], lr=0.03)
    for _ in range(1000):
        rows, k = torch.randint(len(x), (256,), generator=draw), n * raw_k.sigmoid()
        gate = khot.sample_khot(scores.expand(256, n), k, generator=draw)  # (256, n); the gradient reaches k, too
        loss = ((x[rows] * gate) @ weights - y[rows]).square().mean() + price * k
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    best = scores.detach().topk(worth).indices.sort().values.tolist() == list(range(worth))
    print(f"price {price:.2f}: {worth:2d} features are worth it, learned k = {k:4.1f}, these are on top: {best}")

milliseconds = torch.tensor([6.0, 5.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0])
gains = torch.tensor([9.0, 4.0, 6.0, 5.0, 1.0, 3.5, 1.0, 2.0, 0.5, 1.5])  # what each block adds to the output
outputs, budget = torch.randn(1000, 10, generator=draw) * gains.sqrt(), 10.0  # of ten blocks, (1000, 10)

scores = torch.zeros(10, requires_grad=True)
optimizer = torch.optim.Adam([scores], lr=0.1)
for _ in range(300):
    probs = khot.sigmoid_topk(scores, budget, costs=milliseconds)  # Σ milliseconds·probs = 10
    runs = (torch.rand(1000, 10, generator=draw) < probs).float()  # blocks that run: 10 ms on average
    gate = khot.straight_through(runs, probs.expand(1000, 10))
    loss = (outputs * (1 - gate)).sum(-1).square().mean()  # how much the output changes without the other blocks
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def fill(order: torch.Tensor) -> torch.Tensor:
    """Take blocks in this order, each if there is time left for it."""
    choice = torch.zeros(10)
    for i in order:
        choice[i] = float(choice @ milliseconds + milliseconds[i] <= budget)
    return choice


every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 10)  # all 1024 choices, (1024, 10)
exact = every[((every @ gains) * (every @ milliseconds <= budget)).argmax()]
choices = {"learned": fill(probs.argsort(descending=True)), "most useful first": fill(gains.argsort(descending=True))}
for name, choice in (choices | {"best of all 1024": exact}).items():
    print(f"{name:18s}{choice @ milliseconds:4.0f} of {budget:.0f} ms, gain {choice @ gains:.1f} of {gains.sum():.1f}")
