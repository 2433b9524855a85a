"""Published gates to compare with, the concrete autoencoder's selector, STG and L2X's: our own implementations.

Network, steps, batches and the network's learning rate are those of `khot.sklearn.Gate`. Noise is drawn for each row,
which did better here than the published draw for each batch; all rows train, and the last scores are taken, not the
best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from khot.nn import KHotGate, geometric
from khot.sklearn import Gate

OURS = vars(Gate())


def network(n: int, hidden: tuple[int, ...], outputs: int, seed: int) -> nn.Sequential:
    """Make the multilayer perceptron of `khot.sklearn.Gate`; its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(n, size), nn.ReLU()]
            n = size
        return nn.Sequential(*layers, nn.Linear(n, outputs))


def gumbel(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Gumbel noise."""
    uniform = torch.rand(shape, generator=generator).clamp_(min=1e-20)
    return -(-uniform.log()).log()


class Concrete(nn.Module):
    """k rows of `softmax((θ + Gumbel noise)/T)`, each the place of one feature; T goes from 10 to 0.1.

    Two rows may take the same feature. The places lost are filled with the features that come next: those of the
    greatest probability in any row.

    Reference: Abid, Balin and Zou, "Concrete autoencoders" (2019).
    """

    def __init__(self, n: int, k: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inputs = k
        scale = (2 / (n + k)) ** 0.5  # Glorot's, as published
        self.logits = nn.Parameter(scale * torch.randn(k, n, generator=generator))

    def forward(self, x: Tensor, done: float, generator: torch.Generator) -> Tensor:
        """The k mixtures of features that the rows take now, (rows, k); `done` is the share of training."""
        noisy = self.logits + gumbel((len(x), *self.logits.shape), generator)
        weights = (noisy / geometric(10.0, 0.1, done)).softmax(-1)
        return torch.einsum("rkn,rn->rk", weights, x)

    def penalty(self) -> float:
        """None."""
        return 0.0

    def scores(self) -> Tensor:
        """Above 1 for what a row takes, below for the rest; (n)."""
        p = self.logits.detach().softmax(-1)
        taken = torch.zeros(p.shape[-1]).index_fill_(0, p.argmax(-1), 1.0)
        return taken + p.amax(0)


class StochasticGates(nn.Module):
    """`clamp(μ + ½ + σε, 0, 1)` for each feature, with a penalty λ on how many are open.

    How many are open in the end depends on λ; the k greatest μ are taken.

    Reference: Yamada, Lindenbaum, Negahban and Kluger, "Feature selection using stochastic gates" (2020).
    """

    SIGMA = 0.5

    def __init__(self, n: int, k: int, generator: torch.Generator, strength: float = 0.1) -> None:
        super().__init__()
        self.inputs = n
        self.mu = nn.Parameter(0.01 * torch.randn(n, generator=generator))
        self.strength = strength

    def forward(self, x: Tensor, done: float, generator: torch.Generator) -> Tensor:
        """x times the gates, (rows, n)."""
        noise = torch.randn(x.shape, generator=generator)
        return x * (self.mu + 0.5 + self.SIGMA * noise).clamp(0, 1)

    def penalty(self) -> Tensor:
        """λ times the mean probability that a gate is open."""
        return self.strength * torch.special.ndtr((self.mu + 0.5) / self.SIGMA).mean()

    def scores(self) -> Tensor:
        """μ, (n)."""
        return self.mu.detach()


class L2XGate(KHotGate):
    """A choice for each row: the maximum of k draws of `softmax((θ(x) + Gumbel noise)/0.1)` in training.

    Reference: Chen, Song, Wainwright and Jordan, "Learning to explain" (2018).
    """

    def mask(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """As `KHotGate.mask`."""
        if not self.training:
            return super().mask(x)
        theta = self.scores_of(x)
        return ((theta + gumbel((self.k, *theta.shape), generator)) / 0.1).softmax(-1).amax(0)


class GateSelector(SelectorMixin, BaseEstimator):
    """A gate and the network of `khot.sklearn.Gate`, trained together; then the k greatest scores.

    Args:
        k: how many features.
        gate: `(n, k, generator) → gate`.
        gate_learning_rate: of the gate (Adam).
        max_steps: of training.
        seed: of all that is random.
        is_class: whether y holds classes, and not numbers.
    """

    def __init__(
        self,
        k: int,
        gate: Callable[..., Any] = Concrete,
        *,
        gate_learning_rate: float = OURS["gate_learning_rate"],
        max_steps: int = OURS["max_steps"],
        seed: int = 0,
        is_class: bool = True,
    ) -> None:
        self.k = k
        self.gate = gate
        self.gate_learning_rate = gate_learning_rate
        self.max_steps = max_steps
        self.seed = seed
        self.is_class = is_class

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X (rows, n) and y (rows)."""
        x, y = validate_data(self, X, y)
        rows, outputs, loss = torch.from_numpy(StandardScaler().fit_transform(x)).float(), 1, mse_loss
        if self.is_class:
            classes, index = np.unique(y, return_inverse=True)
            target, outputs, loss = torch.from_numpy(index), len(classes), cross_entropy
        else:
            target = torch.from_numpy(StandardScaler().fit_transform(y[:, None])).float()
        generator = torch.Generator().manual_seed(self.seed)
        gate = self.gate(x.shape[1], self.k, generator)
        net = network(gate.inputs, OURS["hidden"], outputs, self.seed)
        optimizer = torch.optim.Adam(
            [
                {"params": net.parameters(), "lr": OURS["learning_rate"]},
                {"params": gate.parameters(), "lr": self.gate_learning_rate},
            ]
        )
        for step in range(self.max_steps):
            batch = torch.randint(len(rows), (OURS["batch_size"],), generator=generator)
            output = net(gate(rows[batch], step / self.max_steps, generator))
            optimizer.zero_grad()
            (loss(output, target[batch]) + gate.penalty()).backward()
            optimizer.step()
        self.scores_ = gate.scores().numpy()
        self.mask_ = np.isin(np.arange(x.shape[1]), np.argsort(-self.scores_, kind="stable")[: self.k])
        return self

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self.mask_
