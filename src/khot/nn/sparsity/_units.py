"""Units: what is chosen. A unit divides the weights of a model into items; an item is kept or dropped as a whole.

A unit is a function of the model and its layers to `Group`s. Those here look at one tensor at a time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import _check

LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
)


@dataclass
class Masked:
    """Hold a tensor that a mask multiplies, with all the places that share it."""

    tensor: nn.Parameter
    places: list[tuple[str, nn.Module, str]]  # the path of the module, the module, the name of the parameter

    @property
    def path(self) -> str:
        """Return the name of the tensor in the model's state dict."""
        path, _, name = self.places[0]
        return f"{path}.{name}" if path else name

    def current(self) -> Tensor:
        """Return the parameter behind the mask, which `fully_shard` replaces."""
        _, module, name = self.places[0]
        masks: Any = getattr(module, "parametrizations", {})
        return masks[name].original if name in masks else self.tensor

    def part(self) -> Tensor:
        """Return the part of the tensor that this process has."""
        tensor: Any = self.tensor
        part: Tensor = tensor.to_local() if _check.is_dtensor(tensor) else tensor
        return part


@dataclass
class Group:
    """Hold items that are chosen among, and how they lie in tensors.

    Args:
        masked: the tensors whose entries they are.
        count: the number of items.
        reduce: entries of the tensors, one tensor each, to a sum for each item, (count,).
        spread: numbers for each item (count,) to a mask for each tensor, that broadcasts to it.
        row: if items are chosen in rows of their own, such as 2 of 4: how many of how many.
        structure: what is made smaller at the end, with a method `remove`; such a group keeps an item at least.
    """

    masked: list[Masked]
    count: int
    reduce: Callable[[Sequence[Tensor]], Tensor]
    spread: Callable[[Tensor], list[Tensor]]
    row: tuple[int, int] | None = None
    structure: Any = None
    name: str = field(default="")

    def __post_init__(self) -> None:
        self.name = self.name or self.masked[0].path


Layers = Mapping[str, nn.Module]
Unit = Callable[[nn.Module, Layers], list[Group]]


def prunable(name: str, module: nn.Module) -> bool:
    """Return whether a module is a layer with weights to choose from: Linear, Conv, Embedding or MultiheadAttention.

    Examples:
        >>> khot.nn.sparsity.prunable("0", torch.nn.Linear(2, 2)), khot.nn.sparsity.prunable("1", torch.nn.ReLU())
        (True, False)
    """
    return isinstance(module, LAYERS)


# ── units within one tensor ──────────────────────────────────────────────────────────────────────────────────────────
def weights(model: nn.Module, layers: Layers) -> list[Group]:
    """Choose among single weights.

    Args:
        model: the model.
        layers: by name, those to choose in.

    Returns:
        A group for each tensor.
    """
    return [_Flat.group(tensor) for tensor in tensors_of(layers)]


def rows(model: nn.Module, layers: Layers) -> list[Group]:
    """Choose among the rows of weights: all that leads to one output; arguments as for `weights`.

    The bias stays. To remove outputs from the model, use `channels`.
    """
    return [_Slices.group(tensor, 0) for tensor in tensors_of(layers)]


def columns(model: nn.Module, layers: Layers) -> list[Group]:
    """Choose among the columns of weights: all that comes from one input; arguments as for `weights`."""
    return [_Slices.group(tensor, 1) for tensor in tensors_of(layers)]


def blocks(size: int) -> Unit:
    """Return a unit: blocks of `size` × `size` weights of the matrix (outputs, inputs); those at the edge are smaller.

    Examples:
        >>> model = torch.nn.Linear(8, 8)
        >>> sparsifier = khot.nn.sparsity.Sparsifier(model, 0.5, steps=0, units=khot.nn.sparsity.blocks(4))
        >>> float(sparsifier.finalize().weight.count_nonzero())
        32.0
    """
    _check.at_least("size", size, 1)
    return _Blocks(int(size))


