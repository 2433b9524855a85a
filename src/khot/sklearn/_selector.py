"""Feature selection in scikit-learn's terms: `KHotSelector` trains a gate and a network together."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from .. import _check
from .._extras import require
from .._threads import threads_for
from ..designs import Design, Pivotal
from ..estimators import straight_through_sample
from ..nn import KHotGate, Schedule
from ..relaxations import Relaxation, hard_topk, sigmoid_topk

try:
    from sklearn.base import BaseEstimator
    from sklearn.feature_selection import SelectorMixin
    from sklearn.utils import check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError:
    require("sklearn", extra="sklearn")  # raises, and says how to install it
    raise

TASKS = ("auto", "classification", "regression", "reconstruction")
CHECKS = 40  # how many times in `max_steps` the validation rows are evaluated
MASKS = 16  # samples of the gate in a batch, for estimators that want the objective


class Rows(NamedTuple):
    """Examples to train on or to validate with."""

    x: Tensor  # (rows, n), standardised
    y: Tensor  # (rows) classes, or (rows, outputs) numbers
    weight: Tensor  # (rows), ≥ 0


@dataclass(eq=False, repr=False)  # scikit-learn has its own
class KHotSelector(SelectorMixin, BaseEstimator):
    """Choose the k features that a prediction needs: a gate over all of them and a network, trained together.

    Features are standardised. The network sees random k-hot samples of them, whose probabilities are learned, and the
    size of the samples goes from all features down to k. So it finds features that matter only together (XOR), and
    nonlinear effects. The features with the k largest scores are selected.

    Args:
        n_features_to_select: k, an int, or a fraction of the features, a float in (0, 1]; None for half of them.
        task: "classification", "regression" or "reconstruction" (of all features from k of them; y is ignored);
            "auto" finds it from y: reconstruction if it is None; classification if it holds strings, booleans, or
            integers with few different values (20, or the root of the number of rows); otherwise regression.
        relaxation: scores to inclusion probabilities, such as `khot.sigmoid_topk`.
        design: what the samples are drawn from, such as `khot.designs.Pivotal`; None multiplies features by their
            probabilities instead.
        estimator: how the gradient passes the samples, a function of `khot.estimators`.
        temperature: of the relaxation; larger is more random.
        hidden: sizes of the network's hidden layers; () for a linear model.
        max_steps: the largest number of training steps.
        batch_size: rows in a step.
        learning_rate: of the network (Adam).
        gate_learning_rate: of the scores (Adam).
        annealed: the share of `max_steps` in which the samples' size goes from all features to k.
        validation_fraction: share of the rows that are held out to stop early; they choose the scores too.
        patience: steps without a better validation loss after which training stops.
        random_state: an int, for the same result each time.
        callback: called with each entry of `history_` as it comes; training stops when it returns True.
        verbose: 1 shows a line of progress on stderr, as scikit-learn's estimators do; 0 shows nothing.

    Attributes:
        scores_: (n_features), larger is better.
        inclusion_probabilities_: (n_features), in [0, 1] with sum k: how likely each is chosen under the scores.
        history_: a dict for each evaluation on the validation rows: step, budget, train_loss, validation_loss.
        task_: the task that was found.
        classes_: of a classification.
        n_features_in_, feature_names_in_: as usual.

    Examples:
        >>> X = np.random.default_rng(0).standard_normal((2000, 20))
        >>> y = X[:, 3] * X[:, 7] > 0  # neither column alone says anything
        >>> selector = KHotSelector(2, random_state=0).fit(X, y)
        >>> selector.get_feature_names_out()
        array(['x3', 'x7'], dtype=object)
        >>> selector.transform(X).shape
        (2000, 2)
    """

    n_features_to_select: float | None = None
    _: KW_ONLY
    task: str = "auto"
    relaxation: Relaxation = sigmoid_topk
    design: Callable[..., Design] | None = Pivotal
    estimator: Callable[..., Tensor] = straight_through_sample
    temperature: float = 1.0
    hidden: tuple[int, ...] = (64, 64)
    max_steps: int = 1000
    batch_size: int = 256
    learning_rate: float = 3e-3
    gate_learning_rate: float = 0.02
    annealed: float = 0.5
    validation_fraction: float = 0.1
    patience: int = 200
    random_state: int | np.random.RandomState | None = None
    callback: Callable[[dict[str, float]], bool | None] | None = None
    verbose: int = 0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Train on X (rows, features), y (rows) or (rows, outputs), and weights of rows if they differ."""
        self._check_parameters()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        x, target = self._validated(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        n, k = x.shape[1], number_of_features(self.n_features_to_select, x.shape[1])
        rows = self._rows(*_merged(x, target, weight))
        how: dict[str, Any] = {"relaxation": self.relaxation, "design": self.design, "estimator": self.estimator}
        gate = KHotGate(n, k, temperature=self.temperature, **how)
        net = _network(n, self.hidden, rows.y.shape[1] if rows.y.ndim == 2 else len(self.classes_), seed)
        largest = max(part.numel() for part in net.parameters())  # the weights of a layer
        with threads_for(int(self.batch_size) * largest):
            scores = self._train(gate, net, *_split(rows, self.validation_fraction, seed), seed)
        if not scores.isfinite().all():
            raise ValueError("training diverged: scores are not finite. Lower `learning_rate` or `gate_learning_rate`.")
        with torch.no_grad():
            probabilities = self.relaxation(scores.double(), k, temperature=self.temperature)
        self.scores_, self.inclusion_probabilities_ = scores.double().numpy(), probabilities.numpy()
        self._support = hard_topk(scores, k).bool().numpy()
        return self

    def _check_parameters(self) -> None:
        _check.one_of("task", self.task, TASKS)
        for name in ("max_steps", "batch_size", "patience"):
            _check.at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "gate_learning_rate"):
            _check.above(name, getattr(self, name), 0)
        _check.fraction("annealed", self.annealed)
        _check.fraction("validation_fraction", self.validation_fraction, is_open=True)
        if not isinstance(self.hidden, (tuple, list)):
            got = type(self.hidden).__name__
            raise TypeError(f"`hidden` must be a tuple of ints, such as (64, 64); got {got}.")
        for i, size in enumerate(self.hidden):
            _check.at_least(f"hidden[{i}]", size, 1)

    def _validated(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return features and what to predict, numbers or indices of classes, (rows, …); set `task_` and `classes_`."""
        if y is None or self.task == "reconstruction":
            if self.task not in ("auto", "reconstruction"):
                said = f"`y` must be given for {self.task}; got None. Without it, the task is reconstruction."
                raise ValueError(said)
            self.task_ = "reconstruction"
            x = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
            return x, x[:, :0]
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, multi_output=True)
        self.task_ = find_task(y) if self.task == "auto" else self.task
        if self.task_ == "regression":
            return x, y.astype(np.float64).reshape(len(y), -1)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` must have at least 2 classes; got one class, {self.classes_[0]!r}.")
        return x, index.astype(np.float64)[:, None]

    def _rows(self, x: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Rows:
        """Return the rows as training takes them: standardised tensors."""
        features = _standardised(x, weight)
        if self.task_ == "classification":
            y = torch.from_numpy(target[:, 0]).long()
        else:
            y = features if self.task_ == "reconstruction" else _standardised(target, weight)
        return Rows(features, y, torch.from_numpy(weight).float())

    def _train(self, gate: KHotGate, net: nn.Module, examples: Rows, validation: Rows, seed: int) -> Tensor:
        """Return the scores of the least validation loss at the budget k; the last ones if it is not reached.

        The gate's budget goes from n to k: features that matter only together are seen together at first. Rows are
        drawn with replacement, in proportion to their weights.
        """
        max_steps, generator = int(self.max_steps), torch.Generator().manual_seed(seed)
        annealing = round(self.annealed * max_steps)
        schedule = Schedule(gate, "budget", examples.x.shape[1], gate.k, steps=annealing)
        rates = ((net, self.learning_rate), (gate, self.gate_learning_rate))
        optimizer = torch.optim.Adam([{"params": part.parameters(), "lr": rate} for part, rate in rates])
        every, best, best_step = max(1, max_steps // CHECKS), float("inf"), annealing
        cumulative = examples.weight.to(torch.float64).cumsum(0)
        losses: list[float] = []
        self.history_: list[dict[str, float]] = []
        result = torch.tensor(torch.nan)
        for step in range(1, max_steps + 1):
            at = torch.rand(int(self.batch_size), dtype=torch.float64, generator=generator) * cumulative[-1]
            rows = torch.searchsorted(cumulative, at, right=True).clamp_(max=len(cumulative) - 1)
            loss = _loss(gate, net, examples.x[rows], examples.y[rows], generator)
            optimizer.zero_grad()
            loss.backward()
            if all(scores.grad is None for scores in gate.parameters()):
                raise ValueError("`design` and `estimator` must give the scores a gradient; this pair gives none.")
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if step % every and step != max_steps:
                continue
            found, is_final = _evaluate(gate, net, validation), step >= annealing
            if not is_final or found < best or not result.isfinite().all():
                result = gate.scores_of(examples.x).detach().clone()
            if is_final and found < best:
                best, best_step = found, step
            means = {"train_loss": sum(losses) / len(losses), "validation_loss": found}
            self.history_.append({"step": step, "budget": int(gate.budget), **means})
            losses = []
            if self.verbose:
                now = f"step {step} of {max_steps}, validation loss {found:.4f}, features {int(gate.budget)}"
                sys.stderr.write(f"\rKHotSelector: {now:<70}")
            has_enough = self.callback is not None and self.callback(self.history_[-1])
            if has_enough or step - best_step >= self.patience:
                break
        if self.verbose:
            sys.stderr.write("\n")
        return result

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self._support

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags


def number_of_features(given: float | None, n: int) -> int:
    """Return k of n: from an int, a fraction, or None for half."""
    if given is None:
        return max(1, n // 2)
    _check.number("n_features_to_select", given, "an int, a float or None")
    if isinstance(given, Integral):
        if not 1 <= int(given) <= n:
            raise ValueError(f"`n_features_to_select` must satisfy 1 ≤ k ≤ {n} (number of features); got {given}.")
        return int(given)
    if not 0 < given <= 1:
        raise ValueError(f"`n_features_to_select`, a fraction, must satisfy 0 < fraction ≤ 1; got {given}.")
    return max(1, int(given * n))


def find_task(y: np.ndarray) -> str:
    """Return classification for strings, booleans and integers with few different values; otherwise regression."""
    if y.ndim == 2 and y.shape[1] > 1:
        return "regression"
    if y.dtype.kind not in "fiu":
        return "classification"
    values = np.unique(y)
    few = len(values) <= max(20, len(y) ** 0.5)
    return "classification" if few and (values == np.round(values)).all() else "regression"


def _standardised(x: np.ndarray, weight: np.ndarray) -> Tensor:
    """Return columns with mean 0 and variance 1, whatever their size; constant ones are 0."""
    x = x / np.where(peak := np.abs(x).max(0), peak, 1)
    x = x - np.average(x, axis=0, weights=weight)
    x = x / np.where((peak := np.abs(x).max(0)) > 1e-14, peak, np.inf)
    scale = np.sqrt(np.average(x**2, axis=0, weights=weight))
    return torch.from_numpy(x / np.where(scale, scale, 1)).float()


def _merged(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge equal rows into one with the sum of their weights, ordered by a hash of what they hold.

    So a weight of 2 is the row twice, a weight of 0 is its absence, the order of the rows does not matter, and no row
    is both trained on and held out.
    """
    content = np.ascontiguousarray(np.concatenate([x, y], 1) + 0.0)  # −0 is 0
    digests = np.array([hashlib.blake2b(row, digest_size=16).digest() for row in content[weight > 0]], dtype="S16")
    order = np.flatnonzero(weight > 0)
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return x[order[first]], y[order[first]], np.bincount(group, weights=weight[order])


def _split(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return rows to train on and held-out ones; if there is one row, or no fraction, they are the same."""
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
    held = max(1, round(fraction * len(order)))
    if held >= len(order) or not fraction:
        return rows, rows
    return Rows(*(part[order[held:]] for part in rows)), Rows(*(part[order[:held]] for part in rows))


def _network(n: int, hidden: tuple[int, ...], outputs: int, seed: int) -> nn.Sequential:
    """Return a multilayer perceptron whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size in map(int, hidden):
            layers += [nn.Linear(n, size), nn.ReLU()]
            n = size
        return nn.Sequential(*layers, nn.Linear(n, outputs))


def _evaluate(gate: KHotGate, net: nn.Module, rows: Rows) -> float:
    """Return the mean loss with the k best features alone."""
    gate.eval()
    with torch.no_grad():
        losses = _losses(net(gate(rows.x)), rows.y)
    gate.train()
    return float((losses * rows.weight).sum() / rows.weight.sum())


def _loss(gate: KHotGate, net: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Return the mean over a batch; an estimator that wants the objective tries every sample on a part of it."""
    if gate.design is None or not gate.takes_objective:
        return _losses(net(gate(x, generator=generator)), y).mean()
    parts = min(MASKS, len(x))
    x, y = (part[: len(part) // parts * parts].unflatten(0, (parts, -1)) for part in (x, y))

    def objective(m: Tensor) -> Tensor:  # (samples, n) → (samples); control variates ask for π too, (…, n) → (…)
        m = m[..., None, :].to(x.dtype)
        if m.shape[:-2] == (parts,):
            return _losses(net(m * x), y).mean(-1)
        outputs = net(m * x.flatten(0, 1))
        return _losses(outputs, y.flatten(0, 1).expand(*outputs.shape[:-1], *y.shape[2:])).mean(-1)

    return gate.estimator(gate.law(x), objective, num_samples=parts, generator=generator)


def _losses(output: Tensor, y: Tensor) -> Tensor:
    """Return a loss for each example: cross-entropy for classes, squared error for numbers."""
    if y.is_floating_point():
        return mse_loss(output, y, reduction="none").mean(-1)
    return cross_entropy(output.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
