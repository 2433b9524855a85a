"""Is the call legal? Shapes, dtypes and Python values; what tensors hold is read for designs alone."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def scores(x: Any, dim: int, name: str = "x") -> None:
    """Raise unless `x` is a floating tensor that has the dimension `dim`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(x).__name__}.")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"`{name}` must be float16, bfloat16, float32 or float64; got {x.dtype}. "
            f"Convert it first, for example with `{name}.float()`."
        )
    if x.ndim == 0:
        raise ValueError(f"`{name}` must have at least one dimension; got a 0-dimensional tensor.")
    if type(dim) is not int:
        raise TypeError(f"`dim` must be an int; got {type(dim).__name__}.")
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(
            f"`dim` must satisfy {-x.ndim} ≤ dim < {x.ndim} (`{name}` has {x.ndim} dimensions); got {dim}."
        )


def count(k: Any, x: Tensor, dim: int, *, integral: bool = False, is_budget: bool = False) -> None:
    """Raise unless `k` is a number in [0, n] or a real tensor that broadcasts to the rows of `x`.

    `integral` asks for a whole number too; a budget may exceed n, as costs are not read. What a tensor holds is not
    read: its bad rows become NaN.
    """
    n = x.shape[dim]
    if isinstance(k, Tensor):
        if k.dtype == torch.bool or k.is_complex():
            raise TypeError(f"`k` must be an integer or floating tensor; got {k.dtype}.")
        _per_row("k", k, x, dim)
        return
    _number("k", k)
    if is_budget:
        if not k >= 0:
            raise ValueError(f"`k`, the budget, must be ≥ 0; got {k}.")
        return
    if not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (size of dim {dim}); got {k}.")
    if integral and int(k) != k:
        raise ValueError(f"`k` must be a whole number, because a hard selection has no fractions; got {k}.")


def temperature(value: Any, x: Tensor, dim: int) -> None:
    """Raise unless `value` is a positive number or a floating tensor that broadcasts to the rows of `x`."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"`temperature` must be a floating tensor; got {value.dtype}.")
        _per_row("temperature", value, x, dim)
        return
    positive("temperature", value)


def positive(name: str, value: Any, hint: str = " For the limit 0, use `khot.hard_topk`.") -> None:
    """Raise if `value` is neither a tensor nor a number > 0."""
    if isinstance(value, Tensor):
        return
    _number(name, value)
    if not value > 0:
        raise ValueError(f"`{name}` must be > 0; got {value}.{hint}")


def one_number(name: str, value: Any) -> None:
    """Raise if `value` is a tensor of more than one."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"`{name}` must be one number; got a tensor of shape {tuple(value.shape)}.")


def all_positive(name: str, value: Any) -> None:
    """Raise unless what a tensor holds is positive."""
    if isinstance(value, Tensor) and not (value > 0).all():
        raise ValueError(f"`{name}` must be > 0; got {_extremes(value)}.")


def not_negative(name: str, value: Any) -> None:
    """Raise if `value` is neither a tensor nor a number ≥ 0."""
    if isinstance(value, Tensor):
        return
    _number(name, value)
    if not value >= 0:
        raise ValueError(f"`{name}` must be ≥ 0; got {value}.")


def sharpness(value: Any, scores: Tensor) -> None:
    """Raise unless `value` is a positive number or a floating tensor that broadcasts to the rows of `scores`."""
    positive("alpha", value, hint="")
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"`alpha` must be a floating tensor; got {value.dtype}.")
        _per_row("alpha", value, scores, -1)


def same_length(selected: Tensor, target: Tensor) -> None:
    """Raise unless both hold vectors of one length and dtype, on one device."""
    same_device("target", target, selected, "selected")
    if selected.dtype != target.dtype:
        raise TypeError(f"`selected` and `target` must have one dtype; got {selected.dtype} and {target.dtype}.")
    if selected.shape[-1] != target.shape[-1]:
        got = f"{selected.shape[-1]} and {target.shape[-1]}"
        raise ValueError(f"`selected` and `target` must have vectors of the same length; got {got}.")


