"""Spark FFNs in transformers models: the gate of a gated MLP becomes a low-rank predictor of its active neurons."""

from typing import Any

import torch
from torch import nn

from .. import _check
from ..nn.spark import SparkFFN

PROBES = 8  # random tokens that show what an MLP computes
PARTS = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def swap_ffns(
    model: nn.Module, k: int | float = 0.08, r: int | float = 0.5, *, exact: bool = False, keep: bool = True
) -> list[str]:
    """Replace every gated MLP of a transformers model by a `khot.nn.SparkFFN` with its weights.

    `down(act(gate(x)) ⊙ up(x))` becomes `down(act(top_k(K₁·P·x)) ⊙ up(x))`, with `gate ≈ K₁·P` of rank r by singular
    values. The model gets sparse at once and loses some quality; train it further to gain that back. All MLPs are
    replaced, or none.

    Args:
        model: a model with modules that have `gate_proj`, `up_proj`, `down_proj` and `act_fn`, as those of Llama,
            Mistral, Qwen and Gemma do.
        k: active neurons, an int; or their share, a float in (0, 1).
        r: the rank of the gate, an int; or its share of the width, a float in (0, 1].
        exact: keep exactly k neurons of each token.
        keep: let active neurons have the values they had; False lessens them by the threshold, as Spark does from
            scratch.

    Returns:
        The names of the modules.

    Examples:
        >>> import khot.hf
        >>> khot.hf.swap_ffns(model, 0.1, 0.5)  # doctest: +SKIP
        ['model.layers.0.mlp', 'model.layers.1.mlp']
    """
    found = {name: module for name, module in model.named_modules() if all(hasattr(module, part) for part in PARTS)}
    if not found:
        fused = [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj")]
        why = f"{fused[0]} has its gate and up in one matrix" if fused else "its MLPs have no gate"
        kind = "modules with `gate_proj`, `up_proj`, `down_proj` and `act_fn`"
        raise ValueError(f"`model` must have gated MLPs: {kind}; got {type(model).__name__}: {why}.")
    made = {name: _spark(name, mlp, k, r, exact, keep) for name, mlp in found.items()}
    for name, layer in made.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.train(model.training))
    return list(made)


def _spark(name: str, mlp: Any, k: int | float, r: int | float, exact: bool, keep: bool) -> SparkFFN:
    """Return the twin of an MLP; raise if it computes something else than a gated FFN does."""
    linears = [getattr(mlp, part) for part in PARTS]
    if not all(type(part) is nn.Linear for part in linears):
        got = ", ".join(type(part).__name__ for part in linears)
        raise ValueError(f"{name} must be made of three torch.nn.Linear; got {got}.")
    if any(part.bias is not None for part in linears):
        raise ValueError(f"{name} must have no biases, because a Spark FFN has none.")
    activation = getattr(mlp, "act_fn", None)
    if activation is None:
        raise ValueError(f"{name} must have its activation as `act_fn`.")
    gate, up, down = linears
    d_ff, d_model = gate.weight.shape
    probes = torch.randn(PROBES, d_model, generator=torch.Generator().manual_seed(0)).to(gate.weight)
    expected = down(activation(gate(probes)) * up(probes))
    given = mlp(probes)
    if not isinstance(given, torch.Tensor) or not torch.allclose(given, expected, rtol=1e-2, atol=1e-3):
        raise ValueError(f"{name} must compute down(act(gate(x)) · up(x)); it computes something else.")
    count, rank = _number("k", k, d_ff), _number("r", r, d_model)
    weights = (gate.weight, up.weight, down.weight)
    layer = SparkFFN.from_gated(*weights, count, rank, activation=activation, exact=exact, keep=keep)
    for part in layer.parameters():
        part.requires_grad_(gate.weight.requires_grad)
    return layer


def _number(name: str, value: int | float, of: int) -> int:
    """Return a count, or that of a share."""
    if isinstance(value, float):
        _check.fraction(name, value)
        return max(1, round(value * of))
    _check.integer_at_most(name, value, of, "of its size")
    return int(value)
