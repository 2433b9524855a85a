"""Prune a convolutional network to a quarter of its FLOPs, and remove the channels that it no longer needs.

One budget over all layers, counted in floating-point operations, is held at every step of training. At the end the
layers are really smaller. Compare with half the widths, which costs about as much: on these small images that is as
good or better. It needs '.[sklearn]', and takes about ten seconds.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn

from khot.nn import sparsity

torch.manual_seed(0)
images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
images = (images.float() / 16).view(-1, 1, 8, 8)
train_x, test_x, train_y, test_y = images[:1200], images[1200:], labels[:1200], labels[1200:]
STEPS, COST = 200, sparsity.Flops(test_x[:1])


def network(a: int, b: int) -> nn.Sequential:
    """Return three convolutions of widths a, b and b, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.BatchNorm2d(b), nn.ReLU()),
        *(nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * b, 10)),
    )


def train(model: nn.Module, after_step: Callable[[], None] = lambda: None) -> nn.Module:
    """Train for all steps; return the model in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(train_x), (64,))
        loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return model.eval()


def say(name: str, model: nn.Module) -> None:
    """Print how good the model is, and what it keeps."""
    counter = sparsity.Sparsifier(model, 1.0, steps=0, cost=COST)
    cost, _ = counter.cost(), counter.finalize()  # all is kept
    accuracy, widths = (model(test_x).argmax(1) == test_y).float().mean(), [m.out_channels for m in model[0:7:3]]
    print(f"{name:<8} accuracy {accuracy:.3f}, {cost:,.0f} FLOPs, widths {widths}")


say("dense", train(network(16, 32)))
say("thin", train(network(8, 16)))
pruned = network(16, 32)
sparsifier = sparsity.Sparsifier(pruned, 0.25, steps=STEPS, units=sparsity.channels, cost=COST)
train(pruned, sparsifier.step)
print(sparsifier.report())
say("pruned", sparsifier.finalize())
