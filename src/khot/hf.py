"""Routers of Hugging Face models, swapped for khot's; needs `khot[hf]` for the models themselves."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn

from .nn._router import Route
from .nn.routing import sigma_topk


def swap_routers(model: nn.Module, route: Route = sigma_topk) -> list[str]:
    """Let every router of a transformers model choose by a function of `khot.nn.routing`, with the weights it has.

    Each router becomes a subclass of its own class, so that `output_router_logits`, `save_pretrained` and `generate`
    work as before; scores are computed as the model does. Swap again with another route to change it; a model loaded
    with `from_pretrained` has its own rule until it is swapped.

    Args:
        model: a model whose routers give (logits, weights, indices), as transformers 5's do.
        route: `(logits, k, …) → Routing`; its `normalize` is the router's own `norm_topk_prob`, or True.

    Returns:
        The names of the routers.

    Examples:
        >>> import khot.hf
        >>> khot.hf.swap_routers(model, khot.nn.routing.sigma_topk)  # doctest: +SKIP
        ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    """
    found = {name: module for name, module in model.named_modules() if _is_router(module)}
    if not found:
        raise ValueError(
            f"`model` must have routers: Modules with `weight` and `top_k` whose class is named …Router, with "
            f"forward(hidden) → (logits, weights, indices); got {type(model).__name__}, which has none."
        )
    takes = set(inspect.signature(route).parameters)
    for module in found.values():
        is_normalized = getattr(module, "norm_topk_prob", True)
        module.__class__ = _subclass(type(module))
        module.khot_route = partial(route, normalize=is_normalized) if "normalize" in takes else route
    return list(found)


def _is_router(module: nn.Module) -> bool:
    is_named = any(cls.__name__.endswith("Router") for cls in type(module).__mro__)
    return is_named and hasattr(module, "top_k") and hasattr(module, "weight")


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """The class with khot's choice; itself if it has that already."""
    if hasattr(cls, "khot_forward"):
        return cls

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = cls.forward(self, *args, **kwargs)
        options = {} if self.training else _evaluation(self.khot_route)
        routing = self.khot_route(logits, self.top_k, **options)
        return logits, routing.weights.to(weights.dtype), routing.indices

    return type(f"KHot{cls.__name__}", (cls,), {"forward": forward, "khot_forward": True})


def _evaluation(route: Route) -> dict[str, bool]:
    """Noise and samples are for training alone."""
    takes = inspect.signature(route).parameters
    return {name: False for name in ("training", "sample") if name in takes}
