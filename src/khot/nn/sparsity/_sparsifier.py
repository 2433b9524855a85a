"""The Sparsifier: it attaches masks to a model, holds the budget at every step, and folds the masks in at the end."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ... import _check
from ..._torch import reshard
from .._budgets import wrapped
from .._choice import Choice
from ..schedules import Schedule, Shape, between, cubic, geometric
from ._costs import Cost, Divide, globally, parameters
from ._masks import (
    Problem,
    Rule,
    dense_gradient,
    masked_gradient,
    sampled,
    soft,
    soft_gradient,
    straight_through,
)
from ._modules import choices
from ._pools import Pool, found_layers, make_pools
from ._report import Report, Row
from ._scores import Known, Score, learned, magnitude
from ._shards import Shards
from ._units import Group, Unit, prunable, weights
from ._weights import Answer, FusedMagnitude, Mask, MaskedWeights, Memory

FLOWS: list[Any] = [masked_gradient, soft_gradient, dense_gradient]
DENSITY, HEAT = between(cubic, 0.0, 0.5), between(geometric, 0.0, 0.8)


class _Dials(nn.Module):
    """The numbers that schedules move."""

    density: Tensor
    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("density", torch.ones((), dtype=torch.float64))
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))


class Sparsifier:
    """Hold a budget over the weights of a model at every step of training, with a gradient to what is chosen.

    The masks m solve `max Σ x·m` with `Σ c·m = budget`: softly by `khot.sigmoid_topk` over all chosen layers at once,
    or hard, by falling score per cost. They are attached by `torch.nn.utils.parametrize`. Make the optimiser after the
    Sparsifier, because learned scores are parameters of the model. Call `step()` after each step of the optimiser, and
    `finalize()` at the end. In evaluation mode the mask is always hard.

    Args:
        model: whose weights are chosen; changed in place.
        budget: what may be kept: a float in (0, 1] is a share of the total cost, an int an absolute cost. None with
            `n_of_m` and `by_layer`, which imply it.
        steps: how many training steps there will be; 0 prunes at once.
        layers: which layers, a function of name and module: `prunable` takes every Linear, Conv and Embedding.
        exclude: names of modules that stay dense, with all below them.
        units: what is chosen: `weights`, `rows`, `columns`, `blocks(b)`, `n_of_m(n, m)`, `channels`, `heads(…)`,
            `choices`, or several by `combine(…)`.
        share: how the budget is divided: `globally`, `uniformly`, `by_erdos_renyi`, `by_layer(fractions)`.
        cost: what is counted: `parameters`, `Flops(example)`, `Latency(table)`, or a function of a layer, its name and
            the shapes of its outputs to the cost of its weights when dense. A layer that costs nothing stays dense.
        score: what makes an item worth keeping: `magnitude`, `learned`, `magnitude_times_learned`,
            `gradient_growth(…)` or a `Score` of your own. If None: `magnitude`, for `choices` their own `learned`.
        mask: the mask in training: `soft`, `straight_through`, `sampled` or `hard`.
        gradient: what reaches a weight itself: `masked_gradient`, `soft_gradient`, `dense_gradient` or
            `best_gradient(extra)`.
        density_schedule: the way of the budget from everything to `budget`, a shape of `khot.nn.schedules`.
        temperature: of σ_k at first and at last, in units of the mean score (for `learned`: of scores).
        temperature_schedule: the way between.
        freeze: from this share of the steps on, the hard mask stays and the weights are fine-tuned; 1 for never.
        every: compute masks anew only each so many steps. In between they are constant.
        generator: where the seed of `sampled` comes from; torch's own if None.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> sparsifier = Sparsifier(model, 0.25, steps=10)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> for _ in range(10):
        ...     loss = model(torch.ones(4, 8)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     sparsifier.step()
        >>> sparsifier.density()
        0.25
        >>> sum(int(p.count_nonzero()) for p in sparsifier.finalize().parameters() if p.ndim == 2)
        40
    """

    def __init__(
        self,
        model: nn.Module,
        budget: float | None,
        *,
        steps: int,
        layers: Callable[[str, nn.Module], bool] = prunable,
        exclude: Iterable[str] = (),
        units: Unit = weights,
        share: Divide = globally,
        cost: Cost = parameters,
        score: Score | None = None,
        mask: Rule = straight_through,
        gradient: Callable[[Problem, Tensor], Tensor | None] = masked_gradient,
        density_schedule: Shape = DENSITY,
        temperature: tuple[float, float] = (1.0, 0.05),
        temperature_schedule: Shape = HEAT,
        freeze: float = 0.8,
        every: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        _check.instance("model", model, nn.Module)
        _check.at_least("steps", steps, 0)
        _check.at_least("every", every, 1)
        _check.fraction("freeze", freeze)
        has_choices = units is choices
        score = (learned if has_choices else magnitude) if score is None else score
        _check.instance("score", score, Score)
        if has_choices and score.start is None:
            raise ValueError("`score` must use θ, as `learned` does, with `choices`: operations have no magnitude.")
        start, end = temperature
        _check.positive("temperature", start)
        _check.positive("temperature", end)
        self.model, self.steps, self.freeze, self.every = model, int(steps), float(freeze), int(every)
        self.score, self.rule, self.gradient, self.units = score, mask, gradient, units
        self._has_gradient = not getattr(mask, "has_no_gradient", False)
        if score.resets and self._has_gradient:
            raise ValueError("`mask` must be `hard` if `score` sets weights to 0, as `gradient_growth` does.")
        found = {} if has_choices else found_layers(model, layers, exclude)
        self.pools = make_pools(model, found, budget, units, share, cost)
        if score.resets and any(pool.costs is not None for pool in self.pools):
            raise ValueError("`score` must not be `gradient_growth` if items cost differently: it counts items.")
        self._dials, self.done = _Dials(), 0
        total = sum(pool.total for pool in self.pools)
        self._end = sum(pool.final for pool in self.pools) / total
        self._schedules = [
            Schedule(self._dials, "density", 1.0, self._end, steps=steps, shape=density_schedule),
            Schedule(self._dials, "temperature", start, end, steps=steps, shape=temperature_schedule),
        ]
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._signature: Any = None
        self._memory: Memory | None = None
        self._masks: dict[str, Mask] = {}
        self._handle: Any = None
        self._is_frozen = self._has_kept = self._is_done = False
        self._shards: Shards | None = None  # if FSDP2 divides the weights
        modules = {id(m): m for pool in self.pools for g in pool.groups for t in g.masked for _, m, _ in t.places}
        self._orders = [(module, list(module._parameters)) for module in modules.values()]
        try:
            self._attach()
            self._freeze() if self._is_time() else self.refresh()
        except BaseException:
            self._detach()
            raise

    # ── masks ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _attach(self) -> None:
        for pool in self.pools:
            for group in pool.groups:
                for masked in group.masked:
                    mask = self._masks[masked.path] = Mask(self, masked.tensor)
                    for _, module, name in masked.places:
                        if isinstance(module, Choice):
                            module.given = mask
                        else:
                            parametrize.register_parametrization(module, name, mask)
                    mask.train(self.model.training)
                if isinstance(group.structure, Choice):
                    pool.thetas.append(group.structure.scores)
                elif self.score.start is not None:
                    sizes = _sizes(group).detach()
                    theta = self.score.start(sizes / sizes.mean())
                    mask = self._masks[group.masked[0].path]
                    mask.theta = nn.Parameter(theta.clone())
                    pool.thetas.append(mask.theta)
        self._handle = self.model.register_forward_pre_hook(self._before)

    def _leaves(self) -> list[nn.Parameter]:
        tensors = [masked.tensor for pool in self.pools for masked in pool.masked]
        return tensors + [theta for pool in self.pools for theta in pool.thetas]

    def _sign(self) -> Any:
        return [(leaf._version, leaf.data_ptr(), leaf.dtype) for leaf in self._leaves()]

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """Compute masks anew if weights changed since the last time, by a step of the optimiser or otherwise."""
        if torch.compiler.is_compiling() or self._is_constant or self._shards is not None:
            return
        if any(masked.current() is not masked.tensor for pool in self.pools for masked in pool.masked):
            raise RuntimeError("Call `sparsifier.refresh()` after `fully_shard`, which replaces the parameters.")
        if self._sign() != self._signature:
            self.refresh()

    @property
    def _is_constant(self) -> bool:
        """Whether masks change in `step()` alone."""
        return self._is_frozen or self.every > 1 or self.score.needs_gradient

    def refresh(self) -> None:
        """Compute the masks for the weights, scores, budget and temperature of now.

        Call it once after `torch.distributed.fsdp.fully_shard`; masks are then computed in `step()` alone.
        """
        self._renew()
        leaves, masks = self._leaves(), list(self._masks.values())
        if self._shards is not None:
            self._shards.refresh(self._answer)
            self._signature, self._has_kept = None, False
            return
        if not self._has_gradient:
            old = [pool.values for pool in self.pools]
            with torch.no_grad():
                self._answer(*leaves)
            if self.score.resets:
                self._reset(old)
            products: Sequence[Tensor | None] = [None] * len(masks)
        elif self._is_fused(leaves):
            products = self._fused(leaves)
        else:
            keep = self._keep if self.score.needs_gradient else None
            products = MaskedWeights.apply(self._answer, keep, *leaves)
        for mask, product, leaf in zip(masks, products, leaves, strict=False):
            mask.product, mask.version = product, leaf._version
        self._signature, self._has_kept = self._sign(), False
        if not all(mask.training for mask in masks):
            self.refresh_kept()

    def _renew(self) -> None:
        """Take the parameters that are there now, and what FSDP2 has made of them."""
        reshard(self.model)
        for masked in (masked for pool in self.pools for masked in pool.masked):
            masked.tensor = masked.current()  # type: ignore[assignment]
        if self._shards is None and any(_check.is_dtensor(leaf) for leaf in self._leaves()):
            if self.units is not weights or self.score.start or self.score.needs_gradient or self.rule is sampled:
                wanted = "`units=weights`, a score of magnitudes, and the mask `hard`, `soft` or `straight_through`"
                raise NotImplementedError(f"Weights that FSDP2 divides need {wanted}; got others.")
            if any(pool.costs is not None for pool in self.pools):
                raise NotImplementedError("Weights that FSDP2 divides must all have the same cost; got several.")
            self._shards = Shards(self.pools, self._masks, self._has_gradient)

    def _rest(self) -> float:
        """Return the share of what is to be dropped that is still kept."""
        return (float(self._dials.density) - self._end) / (1 - self._end) if self._end < 1 else 0.0

    def _answer(self, *leaves: Tensor) -> Answer:
        """Return the masks of all tensors, and what their gradient flows through."""
        masks: list[Tensor] = []
        sources: list[Tensor] = []
        flows: list[Tensor | None] = []
        left = iter(leaves)
        tensors = [[[next(left) for _ in group.masked] for group in pool.groups] for pool in self.pools]
        for pool, own in zip(self.pools, tensors, strict=True):
            thetas = [next(left) for _ in pool.thetas]
            problem = pool.problem = self._problem(pool, own, thetas, self._rest())
            values = self.rule(problem).detach()
            source = problem.soft() if self._has_gradient else values
            flow = self.gradient(problem, values)
            pool.values = values.reshape(-1)
            for found, items in ((masks, pool.values), (sources, source.reshape(-1))):
                found += pool.spread(items)
            flows += [None] * len(pool.masked) if flow is None else pool.spread(flow.detach().reshape(-1))
        if self._shards is None:
            for mask, value, go in zip(self._masks.values(), masks, flows, strict=True):
                mask.mask, mask.flow, mask.is_plain = value, go, self.gradient is masked_gradient
        return Answer(masks, sources, flows)

    def _is_fused(self, leaves: list[nn.Parameter]) -> bool:
        """Return whether the short way of single weights with the score |w| applies."""
        pool = self.pools[0]
        is_simple = self.units is weights and self.score is magnitude and len(self.pools) == 1 and pool.costs is None
        is_known = self.rule in (soft, straight_through) and self.gradient in FLOWS
        return (
            is_simple
            and is_known
            and all(
                leaf.requires_grad
                and leaf.is_contiguous()
                and leaf.is_cpu
                and leaf.dtype.itemsize >= 4
                and leaf.dtype == leaves[0].dtype
                for leaf in leaves
            )
            and self._budget(pool) < sum(pool.counts)
        )

    def _budget(self, pool: Pool) -> float:
        return (pool.final + self._rest() * (pool.total - pool.final)) / pool.price

    def _fused(self, leaves: list[nn.Parameter]) -> tuple[Tensor, ...]:
        pool = self.pools[0]
        if self._memory is None or not self._memory.fits(leaves):
            self._memory = Memory(leaves)
        budget, direct = self._budget(pool), FLOWS.index(self.gradient)
        is_hard, heat = self.rule is straight_through, float(self._dials.temperature)
        memory = self._memory
        products: tuple[Tensor, ...] = FusedMagnitude.apply(memory, budget, heat, is_hard, direct, *leaves)
        pool.values = memory.values
        pool.problem = Problem(memory.scores, budget, torch.tensor(memory.heat), None, self._seed)
        self._put("mask", [memory.values])
        flow = (memory.values, memory.soft, None)[direct]
        flows = [None] * len(products) if flow is None else pool.spread(flow)
        for mask, own in zip(self._masks.values(), flows, strict=True):
            mask.flow, mask.is_plain = own, direct == 0
        return products

    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        if self.wants_gradient:
            for mask, gradient in zip(self._masks.values(), gradients, strict=True):
                mask.keep(gradient)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None}

    def _problem(self, pool: Pool, tensors: list[list[Tensor]], thetas: list[Tensor], rest: float) -> Problem:
        """Return the problem of a pool; `rest` is the share of what is to be dropped that is still kept."""
        sizes = _joined([group.reduce([t.abs() for t in own]) for group, own in zip(pool.groups, tensors, strict=True)])
        theta = _joined(thetas) if thetas else None
        progress = self.done / self.steps if self.steps else 1.0
        x = self.score.function(Known(sizes, theta, self._gradients(pool), pool.values, progress))
        if x.shape != sizes.shape:
            raise ValueError(f"`score` must give one number per item, {tuple(sizes.shape)}; got {tuple(x.shape)}.")
        heat = self._dials.temperature.to(x.device)
        if self.score.is_relative:
            per_cost = x.detach() if pool.costs is None else x.detach() / pool.costs.to(x.device, x.dtype)
            mean = per_cost.mean()
            if pool.group is not None:
                mean = torch.tensor(pool.price * pool.sum(per_cost) / pool.total, dtype=x.dtype)
            heat = heat * mean.clamp(min=torch.finfo(x.dtype).tiny)
        return pool.pose(x, rest, heat, (self._seed + self.done) % 2**63)

    def _gradients(self, pool: Pool) -> Tensor | None:
        if not self.score.needs_gradient:
            return None
        parts = []
        for group in pool.groups:
            own = [self._masks[masked.path].gradient for masked in group.masked]
            if any(g is None for g in own):
                return None
            parts.append(group.reduce([g for g in own if g is not None]))
        return _joined(parts)

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient of this step is needed for the next masks."""
        return self.score.needs_gradient and not self._is_frozen and (self.done + 1) % self.every == 0

    def _reset(self, old: list[Tensor | None]) -> None:
        """Set weights to 0 that were masked and are kept now."""
        for pool, before in zip(self.pools, old, strict=True):
            if before is None:
                continue
            assert pool.values is not None
            is_new = (pool.values > 0) & (before == 0)
            with torch.no_grad():
                for masked, item in zip(pool.masked, pool.spread(is_new), strict=True):
                    masked.tensor.masked_fill_(item, 0.0)

    def refresh_kept(self) -> None:
        """Compute the hard masks that evaluation uses, if they are out of date."""
        if self._has_kept or any(pool.problem is None for pool in self.pools):
            return
        with torch.no_grad():
            self._put("kept", [pool.problem.hard().reshape(-1) for pool in self.pools if pool.problem is not None])
        self._has_kept = True

    def _put(self, what: str, values: list[Tensor]) -> None:
        for pool, own in zip(self.pools, values, strict=True):
            for masked, item in zip(pool.masked, pool.spread(own), strict=True):
                own = item.to(masked.tensor.device)
                setattr(self._masks[masked.path], what, own if self._shards is None else wrapped(own, masked.tensor))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _is_time(self) -> bool:
        return self.done >= self.freeze * self.steps and (self.freeze < 1 or self.steps == 0)

    def step(self) -> None:
        """Move the schedules by one step, and compute the masks for the weights of now."""
        self._require_masks()
        self._renew()
        self.done += 1
        for schedule in self._schedules:
            schedule.step()
        if self._is_frozen:
            return
        if self._is_time():
            self._freeze()
        elif self.done % self.every == 0:
            self.refresh()
        else:
            self._hold()

    def _hold(self) -> None:
        """Let the masks be constants until they are computed anew."""
        self._put("mask", [pool.values for pool in self.pools if pool.values is not None])
        for mask in self._masks.values():
            mask.product = None
        if self._shards is not None:
            self._shards.hold()

    def _freeze(self) -> None:
        """Fix the hard masks of the final budget."""
        self._renew()
        values = self._final()
        for pool, own in zip(self.pools, values, strict=True):
            pool.values, pool.problem = own, None
        self._is_frozen = self._has_kept = True
        self._hold()
        self._put("kept", values)
        for mask in self._masks.values():
            mask.flow, mask.is_plain, mask.gradient = None, True, None

    def _final(self) -> list[Tensor]:
        """Return the hard masks of the final budget: those that are frozen, or those for the weights of now."""
        with torch.no_grad():
            return [self._final_of(pool) for pool in self.pools]

    def _final_of(self, pool: Pool) -> Tensor:
        is_grown = self.score.needs_gradient and pool.values is not None
        if pool.values is not None and (self._is_frozen or (is_grown and pool.cost_of(pool.values) <= pool.final)):
            return pool.values
        return self._problem(pool, *self._own(pool), 0.0).hard().reshape(-1)

    @staticmethod
    def _own(pool: Pool) -> tuple[list[list[Tensor]], list[Tensor]]:
        return [[masked.part() for masked in group.masked] for group in pool.groups], list(pool.thetas)

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────
    def cost(self) -> float:
        """Return what the mask of training costs now, Σ c·m."""
        return sum(pool.cost_of(pool.values) for pool in self.pools if pool.values is not None)

    def density(self) -> float:
        """Return the share of the total cost that the mask of training keeps now."""
        return self.cost() / sum(pool.total for pool in self.pools)

    def report(self) -> Report:
        """Return what each group keeps now; print it for a table, or call its `plot`."""
        found = []
        for pool in self.pools:
            for (group, part), place in zip(pool.parts(), pool.slices, strict=True):
                m = part.detach().to(torch.float64)
                each = pool.price if pool.costs is None else pool.costs[place].to(m.device)
                count = int(pool.sum(torch.tensor(group.count)))
                found.append((group.name, count, pool.sum(m), pool.sum(m * each)))
        whole = sum(cost for *_, cost in found) or 1.0
        rows = [Row(*line, line[3] / whole) for line in found]
        return Report(
            rows, self.cost(), *(sum(getattr(pool, key) for pool in self.pools) for key in ("final", "total"))
        )

    def masks(self) -> dict[str, Tensor]:
        """Return the mask of training of each tensor, by its name in the original model; like the tensor."""
        return {path: mask.mask.detach() for path, mask in self._masks.items()}

    def kept(self) -> dict[str, Tensor]:
        """Return the hard mask of each tensor, that of evaluation, by its name in the original model."""
        self.refresh_kept()
        return {path: mask.kept for path, mask in self._masks.items()}

    def finalize(self, *, remove: bool = True, sparse: bool = False) -> nn.Module:
        """Fold the hard masks of the final budget into the weights, and take the parametrizations off.

        Args:
            remove: make layers smaller where `channels` or heads were dropped, and put what is kept in the place of
                each `Choice`. Tensors that change size are new parameters, so an optimiser must be made anew.
            sparse: store the weights of Linear layers as sparse CSR tensors.

        Returns:
            The model, with the names and the order of its original state dict, unless a `Choice` was replaced. Under
            FSDP2, which holds on to the parametrizations, they stay, with masks that no longer matter.
        """
        self._require_masks()
        self._renew()
        if not self._is_frozen:
            self._freeze()
        kept = [(group, part > 0) for pool in self.pools for group, part in pool.parts()]
        with torch.no_grad():
            for masked in (masked for pool in self.pools for masked in pool.masked):
                masked.tensor.mul_(self._masks[masked.path].kept.to(masked.tensor.dtype))
        self._is_done = True
        if self._shards is not None:
            return self.model
        self._detach()
        for group, part in kept if remove else []:
            if isinstance(group.structure, Choice):
                self._replace(group.structure, part)
            elif group.structure is not None:
                group.structure.remove(part)
        if sparse:
            for masked in (masked for pool in self.pools for masked in pool.masked):
                for _, module, name in masked.places:
                    if isinstance(module, nn.Linear) and name == "weight":
                        module.weight = nn.Parameter(module.weight.detach().to_sparse_csr(), requires_grad=False)
        return self.model

    def _require_masks(self) -> None:
        if self._is_done:
            raise RuntimeError("`finalize()` must come last: the masks are gone. Make a new Sparsifier to go on.")

    def _replace(self, choice: Choice, kept: Tensor) -> None:
        """Put what is kept of a Choice in its place."""
        rest = choice.finalize(kept.to(choice.scores.dtype))
        if choice is self.model:
            self.model = rest
        for module in list(self.model.modules()):
            for name, child in module.named_children():
                if child is choice:
                    setattr(module, name, rest)

    def _detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        for masked in (masked for pool in self.pools for masked in pool.masked):
            for _, module, name in masked.places:
                if isinstance(module, Choice):
                    module.given = None
                elif parametrize.is_parametrized(module, name):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for module, names in self._orders:
            own = module._parameters
            ordered = {name: own[name] for name in names if name in own}
            own.clear()
            own.update(ordered)

    # ── to stop and go on ────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """Return what to save beside the states of the model and the optimiser."""
        if self._shards is not None and self._is_constant:
            raise NotImplementedError("Fixed masks of weights that FSDP2 divides cannot be saved; `finalize()` first.")
        values = [pool.values for pool in self.pools] if self._is_constant else None
        flows = [mask.flow for mask in self._masks.values()] if self._is_constant else None
        return {"done": self.done, "seed": self._seed, "is_frozen": self._is_frozen, "values": values, "flows": flows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; load that of the model first."""
        self.done, self._seed = state["done"], state["seed"]
        for schedule in self._schedules:
            schedule.load_state_dict({"done": self.done})
        self._is_frozen = state["is_frozen"]
        if state["values"] is not None:
            for pool, values in zip(self.pools, state["values"], strict=True):
                pool.values = values.to(pool.masked[0].tensor.device)
            for mask, flow in zip(self._masks.values(), state["flows"], strict=True):
                mask.flow, mask.is_plain = flow, self._is_frozen or self.gradient is masked_gradient
            self._hold()
        if self._is_frozen:
            self._put("kept", state["values"])
            self._has_kept = True
        elif self.done % self.every == 0 and not self.score.needs_gradient:
            self.refresh()
        else:
            for pool in self.pools:
                pool.problem = self._problem(pool, *self._own(pool), self._rest())
            self._has_kept = False


def _sizes(group: Group) -> Tensor:
    return group.reduce([masked.tensor.abs() for masked in group.masked])


def _joined(parts: list[Tensor]) -> Tensor:
    """Return parts as one vector, in float32 or wider."""
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return x if x.dtype.itemsize >= 4 else x.float()
