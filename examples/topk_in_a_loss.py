"""Train a network so that the right 3 of 20 scores come out on top.

A top-k in the loss gives no gradient if it is hard. This script trains the same linear model with a hard top-k, with
the soft top-k of khot at a falling temperature, and with two cross-entropies. It takes a few seconds.
"""

import torch

import khot

n, k, steps = 20, 3, 300
data = torch.Generator().manual_seed(0)
inputs = torch.randn(2000, 8, generator=data)
true_scores = inputs @ torch.randn(8, n, generator=data) + 2.0 * torch.randn(2000, n, generator=data)
right = khot.hard_topk(true_scores, k)  # (2000, 20), three ones in each row
train_x, test_x, train_y, test_y = *inputs.split(1000), *right.split(1000)

soft = khot.nn.SigmoidTopK(k)  # its temperature is a buffer, so that a Schedule can change it


def hard_topk(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the share of wrong choices. The choice is made of zeros and ones: it has no gradient."""
    return 1 - (khot.hard_topk(scores, k) * y).sum(-1).mean() / k


def soft_topk(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the same share for the soft choice, which has a gradient (as khot.precision_at_k_loss)."""
    return 1 - (soft(scores) * y).sum(-1).mean() / k


def khot_cross_entropy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the convex loss whose gradient is sigmoid_topk(scores, k) − y."""
    return khot.khot_cross_entropy(scores, y)


def binary_cross_entropy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return torch's loss of 20 independent yes-or-no questions, which does not know k."""
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, y)


print(f"of the 3 highest scores, how many are right (test data)? by chance {k * k / n:.2f}")
for loss_fn in (hard_topk, soft_topk, khot_cross_entropy, binary_cross_entropy):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, n)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    cooling = khot.nn.Schedule(soft, "temperature", 3.0, 0.3, steps=steps)  # soft at first, nearly hard at the end
    for _ in range(steps):
        loss = loss_fn(model(train_x), train_y)
        if not loss.requires_grad:  # nothing to learn from
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cooling.step()
    hits = (khot.hard_topk(model(test_x), k) * test_y).sum(-1).mean()
    note = "" if loss.requires_grad else "   (the loss has no gradient)"
    print(f"{loss_fn.__name__:21s}{hits:.2f}{note}")
