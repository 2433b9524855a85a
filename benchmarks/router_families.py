"""Which routers of the installed transformers can `khot.hf.swap_routers` swap? Writes docs/tables/router-families.md.

Each router is made from a configuration of its model, with random weights, and swapped. "own rule" is the route of khot
that gives the router's own experts and weights, which says that scores, scales, biases and groups are understood. Where
khot has no such route, one is written here, and the table says what it does. Some seconds.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import khot.hf
from benchmarks import common
from khot.bench import markdown_table
from khot.nn import routing


def root_of_softplus(logits: Tensor, k: int, *, bias: Tensor) -> routing.Routing:
    """DeepSeek-V4's: gates √softplus(x)."""
    gates = softplus(logits.float()).sqrt()
    indices = (gates + bias).topk(k, -1).indices
    weights = gates.gather(-1, indices)
    return routing.Routing(logits, weights / weights.sum(-1, keepdim=True), indices, gates)


def biased_scores(logits: Tensor, k: int, *, bias: Tensor, normalize: bool = True) -> routing.Routing:
    """Kolibri's: the bias is added to the scores, and not to the gates."""
    gates, indices = logits.sigmoid(), (logits + bias).topk(k, -1).indices
    weights = gates.gather(-1, indices)
    total = weights.sum(-1, keepdim=True) if normalize else 1.0
    return routing.Routing(logits, weights / total, indices, gates)


def sparsemixer(logits: Tensor, k: int) -> routing.Routing:
    """Phi's: each expert by a softmax over those near the best of the scores that are left."""
    left, weights, indices = logits, [], []
    for _ in range(k):
        best, place = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * JITTER
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, place))
        indices.append(place)
        left = left.scatter(-1, place, -torch.inf)
    return routing.Routing(logits, torch.cat(weights, -1), torch.cat(indices, -1), logits.softmax(-1))


JITTER = 0.01
"""Phi's `router_jitter_noise`."""
RULES = (routing.softmax_topk, routing.sigmoid_gates)
FOREIGN = {
    root_of_softplus: "gates √softplus(x)",
    biased_scores: "the bias added to scores, not to gates",
    sparsemixer: "SparseMixer: a softmax over scores near the best",
}
"""Rules that khot has no route for."""
SMALL = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "top_k_experts": 2}
"""For configurations whose default has no experts."""
SIZES = SimpleNamespace(
    hidden_size=32, num_local_experts=8, num_experts_per_tok=2, router_scaling_factor=2.5,
    vision_config=SimpleNamespace(hidden_size=32), density_router_hidden_size=16,
)  # fmt: skip
"""For routers whose configuration differs from layer to layer, or has no sizes by default."""


class Family(NamedTuple):
    """A router, and what came of swapping it."""

    model: str
    router: str
    own_rule: str
    refused: str
    """Why; empty if it was swapped."""


def routers() -> Iterator[tuple[str, type[nn.Module], nn.Module | str]]:
    """Every class of a router, with one made of it, or why there is none."""
    import transformers

    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = re.findall(r"^class (\w*(?:Router|MoEV1Gate|TopKGating))\(", file.read_text(), re.MULTILINE)
        folder = f"transformers.models.{file.parent.name}"
        for name in names:
            cls = getattr(importlib.import_module(f"{folder}.{file.stem}"), name)
            settings = vars(importlib.import_module(f"{folder}.configuration_{file.parent.name}"))
            yield file.parent.name, cls, _made(cls, settings, transformers.PreTrainedConfig)


def _made(cls: type[nn.Module], settings: dict[str, Any], base: type) -> nn.Module | str:
    """The router of the first configuration that has what it needs."""
    configs = [v for v in settings.values() if inspect.isclass(v) and issubclass(v, base) and v is not base]
    for config, options, more in product(configs, ({}, SMALL), ((), (0,))):  # some want the number of their layer
        try:
            router = cls(config(**options), *more)
        except Exception:  # each configuration lacks other things
            continue
        if getattr(router, "top_k", 2) is not None:
            return router
    for sizes in ((SIZES,), (32, 8, 2)):
        try:
            return cls(*sizes)
        except Exception as error:
            why = f"cannot be made here: {error}"
    return why


@torch.no_grad()
def tried(model: str, cls: type[nn.Module], router: nn.Module | str) -> Family:
    """What comes of swapping it."""
    if isinstance(router, str):
        return Family(model, cls.__name__, "", router)
    torch.manual_seed(0)
    for tensor in (*router.parameters(), *router.buffers()):
        if tensor.is_floating_point():
            tensor.normal_(0, 0.02)
    router.float().eval()
    try:
        khot.hf.swap_routers(nn.ModuleDict({"gate": router}), routing.sigma_topk)
    except ValueError as error:
        return Family(model, cls.__name__, "", _short(str(error)))
    same = [f"`{rule.__name__}`" for rule in RULES if _is_own_rule(cls, router, rule)]
    same = same or [f"none of khot's: {what}" for rule, what in FOREIGN.items() if _is_own_rule(cls, router, rule)]
    return Family(model, cls.__name__, ", ".join(same), "")


def _is_own_rule(cls: Any, router: Any, rule: Any) -> bool:
    width = next(p for p in router.parameters() if p.ndim == 2).shape[1]
    tokens = torch.randn(1, 64, width)
    bias = [torch.randn(router.num_experts) / 50] if _wants_bias(cls) else []
    try:
        khot.hf.swap_routers(nn.ModuleDict({"gate": router}), rule)
    except TypeError:  # it has no bias, which the rule needs
        return False
    for hidden in (tokens[0], tokens):
        try:
            own, ours = cls.forward(router, hidden, *bias), router(hidden, *bias)
        except (IndexError, RuntimeError, ValueError):
            continue
        return torch.allclose(_dense(*own), _dense(*ours), rtol=1e-3, atol=1e-6)
    return False


def _wants_bias(cls: Any) -> bool:
    return any("bias" in name for name in inspect.signature(cls.forward).parameters)


def _dense(logits: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, indices, weights.float())


def _short(error: str) -> str:
    found = re.search(r"; it (?:is a \w+, which )?(.+)\.$", error)
    return found[1] if found else error


def families() -> list[Family]:
    """All of them."""
    return [tried(*each) for each in routers()]


def table(found: list[Family]) -> str:
    """Those that are refused first."""
    import transformers

    swapped = [each for each in found if not each.refused]
    parts = [
        "<!-- Written by benchmarks/router_families.py; do not edit. -->",
        f"Of the {len(found)} routers of transformers {transformers.__version__}, {len(swapped)} can be swapped. "
        "These are refused; in a model that has others beside them, as `deepseek_v4`, `skip=` leaves them as they are:",
        markdown_table(["model", "router", "it"], [[f"`{e.model}`", e.router, e.refused] for e in found if e.refused]),
        "These are swapped; “own rule” is the route that gives the same experts and weights as the model's own code:",
        markdown_table(
            ["model", "router", "own rule"],
            [[f"`{e.model}`", e.router, e.own_rule or "not known"] for e in swapped],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    args = common.parser(__doc__, "the same").parse_args()
    found = families()
    common.write_table(common.places(args).tables / "router-families.md", table(found))
    common.show(args, (each._asdict() for each in found), table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
