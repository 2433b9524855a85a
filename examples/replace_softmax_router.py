"""Replace the softmax router of a mixture of experts, and count the experts that no token uses.

A softmax over the chosen scores gives no gradient to the other experts, and many are never used. The change is one
argument, `route=`. The mixture has 32 small experts, two for each image of scikit-learn's digits.
It needs scikit-learn and takes about ten seconds.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

from khot.nn import MoE, Router, routing

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1200], order[1200:]
n, k, steps, seeds = 32, 2, 200, 3

routers = {  # name: the route, and the weight of the loss that balances the load
    "softmax": (routing.softmax_topk, 0.0),
    "softmax + balance loss": (routing.softmax_topk, 0.1),
    "σ_k, raw weights": (routing.sigma_topk, 0.0),
    "σ_k": (partial(routing.sigma_topk, normalize=True), 0.0),
    "balanced σ_k": (partial(routing.balanced_sigma_topk, normalize=True), 0.0),
}


def run(route: routing.Route, balance: float, seed: int) -> tuple[float, int]:
    """Train a mixture. Return its accuracy and its unused experts on the test images."""
    torch.manual_seed(seed)
    experts = [nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)) for _ in range(n)]
    moe = MoE(Router(64, n, k, route=route), experts)
    optimizer = torch.optim.Adam(moe.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = train[torch.randint(len(train), (128,))]
        output, chosen, _ = moe(x[rows])
        loss = nn.functional.cross_entropy(output, y[rows]) + balance * routing.load_balance_loss(chosen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        output, chosen, _ = moe.eval()(x[test])
    return (output.argmax(-1) == y[test]).float().mean().item(), routing.dead_experts(chosen)


print(f"router                    accuracy  unused experts of {n} (mean of {seeds} seeds)")
for name, (route, balance) in routers.items():
    results = torch.tensor([run(route, balance, seed) for seed in range(seeds)]).mean(0)
    print(f"{name:24s}    {results[0]:6.1%}  {results[1]:5.1f}")
