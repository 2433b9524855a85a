"""Masks: one budget as a problem, and the rules that answer it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import _check
from ..._math import select
from ...designs import Pivotal
from ...relaxations import hard_topk, sigmoid_topk


class Problem:
    """Choose items by their scores within a budget: `max ⟨x, m⟩` with `Σ c·m = budget`.

    Args:
        x: scores (n,), or (rows, n) with the budget k for each row.
        budget: the number of items, or their costs.
        temperature: of what is soft, in units of scores per cost.
        costs: (n,), or None if each item costs 1.
        seed: of what is random.
    """

    def __init__(self, x: Tensor, budget: float, temperature: Tensor, costs: Tensor | None, seed: int) -> None:
        self.x, self.budget, self.temperature, self.costs = x, budget, temperature, costs
        self.seed = seed
        self._soft: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy the scores as constants: a tensor with a graph cannot be copied."""
        return {**self.__dict__, "x": self.x.detach(), "_soft": None}

    @property
    def is_full(self) -> bool:
        """Whether the budget pays for everything."""
        return self.budget >= (self.x.shape[-1] if self.costs is None else float(self.costs.sum(dtype=torch.float64)))

    def soft(self) -> Tensor:
        """Return σ_k: in [0, 1], with Σ c·m equal to the budget; differentiable in the scores."""
        if self._soft is None:
            if self.is_full:
                self._soft = torch.ones_like(self.x)
            else:
                self._soft = sigmoid_topk(self.x, self.budget, temperature=self.temperature, costs=self.costs)
        return self._soft

    def hard(self, budget: float | None = None) -> Tensor:
        """Return 0 or 1: by falling score per cost, each item that still fits the budget."""
        budget = self.budget if budget is None else budget
        if self.costs is None:
            return hard_topk(self.x, min(int(budget), self.x.shape[-1]))
        return select.greedy(self.x.detach() / self.costs, self.costs, budget).to(self.x.dtype)

    def sample(self) -> Tensor:
        """Draw 0 or 1 within the budget, with the inclusion probabilities `soft()`; near them if costs differ."""
        if self.is_full:
            return torch.ones_like(self.x)
        probs = self.soft().detach().to(torch.float64)
        generator = torch.Generator().manual_seed(self.seed)
        if self.costs is None:
            whole = int(self.budget)
            if whole != self.budget:
                scaled = sigmoid_topk(self.x.detach(), whole, temperature=self.temperature)
                probs = scaled.to(torch.float64)
            return Pivotal(probs, whole, validate_args=False).sample(generator=generator).to(self.x.dtype)
        noise = torch.rand(probs.shape, dtype=probs.dtype, generator=generator).to(probs.device)
        return select.greedy(probs.logit() - noise.logit(), self.costs, self.budget).to(self.x.dtype)


Rule = Callable[[Problem], Tensor]


# ── the mask in training ─────────────────────────────────────────────────────────────────────────────────────────────
def soft(problem: Problem) -> Tensor:
    """Multiply weights by σ_k, with its gradient to the scores."""
    return problem.soft()


def straight_through(problem: Problem) -> Tensor:
    """Multiply weights by the hard mask, with the gradient of σ_k to the scores."""
    return problem.hard()


def sampled(problem: Problem) -> Tensor:
    """Multiply weights by a sample of exactly the budget, with the inclusion probabilities and gradient of σ_k."""
    return problem.sample()


def hard(problem: Problem) -> Tensor:
    """Multiply weights by the hard mask, without a gradient to the scores."""
    return problem.hard()


vars(hard)["has_no_gradient"] = True


# ── the gradient that reaches a weight directly ──────────────────────────────────────────────────────────────────────
def masked_gradient(problem: Problem, mask: Tensor) -> Tensor | None:
    """Give a weight the gradient times its mask: that of the product."""
    return mask


def soft_gradient(problem: Problem, mask: Tensor) -> Tensor | None:
    """Give a weight the gradient times σ_k, whatever the mask is, as Spartan does."""
    return problem.soft().detach()


def dense_gradient(problem: Problem, mask: Tensor) -> Tensor | None:
    """Give every weight its gradient, also if it is masked."""
    return None


@dataclass(frozen=True)
class best_gradient:
    """Give the gradient to the kept items and the best of the others, as Top-KAST does.

    Args:
        extra: how many others, as a share of the total cost of all items, in [0, 1].

    Examples:
        >>> top_kast = dict(mask=khot.nn.sparsity.hard, gradient=khot.nn.sparsity.best_gradient(0.1))
        >>> khot.nn.sparsity.Sparsifier(torch.nn.Linear(8, 8), 0.25, steps=100, **top_kast).density()
        1.0
    """

    extra: float

    def __post_init__(self) -> None:
        _check.fraction("extra", self.extra)

    def __call__(self, problem: Problem, mask: Tensor) -> Tensor | None:
        total = problem.x.shape[-1] if problem.costs is None else float(problem.costs.sum(dtype=torch.float64))
        return problem.hard(problem.budget + self.extra * total)