def above(name: str, value: Any, bound: float) -> None:
    """Raise unless `value` is a finite number > bound."""
    _number(name, value, "a number")
    if not bound < value < float("inf"):
        raise ValueError(f"`{name}` must be > {bound} and finite; got {value}.")


def is_cdf(values: Tensor) -> None:
    """Raise unless the values at rising points are those of a cdf."""
    ends = torch.tensor([0.0, 1.0], dtype=values.dtype)
    if not (values.diff() >= 0).all() or not torch.allclose(values[[0, -1]], ends, rtol=0, atol=1e-3):
        raise ValueError(
            "`cdf` must rise from 0 to 1, elementwise; "
            f"at −1e30, −1e3, −10, −1, 0, 1, 10, 1e3, 1e30 got {values.tolist()}."
        )


def whole(name: str, value: Any, most: int, what: str) -> None:
    """Raise unless `value` is an int in [0, most]."""
    _whole_number(name, value)
    if not 0 <= value <= most:
        raise ValueError(f"`{name}` must satisfy 0 ≤ {name} ≤ {most} ({what}); got {value}.")


def vectors(name: str, value: Any) -> None:
    """Raise unless `value` is a floating tensor (…, m, d) with m, d ≥ 1."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`{name}` must be a floating torch.Tensor; got {got}.")
    if value.ndim < 2 or 0 in value.shape[-2:]:
        raise ValueError(f"`{name}` must have the shape (…, m, d) with m, d ≥ 1; got {tuple(value.shape)}.")


def selection(embeddings: Any, scores: Any, k: Any) -> None:
    """Raise unless (…, n, d) embeddings, (…, n) scores and 1 ≤ k ≤ n go together."""
    vectors("embeddings", embeddings)
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"`scores` must be a floating torch.Tensor; got {type(scores).__name__}.")
    if scores.shape != embeddings.shape[:-1]:
        want, got = tuple(embeddings.shape[:-1]), tuple(scores.shape)
        raise ValueError(f"`scores` must have the shape of `embeddings` without its last dim, {want}; got {got}.")
    if scores.dtype != embeddings.dtype:
        raise TypeError(f"`scores` must have the dtype of `embeddings`, {embeddings.dtype}; got {scores.dtype}.")
    same_device("scores", scores, embeddings, "embeddings")
    whole("k", k, scores.shape[-1], "number of embeddings")
    if k == 0:
        raise ValueError("`k` must be ≥ 1; got 0.")


def mask(value: Any, x: Tensor) -> None:
    """Raise unless `value` is None or a boolean tensor that broadcasts to the shape of `x`."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"`mask` must be a boolean torch.Tensor or None; got {type(value).__name__}.")
    if value.dtype != torch.bool:
        raise TypeError(f"`mask` must be boolean (True = may be chosen); got {value.dtype}. Use `mask.bool()`.")
    _broadcasts("mask", value, tuple(x.shape), "the shape of `x`")
    same_device("mask", value, x)


def costs(value: Any, x: Tensor) -> None:
    """Raise unless `value` is None or a floating tensor that broadcasts to the shape of `x`."""
    if value is None:
        return
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`costs` must be a floating torch.Tensor or None; got {got}.")
    _broadcasts("costs", value, tuple(x.shape), "the shape of `x`")
    same_device("costs", value, x)


def same_shape(name: str, value: Any, x: Tensor, x_name: str) -> None:
    """Raise unless `value` is a tensor with the shape and device of `x`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(value).__name__}.")
    if value.is_complex():
        raise TypeError(f"`{name}` must be real; got {value.dtype}.")
    if value.shape != x.shape:
        raise ValueError(f"`{name}` must have the shape of `{x_name}`, {tuple(x.shape)}; got {tuple(value.shape)}.")
    same_device(name, value, x, x_name)


def same_device(name: str, value: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless `value` lies where `x` lies."""
    if value.device != x.device:
        raise ValueError(
            f"`{name}` must be on the device of `{x_name}`, {x.device}; got {value.device}. "
            f"Use `{name}.to({x_name}.device)`."
        )


