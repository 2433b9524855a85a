"""The Sparsifier: it holds the budget of a model at every step of training, and folds the masks in at the end."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import _check
from .._choice import Choice
from ..schedules import Shape, between, cubic, geometric
from ._attached import Attached, Moment
from ._costs import Cost, Divide, globally, parameters
from ._masks import Problem, Rule, masked_gradient, soft, straight_through
from ._modules import choices
from ._pools import found_layers, make_pools
from ._report import Report, Row
from ._scores import Score, learned, magnitude
from ._units import Unit, prunable, weights

DENSITY, HEAT = between(cubic, 0.0, 0.75), between(geometric, 0.0, 0.8)


class Sparsifier:
    """Hold a budget over the weights of a model at every step of training, with a gradient to what is chosen.

    The masks m solve `max Σ x·m` with `Σ c·m = budget`: softly by `khot.sigmoid_topk` over all chosen layers at once,
    or hard, by falling score per cost. They are attached by `torch.nn.utils.parametrize`. Make the optimiser after the
    Sparsifier, because learned scores are parameters of the model. Call `step()` after each step of the optimiser, and
    `finalize()` at the end. In evaluation mode the model computes what `finalize()` would make of it now.

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
        mask: the mask in training: `soft`, `straight_through`, `sampled` or `hard`. If None: `soft`, but
            `straight_through` for `channels` and `heads`, where soft masks did worse.
        gradient: what reaches a weight itself: `masked_gradient`, `soft_gradient`, `dense_gradient` or
            `best_gradient(extra)`.
        density_schedule: the way of the budget from everything to `budget`, a shape of `khot.nn.schedules`.
        temperature: of σ_k at first and at last, in units of the mean score per cost of what is kept, Σ m·x / Σ m·c
            (for `learned`: of 1 per mean cost).
        temperature_schedule: the way between.
        freeze: from this share of the steps on, the hard mask stays and the weights are fine-tuned; 1 for never. A
            `soft` mask is multiplied into the weights then.
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
        mask: Rule | None = None,
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
        functions = {"layers": layers, "units": units, "share": share, "cost": cost, "gradient": gradient}
        functions |= {"density_schedule": density_schedule, "temperature_schedule": temperature_schedule}
        for name, function in {**functions, "mask": mask or soft}.items():
            _check.instance(name, function, Callable)  # type: ignore[arg-type]
        has_choices = units is choices
        score = (learned if has_choices else magnitude) if score is None else score
        _check.instance("score", score, Score)
        if has_choices and score.start is None:
            raise ValueError("`score` must use θ, as `learned` does, with `choices`: operations have no magnitude.")
        _check.instance("temperature", temperature, tuple)
        start, end = temperature
        _check.positive("temperature", start)
        _check.positive("temperature", end)
        self.model, self.steps, self.freeze, self.every = model, int(steps), float(freeze), int(every)
        found = {} if has_choices else found_layers(model, layers, exclude)
        self.pools = make_pools(model, found, budget, units, share, cost)
        if mask is None:
            mask = soft if all(pool.charge is None for pool in self.pools) else straight_through
        if score.resets and not getattr(mask, "has_no_gradient", False):
            raise ValueError("`mask` must be `hard` if `score` sets weights to 0, as `gradient_growth` does.")
        if score.resets and any(pool.costs is not None for pool in self.pools):
            raise ValueError("`score` must not be `gradient_growth` if items cost differently: it counts items.")
        self.done, self._is_done = 0, False
        self._end = sum(pool.final for pool in self.pools) / sum(pool.total for pool in self.pools)
        self._ways = [(1.0, self._end, density_schedule), (float(start), float(end), temperature_schedule)]
        self._seed = int(torch.randint(2**62, (), generator=generator))
        is_lazy = every > 1 or score.needs_gradient
        self._attached = Attached(model, self.pools, score, mask, gradient, is_lazy=is_lazy)
        try:
            self._attached.attach()
            self._move()
            self._attached.freeze() if self._is_time() else self._attached.refresh()
        except BaseException:
            self._attached.detach()
            raise

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _is_time(self) -> bool:
        return self.done >= self.freeze * self.steps and (self.freeze < 1 or self.steps == 0)

    def _move(self) -> None:
        """Bring the masks to where the schedules are."""
        progress = self.done / self.steps if self.steps else 1.0
        density, temperature = (end if progress >= 1 else way(start, end, progress) for start, end, way in self._ways)
        rest = (density - self._end) / (1 - self._end) if self._end < 1 else 0.0
        self._attached.move(Moment(rest, temperature, progress, (self._seed + self.done) % 2**63))
        is_next = (self.done + 1) % self.every == 0 and not self._attached.is_frozen
        self._attached.wants_gradient = self._attached.score.needs_gradient and is_next

    def step(self) -> None:
        """Move the schedules by one step, and compute the masks for the weights of now."""
        self._require_masks()
        self._attached.renew()
        self.done += 1
        self._move()
        if self._attached.is_frozen:
            return
        if self._is_time():
            self._attached.freeze()
        elif self.done % self.every == 0:
            self._attached.refresh()
        else:
            self._attached.hold()

    def refresh(self) -> None:
        """Compute the masks for the weights, scores, budget and temperature of now.

        Call it once after `torch.distributed.fsdp.fully_shard`; masks are then computed in `step()` alone.
        """
        self._attached.refresh()

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
        """Return the mask of training of each tensor, by its name in the model; it broadcasts to the tensor."""
        return {path: mask.mask.detach() for path, mask in self._attached.masks.items()}

    def kept(self) -> dict[str, Tensor]:
        """Return the mask of evaluation of each tensor: the hard one, times the soft one if that is in force."""
        self._attached.refresh_kept()
        return {path: mask.kept for path, mask in self._attached.masks.items()}

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
        self._attached.renew()
        if not self._attached.is_frozen:
            self._attached.freeze()
        kept = [(group, part > 0) for pool in self.pools for group, part in pool.parts()]
        with torch.no_grad():
            for masked in (masked for pool in self.pools for masked in pool.masked):
                masked.tensor.mul_(self._attached.masks[masked.path].kept.to(masked.tensor.dtype))
        self._is_done = True
        if self._attached.shards is not None:
            return self.model
        self._attached.detach()
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

    # ── to stop and go on ────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """Return what to save beside the states of the model and the optimiser."""
        return {"done": self.done, "seed": self._seed, **self._attached.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; load that of the model first."""
        self.done, self._seed = state["done"], state["seed"]
        self._move()
        is_due = self.done % self.every == 0 and not self._attached.score.needs_gradient
        self._attached.load_state_dict(state, is_due=is_due)
