"""Routers of transformers models that choose by khot's routes.

What a router does is found by giving it random tokens, once, when it is swapped: how it computes its scores, what its
weights sum to, and within which groups of experts it chooses. What no rule here explains is refused.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..nn.moe import BoundRoute, Route, sigma_topk
from ._padding import paddings

PROBES = 32  # random tokens that show what a router of a model does
OPTIONS = ("bias", "mask", "training", "sample")  # what a swapped router can give to a route
KIND = "forward(hidden) → (logits, weights, indices), `top_k`, and a `weight` or one Linear layer"


def swap_routers(model: nn.Module, route: Route = sigma_topk, *, skip: Iterable[str] = ()) -> list[str]:
    """Let every router of a transformers model choose by a function of `khot.nn.routing`, with the weights it has.

    Each router becomes a subclass of its own class, so that `output_router_logits`, `save_pretrained` and `generate`
    work as before; scores are computed as the model does. Swap again with another route to change it; a model loaded
    with `from_pretrained` has its own rule until it is swapped.

    Args:
        model: a model whose routers give (logits, weights, indices), as transformers 5's do. Its `attention_mask`
            reaches routes that have a `mask` option; give the whole model, since a block of experts sees no mask.
        route: `(logits, k, …) → Routing`. If it has a `normalize` option that is not set, it is set where the router's
            own weights have a constant sum; and for σ_k with k > 1, since π sums to k, which no model is used to. It
            is given the router's correction bias, if it takes one. A router that chooses within groups of experts
            still does: other experts have a score of −inf.
        skip: names of routers or of their classes, which stay as they are, such as DeepSeek-V4's
            `"DeepseekV4HashRouter"`, which looks its experts up by token and has no scores to choose by. Without it one
            router that cannot be swapped is an error, and no router changes.

    Returns:
        The names of the routers that were swapped.

    Examples:
        >>> import khot.hf
        >>> khot.hf.swap_routers(model, khot.nn.routing.sigma_topk)  # doctest: +SKIP
        ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    """
    named = {name: module for name, module in model.named_modules() if _is_named(module)}
    named = _without(named, skip)
    found = {name: module for name, module in named.items() if hasattr(module, "top_k") and _linear(module) is not None}
    if not found:
        which = "has none"
        if named:
            name, module = next(iter(named.items()))
            lacks = "no `top_k`" if _linear(module) is not None else "no `weight` and no single Linear layer"
            which = f"has only {name!r}; it is a {type(module).__name__}, which has {lacks}"
        raise ValueError(f"`model` must have routers: Modules with {KIND}; got {type(model).__name__}, which {which}.")
    changes: list[tuple[Any, type[nn.Module], _Choice]] = []
    refused: dict[str, ValueError] = {}
    for name, module in found.items():
        try:
            changes.append((module, *_swapped(name, module, route)))
        except ValueError as error:
            refused.setdefault(_name_of(module), error)
    if refused:
        first = next(iter(refused.values()))
        raise ValueError(f"{first} To leave it as it is, give `skip={(*refused,)}`.") if changes else first
    for (module, cls, choice), padding in zip(changes, paddings(model, list(found)), strict=True):  # all or none
        module.__class__, module.khot_choice, module.khot_padding = cls, choice, padding
    return list(found)


def _name_of(router: nn.Module) -> str:
    """Return the name of the model's own class of a router."""
    name: str = getattr(type(router), "khot_own", type(router)).__name__
    return name


def _without(named: dict[str, nn.Module], skip: Iterable[str]) -> dict[str, nn.Module]:
    """Return the routers that are not to be skipped."""
    kinds = {name: _name_of(module) for name, module in named.items()}
    if not isinstance(skip, Iterable):
        raise TypeError(f"`skip` must be names in a list; got {type(skip).__name__}.")
    left = {skip} if isinstance(skip, str) else {*skip}
    if unknown := left - {*kinds, *kinds.values()}:
        known = ", ".join(sorted({*kinds.values()})) or "none"
        raise ValueError(f"`skip` must name routers of the model or their classes ({known}); got {unknown.pop()!r}.")
    return {name: module for name, module in named.items() if not left & {name, kinds[name]}}


