"""The native CPU library: plain C functions over raw pointers, called with ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._math import threshold
from .._math.cdfs import SIGMOID

ABI = 5  # khot_abi() in native/khot.cpp
HERE = Path(__file__).parent
WIDE, PORTABLE = 1, 0  # the path: the widest vectors this machine has, or one lane at a time

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_COLUMN = (_POINTER, _LONG)  # one number per row: address, stride
_ROWS = (_POINTER, _LONG, _LONG)  # scores, rows, n
_MASK = (_POINTER, _LONG, _LONG)  # address, stride of rows, stride
_SIGNATURES = {
    # x, k, T, mask, threads, path, cdf, y
    "khot_topk_": (*_ROWS, *_COLUMN, *_COLUMN, *_MASK, _INT, _INT, _INT, _POINTER),
    # x, k, T, mask, threads, path, z, is_left
    "khot_sigmoid_margin_": (*_ROWS, *_COLUMN, *_COLUMN, *_MASK, _INT, _INT, _POINTER, _POINTER),
    # x, k, mask, threads, path, out
    "khot_hard_topk_": (*_ROWS, *_COLUMN, *_MASK, _INT, _INT, _POINTER),
    # y, g, T, threads, path, cdf, dx, dk
    "khot_topk_pull_": (_POINTER, *_ROWS, *_COLUMN, _INT, _INT, _INT, _POINTER, _POINTER),
    # p, is_whole, seed, order, is_random, stride of the order's rows, draws, is_paired, threads, out
    "khot_pivotal_": (*_ROWS, _POINTER, _LONG, _POINTER, _INT, _LONG, _LONG, _INT, _INT, _POINTER),
    # p, k, seed, draws, is_paired, threads, out
    "khot_systematic_": (*_ROWS, _POINTER, _LONG, _LONG, _INT, _INT, _POINTER),
}
CDFS = {"sigmoid": 0, "laplace": 1, "euclidean": 2}  # khot::Cdf in native/kernels.h
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
        # seed, stream, count, threads, out
        library.khot_uniform.argtypes, library.khot_uniform.restype = (_LONG, _LONG, _LONG, _INT, _POINTER), None
        # keys, rows, n, threads, out
        library.khot_order.argtypes, library.khot_order.restype = (_POINTER, _LONG, _LONG, _INT, _POINTER), None
    except (OSError, AttributeError) as error:
        return None, f"eager torch (native library does not load: {error})"
    width = "AVX2" if library.khot_has_avx2() else "portable"
    what = "sigmoid, Laplace and Euclidean top-k, hard top-k, pivotal and systematic samples; eager torch for the rest"
    return library, f"native, {width} (for {what}; {built})"


LIBRARY, REASON = _load()
_FUNCTIONS: dict[tuple[str, torch.dtype], Any] = {
    (prefix, dtype): getattr(LIBRARY, prefix + suffix, None)
    for prefix in _SIGNATURES
    for dtype, suffix in _NAMES.items()
}


def native_topk(
    x: Tensor,
    k: float | Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    cdf: str = "sigmoid",
    path: int = WIDE,
) -> Tensor:
    """y = F(z); `k` and `temperature` may be numbers."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        _solve("khot_topk_", x, k, temperature, mask, path, CDFS[cdf], y.data_ptr())
    return y


def _solve(
    name: str,
    x: Tensor,
    k: float | Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    *others: int,
) -> None:
    """Call one of the two functions that take rows; the other arguments are those after the threads."""
    n = x.shape[-1]
    k, *k_place = _column(k)
    temperature, *temperature_place = _column(temperature)
    mask, *mask_place = _mask(mask, n)
    _FUNCTIONS[name, x.dtype](
        x.data_ptr(),
        x.numel() // n,
        n,
        *k_place,
        *temperature_place,
        *mask_place,
        torch.get_num_threads(),
        *others,
    )