def forward_mode(is_nested: bool) -> None:
    """Raise if forward mode is over forward mode, where torch drops a Function's second tangent without a word."""
    if is_nested:
        raise NotImplementedError(
            "Forward mode over forward mode (jacfwd of jacfwd) is not possible with torch's custom functions. "
            "Use torch.func.hessian, jacfwd(jacrev) or jacrev(jacfwd)."
        )


def reduction(value: Any) -> None:
    """Raise unless `value` names a reduction of a loss."""
    one_of("reduction", value, ("mean", "sum", "none"))


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def at_least(name: str, value: Any, least: int) -> None:
    """Raise unless `value` is an int ≥ least."""
    _whole_number(name, value)
    if value < least:
        raise ValueError(f"`{name}` must be ≥ {least}; got {value}.")


def even(what: str, value: int) -> None:
    """Raise unless `value` is even, as pairs are."""
    if value % 2:
        raise ValueError(f"With `antithetic`, {what} must be even; got {value}.")


def instance(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is of that class."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be a {kind.__name__}; got {type(value).__name__}.")


def losses(value: Any, x: Tensor) -> None:
    """Raise unless an objective gave a loss for each sample."""
    if not isinstance(value, Tensor) or value.shape != x.shape[:-1]:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"`fn` must give one loss for each sample, the shape {tuple(x.shape[:-1])} for samples of shape "
            f"{tuple(x.shape)}; got {got}."
        )


def baseline(name: str, value: Any, shape: torch.Size) -> None:
    """Raise unless `value` is a number or broadcasts to the shape."""
    if isinstance(value, Tensor):
        _broadcasts(name, value, tuple(shape), "the design's shape")
    else:
        _number(name, value)


def feasible(soft: Tensor, dim: int) -> None:
    """Raise if a row of a relaxation is NaN, because a sample cannot be."""
    is_bad = soft.detach().isnan().any(dim)
    if is_bad.any():
        first = tuple(is_bad.nonzero()[0].tolist())
        raise ValueError(
            "`k` must satisfy 0 ≤ k ≤ the number of entries of its row that are neither masked nor −inf, and `x` must "
            f"not hold NaN; got {int(is_bad.sum())} rows of {is_bad.numel()} that cannot be drawn from"
            + (f", the first at index {first}." if first else ".")
        )