class _How(NamedTuple):
    """How a router computes its scores."""

    linear_at: tuple[int, ...]  # ndim of `hidden` where scores are hidden·Wᵀ + bias; else the own forward runs
    is_wide: bool = False  # whether that is computed in float32, or else in the dtype of `hidden`
    is_cast: bool = False  # whether autocast has an effect on it
    weights_in: torch.dtype | None = None  # the dtype of the weights; None for that of `hidden`
    weights_cast: bool = False  # whether it is that of autocast instead


class _Choice(NamedTuple):
    """Say how a swapped router computes its scores and chooses by them."""

    route: BoundRoute
    scale: float  # of the weights
    groups: Callable[[Any, Tensor, Tensor | None], Tensor] | None  # which experts may be chosen, if not all
    bias_name: str | None  # of the argument that has the correction bias, if it is no attribute
    plain: _How
    autocast: _How


def _is_named(module: nn.Module) -> bool:
    return any(cls.__name__.endswith(("Router", "Gate", "Gating")) for cls in type(module).__mro__)


def _linear(router: nn.Module) -> Any:
    """Return what has the weight (n, d) and perhaps the bias (n) of the scores: the router, or its one layer."""
    if isinstance(weight := getattr(router, "weight", None), Tensor) and weight.ndim == 2:
        return router
    layers = [child for child in router.children() if isinstance(child, nn.Linear)]
    return layers[0] if len(layers) == 1 else None


@torch.no_grad()
def _swapped(name: str, router: Any, route: Route) -> tuple[type[nn.Module], _Choice]:
    """Return the class of a router with khot's choice, and the choice; the router does not change."""
    own: Any = getattr(type(router), "khot_own", type(router))
    n, k = len(_linear(router).weight), int(router.top_k)
    width = BoundRoute(route, n, k, OPTIONS).width
    if width != n:
        raise ValueError(f"`route` must take as many scores as {name} gives, {n}; it takes {width}.")
    bias_name, twin = _bias_argument(name, own), _twin(router, torch.float32)
    given = _called(own, twin, _probes(twin), bias_name)
    if not (isinstance(given, tuple) and len(given) == 3):
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise ValueError(f"{name} must give (logits, weights, indices); it gives {got}.")
    if given[0].shape != (PROBES, n) or bool((given[0] >= 0).all()):
        got = "what looks like probabilities" if given[0].shape == (PROBES, n) else f"shape {tuple(given[0].shape)}"
        raise ValueError(f"{name} must give logits of {n} experts for each token first; it gives {got}.")
    scale = _scale(router, given)
    option = inspect.signature(route).parameters.get("normalize")
    if option is not None and "normalize" not in getattr(route, "keywords", {}):
        is_constant = bool((given[1].float().sum(-1) - scale).abs().max() < 1e-2 * scale)
        route = partial(route, normalize=is_constant or (k > 1 and not option.default))
    groups, how = _groups(name, twin, given), (_how(own, router, bias_name), _how_cast(own, router, bias_name))
    choice = _Choice(BoundRoute(route, n, k, OPTIONS), scale, groups, bias_name, *how)
    _route(twin, choice, given[0], None, training=False)  # raises if the route does not fit
    return _subclass(own), choice


def _bias_argument(name: str, own: Any) -> str | None:
    """Return the name of the second argument of a router's forward, if it is a correction bias."""
    more = [p for p in list(inspect.signature(own.forward).parameters.values())[2:] if p.kind not in (p.VAR_KEYWORD,)]
    needed = [p.name for p in more if p.default is p.empty and p.kind != p.VAR_POSITIONAL and "bias" not in p.name]
    if needed:
        raise ValueError(f"{name} must choose by its hidden states alone; it needs {', '.join(needed)} as well.")
    return next((p.name for p in more if "bias" in p.name), None)


def _bias(router: nn.Module) -> Tensor | None:
    """Return the correction bias (n) that a router keeps, itself or in a part of it."""
    for part in (router, *router.children()):
        if isinstance(bias := getattr(part, "e_score_correction_bias", None), Tensor):
            return bias.reshape(-1)
    return None


