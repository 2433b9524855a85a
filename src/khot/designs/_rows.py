"""Inclusion probabilities from sizes, and samples of the rows of a table."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _check, _shape
from .._math import select
from .._torch import is_shape_only
from ._pivotal import Pivotal
from ._sample import MakesDesign


class SampledRows(NamedTuple):
    """Hold which rows of a table were drawn, and how many rows each of them stands for."""

    indices: Any
    """Positions of the rows, rising, (k) int64: for `array[i]`, `frame.iloc[i]` (pandas) or `frame[i]` (polars)."""
    weights: Any
    """Design weights 1/π of these rows, (k) float64. `Σ weights · y` estimates the total of y without bias."""


def inclusion_probs(
    size: Tensor,
    k: float | Tensor | Sequence[float],
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    strata: Tensor | None = None,
) -> Tensor:
    """Return inclusion probabilities proportional to size that sum to k; items too large for that are certain.

    `π = min(1, c · size)`, with the c for which `Σπ = k`.

    Args:
        size: (…, n) with n at `dim`; finite and ≥ 0. Items of size 0 are never drawn.
        k: how many, 0 ≤ k ≤ the number of items with a size > 0; may be fractional. A number, or a tensor that
            broadcasts to the shape of `size` without `dim`. With `strata`, as many counts as there are strata, in
            rising order of their labels, in the last dim.
        dim: the dimension of the items.
        mask: boolean, broadcasts to `size`; True = may be drawn.
        strata: labels of the items, (n) integers. π is then proportional to size within each stratum, and sums to its
            count there.

    Returns:
        π like `size`, without a gradient: the `probs` of any design. The m certain items are exactly 1, and all others
        have the same π/size.

    Examples:
        >>> size = torch.tensor([10.0, 1.0, 2.0, 3.0])
        >>> inclusion_probs(size, 2)
        tensor([1.0000, 0.1667, 0.3333, 0.5000])
        >>> inclusion_probs(size, [1, 1], strata=torch.tensor([0, 0, 1, 1]))
        tensor([0.9091, 0.0909, 0.4000, 0.6000])
    """
    _check.scores(size, dim, "size")
    _check.mask(mask, size)
    x = _shape.last(size.detach().to(torch.float64), dim)
    if mask is not None:
        x = torch.where(_shape.last(mask.expand(size.shape), dim), x, 0.0)
    if is_shape_only(x):
        return torch.empty_like(size)
    if not bool((x >= 0).all() & x.isfinite().all()):
        raise ValueError("`size` must be finite and ≥ 0 wherever `mask` allows an item; got a negative, NaN or inf.")
    if strata is None:
        _check.count(k, size, dim)
        return _shape.from_rows(_proportional(x, _shape.per_row(k, x)), dim, size.dtype)  # type: ignore[arg-type]
    _check.instance("strata", strata, Tensor)
    if strata.is_floating_point() or strata.is_complex():
        raise ValueError(f"`strata` must be integers, one for each item; got {strata.dtype}.")
    if tuple(strata.shape) != x.shape[-1:]:
        raise ValueError(f"`strata` must have one label for each of {x.shape[-1]} items; got {tuple(strata.shape)}.")
    labels, code = strata.unique(return_inverse=True)
    counts = torch.as_tensor(k, dtype=torch.float64, device=x.device)
    if counts.ndim == 0 or counts.shape[-1] != len(labels):
        fix = "For a total over all strata, leave `strata` out here, and give it to `Pivotal`."
        raise ValueError(f"`k` must be {len(labels)} counts, one for each stratum; got {tuple(counts.shape)}. {fix}")
    result = torch.empty_like(x)
    for h in range(len(labels)):
        result[..., code == h] = _proportional(x[..., code == h], counts[..., h].expand(x.shape[:-1]), f"stratum {h}")
    return _shape.from_rows(result, dim, size.dtype)


def _proportional(size: Tensor, k: Tensor, where: str = "a row") -> Tensor:
    """Return π of rows (…, n); raise if there are fewer items to draw than k."""
    possible = (size > 0).sum(-1)
    if size.shape[-1] == 0 and bool((k == 0).all()):
        return size.clone()
    if not bool(((k >= 0) & (k <= possible)).all()):
        at = ((k < 0) | (k > possible)).flatten().to(torch.int8).argmax()
        got = f"k = {float(k.flatten()[at]):g} where {int(possible.flatten()[at])} items have a size > 0"
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ the number of items that can be drawn; got {where} with {got}.")
    most = int(k.max().ceil()) if k.numel() else 0
    is_certain = select.proportional(size.log(), k, most) >= 1
    while True:  # logarithms may miss an item that is certain by a rounding error
        rest = torch.where(is_certain, 0.0, size)
        rest = torch.ldexp(rest, -torch.frexp(rest.amax(-1, keepdim=True)).exponent)  # no overflow in the sum; exact
        left, total = (k - is_certain.sum(-1))[..., None], rest.sum(-1, keepdim=True)
        probs = rest * left / torch.where(total > 0, total, 1.0)
        is_more = (probs >= 1 - 8 * torch.finfo(probs.dtype).eps) & (left > 0)
        if not bool(is_more.any()):
            return torch.where(is_certain, 1.0, probs)
        is_certain = is_certain | is_more


def sample_rows(
    data: Any,
    k: int | Mapping[Any, int],
    *,
    weights: Any = None,
    strata: Any = None,
    design: MakesDesign = Pivotal,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> SampledRows:
    """Draw exactly k rows of a table without replacement, with probabilities proportional to `weights`.

    Row i is drawn with exactly the probability `π_i = min(1, c · w_i)`, `Σπ = k`. That is what
    `DataFrame.sample(weights=…)` and `numpy.random.choice(p=…, replace=False)` do not do.

    Args:
        data: a numpy array, a pandas or polars frame or series, a tensor, or a list; n rows of any shape, (n, …). Any
            shape is allowed, as the rows are not looked at.
        k: how many rows; or, with `strata`, a mapping from each label to the number of rows of that stratum.
        weights: sizes of the rows: the name of a column of `data`, or n numbers ≥ 0. All equal if None.
        strata: groups of the rows: the name of a column, or n labels. With one number k, each stratum has its expected
            number of rows, rounded down or up. Rows are matched by position: a pandas series must have the index of
            `data`.
        design: the law; with `strata` it must take that argument, as `Pivotal` does.
        generator: where the randomness comes from; torch's own if None.
        seed: an integer instead.

    Returns:
        The indices, and the design weights 1/π; tensors if `data` is one, else numpy arrays.

    Examples:
        >>> import numpy as np
        >>> sales = np.array([10.0, 1.0, 2.0, 3.0])
        >>> rows = sample_rows(sales, 2, weights=sales, seed=0)
        >>> rows.indices, rows.weights
        (array([0, 2]), array([1., 3.]))
        >>> float((rows.weights * sales[rows.indices]).sum())
        16.0
    """
    n = _length(data)
    if generator is not None:
        _check.instance("generator", generator, torch.Generator)
    if generator is not None and seed is not None:
        raise ValueError("Give one of `generator` and `seed`; got both.")
    if seed is not None:
        _check.integer("seed", seed)
        generator = torch.Generator().manual_seed(int(seed))
    sizes = torch.ones(n, dtype=torch.float64) if weights is None else _sizes(_column(data, weights, "weights"), n)
    more: dict[str, Any] = {}
    if strata is not None:
        labels, codes = _groups(_column(data, strata, "strata"))
        if codes.shape != (n,):
            raise ValueError(f"`strata` must be a column, or {n} labels; got the shape {codes.shape}.")
        more["strata"] = torch.from_numpy(codes.astype(np.int64))
    if isinstance(k, Mapping):
        if strata is None:
            raise ValueError("`strata` must be given if `k` is a mapping from strata to counts.")
        known = labels.tolist()
        if set(known) != set(k):
            raise ValueError(f"`k` must have a count for each of the strata {known}; got {list(k)}.")
        counts = [k[label] for label in known]
        for count in counts:
            _check.at_least("k", count, 0)
        probs, total = inclusion_probs(sizes, counts, strata=more["strata"]), sum(counts)
    else:
        _check.integer_at_most("k", k, n, "rows")
        probs, total = inclusion_probs(sizes, k), int(k)
    try:
        law = design(probs, total, validate_args=False, **more)
    except TypeError as error:
        if not more or "strata" not in str(error):
            raise
        raise TypeError("`design` must take `strata`, as `Pivotal` does, if there are any; it does not.") from None
    indices = law.sample(generator=generator).nonzero()[:, 0]
    chosen = SampledRows(indices, 1 / law.mean.detach()[indices])
    if isinstance(data, Tensor):
        return SampledRows(*(t.to(data.device) for t in chosen))
    return SampledRows(*(t.numpy() for t in chosen))


def _length(data: Any) -> int:
    """Return the number of rows; raise if there are none to count, or none."""
    if isinstance(data, Mapping | Set | str | bytes):
        got = f"got {type(data).__name__}, whose length is not a number of rows"
        raise TypeError(f"`data` must be an array, a frame, a tensor or a list; {got}.")
    try:
        n = len(data)
    except TypeError:
        got = type(data).__name__
        raise TypeError(f"`data` must have a length, as arrays and frames do; got {got}. Collect it first.") from None
    if n == 0:
        raise ValueError("`data` must have at least one row; got none.")
    return n


def _column(data: Any, column: Any, name: str) -> Any:
    """Return a column of a frame by its name, or what was given, as a numpy array."""
    if isinstance(column, str):
        names = getattr(data, "column_names", getattr(data, "columns", None))  # of pyarrow, and of others
        if names is None:
            raise TypeError(f"`{name}` may be the name of a column if `data` is a frame; got {type(data).__name__}.")
        if column not in list(names):
            raise ValueError(f"`{name}` must be one of the columns {list(names)}; got {column!r}.")
        column = data[column]
    own: Any = getattr(data, "index", None)
    given: Any = getattr(column, "index", None)
    if hasattr(own, "equals") and hasattr(given, "equals") and not own.equals(given):  # both of pandas
        fix = "Use `.reindex(data.index)`, or `.to_numpy()` to match rows by position."
        raise ValueError(f"`{name}` must have the same index as `data`; it has another. {fix}")
    return column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)


def _groups(values: Any) -> tuple[Any, Any]:
    """Return the different labels, rising, and the number of each row's label; raise if a label is missing."""
    if values.dtype == object:  # pandas' NA cannot be compared
        is_missing = any(v is None or type(v).__name__ == "NAType" or v != v for v in values.flat)
    else:
        is_missing = bool(np.any(values != values))  # NaN and NaT alone are not equal to themselves
    if is_missing:
        raise ValueError("`strata` must have a label for each row; some are missing.")
    try:
        return np.unique(values, return_inverse=True)
    except TypeError:
        raise TypeError("`strata` must be labels of one kind, such as strings or integers; got several.") from None


def _sizes(values: Any, n: int) -> Tensor:
    if values.shape != (n,):
        raise ValueError(f"`weights` must be a column, or {n} numbers; got the shape {values.shape}.")
    try:
        if values.dtype.kind in "cMm":  # numpy drops imaginary parts, and takes dates as integers
            raise TypeError
        sizes = torch.from_numpy(values.astype(np.float64))
    except (TypeError, ValueError):
        raise TypeError(f"`weights` must be real numbers; got {values.dtype}.") from None
    _check.sizes("weights", sizes)
    return sizes
