"""Masks: one budget as a problem, the rules that answer it, and how an answer multiplies the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ... import _check
from ..._math import select
from ...designs import Pivotal
from ...relaxations import hard_topk, sigmoid_topk

if TYPE_CHECKING:
    from ._sparsifier import Sparsifier


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


# ── from items to weights ────────────────────────────────────────────────────────────────────────────────────────────
class Answers(torch.autograd.Function):
    """Give masks their own gradient graph, which survives any number of backward passes.

    `answer` maps leaves to masks and to what their gradient flows through. It runs once; its graph is kept with the
    masks, until the next ones. So a model may be called several times between two steps, in any order of backward
    passes. The leaves must not change meanwhile; autograd checks that.
    """

    @staticmethod
    def forward(
        ctx: Any, answer: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with torch.enable_grad():
            masks, ctx.sources = answer(*ctx.leaves)
        ctx.set_materialize_grads(False)
        return tuple(mask.detach() for mask in masks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [
            (source, g.to(source.dtype))
            for source, g in zip(ctx.sources, gradients, strict=True)
            if g is not None and source.requires_grad
        ]
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        if not pairs:
            return (None,) * (len(ctx.leaves) + 1)
        sources, cotangents = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(sources, wanted, cotangents, retain_graph=True, allow_unused=True))
        return (None, *(next(found) if leaf.requires_grad else None for leaf in ctx.leaves))


class _Product(torch.autograd.Function):
    """Multiply weights by a mask; the gradient of the weights is that of the product times `flow`, or all of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, flow: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, flow)
        return weight * mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, flow = ctx.saved_tensors
        to_mask = g * weight if ctx.needs_input_grad[1] else None
        return g if flow is None else g * flow, to_mask, None


class Mask(nn.Module):
    """The parametrization of a tensor: it multiplies by the mask of the sparsifier, in evaluation by the hard one."""

    def __init__(self, owner: "Sparsifier", tensor: Tensor) -> None:
        super().__init__()
        self.owner = owner
        self.mask = self.kept = torch.ones((), dtype=tensor.dtype, device=tensor.device)
        self.flow: Tensor | None = None
        self.is_plain = True  # whether the gradient of a weight is that of the product
        self.gradient: Tensor | None = None

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return weight * _broadcast(self.kept, weight)
        mask = _broadcast(self.mask, weight)
        if self.is_plain:
            result = weight * mask
        else:
            result = _Product.apply(weight, mask, None if self.flow is None else _broadcast(self.flow, weight))
        if self.owner.wants_gradient and result.requires_grad:
            result.register_hook(self._keep)
        return result

    def _keep(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach().abs()

    def train(self, mode: bool = True) -> "Mask":
        super().train(mode)
        if not mode:
            self.owner.refresh_kept()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copy masks as constants: a tensor with a graph cannot be copied. The next step computes them anew."""
        state = self.__dict__.copy()
        state.update(mask=self.mask.detach(), gradient=None)
        return state


def _broadcast(mask: Tensor, weight: Tensor) -> Tensor:
    return mask if mask.dtype == weight.dtype else mask.to(weight.dtype)