def broadcast(**tensors: Any) -> None:
    """Raise unless all are real tensors that broadcast."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`{name}` must be a real torch.Tensor; got {got}.")
    try:
        torch.broadcast_shapes(*(value.shape for value in tensors.values()))
    except RuntimeError:
        got = ", ".join(f"`{name}` {tuple(value.shape)}" for name, value in tensors.items())
        raise ValueError(f"These must broadcast: {got}.") from None


def pairs(joint: Any, n: int) -> None:
    """Raise unless `joint` has a value for each pair of n items."""
    if not isinstance(joint, Tensor) or joint.ndim < 2 or tuple(joint.shape[-2:]) != (n, n):
        got = tuple(joint.shape) if isinstance(joint, Tensor) else type(joint).__name__
        raise ValueError(f"`joint_probs` must have the shape (…, {n}, {n}); got {got}.")


def one_parameter(probs: Any, logits: Any, k: Any) -> None:
    """Raise unless one of the two parameters of a design is given, with a count that fits."""
    if (probs is None) == (logits is None):
        raise ValueError("Give one of `probs` and `logits`; got " + ("both." if probs is not None else "neither."))
    name, value = ("probs", probs) if logits is None else ("logits", logits)
    scores(value, -1, name)
    if value.shape[-1] == 0:
        raise ValueError(f"`{name}` must have at least one item in its last dim; got {tuple(value.shape)}.")
    if k is None:
        if logits is not None:
            raise ValueError("`k` must be given with `logits`; only `probs` have a sum.")
    elif isinstance(k, Tensor):
        if k.dtype == torch.bool or k.is_complex():
            raise TypeError(f"`k` must be an integer or floating tensor; got {k.dtype}.")
        try:
            torch.broadcast_shapes(k.shape, value.shape[:-1])
        except RuntimeError:
            got = f"{tuple(k.shape)} and {tuple(value.shape[:-1])}"
            raise ValueError(f"`k` must broadcast with the batch of `{name}`; got {got}.") from None
        same_device("k", k, value, name)
    else:
        count(k, value, -1)


def sizes(k: Tensor, n: int, design: str, takes_fractions: bool) -> None:
    """Raise unless a design of n items can have the sizes k."""
    if not ((k >= 0) & (k <= n)).all():
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (number of items); got {_extremes(k)}.")
    if not takes_fractions and not (k == k.round()).all():
        raise ValueError(
            f"`k` must be a whole number for `{design}`; got {k[k != k.round()][0].item():.9g}. "
            "`Pivotal` and `Systematic` take fractions."
        )


def natural_parameters(logits: Tensor, k: Tensor, name: str = "logits") -> None:
    """Raise unless k of the items can be drawn and no more than k must be."""
    if logits.isnan().any():
        raise ValueError("`logits` must not hold NaN.")
    least, most = ("−inf", "+inf") if name == "logits" else ("0", "1")
    possible = (logits > -torch.inf).sum(-1)
    if not (possible >= k).all():
        got = _worst(possible, possible - k)
        raise ValueError(f"`{name}` must exceed {least} for at least k items; got a row with {got}.")
    forced = (logits == torch.inf).sum(-1)
    if not (forced <= k).all():
        got = _worst(forced, k - forced)
        raise ValueError(f"`{name}` must be {most} for at most k items; got a row with {got}.")


def probabilities(probs: Tensor) -> None:
    """Raise unless all lie in [0, 1], within what their dtype allows."""
    least, most = torch.aminmax(probs) if probs.numel() else (probs.new_zeros(()), probs.new_zeros(()))
    tolerance = _tolerance(probs.dtype)
    if not (least >= -tolerance and most <= 1 + tolerance):
        raise ValueError(f"`probs` must lie in [0, 1]; got values from {least.item():g} to {most.item():g}.")


def total(probs: Tensor, total: Tensor, k: Tensor) -> None:
    """Raise unless the probabilities sum to k, within what their dtype allows."""
    tolerance = _tolerance(probs.dtype)
    error = (total - k).abs()
    if (error >= 0.5).any():  # within the tolerance of a large k there is room for an item too few or too many
        natural_parameters(torch.where(probs >= 1, torch.inf, torch.where(probs > 0, 0.0, -torch.inf)), k, "probs")
    if not (error <= tolerance * k.clamp(min=1)).all():
        where = error.argmax()
        raise ValueError(
            f"`probs` must sum to k, within {tolerance:g}·max(k, 1) for {probs.dtype}; got the sum "
            f"{total.flatten()[where].item():.9g} where k = {k.flatten()[where].item():g}. "
            "Use `logits=` with `k=`, or, for a fractional size, give `k=` too."
        )


def fixed_order(order: str) -> None:
    """Raise unless a pivotal design has one order for all draws."""
    if order != "given":
        raise NotImplementedError(
            f"A pivotal design with the order {order!r} is a mixture over all orders; its probabilities of subsets and "
            'pairs are known for a given one. Use `order="given"`, or `.fix_order(generator)` to draw an order once.'
        )


def few(name: str, value: Tensor, most: int, what: str) -> None:
    """Raise if a size is beyond what is computed."""
    if not (value <= most).all():
        raise NotImplementedError(f"{what} up to {name} = {most}; got {name} = {value.max().item():g}.")


def enumerable(n: int, subsets: int, most: int) -> None:
    """Raise if there are too many subsets to go through."""
    if subsets > most:
        raise NotImplementedError(f"At most {most} subsets are enumerated; {n} items have {subsets} of that size.")


def one_size(sizes: Tensor) -> None:
    """Raise unless all rows have one size, given the different ones."""
    if len(sizes) != 1:
        got = _extremes(sizes) if len(sizes) else "no row"
        raise NotImplementedError(f"All rows must have the same k to enumerate subsets; got {got}.")


def autoencoder(k: float, latents: int, kind: str, candidates: Any, zipf: float) -> None:
    """Raise unless the selection of a sparse autoencoder is possible."""
    if k > latents:
        raise ValueError(f"`k` must satisfy 0 < k ≤ {latents} (the number of latents); got {k:g}.")
    if kind == "topk" and k != int(k):
        raise ValueError(f'`k` must be a whole number for the kind "topk"; got {k:g}. "batch" takes fractions.')
    _number("candidates", candidates, "a number")
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


def is_file(path: Path) -> None:
    """Raise unless there is such a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file; there is none.")


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