def n_of_m(n: int, m: int) -> Unit:
    """Return a unit: n of each m weights that follow each other along the inputs; `n_of_m(2, 4)` is 2:4 sparsity.

    The budget is n/m, so `budget` is None.

    Examples:
        >>> model = torch.nn.Linear(8, 2)
        >>> sparsifier = khot.nn.sparsity.Sparsifier(model, None, steps=0, units=khot.nn.sparsity.n_of_m(2, 4))
        >>> sparsifier.finalize().weight.count_nonzero(1)
        tensor([4, 4])
    """
    _check.at_least("m", m, 1)
    _check.integer_at_most("n", n, m, "m")
    _check.at_least("n", n, 1)
    return _Pattern(int(n), int(m))


def own_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a layer by name: `weight`, or the projections into attention, packed as one or not."""
    keys = ["weight"]
    if isinstance(module, nn.MultiheadAttention):
        keys = ["in_proj_weight"] if module.in_proj_weight is not None else [f"{c}_proj_weight" for c in "qkv"]
    return {key: getattr(module, key, None) for key in keys}  # type: ignore[misc]


def tensors_of(layers: Layers) -> list[Masked]:
    """Return the weights of layers; a tensor that several layers share comes once, with all its places."""
    found: dict[int, Masked] = {}
    for path, module in layers.items():
        for key, weight in own_weights(module).items():
            found.setdefault(id(weight), Masked(weight, [])).places.append((path, module, key))
    return list(found.values())


def shards(group: Group) -> Group:
    """Return a group of single weights for this process's shard of its tensor."""
    masked = group.masked[0]
    own = _Flat(masked.part().shape)
    return Group([masked], own.shape.numel(), own.reduce, own.spread, name=group.name)


@dataclass
class _Flat:
    """Every entry is an item. These are classes and not closures, so that a model with masks can be copied."""

    shape: torch.Size

    @classmethod
    def group(cls, masked: Masked, row: tuple[int, int] | None = None) -> Group:
        own = cls(masked.tensor.shape)
        return Group([masked], masked.tensor.numel(), own.reduce, own.spread, row)

    def reduce(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].reshape(-1)

    def spread(self, items: Tensor) -> list[Tensor]:
        return [items.view(self.shape)]


@dataclass
class _Slices:
    """An item is a slice along a dim."""

    ndim: int
    dim: int

    @classmethod
    def group(cls, masked: Masked, dim: int) -> Group:
        own = cls(masked.tensor.ndim, dim)
        return Group([masked], masked.tensor.shape[dim], own.reduce, own.spread)

    def reduce(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(0, self.dim).flatten(1).sum(1)

    def spread(self, items: Tensor) -> list[Tensor]:
        return [items.view([-1 if d == self.dim else 1 for d in range(self.ndim)])]


@dataclass
class _Blocks:
    """An item is a square of the matrix (outputs, the rest)."""

    size: int

    def __call__(self, model: nn.Module, layers: Layers) -> list[Group]:
        groups = []
        for masked in tensors_of(layers):
            own = _Grid(self.size, masked.tensor.shape)
            groups.append(Group([masked], math.prod(own.counts), own.reduce, own.spread))
        return groups


@dataclass
class _Grid:
    size: int
    shape: torch.Size

    def __post_init__(self) -> None:
        self.matrix = self.shape[0], math.prod(self.shape[1:])
        self.counts = [-(-side // self.size) for side in self.matrix]

    def reduce(self, tensors: Sequence[Tensor]) -> Tensor:
        t = tensors[0].reshape(self.matrix)
        down, right = (-side % self.size for side in self.matrix)
        padded = nn.functional.pad(t, (0, right, 0, down))
        return padded.view(self.counts[0], self.size, self.counts[1], self.size).sum((1, 3)).reshape(-1)

    def spread(self, items: Tensor) -> list[Tensor]:
        grid = items.view(self.counts)
        for dim, side in enumerate(self.matrix):
            grid = grid.repeat_interleave(self.size, dim).narrow(dim, 0, side)
        return [grid.reshape(self.shape)]


@dataclass
class _Pattern:
    n: int
    m: int

    def __call__(self, model: nn.Module, layers: Layers) -> list[Group]:
        found = tensors_of(layers)
        for masked in found:
            inputs = masked.tensor[0].numel()
            if inputs % self.m:
                wrong = f"The inputs of {masked.path!r} must be a multiple of m = {self.m}; got {inputs}."
                raise ValueError(f"{wrong} Leave it out with `exclude`.")
        return [_Flat.group(masked, (self.n, self.m)) for masked in found]
