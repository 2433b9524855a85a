"""Activations in a file, read where they lie: data larger than memory works."""

from __future__ import annotations

import json
import math
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

NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}
"""safetensors' names of floating types; numpy has no bfloat16, and its bits are read."""
ROWS = 2**14
"""At a time, in a pass over all."""


@dataclass(eq=False)
class Activations:
    """Rows of a matrix that stays on the disk."""

    array: np.memmap[Any, Any]
    """(tokens, d)."""
    is_bfloat16: bool = False
    keeps: Any = None
    """What must live as long."""

    @property
    def tokens(self) -> int:
        """How many rows."""
        return int(self.array.shape[0])

    @property
    def d(self) -> int:
        """Their length."""
        return int(self.array.shape[1])

    @cached_property
    def crc(self) -> int:
        """That of `check`, in a pass of its own unless one was made and this set."""
        return check(self)

    def rows(self, index: np.ndarray[Any, Any] | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some of them, (…, d), in float32 if nothing else is asked for."""
        part = torch.from_numpy(np.array(self.array[index], self.array.dtype.newbyteorder("="), order="C"))
        return (part.view(torch.bfloat16) if self.is_bfloat16 else part).to(dtype)

    def parts(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """All rows in order, with the number of the first."""
        last = self.tokens if last is None else last
        for start in range(first, last, ROWS):
            yield start, self.rows(slice(start, min(last, start + ROWS)))


def open_activations(path: Path, name: str | None = None) -> Activations:
    """A matrix (tokens, d) of floats in a .npy, .npz or .safetensors file; `name` says which, if there are several."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a .npy, .npz or .safetensors file; there is none")
    readers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path} must be a .npy, .npz or .safetensors file; got {path.suffix or 'no suffix'!r}")
    try:
        return readers[path.suffix](path, name)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, struct.error) as error:
        raise ValueError(f"{path} must be a whole {path.suffix} file; got: {error}") from None


def check(data: Activations, on_rows: Callable[[int], None] = lambda done: None) -> int:
    """Raise unless all is finite, saying how much is not and where, and rows differ; their CRC-32, in one pass."""
    bad, values, large, first, crc = 0, 0, 0, list[int](), 0
    top, varies = data.rows(slice(1)), False
    for start, part in data.parts():
        crc = zlib.crc32(part.numpy().data, crc)
        varies = varies or bool((part != top).any())
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
    if not varies:
        raise ValueError(f"activations must have at least two different rows; got one (tokens: {data.tokens})")
    return crc


def _npy(path: Path, name: str | None) -> Activations:
    if name is not None:
        raise ValueError(f"{path} must be opened without --array, a .npy file holding one; got {name!r}")
    with path.open("rb") as file:
        return Activations(_map(path, *_header(path, file)))


def _npz(path: Path, name: str | None) -> Activations:
    with zipfile.ZipFile(path) as archive:
        members = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if m.filename.endswith(".npy")}
        member = members[_one(path, list(members), name)]
        if member.compress_type == zipfile.ZIP_STORED:
            return Activations(_inside(path, member.header_offset))
        copy = tempfile.NamedTemporaryFile(suffix=".npy")  # noqa: SIM115 (it lives as long as the array)
        with archive.open(member) as source:
            shutil.copyfileobj(source, copy, 2**24)
        copy.flush()
        return replace(_npy(Path(copy.name), None), keeps=copy)


def _inside(path: Path, offset: int) -> np.memmap[Any, Any]:
    """An uncompressed .npy within an archive; the lengths of its name and extra field are at 26 of its own header."""
    with path.open("rb") as file:
        file.seek(offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        return _map(path, *_header(path, file))


def _header(path: Path, file: BinaryIO) -> tuple[Any, int, tuple[int, ...], str]:
    """The type, place, shape and order of the array whose .npy begins here."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except ValueError as error:
        raise OSError(str(error)) from None
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise ValueError(f"{path} must hold floats of at most 64 bits; got {dtype}")
    return dtype, file.tell(), shape, "F" if is_fortran else "C"


def _safetensors(path: Path, name: str | None) -> Activations:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > min(10**8, path.stat().st_size):
            raise OSError("its header is longer than the file")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            raise OSError("its header is not JSON") from None
    header.pop("__metadata__", None)
    entry = header[_one(path, list(header), name)]
    if entry["dtype"] not in NUMPY:
        raise ValueError(f"{path} must hold floats; got {entry['dtype']}")
    array = _map(path, np.dtype(NUMPY[entry["dtype"]]), 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
    return Activations(array, entry["dtype"] == "BF16")


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
        raise ValueError(f"{path} must have one array, or name one with --array; got {', '.join(names) or 'none'}")
    return wanted or names[0]
