"""Masks: one budget as a problem, and the rules that answer it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import _check
from ..._math import budgets
from ...designs import Pivotal
from ...relaxations import hard_topk, sigmoid_topk


def snapped(budget: float) -> float:
    """Return the integer that a budget is but for rounding, such as 29 for 0.29·100; else the budget."""
    nearest = round(budget)
    return float(nearest) if abs(budget - nearest) <= 1e-9 * max(1.0, abs(budget)) else float(budget)


class Problem:
    """Choose items by their scores within a budget: `max ⟨x, m⟩` with `Σ c·m = budget`.

    Args:
        x: scores (n,), or (rows, n) with the budget k for each row.
        budget: the number of items, or their costs.
        temperature: of what is soft, in units of scores per cost.
        costs: (n,), or None if each item costs 1.
        seed: of what is random.
        group: the process groups over which the items are divided, if they are.
        count: the number of all items then.
    """

    def __init__(
        self,
        x: Tensor,
        budget: float,
        temperature: Tensor,
        costs: Tensor | None,
        seed: int,
        *,
        group: list[str] | None = None,
        count: int | None = None,
    ) -> None:
        self.x, self.budget, self.temperature, self.costs = x, snapped(budget), temperature, costs
        self.seed, self.group, self.count = seed, group, x.shape[-1] if count is None else count
        self._soft: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy the scores as constants: a tensor with a graph cannot be copied."""
        return {**self.__dict__, "x": self.x.detach(), "_soft": None}

    @property
    def total(self) -> float:
        """Return the cost of everything."""
        return self.count if self.costs is None else float(self.costs.sum(dtype=torch.float64))

    @property
    def is_full(self) -> bool:
        """Return whether the budget pays for everything."""
        return self.budget >= self.total

    def soft(self) -> Tensor:
        """Return σ_k: in [0, 1], with Σ c·m equal to the budget; differentiable in the scores."""
        if self._soft is None:
            if self.is_full:
                self._soft = torch.ones_like(self.x)
            else:
                how: dict[str, Any] = {"temperature": self.temperature, "costs": self.costs, "group": self.group}
                self._soft = sigmoid_topk(self.x, self.budget, **how)
        return self._soft

    def hard(self, budget: float | None = None) -> Tensor:
        """Return 0 or 1: by falling score per cost, each item that still fits the budget."""
        budget = self.budget if budget is None else budget
        if self.costs is None:
            return hard_topk(self.x, min(int(snapped(budget)), self.count), group=self.group)
        return budgets.greedy(self.x.detach() / self.costs, self.costs, budget).to(self.x.dtype)

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
        return budgets.greedy(probs.logit() - noise.logit(), self.costs, self.budget).to(self.x.dtype)


class ChargedProblem(Problem):
    """Choose items whose total cost is any rising function of the mask, such as that of channels.

    `soft` is σ_k with the costs that items have when all are kept, at the budget for which `charge` is as asked for.

    Args:
        x, budget, temperature, costs, seed: as for `Problem`.
        charge: the cost of masks (n,), linear in the mask of each group, and rising.
        groups: the items of each group; a group keeps one at least.
    """

    def __init__(
        self,
        x: Tensor,
        budget: float,
        temperature: Tensor,
        costs: Tensor,
        seed: int,
        *,
        charge: Callable[[Tensor], Tensor],
        groups: list[slice],
    ) -> None:
        super().__init__(x, budget, temperature, costs, seed)
        self.charge, self.groups = charge, groups

    @property
    def total(self) -> float:
        return float(self.charge(torch.ones_like(self.x)))

    def soft(self) -> Tensor:
        if self._soft is None:
            self._soft = torch.ones_like(self.x) if self.is_full else self._solve()
        return self._soft

    def _solve(self) -> Tensor:
        assert self.costs is not None
        x, costs = self.x.to(torch.float64), self.costs.to(torch.float64)

        def mask(x: Tensor, linear: float | Tensor) -> Tensor:
            return sigmoid_topk(x, linear, temperature=self.temperature, costs=costs)

        def missing(linear: float) -> float:
            with torch.no_grad():
                return self.budget - float(self.charge(mask(x, linear)))

        top = float(costs.sum())
        linear = torch.tensor(budgets.falling_root(missing, 0.0, top, 1e-9 * self.budget), dtype=torch.float64)
        # The budget of σ_k depends on the scores: one Newton step at the root has its derivative.
        at = linear.clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.charge(mask(x.detach(), at)), at)
        off = self.charge(mask(x, linear)) - self.budget
        return mask(x, linear - (off - off.detach()) / slope).to(self.x.dtype)

    def hard(self, budget: float | None = None) -> Tensor:
        assert self.costs is not None
        budget = self.budget if budget is None else budget
        ratio = self.x.detach() / self.costs
        for part in self.groups:  # the best of each group comes first
            ratio[part.start + int(ratio[part].argmax())] = torch.inf
        return budgets.charged(ratio, self.charge, budget).to(self.x.dtype)

    def sample(self) -> Tensor:
        if self.is_full:
            return torch.ones_like(self.x)
        generator = torch.Generator().manual_seed(self.seed)
        probs = self.soft().detach().to(torch.float64)
        noise = torch.rand(probs.shape, dtype=probs.dtype, generator=generator).to(probs.device)
        keys = probs.logit() - noise.logit()
        for part in self.groups:
            keys[part.start + int(keys[part].argmax())] = torch.inf
        return budgets.charged(keys, self.charge, self.budget).to(self.x.dtype)


