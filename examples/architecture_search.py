"""Search for an architecture: one operation in each of three places, within a budget of their costs.

A `Choice` mixes operations with learned scores. `Sparsifier` holds one budget over all of them: at every step it solves
for a price of each unit of cost. Compare with the choice without a budget. It needs '.[sklearn]', and takes some ten
seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from khot.nn import Choice, sparsity

images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
images = (images.float() / 16).view(-1, 1, 8, 8)
train_x, test_x, train_y, test_y = images[:1200], images[1200:], labels[:1200], labels[1200:]
STEPS, NAMES, COSTS = 150, ["skip", "1×1", "depthwise 3×3", "3×3", "5×5"], [1.0, 256.0, 144.0, 2304.0, 6400.0]


def operations() -> list[nn.Module]:
    """Return one of each kind."""
    convolutions = [nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)]
    convolutions += [nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 5, padding=2)]
    return [nn.Identity(), *(nn.Sequential(c, nn.BatchNorm2d(16), nn.ReLU()) for c in convolutions)]


def search(budget: int) -> None:
    """Train all operations together; print what is kept."""
    torch.manual_seed(0)
    choices = [Choice(operations(), costs=COSTS) for _ in range(3)]
    middle = [choices[0], nn.MaxPool2d(2), choices[1], choices[2]]
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *middle, nn.Flatten(), nn.Linear(256, 10))
    sparsifier = sparsity.Sparsifier(model, budget, steps=STEPS, units=sparsity.choices, mask=sparsity.soft)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(train_x), (64,))
        loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step()
    kept = [NAMES[int(choice.mask().argmax())] for choice in choices]
    cost = sparsifier.cost()
    model = sparsifier.finalize().eval()
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    print(f"budget {budget:>6}: {', '.join(kept):<40} cost {cost:>7,.0f}, accuracy {accuracy:.3f}")


search(int(3 * max(COSTS)))
search(3000)
search(500)
