"""Learn a map of handwritten digits in which nearest neighbours agree, in two ways.

In scikit-learn, `KHotNeighborhood` is one step of a pipeline: here digits in two dimensions, where a plain projection
mixes them. In torch, `SoftNeighbors` is a layer that averages the values of the soft k nearest keys. So the embedding,
the temperature and even k are learned from a regression. It needs '.[sklearn]', and takes about ten seconds.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis
from sklearn.pipeline import make_pipeline

import khot
from khot.sklearn import KHotNeighborhood

x, y = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.3, random_state=0)
maps = {
    "PCA": PCA(2),
    "NCA": NeighborhoodComponentsAnalysis(2, random_state=0),
    "KHotNeighborhood": KHotNeighborhood(2, random_state=0),
    "  with a network": KHotNeighborhood(2, hidden=(128,), random_state=0),
}
for name, model in maps.items():
    pipeline = make_pipeline(model, KNeighborsClassifier()).fit(train_x, train_y)
    print(f"{name:<17} accuracy of 5 nearest neighbours in two dimensions: {pipeline.score(test_x, test_y):.2f}")

# Two of ten features matter. The layer learns which, how far to look, and how many neighbours to average.
torch.manual_seed(0)
keys = torch.randn(1000, 10)
values = torch.sin(2 * keys[:, :1]) + keys[:, 1:2] + 0.3 * torch.randn(1000, 1)
embed = torch.nn.Linear(10, 10, bias=False)
k, temperature = (torch.nn.Parameter(torch.tensor(number)) for number in (5.0, 1.0))
layer = khot.nn.SoftNeighbors(k, temperature=temperature)


def error() -> torch.Tensor:
    """Return the mean squared error of each example's prediction from all others."""
    z = embed(keys)
    return (layer(z, z, values, leave_one_out=True).values - values).square().mean()


torch.nn.init.eye_(embed.weight)
print(f"\nbefore training: k = {k.item():.1f}, error {error().item():.2f}")
optimizer = torch.optim.Adam([{"params": embed.parameters(), "lr": 0.02}, {"params": [k, temperature], "lr": 0.1}])
for _ in range(100):
    optimizer.zero_grad()
    error().backward()
    optimizer.step()
used = embed.weight.detach().square().sum(0)
print(f"after training:  k = {k.item():.1f}, error {error().item():.2f} (the noise alone is 0.09)")
print(f"share of the map that looks at the two features: {used[:2].sum() / used.sum():.2f}")
