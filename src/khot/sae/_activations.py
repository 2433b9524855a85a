"""Activations in a file, mapped into memory, so that data larger than memory work."""

import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}  # bfloat16, which numpy lacks, as bits in integers
ROWS = 2**14  # number of rows read at a time in a pass over all of them


@dataclass(eq=False)
class Activations:
    """Hold the rows of a matrix, read only when asked for.

    Args:
        array: (tokens, d) floats, usually a `numpy.memmap`.
        is_bfloat16: whether the array holds the bits of bfloat16 numbers as 16-bit integers.
        keeps: an object that must live as long, such as a temporary file.
    """

    array: np.ndarray[Any, Any]
    is_bfloat16: bool = False
    keeps: Any = None

    @property
    def tokens(self) -> int:
        """Return the number of rows."""
        return int(self.array.shape[0])

    @property
    def d(self) -> int:
        """Return the length of a row."""
        return int(self.array.shape[1])

    @cached_property
    def crc(self) -> int:
        """Return the checksum that `check_activations` computes; assign it to save a second pass."""
        return check_activations(self)

    def rows(self, index: np.ndarray[Any, Any] | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a copy of the chosen rows, (…, d)."""
        part = torch.from_numpy(np.array(self.array[index], self.array.dtype.newbyteorder("="), order="C"))
        return (part.view(torch.bfloat16) if self.is_bfloat16 else part).to(dtype)

    def order(self, rows: np.ndarray[Any, Any], generator: torch.Generator) -> np.ndarray[Any, Any]:
        """Return row numbers in random order."""
        dtype = torch.int32 if len(rows) < 2**31 else torch.int64
        found: np.ndarray[Any, Any] = rows[torch.randperm(len(rows), generator=generator, dtype=dtype).numpy()]
        return found

    def spread(self, rows: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
        """Return at most `most` of some row numbers, evenly spaced."""
        return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).round().astype(np.int64)]

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in order, a part at a time, each with the number of its first row."""
        for start in range(0, self.tokens, ROWS):
            yield start, self.rows(slice(start, start + ROWS))


def open_activations(path: str | os.PathLike[str], array: str | None = None) -> Activations:
    """Map a matrix (tokens, d) of floats from a .npy, .npz or .safetensors file.

    Args:
        path: the file. An array in a compressed .npz is unpacked to a temporary file; the others are mapped in place.
        array: which array of the file, if there are several.

    Raises:
        ValueError: the file is not such a matrix, is cut short, or holds several arrays and none was named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is {'not a file' if path.exists() else 'missing'}")
    readers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path} must be a .npy, .npz or .safetensors file; got {path.suffix or 'no suffix'!r}")
    try:
        return readers[path.suffix](path, array)
    except (OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile, struct.error, zlib.error) as error:
        raise ValueError(f"{path} must be a complete {path.suffix} file; got: {error}") from None


def check_activations(data: Any, on_rows: Callable[[int], None] = lambda done: None) -> int:
    """Raise ValueError unless all values are finite in float32 and at least two rows differ; return their CRC-32.

    Args:
        data: `Activations` or another source, read once from beginning to end. Targets of `Pairs` must differ too.
        on_rows: called with the number of rows read so far.
    """
    bad, values, large, first, crc = 0, 0, 0, list[int](), 0
    top, varies = data.rows(slice(1)), torch.zeros(data.d, dtype=torch.bool)
    for start, part in data.parts():
        crc = zlib.crc32(part.numpy().data, crc)
        if not varies.all():
            varies |= (part != top).any(0)
        is_bad = ~part.isfinite()
        if is_bad.any():
            rows = is_bad.any(1).nonzero().squeeze(1)
            is_large = is_bad & data.rows(slice(start, start + len(part)), torch.float64).isfinite()
            bad, values, large = bad + len(rows), values + int(is_bad.sum()), large + int(is_large.sum())
            first += (rows[: 5 - len(first)] + start).tolist()
        on_rows(start + len(part))
    if bad:
        kinds = ((values - large, "NaN or infinite values"), (large, "values that exceed float32's 3.4e38"))
        got = " and ".join(f"{count} {what}" for count, what in kinds if count)
        listed = ", ".join(map(str, first)) + (", …" if bad > len(first) else "")
        raise ValueError(f"activations must be finite; got {got} in {bad} rows: {listed}")
    for what, columns in zip(("activations", "targets"), varies.split(getattr(data, "widths", [data.d])), strict=False):
        if not columns.any():
            raise ValueError(f"{what} must have at least two different rows; got one (tokens: {data.tokens})")
    return crc


def _npy(path: Path, name: str | None) -> Activations:
    if name is not None:
        raise ValueError(f"{path} must be opened without the name of an array, a .npy file holding one; got {name!r}")
    with path.open("rb") as file:
        return _npy_at(path, file)


def _npz(path: Path, name: str | None) -> Activations:
    with zipfile.ZipFile(path) as archive:
        members = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if m.filename.endswith(".npy")}
        member = members[_one(path, list(members), name)]
        if member.compress_type == zipfile.ZIP_STORED:
            with path.open("rb") as file:
                file.seek(member.header_offset + 26)  # there stand the lengths of its name and of its extra
                file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
                return _npy_at(path, file)
        copy = tempfile.NamedTemporaryFile(suffix=".npy")  # noqa: SIM115 (it lives as long as the array)
        with archive.open(member) as source:
            shutil.copyfileobj(source, copy, 2**24)
        copy.flush()
        return replace(_npy(Path(copy.name), None), keeps=copy)


def _npy_at(path: Path, file: BinaryIO) -> Activations:
    """Map the array whose .npy begins where the file stands."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except ValueError as error:
        raise OSError(str(error)) from None
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise ValueError(f"{path} must hold floats of at most 64 bits; got {dtype}")
    return Activations(_map(path, dtype, file.tell(), shape, "F" if is_fortran else "C"))


def _safetensors(path: Path, name: str | None) -> Activations:
    """Map an array by the header. `safe_open` would refuse files larger than memory: it maps them as writable."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > min(10**8, path.stat().st_size):
            raise OSError("its header is longer than the file")
        try:
            header = dict(json.loads(file.read(size)))
        except (ValueError, TypeError):
            raise OSError("its header is not a JSON object") from None
    header.pop("__metadata__", None)
    entry = header[_one(path, list(header), name)]
    if entry["dtype"] not in NUMPY:
        raise ValueError(f"{path} must hold floats; got {entry['dtype']}")
    dtype, offsets, shape = np.dtype(NUMPY[entry["dtype"]]), entry["data_offsets"], tuple(entry["shape"])
    if len(offsets) != 2 or not all(isinstance(number, int) and number >= 0 for number in (*offsets, *shape)):
        raise OSError(f"its header has the offsets {offsets} and the shape {shape}")
    start, end = offsets
    if end - start != dtype.itemsize * math.prod(shape):
        raise OSError(f"its header gives {end - start} bytes to {shape} numbers of {dtype.itemsize} bytes")
    return Activations(_map(path, dtype, 8 + size + start, shape), entry["dtype"] == "BF16")


def _map(path: Path, dtype: Any, offset: int, shape: tuple[int, ...], order: Any = "C") -> np.memmap[Any, Any]:
    if len(shape) != 2:
        raise ValueError(f"{path} must be a matrix (tokens, d); got the shape {shape}: reshape it first")
    if 0 in shape:
        raise ValueError(f"{path} must hold at least one token; got the shape {shape}")
    if offset + dtype.itemsize * math.prod(shape) > path.stat().st_size:
        raise OSError("it ends before its data do")
    return np.memmap(path, dtype, "r", offset, shape, order)


def _one(path: Path, names: list[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in names:
        raise ValueError(f"{path} must have an array {wanted!r}; got {', '.join(names) or 'none'}")
    if wanted is None and len(names) != 1:
        raise ValueError(f"{path} must have one array, or `array` must name one; got {', '.join(names) or 'none'}")
    return wanted or names[0]
