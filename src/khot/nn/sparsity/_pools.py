"""Pools: items that share a budget, their costs, and how they are found in a model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral

import torch
from torch import Tensor, nn

from ... import _check
from .._choice import Choice
from ._costs import Charge, Cost, Divide, Flops, globally, item_costs, parameters, traced
from ._masks import ChargedProblem, PricedProblem, Problem, snapped
from ._units import Group, Layers, Masked, Unit, own_weights


@dataclass
class Pool:
    """Hold groups that share a budget."""

    groups: list[Group]
    thetas: list[nn.Parameter]
    costs: Tensor | None  # (n,) of all items, or None if each costs the same
    price: float  # what an item costs, if all cost the same; else 1
    final: float  # the budget at the end
    total: float  # the cost of everything
    row: tuple[int, int] | None
    charge: Charge | None = None  # of masks, if their costs are not a sum
    values: Tensor | None = None  # (n,), the mask in force
    problem: Problem | None = None  # that it answers
    group: list[str] | None = None  # the process groups over which items are divided, if they are
    unit: float | None = None  # of the temperature; None to measure it when the mask is computed next

    @property
    def has_choices(self) -> bool:
        """Return whether items are operations of `Choice`s, whose scores are not divided by their costs."""
        return isinstance(self.groups[0].structure, Choice)

    @property
    def counts(self) -> list[int]:
        return [group.count for group in self.groups]

    def measure(self, x: Tensor) -> float:
        """Return the unit of the temperature: Σ m·x / Σ m·c, the score per cost of what the mask in force keeps."""
        if self.unit is None:
            m = torch.ones_like(x) if self.values is None else self.values.to(x)
            whole = m if self.costs is None or self.has_choices else m * self.costs.to(x)
            self.unit = max(self.sum(m * x) / self.sum(whole), torch.finfo(x.dtype).tiny)
        return self.unit

    def budget(self, rest: float) -> float:
        """Return the budget if the share `rest` of what is to be dropped is still kept."""
        return self.final + rest * (self.total - self.final)

    def pose(self, x: Tensor, rest: float, heat: Tensor, seed: int) -> Problem:
        """Return the problem for scores x (n,); `rest` is the share of what is to be dropped that is still kept."""
        if self.row is not None:
            n, m = self.row
            return Problem(x.view(-1, m), n + rest * (m - n), heat, None, seed)
        budget = self.budget(rest)
        if self.costs is None:
            count = round(self.total / self.price)
            return Problem(x, budget / self.price, heat, None, seed, group=self.group, count=count)
        costs = self.costs.to(x.device, x.dtype)
        if self.has_choices:
            sizes = [group.structure.k for group in self.groups]
            return PricedProblem(x, budget, heat, costs, seed, groups=self.slices, sizes=sizes)
        if self.charge is not None:
            return ChargedProblem(x, budget, heat, costs, seed, charge=self.charge, groups=self.slices)
        return Problem(x, budget, heat, costs, seed)

    @property
    def slices(self) -> list[slice]:
        """Return the items of each group."""
        ends = list(accumulate(self.counts))
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]

    def parts(self) -> list[tuple[Group, Tensor]]:
        """Return each group with its part of the mask in force."""
        assert self.values is not None
        return list(zip(self.groups, self.values.split(self.counts), strict=True))

    def spread(self, items: Tensor) -> list[Tensor]:
        """Return a mask for each tensor, from numbers for each item (n,)."""
        parts = zip(self.groups, items.split(self.counts), strict=True)
        return [mask for group, part in parts for mask in group.spread(part)]

    @property
    def masked(self) -> list[Masked]:
        return [masked for group in self.groups for masked in group.masked]

    def cost_of(self, values: Tensor) -> float:
        """Return Σ c·m in float64."""
        m = values.detach().reshape(-1).to(torch.float64)
        if self.charge is not None:
            return float(self.charge(m))
        return self.price * self.sum(m if self.costs is None else m * self.costs.to(m.device))

    def sum(self, t: Tensor) -> float:
        """Return Σ over all items, those of other processes too."""
        if self.group is None:
            return float(t.sum())
        from ...distributed import Over

        return float(Over(self.group).sum(t.sum(dtype=torch.float64)))


# ── how a budget is set up ───────────────────────────────────────────────────────────────────────────────────────────
def found_layers(
    model: nn.Module, layers: Callable[[str, nn.Module], bool], exclude: Iterable[str]
) -> dict[str, nn.Module]:
    """Return the layers to choose in, by name; a module that is used twice comes once."""
    everything = dict(model.named_modules(remove_duplicate=False))
    excluded = [exclude] if isinstance(exclude, str) else list(exclude)
    for name in excluded:
        if name not in everything:
            raise ValueError(f"`exclude` must name modules of the model; got {name!r}, which it does not have.")
    out = {id(m) for name in excluded for m in everything[name].modules()}
    found = {name: m for name, m in model.named_modules() if id(m) not in out and layers(name, m)}
    if not found:
        raise ValueError("`layers` must accept at least one layer of the model; it accepted none. See `prunable`.")
    for name, module in found.items():
        if getattr(module, "sparse", False):
            raise ValueError(f"{name!r} has sparse gradients, which a mask cannot pass on. Use `sparse=False`.")
        for key, weight in own_weights(module).items():
            if not isinstance(weight, nn.Parameter):
                has = f"has no parameter `{key}`, or one that is parametrized already"
                raise ValueError(f"{name!r} ({type(module).__name__}) {has}. Leave it out with `exclude`.")
            if isinstance(weight, nn.parameter.UninitializedParameter) or weight.is_meta:
                raise ValueError(f"{name!r} has no weights yet; run the model once before.")
            if not weight.numel() or not weight.is_floating_point():
                got = f"{tuple(weight.shape)} of {weight.dtype}"
                raise ValueError(
                    f"{name!r} must have real weights, at least one; got {got}. Leave it out with `exclude`."
                )
    return found


def make_pools(
    model: nn.Module, layers: Layers, budget: float | None, units: Unit, share: Divide, cost: Cost
) -> list[Pool]:
    """Divide the model into items and the budget among them."""
    if budget is not None:
        _check.above("budget", budget, 0)
    shapes = traced(model, layers, cost.example) if isinstance(cost, Flops) else {}
    prices: dict[int, float] = {}
    for name, module in layers.items():
        value = cost(module, name, shapes.get(name, []))
        _check.not_negative(f"the cost of {name!r}", value)
        own = own_weights(module).values()
        for weight in own:
            prices[id(weight)] = prices.get(id(weight), 0) + value / sum(w.numel() for w in own)
            if cost is parameters:
                prices[id(weight)] = 1  # a tensor that layers share is stored once
    costly = {name: m for name, m in layers.items() if any(prices[id(w)] for w in own_weights(m).values())}
    if layers and not costly:
        raise ValueError("`cost` must be > 0 for at least one layer; it is 0 for all.")
    groups = units(model, costly)
    if groups[0].row is not None:
        if budget is not None:
            raise ValueError(f"`budget` must be None with `n_of_m`, which implies it; got {budget}.")
        return [_pool([group], prices, None) for group in groups]
    if any(group.structure is not None for group in groups):
        if share is not globally:
            raise ValueError("`share` must be `globally` with `channels`, `heads` and `choices`, which share costs.")
        charge = None if isinstance(groups[0].structure, Choice) else Charge(groups, prices, costly)
        whole = _pool(groups, prices, None, charge)
        return [_pool(groups, prices, _absolute(budget, whole.total), charge)]
    totals = [_pool([group], prices, None).total for group in groups]
    budget = None if budget is None else _absolute(budget, sum(totals))
    return [_pool(own, prices, part) for own, part in share(groups, totals, budget)]


def _absolute(budget: float | None, total: float) -> float:
    """Return a budget in units of cost."""
    if budget is None:
        raise ValueError("`budget` must be a number; None is for `n_of_m` and `by_layer`, which imply it.")
    if not isinstance(budget, Integral) and budget <= 1:
        return snapped(budget * total)
    if budget > total:
        raise ValueError(f"`budget` must be at most {total:g}, the cost of everything; got {budget}.")
    return float(budget)


def _pool(groups: list[Group], prices: dict[int, float], budget: float | None, charge: Charge | None = None) -> Pool:
    """Return groups with their costs; without a budget, that of a row or everything."""
    counts, row = [group.count for group in groups], groups[0].row
    price, costs = 1.0, None
    if charge is not None:
        at = torch.ones(sum(counts), dtype=torch.float64, requires_grad=True)
        (costs,) = torch.autograd.grad(whole := charge(at), at)
        firsts = torch.zeros_like(costs).index_fill(0, torch.tensor([part.start for part in charge.groups]), 1.0)
        total, least = float(whole.detach()), float(charge(firsts))
    else:
        each = [item_costs(group, prices) for group in groups]
        if all(isinstance(c, float) for c in each) and len(set(each)) == 1:
            price, total, least = float(each[0]), float(each[0]) * sum(counts), float(each[0])
        else:
            every = zip(each, counts, strict=True)
            costs = torch.cat([torch.as_tensor(c, dtype=torch.float64).expand(n) for c, n in every])
            total, least = float(costs.sum()), float(costs.min())
        if isinstance(groups[0].structure, Choice):
            sizes = [(group.structure.costs.cpu().sort().values, group.structure.k) for group in groups]
            costs = torch.cat([group.structure.costs.cpu() for group in groups])
            least = sum(float(own[:k].sum()) for own, k in sizes)
            price, total = 1.0, sum(float(own[len(own) - k :].sum()) for own, k in sizes)
    final = total * (row[0] / row[1] if row else 1.0) if budget is None else budget
    if final < least * (1 - 1e-12):
        name = ", ".join(repr(group.name) for group in groups[:3]) + (", …" if len(groups) > 3 else "")
        raise ValueError(f"The budget of {name} must be ≥ {least:g}, the least that can be kept; got {final:g}.")
    return Pool(groups, [], costs, price, final, total, row, charge)