def _called(own: Any, router: Any, tokens: Tensor, bias_name: str | None) -> Any:
    """Return what a router gives for tokens, with a correction bias of 0 if it wants one."""
    extra = {} if bias_name is None else {bias_name: tokens.new_zeros(len(_linear(router).weight))}
    try:
        return own.forward(router, tokens, **extra)
    except (IndexError, RuntimeError, ValueError):  # it wants another number of dimensions
        return own.forward(router, tokens[None], **extra)


def _twin(router: Any, dtype: torch.dtype) -> Any:
    """Return a copy to try, with random weights: those of a new model may be 0, and show nothing."""
    twin = copy.deepcopy(router).to("cpu", dtype)  # not every device computes in bfloat16
    weight = _linear(twin).weight
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / weight.shape[1] ** 0.5)
    return twin


def _probes(router: Any) -> Tensor:
    weight = _linear(router).weight
    return torch.randn(PROBES, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)


def _scale(router: Any, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the factor of a router's weights: their constant sum, or their ratio to a softmax or to sigmoid gates."""
    logits, weights, indices = given[0].float(), given[1].float(), given[2]
    sums = weights.sum(-1)
    for size in (sums, *(weights / each.gather(-1, indices) for each in (logits.softmax(-1), logits.sigmoid()))):
        if bool((size - size.mean()).abs().max() < 1e-2 * size.mean()):
            return round(float(size.mean()), 4)
    return float(getattr(router, "routed_scaling_factor", 1.0))


def _best_two(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return the worth of groups (…, groups, experts): the sum of the best two gates, as in DeepSeek-V3."""
    gates = logits.sigmoid() if bias is None else logits.sigmoid() + bias
    return gates.topk(min(2, logits.shape[-1]), -1).values.sum(-1)


def _best_one(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return the worth of groups: their best expert, as in DeepSeek-V2."""
    return logits.amax(-1)


def _allowed(worth: Callable[[Tensor, Tensor | None], Tensor], router: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return which experts (tokens, n) are in one of the best groups of their token."""
    parts = x.unflatten(-1, (int(router.num_group), -1))
    split = None if bias is None else bias.view(parts.shape[-2:])
    best = worth(parts, split).topk(int(router.topk_group), -1).indices
    is_best = torch.zeros(parts.shape[:-1], dtype=torch.bool, device=x.device).scatter(-1, best, True)
    return is_best[..., None].expand_as(parts).flatten(-2)


def _groups(name: str, router: Any, given: Any) -> Callable[[Any, Tensor, Tensor | None], Tensor] | None:
    """Return the rule of groups that explains what a router chose; None if it chooses among all experts."""
    groups = getattr(router, "num_group", None) or 1
    if groups == 1 or (getattr(router, "topk_group", None) or groups) == groups:
        return None
    bias = _bias(router)
    for worth in (_best_two, _best_one):
        rule = partial(_allowed, worth)
        if bool(rule(router, given[0].float(), bias).gather(-1, given[2]).all()):
            return rule
    if getattr(router, "topk_method", "") == "greedy":
        return None
    raise ValueError(f"{name} must choose groups of experts by the best one or two of each; it has another rule.")


def _how(own: Any, router: Any, bias_name: str | None) -> _How:
    """Return how a router computes, from what a copy in bfloat16 does."""
    twin = _twin(router, torch.bfloat16)
    tokens = _probes(twin)
    with torch.random.fork_rng(devices=[]):
        try:
            found = _called(own, twin, tokens, bias_name)[1].dtype
        except RuntimeError:  # it cannot compute in bfloat16; the model's own dtype is all it has to serve
            return _How((), weights_in=torch.float32)
        weights_in = None if found == torch.bfloat16 else found
        for is_wide in (False, True):
            if fits := _linear_at(own, twin, (tokens,), bias_name, _How((), is_wide)):
                return _How(fits, is_wide, weights_in=weights_in)
    return _How((), weights_in=weights_in)


def _how_cast(own: Any, router: Any, bias_name: str | None) -> _How:
    """Return how a router computes under autocast, from what a copy in float32 does for tokens of two dtypes."""
    twin = _twin(router, torch.float32)
    both = (_probes(twin), _probes(twin).bfloat16())
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
        try:
            found = [_called(own, twin, tokens, bias_name)[1].dtype for tokens in both]
        except RuntimeError:
            return _How(())
        weights_in = found[0] if found[0] == found[1] == torch.float32 else None
        is_cast = found[0] == torch.bfloat16
        for how in (_How((), is_cast=True), _How((), is_wide=True), _How(())):
            if fits := _linear_at(own, twin, both, bias_name, how):
                return how._replace(linear_at=fits, weights_in=weights_in, weights_cast=is_cast)
    return _How(())


def _linear_at(own: Any, router: Any, probes: tuple[Tensor, ...], bias_name: str | None, how: _How) -> tuple[int, ...]:
    """Return with how many dimensions of tokens `_logits` are the scores of a router, in training and in evaluation."""

    def is_linear(hidden: Tensor) -> bool:
        try:
            expected = _logits(router, hidden, how)
            extra = {} if bias_name is None else {bias_name: router_bias}
            given = [own.forward(router.train(mode), hidden, **extra)[0] for mode in (True, False)]
        except (IndexError, RuntimeError, ValueError):  # it takes another number of dimensions
            return False
        return all(logits.dtype == expected.dtype and torch.equal(logits, expected) for logits in given)

    router_bias = probes[0].new_zeros(len(_linear(router).weight))
    shapes: tuple[Callable[[Tensor], Tensor], ...] = (lambda t: t, lambda t: t[None])
    return tuple(shape(probes[0]).ndim for shape in shapes if all(is_linear(shape(t)) for t in probes))


def _logits(router: Any, hidden: Tensor, how: _How) -> Tensor:
    """Return the scores of tokens (…, d), (tokens, n), as a linear router computes them."""
    if not how.is_cast and torch.is_autocast_enabled(hidden.device.type):
        with torch.autocast(hidden.device.type, enabled=False):
            return _logits(router, hidden, how)
    layer = _linear(router)
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]:
        bias = None
    rows = hidden.reshape(-1, weight.shape[1])
    if how.is_wide:
        rows, weight, bias = rows.float(), weight.float(), None if bias is None else bias.float()
    return linear(rows, weight, bias)


def _route(
    router: Any, choice: _Choice, logits: Tensor, bias: Tensor | None, *, training: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights and indices, (tokens, slots); where there is no expert, the weight is 0."""
    bias = _bias(router) if bias is None else bias
    scores = logits
    if choice.groups is not None:
        scores = logits.masked_fill(~choice.groups(router, logits.detach().float(), bias), -torch.inf)
    routing = choice.route(scores, int(router.top_k), training=training, bias=bias, mask=mask)
    indices = torch.where(routing.indices < logits.shape[-1], routing.indices, 0)
    return routing.weights * choice.scale, indices


@cache
def _subclass(own: Any) -> type[nn.Module]:
    """Return the class with khot's choice."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        choice: _Choice = self.khot_choice
        bias = (args[0] if args else kwargs.get(choice.bias_name)) if choice.bias_name else None
        how = choice.autocast if torch.is_autocast_enabled(hidden.device.type) else choice.plain
        if hidden.ndim in how.linear_at and len(args) + len(kwargs) == (bias is not None):
            cast = torch.get_autocast_dtype(hidden.device.type) if how.weights_cast else None
            logits, dtype = _logits(self, hidden, how), cast or how.weights_in or hidden.dtype
        else:
            logits, weights, _ = own.forward(self, hidden, *args, **kwargs)
            dtype = weights.dtype
        mask = self.khot_padding.of(len(logits), logits.device) if "mask" in choice.route.takes else None
        weights, indices = _route(self, choice, logits, bias, training=self.training, mask=mask)
        return logits, weights.to(dtype), indices

    def reduce(self: Any) -> tuple[Any, ...]:
        return _empty, (own,), self.__dict__

    return type(f"KHot{own.__name__}", (own,), {"forward": forward, "khot_own": own, "__reduce__": reduce})


def _empty(own: Any) -> Any:
    """Make an instance for pickle, which finds a class by its name."""
    cls = _subclass(own)
    return cls.__new__(cls)
