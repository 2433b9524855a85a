"""Three ways to search architectures by gradients, re-implemented for comparison: DARTS, DARTS-PT and RARTS.

Each takes a network with `khot.nn.Choice`s, whose masks are set to `softmax(θ)`, and returns a score for every
operation of every choice. `spent` is how often operations may be applied to a batch; `losses` gives the loss on a batch
of the first and of the second half of the training rows. `charge` adds an expected cost to the loss of θ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from khot.nn import Choice, perturbation_scores

Loss = Callable[[nn.Module], Tensor]


def choices_of(model: nn.Module) -> list[Choice]:
    """Return the choices of a network, in order."""
    return [module for module in model.modules() if isinstance(module, Choice)]


def mix(model: nn.Module, scores: Sequence[Tensor]) -> None:
    """Let every choice mix all its operations by the softmax of its scores."""
    for choice, theta in zip(choices_of(model), scores, strict=True):
        choice.given = theta.softmax(-1)


def expected_cost(model: nn.Module) -> Tensor:
    """Return the cost of a network as its masks weigh it."""
    return torch.stack([(choice.given * choice.costs).sum() for choice in choices_of(model)]).sum()


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the weights and the scores of a network."""
    scores = [choice.scores for choice in choices_of(model)]
    ids = {id(theta) for theta in scores}
    return [p for p in model.parameters() if id(p) not in ids], scores


def darts(
    model: nn.Module,
    losses: tuple[Loss, Loss],
    *,
    spent: int,
    rate: float,
    score_rate: float,
    charge: float = 0.0,
) -> list[Tensor]:
    """Alternate a step of the weights on one half of the rows and a step of θ on the other: first-order DARTS.

    Liu, Simonyan and Yang, "DARTS: differentiable architecture search" (2019). The score of an operation is its θ.
    """
    weights, scores = split_parameters(model)
    optimisers = torch.optim.Adam(weights, rate), torch.optim.Adam(scores, score_rate)
    branches = len(choices_of(model)[0].operations)
    for step in range(spent // branches):
        which = step % 2
        mix(model, scores)
        loss = losses[which](model) + (charge * expected_cost(model) if which else 0.0)
        model.zero_grad()
        loss.backward()
        optimisers[which].step()
    mix(model, scores)
    return [theta.detach() for theta in scores]


def darts_pt(
    model: nn.Module,
    losses: tuple[Loss, Loss],
    evaluate: Callable[[nn.Module], float],
    *,
    spent: int,
    rate: float,
    score_rate: float,
    charge: float = 0.0,
) -> list[Tensor]:
    """Train as DARTS, and score an operation by the accuracy that is lost without it.

    Wang et al., "Rethinking architecture selection in differentiable NAS" (2021); without the paper's fine-tuning
    between two choices, and all choices looked at in the same network. `khot.nn.perturbation_scores` does the masking.
    """
    darts(model, losses, spent=spent, rate=rate, score_rate=score_rate, charge=charge)
    model.eval()
    return list(perturbation_scores(model, lambda: evaluate(model)).values())


def rarts(
    model: nn.Module,
    losses: tuple[Loss, Loss],
    *,
    spent: int,
    rate: float,
    score_rate: float,
    charge: float = 0.0,
    pull: float = 1e-3,
) -> list[Tensor]:
    """Search with two copies of the weights, w on one half of the rows and y on the other, and one θ: single-level.

    Xue, Qi and Xin, "RARTS: an efficient first-order relaxed architecture search method" (2020). One step descends
    `L₁(w, θ) + L₂(y, θ) + β/2·‖w − y‖²` in all three, with β = 1e-3.
    """
    other = copy.deepcopy(model)
    weights, scores = split_parameters(model)
    others, _ = split_parameters(other)
    optimisers = torch.optim.Adam([*weights, *others], rate), torch.optim.Adam(scores, score_rate)
    branches = len(choices_of(model)[0].operations)
    for _ in range(spent // (2 * branches)):
        mix(model, scores)
        mix(other, scores)
        apart = sum((w - y).square().sum() for w, y in zip(weights, others, strict=True))
        loss = losses[0](model) + losses[1](other) + pull / 2 * apart + charge * expected_cost(model)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
    return [theta.detach() for theta in scores]
