"""Metric learning in scikit-learn's terms: a map in which the k nearest neighbours agree."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from .. import _check
from .._process import interruptible, threads_for
from ..nn import SoftNeighbors, neighbors_loss
from ..nn.neighbors import squared_euclidean
from ..relaxations import Relaxation, sigmoid_topk
from ._selector import find_task

TASKS = ("auto", "classification", "regression")
ENTRIES = 40  # of `history_`
NETWORK_RATE = 1 / 30  # the network's learning rate, as a share of the linear map's
FIRST_ROWS = 2000  # that set the scale of the first map


class KHotNeighborhood(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Learn a linear map, or a small network, after which k nearest neighbours predict well.

    `min Σ_i (share of the k soft neighbours of i with another class)`, or, for numbers, `min Σ_i (y_i − mean of y over
    them)²`; neighbours by the distances `‖f(x_i) − f(x_j)‖²`, without i itself. scikit-learn's
    `NeighborhoodComponentsAnalysis` is the same with one neighbour, softmax weights and all pairs at once. Follow it
    with `KNeighborsClassifier` or `KNeighborsRegressor`.

    Args:
        n_components: the number of dimensions of the result; None for the number of features.
        n_neighbors: k.
        task: "classification", "regression" or "auto", which finds it from y: classification if it holds strings,
            booleans, or integers with few different values (20, or the root of the number of rows).
        hidden: sizes of the hidden layers of a network that is added to the linear map; () for the map alone.
        relaxation: how neighbours are made soft: `khot.sigmoid_topk` or any other of `khot`'s.
        temperature: larger is softer, relative to the mean squared distance to the k-th neighbour under the first map.
        init: the first linear map, (n_components, n_features); None for the first principal components.
        max_steps: the number of training steps.
        batch_size: rows in a step; neighbours are sought among them. Memory and time grow with its square.
        learning_rate: of the linear map (Adam, falling to 0 along a cosine), relative to the size of its entries.
        random_state: an int, for the same result each time.
        callback: called with each entry of `history_` as it comes; training stops when it returns True.

    Attributes:
        components_: the linear map, (n_components, n_features).
        mean_, scale_: of the features; the network sees `(X − mean_)/scale_`.
        coefs_, intercepts_: the layers of the network; empty without one.
        history_: a dict for about every fortieth part of the steps: step, loss (the mean since the last entry).
        n_steps_: how many steps were taken.
        task_, classes_: the task that was found, and its classes.
        n_features_in_, feature_names_in_: as usual.

    Ctrl-C during `fit` keeps the map so far.

    Examples:
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> X = np.random.default_rng(0).standard_normal((400, 20))
        >>> y = (X[:, 3] > 0).astype(int)  # the other columns disturb
        >>> model = make_pipeline(KHotNeighborhood(2, random_state=0), KNeighborsClassifier())
        >>> KNeighborsClassifier().fit(X[:300], y[:300]).score(X[300:], y[300:]) < 0.8
        True
        >>> model.fit(X[:300], y[:300]).score(X[300:], y[300:]) > 0.9
        True

    References: Goldberger et al., "Neighbourhood components analysis" (2005); Weinberger and Tesauro, "Metric learning
    for kernel regression" (2007).
    """

    def __init__(
        self,
        n_components: int | None = None,
        n_neighbors: int = 5,
        *,
        task: str = "auto",
        hidden: tuple[int, ...] = (),
        relaxation: Relaxation = sigmoid_topk,
        temperature: float = 1.0,
        init: Any = None,
        max_steps: int = 200,
        batch_size: int = 256,
        learning_rate: float = 0.1,
        random_state: int | np.random.RandomState | None = None,
        callback: Callable[[dict[str, float]], bool | None] | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_neighbors = n_neighbors
        self.task = task
        self.hidden = hidden
        self.relaxation = relaxation
        self.temperature = temperature
        self.init = init
        self.max_steps = max_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.callback = callback

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X (rows, features) and y (rows), or (rows, outputs) for regression."""
        X, target = self._validated(X, y)
        n, c = X.shape[1], X.shape[1] if self.n_components is None else int(self.n_components)
        self.mean_, scale = X.mean(0), X.std(0)
        self.scale_ = np.where(scale > 1e-12 * np.abs(X).max(0), scale, 1.0)
        x = torch.from_numpy((X - self.mean_) / self.scale_).float()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        linear = self._first(x, X - self.mean_, c, generator)
        net = _network(n, tuple(map(int, self.hidden)), c, generator)
        batch = min(int(self.batch_size), len(x))
        with threads_for(batch * max(batch * c, n * max(c, *self.hidden, 0))):
            self._train(linear, net, x, target, batch, generator)
        self.components_ = linear.detach().double().numpy() / self.scale_
        layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        self.coefs_ = [layer.weight.detach().double().numpy().T for layer in layers]
        self.intercepts_ = [layer.bias.detach().double().numpy() for layer in layers]
        if not all(np.isfinite(part).all() for part in (self.components_, *self.coefs_, *self.intercepts_)):
            raise ValueError("training diverged: the map is not finite. Lower `learning_rate`.")
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return f(X), (rows, n_components)."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=np.float64) - self.mean_
        result: np.ndarray = x @ self.components_.T
        if self.coefs_:
            x = x / self.scale_
            for weight, bias in zip(self.coefs_[:-1], self.intercepts_[:-1], strict=True):
                x = np.maximum(x @ weight + bias, 0)
            result += x @ self.coefs_[-1] + self.intercepts_[-1]
        return result

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _validated(self, X: Any, y: Any) -> tuple[np.ndarray, Tensor]:
        """Check parameters and data; return features, and classes (rows) or standardised numbers (rows, outputs)."""
        _check.one_of("task", self.task, TASKS)
        for name in ("max_steps", "batch_size", "n_neighbors"):
            _check.at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "temperature"):
            _check.above(name, getattr(self, name), 0)
        if not isinstance(self.hidden, (tuple, list)):
            got = type(self.hidden).__name__
            raise TypeError(f"`hidden` must be a tuple of ints, such as (64,); got {got}.")
        for i, size in enumerate(self.hidden):
            _check.at_least(f"hidden[{i}]", size, 1)
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, multi_output=True)
        most = min(len(X), self.batch_size) - 1
        if self.n_neighbors > most:
            bound = f"`n_neighbors` must satisfy 1 ≤ n_neighbors ≤ {most} (other rows of a batch)"
            raise ValueError(f"{bound}; got {self.n_neighbors} with n_samples = {len(X)}.")
        if self.n_components is not None:
            _check.at_least("n_components", self.n_components, 1)
            _check.integer_at_most("n_components", self.n_components, X.shape[1], "number of features")
        self.task_ = find_task(y) if self.task == "auto" else self.task
        if self.task_ == "regression":
            y = y.astype(np.float64).reshape(len(y), -1)
            y = (y - y.mean(0)) / np.where((spread := y.std(0)) > 0, spread, 1.0)
            return X, torch.from_numpy(y).float()
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` must have at least 2 classes; got one class, {self.classes_.tolist()[0]!r}.")
        return X, torch.from_numpy(index).long()

    def _first(self, x: Tensor, X: np.ndarray, c: int, generator: torch.Generator) -> nn.Parameter:
        """Return the first map of standardised features: the k-th neighbour is at squared distance 1/temperature."""
        if self.init is None:
            values, vectors = np.linalg.eigh(X.T @ X)
            linear = vectors[:, np.argsort(-values)[:c]].T
        else:
            linear = check_array(self.init, dtype=np.float64)
            if linear.shape != (c, X.shape[1]):
                raise ValueError(f"`init` must have the shape {(c, X.shape[1])}; got {linear.shape}.")
        first = torch.from_numpy(linear * self.scale_).float()
        rows = torch.randperm(len(x), generator=generator)[: min(FIRST_ROWS, int(self.batch_size))]
        z = x[rows] @ first.mT
        distance = squared_euclidean(z, z).fill_diagonal_(torch.inf).topk(self.n_neighbors, largest=False).values
        size = float(distance[:, -1].clamp(min=0).mean()) * self.temperature
        return nn.Parameter(first / size**0.5 if size > 0 else first)

    def _train(
        self, linear: nn.Parameter, net: nn.Sequential, x: Tensor, y: Tensor, batch: int, generator: torch.Generator
    ) -> None:
        steps, every, losses = int(self.max_steps), max(1, int(self.max_steps) // ENTRIES), []
        neighbors = SoftNeighbors(int(self.n_neighbors), relaxation=self.relaxation)
        rate = self.learning_rate * float(linear.detach().square().mean().sqrt())
        parts = [{"params": [linear], "lr": rate}]
        if len(net):
            parts.append({"params": list(net.parameters()), "lr": self.learning_rate * NETWORK_RATE})
        optimizer = torch.optim.Adam(parts)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        self.history_: list[dict[str, float]] = []
        self.n_steps_ = 0
        with interruptible(lambda: None) as is_interrupted:
            while self.n_steps_ < steps and not is_interrupted():
                rows = torch.randperm(len(x), generator=generator)[:batch] if batch < len(x) else slice(None)
                z = x[rows] @ linear.mT
                z = z + net(x[rows]) if len(net) else z
                if y.ndim == 1:
                    loss = neighbors_loss(z, y[rows], neighbors.k, relaxation=self.relaxation)
                else:
                    mean = neighbors(z, z, y[rows], leave_one_out=True).values
                    assert mean is not None
                    loss = mse_loss(mean, y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(float(loss.detach()))
                self.n_steps_ += 1
                if self.n_steps_ % every == 0 or self.n_steps_ == steps:
                    self.history_.append({"step": self.n_steps_, "loss": sum(losses) / len(losses)})
                    losses = []
                    if self.callback is not None and self.callback(self.history_[-1]):
                        break

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.non_deterministic = self.random_state is None
        return tags


def _network(n: int, hidden: tuple[int, ...], c: int, generator: torch.Generator) -> nn.Sequential:
    """Return a multilayer perceptron that is 0 at first; empty if there are no hidden layers."""
    if not hidden:
        return nn.Sequential()
    layers: list[nn.Module] = []
    for size in hidden:
        layer = nn.Linear(n, size)
        for part in layer.parameters():
            nn.init.uniform_(part, -(n**-0.5), n**-0.5, generator=generator)
        layers += [layer, nn.ReLU()]
        n = size
    last = nn.Linear(n, c)
    for part in last.parameters():
        nn.init.zeros_(part)
    return nn.Sequential(*layers, last)
