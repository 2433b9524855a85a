"""Attached masks: they multiply the weights of a model, and are computed anew when weights or schedules move."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ... import _check
from ..._torch import reshard, version
from .._budgets import wrapped
from .._choice import Choice
from ._masks import Problem, Rule, dense_gradient, masked_gradient, sampled, soft, soft_gradient, straight_through
from ._pools import Pool
from ._scores import Known, Score, magnitude
from ._shards import Shards
from ._weights import Answer, FusedMagnitude, Mask, MaskedWeights, Memory

FLOWS: list[Any] = [masked_gradient, soft_gradient, dense_gradient]


class Moment(NamedTuple):
    """Hold where the schedules of training are."""

    rest: float  # the share of what is to be dropped that is still kept
    temperature: float
    progress: float  # the share of all steps that are done
    seed: int


class Attached:
    """Hold the masks of a model, one for each tensor, that solve the problems of pools.

    Args:
        model: whose weights are multiplied.
        pools: the items.
        score, rule, gradient: as for `Sparsifier`.
        is_lazy: whether masks change only when they are asked to, and not whenever weights have changed.
    """

    def __init__(
        self,
        model: nn.Module,
        pools: list[Pool],
        score: Score,
        rule: Rule,
        gradient: Callable[[Problem, Tensor], Tensor | None],
        *,
        is_lazy: bool,
    ) -> None:
        self.model, self.pools, self.score, self.rule, self.gradient = model, pools, score, rule, gradient
        self.is_lazy, self.is_frozen, self.wants_gradient = is_lazy, False, False
        self.moment = Moment(1.0, 1.0, 0.0, 0)
        self.masks: dict[str, Mask] = {}
        self.shards: Shards | None = None  # if FSDP2 divides the weights
        self._has_gradient = not getattr(rule, "has_no_gradient", False)
        self._is_simple = (
            (score is magnitude and rule in (soft, straight_through) and gradient in FLOWS)
            and (len(pools) == 1 and pools[0].costs is None and pools[0].row is None)
            and all(group.count == group.masked[0].tensor.numel() for group in pools[0].groups)
        )
        self._signature: Any = None
        self._memory: Memory | None = None
        self._handle: Any = None
        self._has_kept = False
        modules = {id(m): m for pool in pools for masked in pool.masked for _, m, _ in masked.places}
        self._orders = [(module, _names(module)) for module in modules.values()]

    def attach(self) -> None:
        """Put the masks on."""
        for pool in self.pools:
            for group in pool.groups:
                for masked in group.masked:
                    mask = self.masks[masked.path] = Mask(self, masked.tensor)
                    for _, module, name in masked.places:
                        if isinstance(module, Choice):
                            module.given = mask
                        else:
                            parametrize.register_parametrization(module, name, mask)
                    mask.train(self.model.training)
                if isinstance(group.structure, Choice):
                    pool.thetas.append(group.structure.scores)
                elif self.score.start is not None:
                    sizes = group.reduce([masked.tensor.detach().abs() for masked in group.masked])
                    theta = nn.Parameter(self.score.start(sizes / sizes.mean()).clone())
                    self.masks[group.masked[0].path].theta = theta
                    pool.thetas.append(theta)
        self._handle = self.model.register_forward_pre_hook(self._before)

    def detach(self) -> None:
        """Take the masks off; tensors are as they are without a mask, and in their old order."""
        if self._handle is not None:
            self._handle.remove()
        for masked in (masked for pool in self.pools for masked in pool.masked):
            for _, module, name in masked.places:
                if isinstance(module, Choice):
                    module.given = None
                elif parametrize.is_parametrized(module, name):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for module, names in self._orders:
            for name in filter(set(_names(module)).__contains__, names):  # taken off and put back, each goes last
                parameter = getattr(module, name)
                delattr(module, name)
                module.register_parameter(name, parameter)

    # ── when masks are computed ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_constant(self) -> bool:
        """Return whether masks change only when they are asked to."""
        return self.is_frozen or self.is_lazy

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """Compute masks anew if weights changed since the last time, by a step of the optimiser or otherwise."""
        if torch.compiler.is_compiling() or self.is_constant or self.shards is not None:
            return
        if any(masked.current() is not masked.tensor for pool in self.pools for masked in pool.masked):
            raise RuntimeError("Call `sparsifier.refresh()` after `fully_shard`, which replaces the parameters.")
        if self._sign() != self._signature:
            self.refresh()

    def renew(self) -> None:
        """Take the parameters that are there now, and what FSDP2 has made of them."""
        reshard(self.model)
        for masked in (masked for pool in self.pools for masked in pool.masked):
            masked.tensor = masked.current()  # type: ignore[assignment]
        if self.shards is None and any(_check.is_dtensor(leaf) for leaf in self._leaves()):
            has_weights = all(group.count == group.masked[0].tensor.numel() for p in self.pools for group in p.groups)
            if not has_weights or self.score.start or self.score.needs_gradient or self.rule is sampled:
                wanted = "`units=weights`, a score of magnitudes, and the mask `hard`, `soft` or `straight_through`"
                raise NotImplementedError(f"Weights that FSDP2 divides need {wanted}; got others.")
            if any(pool.costs is not None for pool in self.pools):
                raise NotImplementedError("Weights that FSDP2 divides must all have the same cost; got several.")
            self.shards = Shards(self.pools, self.masks, self._has_gradient)

    def _leaves(self) -> list[nn.Parameter]:
        tensors = [masked.tensor for pool in self.pools for masked in pool.masked]
        return tensors + [theta for pool in self.pools for theta in pool.thetas]

    def _sign(self) -> Any:
        return [(version(leaf), leaf.data_ptr(), leaf.dtype) for leaf in self._leaves()]

    def move(self, moment: Moment) -> None:
        """Go to another moment; the unit of the temperature is measured again when masks are computed next."""
        self.moment = moment
        for pool in self.pools:
            pool.unit = None

    def refresh(self) -> None:
        """Compute the masks for the weights, scores, budget and temperature of now."""
        self.renew()
        leaves, masks = self._leaves(), list(self.masks.values())
        for masked in (masked for pool in self.pools for masked in pool.masked):
            if self.shards is None:
                _check.finite(masked.path, masked.tensor.detach())  # one NaN would make every mask NaN
        if self.shards is not None:
            self.shards.refresh(self._answer)
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
            mask.product, mask.version = product, version(leaf)
        self._signature, self._has_kept = self._sign(), False
        if not all(mask.training for mask in masks):
            self.refresh_kept()

    def refresh_kept(self) -> None:
        """Compute the masks that evaluation uses, if they are out of date."""
        if self._has_kept or any(pool.problem is None for pool in self.pools):
            return
        with torch.no_grad():
            self._put("kept", [self._cut(pool) for pool in self.pools])
        self._has_kept = True

    def _cut(self, pool: Pool) -> Tensor:
        """Return the hard mask of a pool; times the soft one, if that is in force and `freeze` will fold it in."""
        assert pool.problem is not None
        kept = pool.problem.hard().reshape(-1)
        return kept * pool.values if self._folds(pool) and pool.values is not None else kept

    def _folds(self, pool: Pool) -> bool:
        return getattr(self.rule, "is_folded", False) and not pool.has_choices

    def _put(self, what: str, values: list[Tensor]) -> None:
        for pool, own in zip(self.pools, values, strict=True):
            for masked, item in zip(pool.masked, pool.spread(own), strict=True):
                part = item.to(masked.tensor.device)
                setattr(self.masks[masked.path], what, part if self.shards is None else wrapped(part, masked.tensor))

    def hold(self) -> None:
        """Let the masks in force be constants until they are computed anew."""
        self._put("mask", [pool.values for pool in self.pools if pool.values is not None])
        for mask in self.masks.values():
            mask.product = None
        if self.shards is not None:
            self.shards.hold()

    def freeze(self) -> None:
        """Fix the hard masks of the final budget; a soft mask that was trained with is multiplied into the weights."""
        self.renew()
        folded = [m for pool in self.pools if self._folds(pool) and pool.values is not None for m in pool.masked]
        if folded:
            self.refresh()
        with torch.no_grad():
            values = [self._final(pool) for pool in self.pools]
            for masked in folded:
                masked.tensor.mul_(self.masks[masked.path].mask.to(masked.tensor.dtype))
        self.fix(values)

    def fix(self, values: list[Tensor]) -> None:
        """Let hard masks stay for good."""
        for pool, own in zip(self.pools, values, strict=True):
            pool.values, pool.problem = own, None
        self.is_frozen, self._has_kept, self.wants_gradient, self._memory = True, True, False, None
        self.hold()
        self._put("kept", values)
        for mask in self.masks.values():
            mask.flow, mask.is_plain, mask.gradient = None, True, None

    def _final(self, pool: Pool) -> Tensor:
        """Return the hard mask of the final budget for the weights of now, or the mask that growth has led to."""
        if self.score.needs_gradient and pool.values is not None and pool.cost_of(pool.values) <= pool.final:
            return pool.values
        return self._problem(pool, *self._own(pool), 0.0).hard().reshape(-1)

    # ── how masks are computed ───────────────────────────────────────────────────────────────────────────────────────
    def _answer(self, *leaves: Tensor) -> Answer:
        """Return the masks of all tensors, and what their gradient flows through."""
        masks: list[Tensor] = []
        sources: list[Tensor] = []
        flows: list[Tensor | None] = []
        left = iter(leaves)
        tensors = [[[next(left) for _ in group.masked] for group in pool.groups] for pool in self.pools]
        for pool, own in zip(self.pools, tensors, strict=True):
            problem = pool.problem = self._problem(pool, own, [next(left) for _ in pool.thetas], self.moment.rest)
            values = self.rule(problem).detach()
            source = problem.soft() if self._has_gradient else values
            flow = self.gradient(problem, values)
            pool.values = values.reshape(-1)
            for found, items in ((masks, pool.values), (sources, source.reshape(-1))):
                found += pool.spread(items)
            flows += [None] * len(pool.masked) if flow is None else pool.spread(flow.detach().reshape(-1))
        if self.shards is None:
            for mask, value, go in zip(self.masks.values(), masks, flows, strict=True):
                mask.mask, mask.flow, mask.is_plain = value, go, self.gradient is masked_gradient
        return Answer(masks, sources, flows)

    @staticmethod
    def _own(pool: Pool) -> tuple[list[list[Tensor]], list[Tensor]]:
        return [[masked.part() for masked in group.masked] for group in pool.groups], list(pool.thetas)

    def _problem(self, pool: Pool, tensors: list[list[Tensor]], thetas: list[Tensor], rest: float) -> Problem:
        """Return the problem of a pool; `rest` is the share of what is to be dropped that is still kept."""
        sizes = _joined([group.reduce([t.abs() for t in own]) for group, own in zip(pool.groups, tensors, strict=True)])
        theta = _joined(thetas) if thetas else None
        kept = pool.values if self.is_lazy else None  # else a resumed run has none
        x = self.score.function(Known(sizes, theta, self._gradients(pool), kept, self.moment.progress))
        if x.shape != sizes.shape:
            raise ValueError(f"`score` must give one number per item, {tuple(sizes.shape)}; got {tuple(x.shape)}.")
        heat = self.moment.temperature * pool.measure(x.detach() if self.score.is_relative else torch.ones_like(x))
        return pool.pose(x, rest, torch.tensor(heat, dtype=torch.float64, device=x.device), self.moment.seed)

    def probs(self, mask: Mask) -> Tensor:
        """Return the soft mask that a mask is drawn with, differentiable in scores."""
        (pool,) = (pool for pool in self.pools if any(self.masks[m.path] is mask for m in pool.masked))
        soft = pool.spread(self._problem(pool, *self._own(pool), self.moment.rest).soft().reshape(-1))
        (found,) = (part for m, part in zip(pool.masked, soft, strict=True) if self.masks[m.path] is mask)
        return found

    def _is_fused(self, leaves: list[nn.Parameter]) -> bool:
        """Return whether the short way of single weights with the score |w| applies."""
        return (
            self._is_simple
            and all(leaf.requires_grad and leaf.is_contiguous() and leaf.is_cpu for leaf in leaves)
            and all(leaf.dtype == leaves[0].dtype and leaf.dtype.itemsize >= 4 for leaf in leaves)
            and self.pools[0].budget(self.moment.rest) < self.pools[0].total
        )

    def _fused(self, leaves: list[nn.Parameter]) -> tuple[Tensor, ...]:
        pool = self.pools[0]
        if self._memory is None or not self._memory.fits(leaves):
            self._memory = Memory(leaves)
        memory, direct = self._memory, FLOWS.index(self.gradient)
        memory.read(leaves)
        heat = self.moment.temperature * pool.measure(memory.scores)
        pool.problem = pool.pose(memory.scores, self.moment.rest, torch.tensor(heat, dtype=torch.float64), 0)
        is_hard = self.rule is straight_through
        products: tuple[Tensor, ...] = FusedMagnitude.apply(memory, pool.problem.budget, heat, is_hard, direct, *leaves)
        pool.values = memory.values
        self._put("mask", [memory.values])
        flow = (memory.values, memory.soft, None)[direct]
        flows = [None] * len(products) if flow is None else pool.spread(flow)
        for mask, own in zip(self.masks.values(), flows, strict=True):
            mask.flow, mask.is_plain = own, direct == 0
        return products

    # ── scores that use gradients ────────────────────────────────────────────────────────────────────────────────────
    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        if self.wants_gradient:
            for mask, gradient in zip(self.masks.values(), gradients, strict=True):
                mask.keep(gradient)

    def _gradients(self, pool: Pool) -> Tensor | None:
        if not self.score.needs_gradient:
            return None
        parts = []
        for group in pool.groups:
            own = [self.masks[masked.path].gradient for masked in group.masked]
            if any(g is None for g in own):
                return None
            parts.append(group.reduce([g for g in own if g is not None]))
        return _joined(parts)

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

    # ── to stop, copy and go on ──────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """Return what the weights and the moment do not tell: units, and masks that stay."""
        if self.shards is not None and self.is_constant:
            raise NotImplementedError("Fixed masks of weights that FSDP2 divides cannot be saved; `finalize()` first.")
        state: dict[str, Any] = {"is_frozen": self.is_frozen, "units": [pool.unit for pool in self.pools]}
        if self.is_constant:
            state["values"] = [pool.values for pool in self.pools]
            state["flows"] = [mask.flow for mask in self.masks.values()]
        return state

    def load_state_dict(self, state: dict[str, Any], *, is_due: bool) -> None:
        """Go on from a saved state, after `move`; masks are computed anew if they were when it was saved."""
        for pool, unit in zip(self.pools, state["units"], strict=True):
            pool.unit = unit
        saved = zip(state["values"], self.pools, strict=True) if "values" in state else ()
        values = [own.to(pool.masked[0].tensor.device) for own, pool in saved]
        self.is_frozen = False
        if state["is_frozen"]:
            self.fix(values)
            return
        if self.is_constant:
            for pool, own in zip(self.pools, values, strict=True):
                pool.values = own
            for mask, flow in zip(self.masks.values(), state["flows"], strict=True):
                mask.flow, mask.is_plain = flow, self.gradient is masked_gradient
            self.hold()
        if is_due:
            self.refresh()
        else:
            for pool in self.pools:
                pool.problem = self._problem(pool, *self._own(pool), self.moment.rest)
            self._has_kept = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None}


def _joined(parts: list[Tensor]) -> Tensor:
    """Return parts as one vector, in float32 or wider."""
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return x if x.dtype.itemsize >= 4 else x.float()


def _names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, in their order."""
    return [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
