"""Train a gate and a network together: which k features does a prediction need?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ..nn import KHotGate, Schedule

CHECKS = 40
"""How many times in `max_steps` the validation rows are evaluated."""
MASKS = 16
"""Samples of the gate in a batch, for estimators that want the objective."""


class Rows(NamedTuple):
    """Examples to train on or to validate with."""

    x: Tensor
    """(rows, n), standardised"""
    y: Tensor
    """(rows) classes, or (rows, outputs) numbers"""
    weight: Tensor
    """(rows), ≥ 0"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of training."""

    hidden: tuple[int, ...]
    max_steps: int
    batch_size: int
    learning_rate: float
    gate_learning_rate: float
    annealed: float
    """The share of `max_steps` in which the budget goes from n to k."""
    patience: int
    """Steps without a better validation loss after which training ends, once the budget is k."""


class Progress(NamedTuple):
    """The state of training at an evaluation."""

    step: int
    budget: int
    """How many features the gate lets through now; k at the end."""
    train_loss: float
    """Of the batches since the last time, with the gate's samples."""
    validation_loss: float
    """With the k best features alone."""
    scores: Tensor
    """(n)"""
    is_final: bool
    """The budget has come down to k for good."""


def network(n: int, hidden: tuple[int, ...], outputs: int, seed: int) -> nn.Sequential:
    """Return a multilayer perceptron whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(n, size), nn.ReLU()]
            n = size
        return nn.Sequential(*layers, nn.Linear(n, outputs))


def train(
    examples: Rows, validation: Rows, gate: KHotGate, net: nn.Module, plan: Plan, seed: int
) -> Iterator[Progress]:
    """Train until the validation loss no longer falls, and yield the progress at each evaluation.

    The gate's budget goes from n to k: features that matter only together are seen together at first. Rows are drawn
    with replacement, in proportion to their weights.
    """
    n, generator = examples.x.shape[1], torch.Generator().manual_seed(seed)
    annealing = round(plan.annealed * plan.max_steps)
    schedule = Schedule(gate, "budget", n, gate.k, steps=annealing)
    optimizer = torch.optim.Adam(
        [
            {"params": net.parameters(), "lr": plan.learning_rate},
            {"params": gate.parameters(), "lr": plan.gate_learning_rate},
        ]
    )
    every, best, best_step = max(1, plan.max_steps // CHECKS), float("inf"), annealing
    losses: list[float] = []
    cumulative = examples.weight.to(torch.float64).cumsum(0)
    for step in range(1, plan.max_steps + 1):
        at = torch.rand(plan.batch_size, dtype=torch.float64, generator=generator) * cumulative[-1]
        rows = torch.searchsorted(cumulative, at, right=True).clamp_(max=len(cumulative) - 1)
        loss = _loss(gate, net, examples.x[rows], examples.y[rows], generator)
        optimizer.zero_grad()
        loss.backward()
        if all(scores.grad is None for scores in gate.parameters()):
            raise ValueError("`design` and `estimator` must give the scores a gradient; this pair gives none.")
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % every == 0 or step == plan.max_steps:
            found = evaluate(gate, net, validation)
            is_final = step >= annealing
            if is_final and found < best:
                best, best_step = found, step
            scores = gate.scores_of(examples.x).detach().clone()
            yield Progress(step, int(gate.budget), sum(losses) / len(losses), found, scores, is_final)
            losses = []
            if step - best_step >= plan.patience:
                return


def evaluate(gate: KHotGate, net: nn.Module, rows: Rows) -> float:
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
