"""The native CPU library: plain C functions over raw pointers, called with ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

ABI = 2  # khot_abi() in native/khot.cpp
HERE = Path(__file__).parent
WIDE, PORTABLE = 1, 0  # the path: the widest vectors this machine has, or one lane at a time

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    # x, rows, n, k, its stride, T, its stride, mask, its strides, threads, path, p
    "khot_sigmoid_topk_": (
        _POINTER,
        _LONG,
        _LONG,
        *(_POINTER, _LONG) * 2,
        _POINTER,
        _LONG,
        _LONG,
        _INT,
        _INT,
        _POINTER,
    ),
    # x, rows, n, k, its stride, mask, its strides, threads, out
    "khot_hard_topk_": (_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT, _POINTER),
    # p, g, rows, n, T, its stride, threads, path, dx, dk
    "khot_sigmoid_topk_pull_": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _INT, _INT, _POINTER, _POINTER),
}
_NAMES = {torch.float32: "float", torch.float64: "double"}


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, and a line that says what serves the CPU and why."""
    note = HERE / "build.txt"
    built = note.read_text().strip() if note.exists() else "not built: khot was not installed by its own build"
    files = sorted(HERE.glob("libkhot.*"))
    if not files:
        return (
            None,
            f"eager torch (native library {'is missing, reinstall khot' if built.startswith('built') else built})",
        )
    try:
        library = ctypes.CDLL(str(files[0]))
        abi = library.khot_abi()
        if abi != ABI:
            return None, f"eager torch (native library has interface {abi}, not {ABI}: reinstall khot)"
        for prefix, arguments in _SIGNATURES.items():
            for suffix in _NAMES.values():
                function = getattr(library, prefix + suffix)
                function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError) as error:
        return None, f"eager torch (native library does not load: {error})"
    width = "AVX2" if library.khot_has_avx2() else "portable"
    return library, f"native, {width} ({built})"


LIBRARY, REASON = _load()
_FUNCTIONS = {
    (prefix, dtype): getattr(LIBRARY, prefix + suffix, None)
    for prefix in _SIGNATURES
    for dtype, suffix in _NAMES.items()
}


def sigmoid_topk(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, path: int = WIDE) -> Tensor:
    """As `_math.sigmoid.topk`."""
    x, n = x.contiguous(), x.shape[-1]
    p = torch.empty_like(x)
    if p.numel() == 0:
        return p
    (k, k_step), (temperature, temperature_step) = _column(k), _column(temperature)
    mask, *mask_place = _mask(mask, n)
    _FUNCTIONS["khot_sigmoid_topk_", x.dtype](  # type: ignore[misc]
        x.data_ptr(),
        p.numel() // n,
        n,
        k.data_ptr(),
        k_step,
        temperature.data_ptr(),
        temperature_step,
        *mask_place,
        torch.get_num_threads(),
        path,
        p.data_ptr(),
    )
    return p


def sigmoid_topk_pull(g: Tensor, p: Tensor, temperature: Tensor, path: int = WIDE) -> tuple[Tensor, Tensor]:
    """As `_math.implicit.sigmoid_topk_pull`."""
    g, p, n = g.to(p.dtype).contiguous(), p.contiguous(), p.shape[-1]
    dx, dk = torch.empty_like(p), torch.zeros(p.shape[:-1], dtype=torch.float64)
    if dx.numel() == 0:
        return dx, dk
    temperature, step = _column(temperature)
    _FUNCTIONS["khot_sigmoid_topk_pull_", p.dtype](  # type: ignore[misc]
        p.data_ptr(),
        g.data_ptr(),
        dx.numel() // n,
        n,
        temperature.data_ptr(),
        step,
        torch.get_num_threads(),
        path,
        dx.data_ptr(),
        dk.data_ptr(),
    )
    return dx, dk


def hard_topk(x: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """As `_math.select.k_hot`."""
    x, n = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    k, step = _column(k)
    mask, *mask_place = _mask(mask, n)
    _FUNCTIONS["khot_hard_topk_", x.dtype](  # type: ignore[misc]
        x.data_ptr(), out.numel() // n, n, k.data_ptr(), step, *mask_place, torch.get_num_threads(), out.data_ptr()
    )
    return out


def _mask(mask: Tensor | None, n: int) -> tuple[Tensor | None, int | None, int, int]:
    """The mask as rows (to be kept while it is read), its address, and its strides."""
    if mask is None:
        return None, None, 0, 0
    mask = mask.reshape(-1, n)  # a view, unless inner batch dimensions were broadcast
    return mask, mask.data_ptr(), mask.stride(0), mask.stride(1)


def _column(t: Tensor) -> tuple[Tensor, int]:
    """A tensor of one number per row, and the stride between them: 0 for a number that was broadcast."""
    t = t.to(torch.float64)
    if not any(t.stride()):
        return t, 0
    return t.contiguous(), 1
