"""Hugging Face models with khot's routers."""

import copy
import inspect
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..nn.moe import BoundRoute, Route, sigma_topk

PROBES = 8  # random tokens that show what a router of a model does
OPTIONS = ("bias", "training", "sample")  # what a swapped router can give to a route


def swap_routers(model: nn.Module, route: Route = sigma_topk) -> list[str]:
    """Let every router of a transformers model choose by a function of `khot.nn.routing`, with the weights it has.

    Each router becomes a subclass of its own class, so that `output_router_logits`, `save_pretrained` and `generate`
    work as before; scores are computed as the model does. Swap again with another route to change it; a model loaded
    with `from_pretrained` has its own rule until it is swapped.

    Args:
        model: a model whose routers give (logits, weights, indices), as transformers 5's do.
        route: `(logits, k, …) → Routing`. If it has a `normalize` option that is not set, it is set where the router's
            own weights have a constant sum; and for σ_k with k > 1, since π sums to k, which no model is used to. It
            is given the router's correction bias, if it takes one.

    Returns:
        The names of the routers.

    Examples:
        >>> import khot.hf
        >>> khot.hf.swap_routers(model, khot.nn.routing.sigma_topk)  # doctest: +SKIP
        ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    """
    found = {name: module for name, module in model.named_modules() if _is_router(module)}
    if not found:
        kind = "Modules of a class named …Router, with `weight`, `top_k`, forward(hidden) → (logits, weights, indices)"
        raise ValueError(f"`model` must have routers: {kind}; got {type(model).__name__}, which has none.")
    changes = [(module, *_swapped(name, module, route)) for name, module in found.items()]
    for module, cls, choice in changes:  # all or none
        module.__class__, module.khot_choice = cls, choice
    return list(found)


class _Choice(NamedTuple):
    """How a swapped router computes its scores and chooses by them."""

    route: BoundRoute
    linear_at: tuple[int, ...]  # ndim of `hidden` where scores are hidden·Wᵀ + bias; else the own forward runs
    is_wide: bool  # whether that is computed in float32, or else in the dtype of `hidden`
    weights_in: torch.dtype | None  # the dtype of the weights; None for the dtype of `hidden`


def _is_router(module: nn.Module) -> bool:
    is_named = any(cls.__name__.endswith("Router") for cls in type(module).__mro__)
    return is_named and hasattr(module, "top_k") and hasattr(module, "weight")


@torch.no_grad()
def _swapped(name: str, router: Any, route: Route) -> tuple[type[nn.Module], _Choice]:
    """Return the class of a router with khot's choice, and the choice; the router does not change."""
    own: Any = getattr(type(router), "khot_own", type(router))
    n, k = len(router.weight), int(router.top_k)
    if (groups := getattr(router, "num_group", None) or 1) > 1:
        raise ValueError(f"{name} must choose among all its experts; it chooses within {groups} groups.")
    width = BoundRoute(route, n, k, OPTIONS).width
    if width != n:
        raise ValueError(f"`route` must take as many scores as {name} gives, {n}; it takes {width}.")
    given = own.forward(router, _probes(router))
    if not (isinstance(given, tuple) and len(given) == 3):
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise ValueError(f"{name} must give (logits, weights, indices); it gives {got}.")
    option = inspect.signature(route).parameters.get("normalize")
    if option is not None and "normalize" not in getattr(route, "keywords", {}):
        sums, scale = given[1].float().sum(-1), _scale(router)
        is_constant = bool((sums - scale).abs().max() < 1e-2 * scale)
        route = partial(route, normalize=is_constant or (k > 1 and not option.default))
    choice = _Choice(BoundRoute(route, n, k, OPTIONS), *_how(own, router))
    _route(router, choice, given[0], training=False)  # raises if the route does not fit
    return _subclass(own), choice


def _probes(router: Any) -> Tensor:
    tokens = torch.randn(PROBES, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    return tokens.to(router.weight)


def _how(own: Any, router: Any) -> tuple[tuple[int, ...], bool, torch.dtype | None]:
    """Return the last three fields of `_Choice`, from what a copy in bfloat16 does."""
    twin = copy.deepcopy(router).to("cpu", torch.bfloat16)  # not every device computes in bfloat16
    tokens = _probes(twin)
    with torch.random.fork_rng(devices=[]):
        found = own.forward(twin, tokens)[1].dtype
        weights_in = None if found == torch.bfloat16 else found
        for is_wide in (False, True):
            fits = tuple(x.ndim for x in (tokens, tokens[None]) if _is_linear(own, twin, x, is_wide))
            if fits:
                return fits, is_wide, weights_in
    return (), False, weights_in


def _is_linear(own: Any, router: Any, hidden: Tensor, is_wide: bool) -> bool:
    """Return whether `_logits` are the scores of a router, in training and in evaluation."""
    expected = _logits(router, hidden, is_wide)
    try:
        given = [own.forward(router.train(mode), hidden)[0] for mode in (True, False)]
    except (IndexError, RuntimeError, ValueError):  # it takes another number of dimensions
        return False
    return all(torch.equal(logits, expected) for logits in given)


def _logits(router: Any, hidden: Tensor, is_wide: bool) -> Tensor:
    """Return the scores of tokens (…, d), (tokens, n), as a linear router computes them."""
    weight, bias = router.weight, getattr(router, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]:
        bias = None
    rows = hidden.reshape(-1, weight.shape[1])
    if is_wide:
        rows, weight, bias = rows.float(), weight.float(), None if bias is None else bias.float()
    return linear(rows, weight, bias)


def _route(router: Any, choice: _Choice, logits: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """Return weights and indices, (tokens, slots); where there is no expert, the weight is 0."""
    bias = getattr(router, "e_score_correction_bias", None)
    routing = choice.route(logits, int(router.top_k), training=training, bias=bias)
    indices = torch.where(routing.indices < logits.shape[-1], routing.indices, 0)
    return routing.weights * _scale(router), indices


def _scale(router: Any) -> float:
    return float(getattr(router, "routed_scaling_factor", 1.0))


@cache
def _subclass(own: Any) -> type[nn.Module]:
    """Return the class with khot's choice."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        choice: _Choice = self.khot_choice
        is_plain = len(args) == 1 and not kwargs and args[0].ndim in choice.linear_at
        if is_plain and not torch.is_autocast_enabled(args[0].device.type):  # which has rules of its own
            logits, dtype = _logits(self, args[0], choice.is_wide), choice.weights_in or args[0].dtype
        else:
            logits, weights, _ = own.forward(self, *args, **kwargs)
            dtype = weights.dtype
        weights, indices = _route(self, choice, logits, training=self.training)
        return logits, weights.to(dtype), indices

    def reduce(self: Any) -> tuple[Any, ...]:
        return _empty, (own,), self.__dict__

    return type(f"KHot{own.__name__}", (own,), {"forward": forward, "khot_own": own, "__reduce__": reduce})


def _empty(own: Any) -> Any:
    """Make an instance for pickle, which finds a class by its name."""
    cls = _subclass(own)
    return cls.__new__(cls)
