"""Routers of Hugging Face models, swapped for khot's; needs `khot[hf]` for the models themselves."""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from . import _check
from .nn._router import Route, width
from .nn.routing import sigma_topk

PROBES = 8
"""Random tokens that show what a router of a model does."""


def swap_routers(model: nn.Module, route: Route = sigma_topk) -> list[str]:
    """Let every router of a transformers model choose by a function of `khot.nn.routing`, with the weights it has.

    Each router becomes a subclass of its own class, so that `output_router_logits`, `save_pretrained` and `generate`
    work as before; scores are computed as the model does. Swap again with another route to change it; a model loaded
    with `from_pretrained` has its own rule until it is swapped.

    Args:
        model: a model whose routers give (logits, weights, indices), as transformers 5's do.
        route: `(logits, k, …) → Routing`. If it can normalise and does not say, it does where the router's own weights
            have a constant sum; and σ_k for k > 1, since π sums to k, which no model is used to. It is given the
            router's correction bias, if it takes one.

    Returns:
        The names of the routers.

    Examples:
        >>> import khot.hf
        >>> khot.hf.swap_routers(model, khot.nn.routing.sigma_topk)  # doctest: +SKIP
        ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    """
    found = {name: module for name, module in model.named_modules() if _is_router(module)}
    _check.has_routers(model, len(found))
    parameters = inspect.signature(route).parameters
    _check.takes_scores(route, [p.name for p in parameters.values() if p.default is p.empty][2:])
    option = parameters.get("normalize")
    is_open = option is not None and "normalize" not in getattr(route, "keywords", {})
    changes = []
    for name, module in found.items():
        own: Any = getattr(type(module), "khot_own", type(module))
        n, k = len(module.weight), int(module.top_k)
        _check.can_route(name, width(route, n, k), n, getattr(module, "num_group", None) or 1)
        is_own = _is_normalized(name, own, module)
        options = {"normalize": is_own or (k > 1 and not option.default)} if option and is_open else {}
        changes.append((module, _subclass(own), partial(route, **options)))
    for module, cls, chosen in changes:  # all or none
        module.__class__, module.khot_route = cls, chosen
    return list(found)


def _is_router(module: nn.Module) -> bool:
    is_named = any(cls.__name__.endswith("Router") for cls in type(module).__mro__)
    return is_named and hasattr(module, "top_k") and hasattr(module, "weight")


@torch.no_grad()
def _is_normalized(name: str, own: type[nn.Module], router: Any) -> bool:
    """Whether the weights that the model's own rule gives have the same sum for all tokens."""
    weight = router.weight
    tokens = torch.randn(PROBES, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    given = own.forward(router, tokens)
    _check.routing_of(name, given)
    sums = given[1].float().sum(-1)
    return bool((sums - _scale(router)).abs().max() < 1e-2 * _scale(router))


def _scale(router: Any) -> float:
    return float(getattr(router, "routed_scaling_factor", 1.0))


@cache
def _subclass(own: Any) -> type[nn.Module]:
    """The class with khot's choice."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = own.forward(self, *args, **kwargs)
        takes = inspect.signature(self.khot_route).parameters
        options = {} if self.training else {name: False for name in ("training", "sample") if name in takes}
        if "bias" in takes and hasattr(self, "e_score_correction_bias"):
            options["bias"] = self.e_score_correction_bias
        routing = self.khot_route(logits, self.top_k, **options)
        indices = torch.where(routing.indices < logits.shape[-1], routing.indices, 0)  # none: the weight is 0
        return logits, (routing.weights * _scale(self)).to(weights.dtype), indices

    def reduce(self: Any) -> tuple[Any, ...]:
        return _empty, (own,), self.__dict__

    return type(f"KHot{own.__name__}", (own,), {"forward": forward, "khot_own": own, "__reduce__": reduce})


def _empty(own: Any) -> Any:
    """For pickle, which finds a class by its name."""
    cls = _subclass(own)
    return cls.__new__(cls)