def margin(x: Tensor, k: Tensor, temperature: Tensor, mask: Tensor | None, path: int = WIDE) -> Tensor:
    """As `_math.threshold.margin` of the logistic cdf without costs, which takes the rows that the kernel leaves.

    It leaves rows with an infinite threshold, or with one that is decided by numbers too small to be summed.
    """
    x, n = x.contiguous(), x.shape[-1]
    z = torch.empty_like(x)
    is_left = torch.empty(z.numel() // n, dtype=torch.bool, device="cpu")
    _solve("khot_sigmoid_margin_", x, k, temperature, mask, path, z.data_ptr(), is_left.data_ptr())
    if bool(is_left.any()):
        rows = [t.reshape(len(is_left), -1)[is_left] for t in (x, k, temperature)]
        allowed = None if mask is None else mask.reshape(-1, n)[is_left]
        rest = threshold.margin(rows[0], rows[1][:, 0], rows[2][:, 0], allowed, None, SIGMOID, early_stop=True)
        z.view(-1, n)[is_left] = rest
    return z


def native_pull(
    g: Tensor,
    y: Tensor,
    temperature: float | Tensor,
    dk: Tensor | None = None,
    cdf: str = "sigmoid",
    path: int = WIDE,
) -> Tensor:
    """The cotangent of x for that of y; that of k is written to `dk` if it is given."""
    g, y, n = (g if g.dtype == y.dtype else g.to(y.dtype)).contiguous(), y.contiguous(), y.shape[-1]
    dx = torch.empty_like(y)
    if dx.numel() == 0:
        return dx
    temperature, *temperature_place = _column(temperature)
    _FUNCTIONS["khot_topk_pull_", y.dtype](
        y.data_ptr(),
        g.data_ptr(),
        dx.numel() // n,
        n,
        *temperature_place,
        torch.get_num_threads(),
        path,
        CDFS[cdf],
        dx.data_ptr(),
        None if dk is None else dk.data_ptr(),
    )
    return dx


def hard_topk(x: Tensor, k: Tensor, mask: Tensor | None, path: int = WIDE) -> Tensor:
    """As `_math.select.k_hot`."""
    x, n = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    k, *k_place = _column(k)
    mask, *mask_place = _mask(mask, n)
    _FUNCTIONS["khot_hard_topk_", x.dtype](
        x.data_ptr(), out.numel() // n, n, *k_place, *mask_place, torch.get_num_threads(), path, out.data_ptr()
    )
    return out


def pivotal(
    p: Tensor, is_whole: Tensor, seed: Tensor, order: Tensor | None, is_random: bool, draws: int, is_paired: bool
) -> Tensor:
    """As `_math.pivotal.draw`."""
    p, is_whole = _sampled(p).contiguous(), is_whole.contiguous()
    out = p.new_empty(draws * p.shape[0], p.shape[1])
    order = None if order is None else order.contiguous()
    _FUNCTIONS["khot_pivotal_", p.dtype](
        p.data_ptr(),
        *p.shape,
        is_whole.data_ptr(),
        int(seed),
        None if order is None else order.data_ptr(),
        is_random,
        0 if order is None or len(order) == 1 else p.shape[1],
        draws,
        is_paired,
        torch.get_num_threads(),
        out.data_ptr(),
    )
    return out


def systematic(p: Tensor, k: Tensor, seed: Tensor, draws: int, is_paired: bool) -> Tensor:
    """As `_math.systematic.draw`."""
    p, k = _sampled(p).contiguous(), k.contiguous()
    out = p.new_empty(draws * p.shape[0], p.shape[1])
    _FUNCTIONS["khot_systematic_", p.dtype](
        p.data_ptr(), *p.shape, k.data_ptr(), int(seed), draws, is_paired, torch.get_num_threads(), out.data_ptr()
    )
    return out


def uniform(seed: Tensor, stream: int, count: int) -> Tensor:
    """As `_math.noise.uniform`."""
    assert LIBRARY is not None
    out = torch.empty(count, dtype=torch.float64, device="cpu")
    LIBRARY.khot_uniform(int(seed), stream, count, torch.get_num_threads(), out.data_ptr())
    return out


def order(keys: Tensor, n: int) -> Tensor:
    """As `_math.noise.order`."""
    assert LIBRARY is not None
    keys = keys.contiguous()
    out = torch.empty(*keys.shape, n, dtype=torch.int64, device="cpu")
    LIBRARY.khot_order(keys.data_ptr(), keys.numel(), n, torch.get_num_threads(), out.data_ptr())
    return out


def _sampled(p: Tensor) -> Tensor:
    """In a dtype that has a kernel."""
    return p if p.dtype in _NAMES else p.to(torch.float32)


def _mask(mask: Tensor | None, n: int) -> tuple[Tensor | None, int | None, int, int]:
    """The mask as rows (to be kept while it is read), its address, and its strides."""
    if mask is None:
        return None, None, 0, 0
    mask = mask.reshape(-1, n)  # a view, unless inner batch dimensions were broadcast
    return mask, mask.data_ptr(), mask.stride(0), mask.stride(1)


def _column(value: Any) -> tuple[Any, int, int]:
    """One number per row (to be kept while it is read), its address, and its stride: 0 if all rows share it."""
    if not isinstance(value, Tensor):
        number = ctypes.c_double(value)
        return number, ctypes.addressof(number), 0
    value = value.to(torch.float64)
    if not any(value.stride()):
        return value, value.data_ptr(), 0
    value = value.contiguous()
    return value, value.data_ptr(), 1