def last_dim(name: str, value: Tensor, n: int) -> None:
    """Raise unless `value` is a tensor whose last dimension has n entries."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(value).__name__}.")
    if value.ndim == 0 or value.shape[-1] != n:
        raise ValueError(f"`{name}` must have {n} features in its last dimension; got {tuple(value.shape)}.")


def fraction(name: str, value: Any, *, is_open: bool = False) -> None:
    """Raise unless `value` is a number in [0, 1], or in [0, 1) if that is asked for."""
    _number(name, value, "a number")
    if not 0 <= value <= 1 or (is_open and value == 1):
        raise ValueError(f"`{name}` must satisfy 0 ≤ {name} {'<' if is_open else '≤'} 1; got {value}.")


def share_of(name: str, value: Any, n: int) -> None:
    """Raise unless `value` is an int in [1, n], a float in (0, 1], or None."""
    if value is None:
        return
    _number(name, value, "an int, a float or None")
    if isinstance(value, Integral):
        if not 1 <= int(value) <= n:
            raise ValueError(f"`{name}` must satisfy 1 ≤ k ≤ {n} (number of features); got {value}.")
    elif not 0 < value <= 1:
        raise ValueError(f"`{name}`, a fraction, must satisfy 0 < fraction ≤ 1; got {value}.")


def sizes_of_layers(name: str, value: Any) -> None:
    """Raise unless `value` is a tuple or list of ints ≥ 1."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"`{name}` must be a tuple of ints, such as (64, 64); got {type(value).__name__}.")
    for size in value:
        at_least(f"{name}, each of it,", size, 1)


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
    _number("capacity", value, "a number or None")
    if value * n < tokens * k:
        raise ValueError(
            f"`capacity` must be ≥ {mean:g} (k·tokens/experts); got {value}: "
            f"{tokens * k - int(value * n)} of {tokens * k} assignments would be dropped."
        )


def as_many_experts(given: int, n: int) -> None:
    """Raise unless there is an expert for each of the router's."""
    if given != n:
        raise ValueError(f"`experts` must be {n} Modules, as many as the router has; got {given}.")


def no_nan(logits: Tensor) -> None:
    """Raise if a token has NaN among its scores; read on the host, as dispatch reads them anyway."""
    bad = logits.detach().reshape(-1, logits.shape[-1]).isnan().any(-1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(f"`logits` must not be NaN; got NaN for {int(bad.sum())} of {len(bad)} tokens, first {first}.")


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 1e-3)


def _extremes(values: Tensor) -> str:
    least, most = values.min().item(), values.max().item()
    return f"{least:g}" if least == most else f"values from {least:g} to {most:g}"


def _worst(values: Tensor, slack: Tensor) -> str:
    return str(values.flatten()[slack.argmin()].item())


def _number(name: str, value: Any, what: str = "a number or a torch.Tensor") -> None:
    # bool is an int to Python, but k=True is always a mistake; numpy's scalars count as numbers.
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or _numpy_number(value)):
        raise TypeError(f"`{name}` must be {what}; got {type(value).__name__}.")


def _whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an int; got {type(value).__name__}.")


def _numpy_number(value: Any) -> bool:
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind in ("i", "u", "f") and getattr(value, "ndim", None) == 0


def _per_row(name: str, value: Tensor, x: Tensor, dim: int) -> None:
    dim %= x.ndim
    rows = tuple(x.shape[:dim]) + tuple(x.shape[dim + 1 :])
    _broadcasts(name, value, rows, f"the batch shape (the shape of `x` without dim {dim})")
    same_device(name, value, x)


def _broadcasts(name: str, value: Tensor, shape: tuple[int, ...], what: str) -> None:
    got = tuple(value.shape)
    fits = len(got) <= len(shape) and all(a == 1 or a == b for a, b in zip(got[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"`{name}` must broadcast to {what}, {shape}; got {got}.")
