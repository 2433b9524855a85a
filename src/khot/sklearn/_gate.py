"""The gate, a strategy of `KHotSelector`: scores of all units and a network, trained together."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from .. import _check
from .._process import threads_for
from ..designs import Design, Pivotal
from ..estimators import straight_through_sample
from ..nn import KHotGate, Schedule
from ..relaxations import Relaxation, sigmoid_topk
from ._problem import Choice, Problem

CHECKS = 40  # how many times in `max_steps` the validation rows are evaluated
MASKS = 16  # samples of the gate in a batch, for estimators that want the objective


class Rows(NamedTuple):
    """Examples to train on or to validate with."""

    x: Tensor  # (rows, n), standardised
    y: Tensor  # (rows) classes, or (rows, outputs) numbers
    weight: Tensor  # (rows), > 0


@dataclass(frozen=True)
class Gate:
    """Choose by a gate over all units and a network, trained together.

    The network sees random k-hot samples of the units, whose probabilities are learned, and the size of the samples
    goes from all units down to k. So it finds features that matter only together, and nonlinear effects.

    Args:
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
        annealed: the share of `max_steps` in which the samples' size goes from all units to k.
        validation_fraction: share of the rows that are held out to stop early; they choose the scores too.
        patience: steps without a better validation loss after which training stops.

    With costs, samples have as many units as could fit at most, and the choice takes the highest scores that fit. The
    `history` of the choice has a dict for each evaluation: step, budget, train_loss, validation_loss.

    Examples:
        >>> from khot.sklearn import KHotSelector
        >>> X = np.random.default_rng(0).standard_normal((2000, 20))
        >>> y = X[:, 3] * X[:, 7] > 0  # neither column alone says anything
        >>> KHotSelector(2, strategy=Gate(), random_state=0).fit(X, y).get_feature_names_out()
        array(['x3', 'x7'], dtype=object)
    """

    _: KW_ONLY
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

    def __repr__(self) -> str:
        """Return what differs from the defaults, with functions by their names."""
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        told = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in changed.items())
        return f"{type(self).__name__}({', '.join(told)})"

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "patience"):
            _check.at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "gate_learning_rate"):
            _check.above(name, getattr(self, name), 0)
        _check.positive("temperature", self.temperature)
        _check.fraction("annealed", self.annealed)
        _check.fraction("validation_fraction", self.validation_fraction, is_open=True)
        if not isinstance(self.hidden, (tuple, list)):
            got = type(self.hidden).__name__
            raise TypeError(f"`hidden` must be a tuple of ints, such as (64, 64); got {got}.")
        for i, size in enumerate(self.hidden):
            _check.at_least(f"hidden[{i}]", size, 1)

    def __call__(self, problem: Problem) -> Choice:
        """Return the units with the highest scores."""
        x, weight = torch.from_numpy(problem.x).float(), torch.from_numpy(problem.weight).float()
        targets = problem.y if problem.classes is None else problem.classes
        y = torch.from_numpy(targets) if problem.classes is not None else torch.from_numpy(targets).float()
        outputs = int(y.max()) + 1 if problem.classes is not None else y.shape[1]
        how: dict[str, Any] = {"relaxation": self.relaxation, "design": self.design, "estimator": self.estimator}
        gate = KHotGate(len(problem.units), problem.k, temperature=self.temperature, **how)
        net = _network(x.shape[1], self.hidden, outputs, problem.seed)
        largest = max(part.numel() for part in net.parameters())  # the weights of a layer
        parts = _split(Rows(x, y, weight), self.validation_fraction, problem.seed)
        with threads_for(int(self.batch_size) * largest):
            scores, history = self._train(gate, net, *parts, problem)
        if not scores.isfinite().all():
            raise ValueError("training diverged: scores are not finite. Lower `learning_rate` or `gate_learning_rate`.")
        return by_scores(problem, scores.double().numpy(), tuple(history))

    def _train(
        self, gate: KHotGate, net: nn.Module, examples: Rows, validation: Rows, problem: Problem
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """Return the scores of the least validation loss at the budget k; the last ones if it is not reached.

        The gate's budget goes from n to k: features that matter only together are seen together at first. Rows are
        drawn with replacement, in proportion to their weights.
        """
        max_steps, generator = int(self.max_steps), torch.Generator().manual_seed(problem.seed)
        owner = torch.empty(examples.x.shape[1], dtype=torch.long)
        for u, columns in enumerate(problem.units):
            owner[torch.from_numpy(columns)] = u
        annealing = round(self.annealed * max_steps)
        schedule = Schedule(gate, "budget", len(problem.units), gate.k, steps=annealing)
        rates = ((net, self.learning_rate), (gate, self.gate_learning_rate))
        optimizer = torch.optim.Adam([{"params": part.parameters(), "lr": rate} for part, rate in rates])
        every, best, best_step = max(1, max_steps // CHECKS), float("inf"), annealing
        cumulative = examples.weight.to(torch.float64).cumsum(0)
        losses: list[float] = []
        history: list[dict[str, Any]] = []
        result = torch.tensor(torch.nan)
        for step in range(1, max_steps + 1):
            at = torch.rand(int(self.batch_size), dtype=torch.float64, generator=generator) * cumulative[-1]
            rows = torch.searchsorted(cumulative, at, right=True).clamp_(max=len(cumulative) - 1)
            loss = _loss(gate, net, examples.x[rows], examples.y[rows], owner, generator)
            optimizer.zero_grad()
            loss.backward()
            if all(scores.grad is None for scores in gate.parameters()):
                raise ValueError("`design` and `estimator` must give the scores a gradient; this pair gives none.")
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if step % every and step != max_steps:
                continue
            found, is_final = _evaluate(gate, net, validation, owner), step >= annealing
            if not is_final or found < best or not result.isfinite().all():
                result = gate.get_parameter("scores").detach().clone()
            if is_final and found < best:
                best, best_step = found, step
            means = {"train_loss": sum(losses) / len(losses), "validation_loss": found}
            history.append({"step": step, "steps": max_steps, "budget": int(gate.budget), **means})
            losses = []
            if problem.tell(history[-1]) or step - best_step >= self.patience:
                break
        return result, history


def by_scores(problem: Problem, scores: np.ndarray, history: tuple[dict[str, Any], ...] = ()) -> Choice:
    """Return the units with the highest scores that fit the budget; they get the highest scores."""
    chosen: list[int] = []
    for u in np.argsort(-scores, kind="stable"):
        if problem.purse.room([*chosen, int(u)]) >= 0:
            chosen.append(int(u))
    if not chosen:  # all are too dear
        return Choice((), scores, history)
    skipped = [u for u in np.argsort(-scores, kind="stable") if u not in chosen and scores[u] > scores[chosen].min()]
    if skipped:  # too dear
        scores = scores.copy()
        scores[skipped] = scores[chosen].min() - 1e-9 * (1 + np.arange(len(skipped)))
    return Choice(tuple(sorted(chosen)), scores, history)


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


def _evaluate(gate: KHotGate, net: nn.Module, rows: Rows, owner: Tensor) -> float:
    """Return the mean loss with the k best features alone."""
    gate.eval()
    with torch.no_grad():
        mask = gate.mask(rows.x.new_ones(1, gate.get_parameter("scores").numel()))[:, owner]
        losses = _losses(net(rows.x * mask), rows.y)
    gate.train()
    return float((losses * rows.weight).sum() / rows.weight.sum())


def _loss(gate: KHotGate, net: nn.Module, x: Tensor, y: Tensor, owner: Tensor, generator: torch.Generator) -> Tensor:
    """Return the mean over a batch; an estimator that wants the objective tries every sample on a part of it."""
    if gate.design is None or not gate.takes_objective:
        mask = gate.mask(x.new_ones(len(x), gate.get_parameter("scores").numel()), generator=generator)
        return _losses(net(x * mask[:, owner]), y).mean()
    parts = min(MASKS, len(x))
    x, y = (part[: len(part) // parts * parts].unflatten(0, (parts, -1)) for part in (x, y))

    def objective(m: Tensor) -> Tensor:  # (samples, n) → (samples); control variates ask for π too, (…, n) → (…)
        m = m[..., None, owner].to(x.dtype)
        if m.shape[:-2] == (parts,):
            return _losses(net(m * x), y).mean(-1)
        outputs = net(m * x.flatten(0, 1))
        return _losses(outputs, y.flatten(0, 1).expand(*outputs.shape[:-1], *y.shape[2:])).mean(-1)

    return gate.estimator(
        gate.law(x.new_ones(1, gate.get_parameter("scores").numel())), objective, num_samples=parts, generator=generator
    )


def _losses(output: Tensor, y: Tensor) -> Tensor:
    """Return a loss for each example: cross-entropy for classes, squared error for numbers."""
    if y.is_floating_point():
        return mse_loss(output, y, reduction="none").mean(-1)
    return cross_entropy(output.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
