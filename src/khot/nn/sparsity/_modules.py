"""Units that are parts of modules, the operations of a `Choice`; and several units at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._choice import Choice
from ._units import Group, Layers, Masked, Unit


# ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────
def choices(model: nn.Module, layers: Layers) -> list[Group]:
    """Choose among the operations of all `khot.nn.Choice`s of a model, with one budget of their costs.

    Each Choice keeps its k, and the total cost is at most the budget: m = σ_k((θ − λ·c)/T), with the price λ ≥ 0 that
    the budget needs. Arguments as for `weights`; the layers are not used.

    Returns:
        A group for each Choice.
    """
    groups = []
    for name, module in model.named_modules():
        if isinstance(module, Choice):
            n = len(module.operations)
            ones = nn.Parameter(torch.ones_like(module.scores), requires_grad=False)
            masked = Masked(ones, [(name, module, "mask")])
            groups.append(Group([masked], n, _first, _alone, structure=module, name=name or "the model"))
    if not groups:
        raise ValueError("The model must have a `khot.nn.Choice`; it has none.")
    return groups


vars(choices)["needs_no_layers"] = True


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _alone(items: Tensor) -> list[Tensor]:
    return [items]


# ── several units ────────────────────────────────────────────────────────────────────────────────────────────────────
def combine(*units: Unit) -> Unit:
    """Return a unit that applies several, such as `combine(heads(), channels)`: each takes of the layers left over."""
    if not units:
        raise ValueError("`combine` must be given at least one unit, such as `heads()`; got none.")
    return _Combined(units)


@dataclass
class _Combined:
    units: tuple[Unit, ...]

    def __call__(self, model: nn.Module, layers: Layers) -> list[Group]:
        groups: list[Group] = []
        left = dict(layers)
        for unit in self.units:
            groups += unit(model, left)
            taken = {path for group in groups for masked in group.masked for path, _, _ in masked.places}
            left = {name: module for name, module in left.items() if name not in taken}
        return groups
