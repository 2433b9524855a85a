"""Samples from inclusion probabilities in a file that memory need not hold."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._math import chunks, noise
from ._design import SUM_TOLERANCE
from ._parameters import tolerance_of
from ._pivotal import Systematic
from ._sample import MakesDesign, require_in_order


def sample_file(
    design: MakesDesign,
    path: str | PathLike[str],
    k: float | None = None,
    *,
    dtype: Any = None,
    chunk: int = 2**18,
    generator: torch.Generator | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Tensor]:
    """Draw one sample from the inclusion probabilities in a file, which is read twice in chunks.

    Args:
        design: `Systematic`, or `functools.partial(Pivotal, order="given")`.
        path: a .npy file with one dimension; or, with `dtype`, the bare numbers one after the other.
        k: how many; by default the nearest integer to the sum. The numbers must sum to it, up to rounding.
        dtype: float16, float32 or float64, of torch or numpy, if the file has no header.
        chunk: how many probabilities to read at a time, a power of two. The sample does not depend on it.
        generator: where the seed comes from; torch's own if None.
        on_progress: called after each chunk with the numbers read, and those to be read: twice the length.

    Returns:
        An iterator over the rising indices of the drawn items, int64, a tensor for each chunk. Together they are those
        of `design(probs, k).sample_indices(generator=generator)`, bit for bit. The memory is that of a few chunks.
        Before it returns, the whole file is read once and checked; ValueError says what is wrong with it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "probs.npy")
        >>> np.save(path, np.full(1000, 0.005))
        >>> torch.cat(list(sample_file(Systematic, path, generator=torch.Generator().manual_seed(0))))
        tensor([138, 338, 538, 738, 938])
    """
    kind = require_in_order(design, "A file")
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"`chunk` must be a power of two; got {chunk}.")
    where = Path(path)
    number, offset, n = _layout(where, dtype)
    if k is not None and not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (numbers in {where.name}); got {k}.")
    in_chunks = chunks.Systematic if kind is Systematic else chunks.Pivotal
    stream = in_chunks(n, chunk, noise.seed(generator, torch.device("cpu")))
    read = partial(_chunks, where, number, offset, n, chunk)
    sums = []
    for start, values in read():
        sums.append(_checked_sum(values, start, where.name))
        stream.look(values.to(torch.float64).clamp(0, 1))
        on_progress(start + len(values), 2 * n)
    total = math.fsum(sums)
    size = float(round(total) if k is None else k)
    most = min(SUM_TOLERANCE, tolerance_of(values.dtype) * max(size, 1))
    if not abs(total - size) <= most:
        asked = "an integer, or `k` must be given" if k is None else f"k = {k:g}"
        raise ValueError(f"The numbers in {where.name} must sum to {asked}, within {most:.2g}; got {total:.12g}.")
    stream.begin(size)

    def draw() -> Iterator[Tensor]:
        for (start, values), known in zip(read(), sums, strict=True):
            if _checked_sum(values, start, where.name) != known:
                raise ValueError(f"{where.name} must not change while it is read; numbers from {start} on did.")
            yield start + stream.draw(values.to(torch.float64).clamp(0, 1)).nonzero()[:, 0]
            on_progress(n + start + len(values), 2 * n)

    return draw()


def _layout(path: Path, dtype: Any) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype of the numbers in a file, where they begin, and how many there are; raise if it has others."""
    size = path.stat().st_size
    if dtype is None:
        wanted = f"{path.name} must be a whole .npy file with one dimension, or `dtype` must be given"
        try:
            header = np.load(path, mmap_mode="r", allow_pickle=False)  # maps the numbers, and reads none
        except (ValueError, EOFError) as problem:
            raise ValueError(f"{wanted}; got another file.") from problem
        if not isinstance(header, np.memmap) or header.ndim != 1:
            raise ValueError(f"{wanted}; got {getattr(header, 'shape', 'several arrays')}.")
        number, offset = header.dtype, header.offset
    else:
        number, offset = np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype), 0
    if number.kind != "f" or number.itemsize > 8:
        raise TypeError(f"{path.name} must hold float16, float32 or float64; got {number}.")
    n, rest = divmod(size - offset, number.itemsize)
    if rest or n < 1 or (dtype is None and n != len(header)):
        wanted = f"{len(header)} numbers" if dtype is None else "a positive multiple"
        raise ValueError(f"{path.name} must hold {wanted} of {number.itemsize} bytes; got {size - offset} bytes.")
    return number, offset, n


def _chunks(path: Path, number: np.dtype[Any], offset: int, n: int, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the numbers chunk by chunk, each with the index of its first. A mapping would count as memory in use."""
    with path.open("rb") as file:
        file.seek(offset)
        for start in range(0, n, chunk):
            values = np.fromfile(file, number, min(chunk, n - start))
            if len(values) < min(chunk, n - start):
                raise ValueError(f"{path.name} must not change while it is read; it ends before {n} numbers.")
            yield start, torch.from_numpy(values.astype(number.newbyteorder("="), copy=False))


def _checked_sum(values: Tensor, start: int, name: str) -> float:
    """Return the sum of a chunk; raise unless all its values lie in [0, 1], within what their dtype allows."""
    least, most = torch.aminmax(values)
    allowed = tolerance_of(values.dtype)
    if not (least >= -allowed and most <= 1 + allowed):
        is_bad = ~((values >= -allowed) & (values <= 1 + allowed))
        first = int(is_bad.nonzero()[0])
        raise ValueError(f"The numbers in {name} must lie in [0, 1]; got {float(values[first]):g} at {start + first}.")
    return float(values.sum(dtype=torch.float64))