class PricedProblem(Problem):
    """Choose k of each group, at a total cost of at most the budget: `max Σ x·m` with `Σ m = k` in each group.

    `soft` is σ_k((x − λ·c)/T) in each group, with the price λ ≥ 0 at which the cost is the budget, or 0.

    Args:
        x, budget, temperature, costs, seed: as for `Problem`.
        groups: the items of each group.
        sizes: k of each group.
    """

    def __init__(
        self,
        x: Tensor,
        budget: float,
        temperature: Tensor,
        costs: Tensor,
        seed: int,
        *,
        groups: list[slice],
        sizes: list[int],
    ) -> None:
        super().__init__(x, budget, temperature, costs, seed)
        self.groups, self.sizes = groups, sizes

    def _masks(self, x: Tensor) -> Tensor:
        parts = zip(self.groups, self.sizes, strict=True)
        return torch.cat([sigmoid_topk(x[part], k, temperature=self.temperature) for part, k in parts])

    def _chosen(self, x: Tensor) -> Tensor:
        return torch.cat([hard_topk(x[part], k) for part, k in zip(self.groups, self.sizes, strict=True)])

    def _price(self, masks: Callable[[Tensor], Tensor]) -> float:
        """Return the smallest price λ ≥ 0 at which the masks are within the budget."""
        assert self.costs is not None
        x, costs = self.x.detach().to(torch.float64), self.costs.to(torch.float64)

        def excess(price: float) -> float:
            return float((masks(x - price * costs) * costs).sum()) - self.budget

        if excess(0.0) <= 0:
            return 0.0
        high = 1.0
        while excess(high) > 0:
            high *= 2
            if high > 1e30:  # the cheapest cost the budget, and rounding is in the way
                break
        return budgets.falling_root(excess, 0.0, high, 1e-9 * self.budget)

    def soft(self) -> Tensor:
        if self._soft is None:
            assert self.costs is not None
            price, costs = self._price(self._masks), self.costs.to(torch.float64)
            x = self.x.to(torch.float64)
            if price == 0:
                self._soft = self._masks(x).to(self.x.dtype)
            else:
                at = torch.tensor(price, dtype=torch.float64, requires_grad=True)
                with torch.enable_grad():
                    (slope,) = torch.autograd.grad((self._masks(x.detach() - at * costs) * costs).sum(), at)
                off = (self._masks(x - price * costs) * costs).sum()
                self._soft = self._masks(x - (price - (off - off.detach()) / slope) * costs).to(self.x.dtype)
        return self._soft

    def hard(self, budget: float | None = None) -> Tensor:
        assert self.costs is not None
        x, costs = self.x.detach().to(torch.float64), self.costs.to(torch.float64)
        kept = self._chosen(x - self._price(self._chosen) * costs) > 0
        left = self.budget - float(costs[kept].sum())
        return budgets.exchanged(kept, x, costs, left, self.groups).to(self.x.dtype)

    def sample(self) -> Tensor:
        """Draw k of each group with the inclusion probabilities `soft()`; the cost is the budget on average."""
        generator = torch.Generator().manual_seed(self.seed)
        probs, draws = self.soft().detach().to(torch.float64), []
        for part, k in zip(self.groups, self.sizes, strict=True):
            draws.append(Pivotal(probs[part], k, validate_args=False).sample(generator=generator))
        return torch.cat(draws).to(self.x.dtype)


Rule = Callable[[Problem], Tensor]


# ── the mask in training ─────────────────────────────────────────────────────────────────────────────────────────────
def soft(problem: Problem) -> Tensor:
    """Multiply weights by σ_k, with its gradient to the scores.

    What is kept at the end keeps its soft mask too: it is multiplied into the weights when masks are frozen.
    """
    return problem.soft()


vars(soft)["is_folded"] = True


def straight_through(problem: Problem) -> Tensor:
    """Multiply weights by the hard mask, with the gradient of σ_k to the scores."""
    return problem.hard()


def sampled(problem: Problem) -> Tensor:
    """Multiply weights by a sample of exactly the budget, with the inclusion probabilities and gradient of σ_k."""
    return problem.sample()


def hard(problem: Problem) -> Tensor:
    """Multiply weights by the hard mask, without a gradient to the scores."""
    return problem.hard()


def drawn(problem: Problem) -> Tensor:
    """Multiply weights by a sample, as `sampled` does, without a gradient to the scores; see `Choice.log_prob`."""
    return problem.sample()


vars(hard)["has_no_gradient"] = vars(drawn)["has_no_gradient"] = True


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
        return problem.hard(problem.budget + self.extra * problem.total)
