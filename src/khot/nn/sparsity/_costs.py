"""Costs: what is counted. And shares: how the budget is divided among the layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import _check
from .._choice import Choice
from ._structure import Space
from ._units import Group, own_weights

Shapes = Mapping[str, list[tuple[int, ...]]]  # of a module's outputs by its path: one for each call
Cost = Callable[[nn.Module, str, Sequence[tuple[int, ...]]], float]
Divide = Callable[[list[Group], list[float], float | None], list[tuple[list[Group], float]]]


def parameters(module: nn.Module, name: str, shapes: Sequence[tuple[int, ...]] = ()) -> float:
    """Return the number of weights of a tensor.

    Args:
        module: the layer.
        name: its name in the model.
        shapes: of its outputs, in an example; not used.

    Examples:
        >>> khot.nn.sparsity.parameters(torch.nn.Linear(3, 4), "layer")
        12
    """
    return sum(weight.numel() for weight in own_weights(module).values())


@dataclass
class Flops:
    """Count the floating-point operations of one example: two for each weight and place where it is used.

    Biases, norms and the products of attention have no weights to choose from, and are not counted.

    Args:
        example: an input of the model, or a tuple of them; the first dim is the batch. It is run once, in evaluation
            mode, to see the shapes.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> cost = khot.nn.sparsity.Flops(torch.zeros(1, 1, 4, 4))
        >>> khot.nn.sparsity.Sparsifier(model, 1.0, steps=0, cost=cost).cost()
        192.0
    """

    example: Any

    def __call__(self, module: nn.Module, name: str, shapes: Sequence[tuple[int, ...]]) -> float:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return 0  # a look-up
        if isinstance(module, nn.MultiheadAttention):
            if len({shape[1:-1] for shape in shapes}) > 1:
                raise ValueError(f"{name!r} has a query and keys of different lengths. Leave it out with `exclude`.")
            return 2 * parameters(module, name) * sum(torch.Size(shape[1:-1]).numel() for shape in shapes) // 3
        weight: Tensor = module.weight  # type: ignore[assignment]
        if isinstance(module, nn.Linear):
            return int(sum(2 * weight.numel() * torch.Size(shape[1:-1]).numel() for shape in shapes))
        where = (3 if weight.ndim == 3 else weight.ndim) - 2  # the spatial dims of a convolution
        return int(sum(2 * weight.numel() * torch.Size(shape[len(shape) - where :]).numel() for shape in shapes))


@dataclass
class Latency:
    """Count what a table of your own says, such as milliseconds that you measured.

    Args:
        table: the cost of each layer when it is dense, by the name of the module.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> cost = khot.nn.sparsity.Latency({"0": 3.0, "1": 1.0})
        >>> khot.nn.sparsity.Sparsifier(model, 1.0, steps=0, cost=cost).cost()
        4.0
    """

    table: Mapping[str, float]

    def __call__(self, module: nn.Module, name: str, shapes: Sequence[tuple[int, ...]]) -> float:
        if name not in self.table:
            raise ValueError(f"`table` must have the cost of every layer; {name!r} is missing. Add or exclude it.")
        return self.table[name]


def traced(model: nn.Module, layers: Mapping[str, nn.Module], example: Any) -> Shapes:
    """Return the shapes of the outputs of layers in one run on an example, by name; one for each call."""
    inputs = example if isinstance(example, tuple) else (example,)
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
            if isinstance(module, nn.MultiheadAttention):  # what is projected; its last layer is not called by itself
                given = (*inputs, *(options[key] for key in ("query", "key", "value") if key in options))
                shapes[name] += [tuple(t.shape) for t in given[:3]]
                shapes.get(f"{name}.out_proj".lstrip("."), []).append(tuple(output[0].shape))
            else:
                shapes[name].append(tuple(output.shape))

        return hook

    handles = [module.register_forward_hook(record(name), with_kwargs=True) for name, module in layers.items()]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs)
    except Exception as error:
        raise ValueError(
            f"The model must accept the example of `cost`; it raised {type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    missing = [name for name in layers if not shapes[name]]
    if missing:
        raise ValueError(f"Every layer must be used in the example of `cost`; {missing[0]!r} was not. Exclude it.")
    return shapes


# ── how the budget is divided ────────────────────────────────────────────────────────────────────────────────────────
def globally(groups: list[Group], totals: list[float], budget: float | None) -> list[tuple[list[Group], float]]:
    """Let all layers share one budget.

    Args:
        groups: of items.
        totals: the cost of each group if all of it is kept.
        budget: for all of them.

    Returns:
        Groups that share a budget, with that budget.
    """
    return [(groups, _given(budget))]


def uniformly(groups: list[Group], totals: list[float], budget: float | None) -> list[tuple[list[Group], float]]:
    """Give each layer the same share of its cost; arguments as for `globally`."""
    fraction = _given(budget) / sum(totals)
    return [([group], fraction * total) for group, total in zip(groups, totals, strict=True)]


def by_erdos_renyi(groups: list[Group], totals: list[float], budget: float | None) -> list[tuple[list[Group], float]]:
    """Give each layer a density in proportion to (sum of its sizes)/(product of its sizes): small layers stay denser.

    A layer that would be more than dense is dense, and the others share the rest. Arguments as for `globally`.
    Reference: the Erdős–Rényi kernel of Evci et al. (2020).
    """
    left, shares = _given(budget), [0.0] * len(groups)
    raw = [sum(group.masked[0].tensor.shape) / group.masked[0].tensor.numel() for group in groups]
    free = set(range(len(groups)))
    while free:
        scale = left / sum(raw[i] * totals[i] for i in free)
        full = {i for i in free if scale * raw[i] >= 1}
        for i in full or free:
            shares[i] = totals[i] if full else scale * raw[i] * totals[i]
        left -= sum(totals[i] for i in full)
        free = free - full if full else set()
    return [([group], share) for group, share in zip(groups, shares, strict=True)]


@dataclass(frozen=True)
class by_layer:
    """Give each layer its own share of its cost; `budget` is then None.

    Args:
        fractions: by the name of the module; a layer that is not named stays dense.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> share = khot.nn.sparsity.by_layer({"0": 0.25, "1": 0.5})
        >>> khot.nn.sparsity.Sparsifier(model, None, steps=0, share=share).density()
        0.375
    """

    fractions: Mapping[str, float]

    def __call__(
        self, groups: list[Group], totals: list[float], budget: float | None
    ) -> list[tuple[list[Group], float]]:
        if budget is not None:
            raise ValueError(f"`budget` must be None with `by_layer`, which gives each layer its own; got {budget}.")
        known = {path: i for i, group in enumerate(groups) for masked in group.masked for path, _, _ in masked.places}
        shares = list(totals)
        for name, fraction in self.fractions.items():
            if name not in known:
                raise ValueError(f"`fractions` must name layers ({', '.join(map(repr, known))}); got {name!r}.")
            _check.fraction(f"fractions[{name!r}]", fraction)
            shares[known[name]] = fraction * totals[known[name]]
        return [([group], share) for group, share in zip(groups, shares, strict=True)]


def _given(budget: float | None) -> float:
    if budget is None:
        raise ValueError("`budget` must be a number; None is for `n_of_m` and `by_layer`, which imply it.")
    return budget


def item_costs(group: Group, prices: Mapping[int, float]) -> Tensor | float:
    """Return the cost of each item of a group (count,), or one number if all cost the same.

    `prices` are those of a weight, by the id of its tensor; what has none, such as a bias, costs nothing.
    """
    if isinstance(group.structure, Choice):
        return group.structure.costs.cpu()
    tensors = [masked.tensor for masked in group.masked]
    if len(tensors) == 1 and group.count == tensors[0].numel():
        return float(prices[id(tensors[0])])
    filled = [torch.full(t.shape, prices.get(id(t), 0.0), dtype=torch.float64) for t in tensors]
    costs = group.reduce(filled)
    return float(costs[0]) if bool((costs == costs[0]).all()) else costs


class Charge:
    """Compute what masks cost if dropped channels make layers smaller on both sides: Σ price·Π Σ m.

    A layer costs (inputs kept)·(outputs kept). It is linear in the mask of each group.

    Args:
        groups: in the order of their items.
        prices: of a weight, by the id of its tensor.
        layers: all that are counted, by name.
    """

    def __init__(self, groups: list[Group], prices: Mapping[int, float], layers: Mapping[str, nn.Module]) -> None:
        self.terms: dict[int, tuple[float, list[slice]]] = {}  # by layer: the price, and which items it is times of
        self.linear: list[tuple[Tensor | float, slice]] = []
        self.groups, start, spaces = [], 0, []
        for group in groups:
            place = slice(start, start + group.count)
            self.groups.append(place)
            start += group.count
            if isinstance(group.structure, Space):
                spaces.append((group.structure, place))
            else:
                self.linear.append((item_costs(group, prices), place))
        others = [group for group in groups if not isinstance(group.structure, Space)]
        owned = {path for group in others for masked in group.masked for path, _, _ in masked.places}
        for name, module in layers.items():
            if name in owned:
                continue
            touching = [(space.size, place) for space, place in spaces for m in space.layers() if m is module]
            whole = sum(prices[id(weight)] * weight.numel() for weight in own_weights(module).values())
            each = whole / math.prod(size for size, _ in touching)
            self.terms[id(module)] = (each, [place for _, place in touching])

    def __call__(self, m: Tensor) -> Tensor:
        """Return the cost of masks (n,), in float64, differentiable."""
        wide = m.to(torch.float64)
        total = wide.new_zeros(())
        for price, factors in self.terms.values():
            product = torch.full_like(total, price)
            for part in factors:
                product = product * wide[part].sum()
            total = total + product
        for costs, part in self.linear:
            total = total + (wide[part] * (costs.to(wide.device) if isinstance(costs, Tensor) else costs)).sum()
        return total
