"""Train a network of which two of every four weights are 0, the pattern that some hardware multiplies faster.

Each group of four shares a budget of two: σ_2 over four scores, with a gradient to all of them. Compare with choosing
the two largest once, after training, without training on. It needs '.[sklearn]', and takes a few seconds.
"""

import copy
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn

from khot.nn import sparsity

torch.manual_seed(0)
pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
pixels = pixels.float() / 16
train_x, test_x, train_y, test_y = pixels[:1200], pixels[1200:], labels[:1200], labels[1200:]
STEPS, PATTERN = 400, sparsity.n_of_m(2, 4)


def train(model: nn.Module, after_step: Callable[[], None] = lambda: None) -> nn.Module:
    """Train for all steps; return the model in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(train_x), (64,))
        loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step()
    return model.eval()


def say(name: str, model: nn.Module) -> None:
    """Print how good the model is, and what it keeps."""
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    counts = {int(c) for m in model if isinstance(m, nn.Linear) for c in m.weight.view(-1, 4).count_nonzero(1)}
    print(f"{name:<24} accuracy {accuracy:.3f}, weights per group of four: {sorted(counts)}")


start = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
dense = train(copy.deepcopy(start))
say("dense", dense)
once = sparsity.Sparsifier(copy.deepcopy(dense), None, steps=0, units=PATTERN)
say("2 of 4, after training", once.finalize())
model = copy.deepcopy(start)
sparsifier = sparsity.Sparsifier(model, None, steps=STEPS, units=PATTERN)
train(model, sparsifier.step)
say("2 of 4, in training", sparsifier.finalize())
