"""Units that are parts of modules: the heads of attention, the operations of a `Choice`; and several units at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._choice import Choice
from ._structure import set_sizes, take
from ._units import Group, Layers, Masked, Unit


# ── heads ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def heads(inputs: Sequence[str] = ("query", "key", "value"), *, output: str = "output", count: str = "heads") -> Unit:
    """Return a unit: the heads of attention modules, each with its rows of the inputs and its columns of the output.

    It takes every module that has Linear layers of these names and the number of its heads as an attribute. At the end
    heads are removed, and the attribute becomes the number that is left; the module should compute the width of a head
    from the size of its layers. Every module keeps a head at least.

    Args:
        inputs: the names of the layers that project to heads.
        output: the name of the layer after them.
        count: the name of the attribute.
    """
    return _Heads(tuple(inputs), output, count)


@dataclass
class _Heads:
    inputs: tuple[str, ...]
    output: str
    count: str

    def __call__(self, model: nn.Module, layers: Layers) -> list[Group]:
        names = {id(layer): name for name, layer in layers.items()}
        groups = []
        for path, module in model.named_modules():
            children = dict(module.named_children())
            parts = [children[key] for key in (*self.inputs, self.output) if id(children.get(key)) in names]
            if isinstance(getattr(module, self.count, None), int) and len(parts) == len(self.inputs) + 1:
                groups.append(self._group(path, module, [(names[id(part)], part) for part in parts]))
        if not groups:
            what = f"Linear layers {', '.join(map(repr, (*self.inputs, self.output)))} and a number {self.count!r}"
            raise ValueError(f"The model must have a module with {what}, none of them excluded; it has none.")
        return groups

    def _group(self, path: str, module: nn.Module, parts: list[tuple[str, nn.Module]]) -> Group:
        heads = getattr(module, self.count)
        *inputs, (name, last) = parts
        for own, layer in parts:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            size = weight.shape[1 if layer is last else 0]
            if size % heads:
                raise ValueError(f"The width of {own!r} must be a multiple of the {heads} heads; got {size}.")
        masked = [
            Masked(tensor, [(own, layer, key)])
            for own, layer in inputs
            for key in ("weight", "bias")
            if (tensor := getattr(layer, key)) is not None
        ]
        masked.append(Masked(last.weight, [(name, last, "weight")]))  # type: ignore[arg-type]
        slices = HeadSlices(heads, [0] * (len(masked) - 1) + [1], [t.tensor.shape for t in masked])
        structure = Attention(module, self.count, [layer for _, layer in inputs], last)
        return Group(masked, heads, slices.reduce, slices.spread, structure=structure, name=path)


@dataclass
class HeadSlices:
    """An item is a range of rows, or of columns, in each of several tensors."""

    heads: int
    dims: list[int]
    shapes: list[torch.Size]

    def reduce(self, tensors: Sequence[Tensor]) -> Tensor:
        sums = [t.sum(1 - d).view(self.heads, -1).sum(1) for t, d in zip(tensors, self.dims, strict=True) if t.ndim > 1]
        return torch.stack(sums).sum(0)

    def spread(self, items: Tensor) -> list[Tensor]:
        masks = []
        for dim, shape in zip(self.dims, self.shapes, strict=True):
            wide = items.repeat_interleave(shape[dim] // self.heads)
            masks.append(wide if len(shape) == 1 else wide.unsqueeze(1 - dim))
        return masks


@dataclass
class Attention:
    """What is made smaller when heads are removed."""

    module: nn.Module
    count: str
    inputs: list[nn.Module]
    output: nn.Module

    def remove(self, kept: Tensor) -> None:
        """Make the layers smaller; kept (heads,) bool."""
        for layer in self.inputs:
            index = kept.repeat_interleave(len(layer.weight) // len(kept)).nonzero().flatten()  # type: ignore[arg-type]
            take(layer, "weight", 0, index)
            take(layer, "bias", 0, index)
            set_sizes(layer, len(index), "out_features")
        weight: Tensor = self.output.weight  # type: ignore[assignment]
        index = kept.repeat_interleave(weight.shape[1] // len(kept)).nonzero().flatten()
        take(self.output, "weight", 1, index)
        set_sizes(self.output, len(index), "in_features")
        setattr(self.module, self.count, int(kept.sum()))


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
