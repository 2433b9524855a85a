"""Layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._tensors import scores
from ._values import number


def autoencoder(k: float, latents: int, kind: str, candidates: Any, zipf: float) -> None:
    """Raise unless the selection of a sparse autoencoder is possible."""
    if k > latents:
        raise ValueError(f"`k` must satisfy 0 < k ≤ {latents} (the number of latents); got {k:g}.")
    if kind == "topk" and k != int(k):
        raise ValueError(f'`k` must be a whole number for the kind "topk"; got {k:g}. "batch" takes fractions.')
    number("candidates", candidates, "a number")
    if not candidates >= 1:
        raise ValueError(f"`candidates` must be ≥ 1; got {candidates}.")
    if zipf and kind != "feature":
        raise ValueError(f'`zipf` is for the kind "feature", whose latents have budgets; got kind {kind!r}.')


def enough_tokens(count: int, k: float, latents: int) -> None:
    """Raise unless each latent can choose a token."""
    if count * k < latents:
        raise ValueError(
            f"Feature Choice needs at least latents/k = {latents / k:g} tokens in a training batch, one for each "
            f"latent; got {count}."
        )


def samples(name: str, rows: Tensor) -> None:
    """Raise unless there is a row and all are finite, because weights are taken from them."""
    if not len(rows):
        raise ValueError(f"`{name}` must have at least one row; got none.")
    bad = ~rows.isfinite().all(-1)
    if bad.any():
        raise ValueError(
            f"`{name}` must be finite in {rows.dtype}; got {int(bad.sum())} of {len(rows)} rows that are not, "
            f"first {int(bad.nonzero()[0])}: leave them out."
        )


def measured(tokens: int) -> None:
    """Raise unless metrics have seen a token."""
    if not tokens:
        raise ValueError("Metrics need at least one token; got none: call `update` first.")


def tensors(path: Path, got: dict[str, tuple[int, ...]], want: dict[str, tuple[int, ...]]) -> None:
    """Raise unless a file's tensors have these names and shapes."""
    if got != want:
        names = [name for name in {**want, **got} if got.get(name) != want.get(name)]
        said = "; ".join(f"{name} {got.get(name, 'missing')}, not {want.get(name, 'known')}" for name in names[:4])
        raise ValueError(f"{path} must have the tensors of its config; got {said}.")


def buffer(module: Any, name: str) -> None:
    """Raise unless a module itself has a buffer of this name that holds a number."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"`module` must be a torch.nn.Module; got {type(module).__name__}.")
    known = {key: value for key, value in module.named_buffers(recurse=False) if value.dtype != torch.bool}
    if name not in known:
        names = ", ".join(map(repr, known)) or "it has none"
        raise ValueError(f"`name` must be a buffer of {type(module).__name__} ({names}); got {name!r}.")


def experts(logits: Any, k: Any) -> None:
    """Raise unless there are scores of experts, and k of them can be chosen."""
    scores(logits, -1, "logits")
    n = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"`k` must be an int; got {type(k).__name__}.")
    if not 1 <= k <= n:
        raise ValueError(f"`k` must satisfy 1 ≤ k ≤ {n} (number of experts); got {k}.")


def capacity(value: Any, mean: float, tokens: int, n: int, k: int) -> None:
    """Raise if experts with this capacity cannot take all tokens."""
    if value is None:
        return
    number("capacity", value, "a number or None")
    if not value >= mean * (1 - 1e-12):
        raise ValueError(
            f"`capacity` must be ≥ {mean:g} (k·tokens/experts); got {value}: "
            f"{math.ceil(tokens * k - value * n)} of {tokens * k} assignments would be dropped."
        )


def as_many_experts(given: int, n: int) -> None:
    """Raise unless there is an expert for each of the router's."""
    if given != n:
        raise ValueError(f"`experts` must be {n} Modules, as many as the router has; got {given}.")


def can_dispatch(logits: Tensor) -> None:
    """Raise if a token has NaN or +inf among its scores; read on the host, as dispatch reads them anyway."""
    of = logits.detach().reshape(-1, logits.shape[-1])
    bad = (of.isnan() | (of == torch.inf)).any(-1)
    if bad.any():
        what = "NaN" if of.isnan().any() else "+inf"
        raise ValueError(
            f"`logits` must not be NaN or +inf; got {what} for {int(bad.sum())} of {len(bad)} tokens, "
            f"first {int(bad.nonzero()[0])}."
        )


def capacity_factor(value: Any) -> None:
    """Raise unless it is positive and finite."""
    if value is None:
        return
    number("capacity_factor", value, "a number or None")
    if not 0 < value < float("inf"):
        raise ValueError(f"`capacity_factor` must be > 0 and finite; got {value}. At least 1 holds all tokens.")


def expert_bias(bias: Tensor | None, n: int) -> None:
    """Raise unless there is one number for each expert."""
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"`bias` must have the shape ({n},), one for each expert; got {tuple(bias.shape)}.")


def has_routers(model: Any, count: int) -> None:
    """Raise if there are none."""
    if not count:
        raise ValueError(
            f"`model` must have routers: Modules with `weight` and `top_k` whose class is named …Router, with "
            f"forward(hidden) → (logits, weights, indices); got {type(model).__name__}, which has none."
        )


def halves(name: str, x: Tensor) -> None:
    """Raise unless the last dimension is two of a size."""
    scores(x, -1, name)
    if x.shape[-1] % 2:
        raise ValueError(f"`{name}` must have 2n entries, scores and scales; got {x.shape[-1]}.")


def takes_bias(biased: bool, takes: bool) -> None:
    """Raise if there is a bias that the route would not see."""
    if biased and not takes:
        raise ValueError("`biased` needs a `route` that takes a bias: sigmoid_gates or sigma_topk.")


def takes_scores(route: Any, more: list[str]) -> None:
    """Raise if a route needs more than scores and k."""
    if more:
        raise ValueError(
            f"`route` must take (logits, k) and options; {getattr(route, '__name__', route)} needs {', '.join(more)}."
        )


def can_route(name: str, wanted: int, n: int, groups: int) -> None:
    """Raise unless a function of n scores can do what a model's router does."""
    if wanted != n:
        raise ValueError(f"`route` must take as many scores as {name} gives, {n}; it takes {wanted}.")
    if groups > 1:
        raise ValueError(f"{name} must choose among all its experts; it chooses within {groups} groups.")


def routing_of(name: str, given: Any) -> None:
    """Raise unless a model's router gave what it should."""
    if not (isinstance(given, tuple) and len(given) == 3):
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise ValueError(f"{name} must give (logits, weights, indices); it gives {got}.")
