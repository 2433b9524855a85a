"""The native CPU library: plain C functions over raw pointers, called with ctypes."""

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._math import pursuit, threshold
from .._math.cdfs import SIGMOID
from .._shape import Mask, PerRow

HERE = Path(__file__).parent
WIDE, PORTABLE = 1, 0  # the path: the widest vectors this machine has, or one lane at a time
CDFS = {"sigmoid": 0, "laplace": 1, "euclidean": 2}  # the cdfs of native/khot.h
_DTYPES = {torch.float32: 0, torch.float64: 1}
_POINTER, _LONG, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_KINDS = {"pointer": _POINTER, "int64_t": _LONG, "int32_t": _INT, "double": _DOUBLE}


def _fields(declarations: str) -> list[tuple[str, Any]]:
    """Return the fields of a ctypes structure that is declared as in native/khot.h."""
    pairs = (declaration.split(maxsplit=1) for declaration in declarations.split("; "))
    return [(name, _KINDS[kind]) for kind, names in pairs for name in names.split(", ")]


class _Rows(ctypes.Structure):
    """`khot_rows` of native/khot.h."""

    _fields_ = _fields(
        "pointer x; int64_t rows, n; pointer k; int64_t k_stride; pointer temperature; int64_t temperature_stride; "
        "pointer mask; int64_t mask_row_stride, mask_stride; double k_of_all, temperature_of_all; "
        "int32_t dtype, threads, path, cdf"
    )


class _Draws(ctypes.Structure):
    """`khot_draws` of native/khot.h."""

    _fields_ = _fields("pointer p; int64_t rows, n, seed, draws; int32_t is_paired, dtype, threads")


class _Signals(ctypes.Structure):
    """`khot_signals` of native/khot.h."""

    _fields_ = (
        ("gram", _POINTER),
        ("rows", _LONG),
        ("n", _LONG),
        ("slots", _LONG),
        ("counts", _POINTER),
        ("square", _POINTER),
        ("enough", _POINTER),
        ("noise", _POINTER),
        ("dtype", _INT),
        ("threads", _INT),
        ("path", _INT),
    )


_ROWS, _DRAWS, _SIGNALS = ctypes.POINTER(_Rows), ctypes.POINTER(_Draws), ctypes.POINTER(_Signals)
_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "khot_abi": ((), ctypes.c_uint32),
    "khot_has_avx2": ((), _INT),
    "khot_topk": ((_ROWS, _POINTER), None),  # y
    "khot_sigmoid_margin": ((_ROWS, _POINTER, _POINTER), None),  # z, is_left
    "khot_hard_topk": ((_ROWS, _POINTER), None),  # out
    "khot_topk_pull": ((_ROWS, _POINTER, _POINTER, _POINTER), None),  # g, dx, dk
    # is_integer, order, stride of the order's rows, is_random, out
    "khot_pivotal": ((_DRAWS, _POINTER, _POINTER, _LONG, _INT, _POINTER), _INT),
    "khot_systematic": ((_DRAWS, _POINTER, _POINTER), None),  # k, out
    "khot_uniform": ((_LONG, _LONG, _LONG, _INT, _POINTER), None),  # seed, stream, count, threads, out
    "khot_order": ((_POINTER, _LONG, _LONG, _INT, _POINTER), _INT),  # keys, rows, n, threads, out
    # alpha, atoms, coefs, taken, is_close
    "khot_pursue": ((_SIGNALS, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER), _INT),
}


def _load() -> tuple[Any, str]:
    """Load the library; return it, or None, and a line that says what serves the CPU and why."""
    note = HERE / "build.txt"
    built = note.read_text().strip() if note.exists() else "not built: khot was not installed by its own build"
    files = sorted(HERE.glob("libkhot.*"))
    if not files:
        why = "is missing, reinstall khot" if built.startswith("built") else built
        return None, f"eager torch (native library {why})"
    try:
        library = _open(files[0])
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        # `hatch_build.py` compiles this number into the library.
        if library.khot_abi() != int(hashlib.sha256((HERE / "native" / "khot.h").read_bytes()).hexdigest()[:8], 16):
            return None, "eager torch (native library was built from another version of khot.h: reinstall khot)"
    except (OSError, AttributeError) as error:
        return None, f"eager torch (native library does not load: {error})"
    width = "AVX2" if library.khot_has_avx2() else "portable"
    what = "top-k (sigmoid, Laplace, Euclidean, hard), pivotal and systematic samples, matching pursuit"
    return library, f"native, {width} (for {what}; eager torch for the rest; {built})"


def _open(path: Path) -> ctypes.CDLL:
    """Load the library. It uses torch's OpenMP: one that torch keeps to itself is first made visible.

    Where torch brings none, it is the system's.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "undefined symbol" not in str(error):
            raise
    packages = Path(torch.__file__).parents[1]
    copies = [*packages.glob("torch/lib/libgomp*"), *packages.glob("torch.libs/libgomp*"), Path("libgomp.so.1")]
    ctypes.CDLL(str(copies[0]), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


LIBRARY, REASON = _load()


def native_topk(
    x: Tensor,
    k: PerRow,
    temperature: PerRow,
    mask: Mask,
    cdf: str = "sigmoid",
    path: int = WIDE,
    out: Tensor | None = None,
) -> Tensor:
    """Return y = F(z), as `_math.threshold.topk`; `k` and `temperature` may be numbers; `out` is contiguous."""
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    if y.numel():
        _solve("khot_topk", x, k, temperature, mask, path, CDFS[cdf], y.data_ptr())
    return y


def _solve(
    name: str, x: Tensor, k: Any, temperature: Any, mask: Mask, path: int, cdf: int, *outputs: int | None
) -> None:
    """Call one of the functions that take rows."""
    n = x.shape[-1]
    k, k_address, k_stride, k_of_all = _column(k)
    temperature, address, stride, of_all = _column(temperature)
    mask, mask_address, mask_row_stride, mask_stride = _mask(mask, n)
    rows = _Rows(
        x.data_ptr(), x.numel() // n, n, k_address, k_stride, address, stride, mask_address, mask_row_stride,
        mask_stride, k_of_all, of_all, _DTYPES[x.dtype], torch.get_num_threads(), path, cdf,
    )  # fmt: skip
    getattr(LIBRARY, name)(rows, *outputs)


def margin(x: Tensor, k: Tensor, temperature: Tensor, mask: Mask, path: int = WIDE) -> Tensor:
    """Return z as `_math.threshold.margin` does for the logistic cdf without costs.

    The kernel leaves rows with an infinite threshold, or one that is decided by numbers too small to be summed, to it.
    """
    x, n = x.contiguous(), x.shape[-1]
    z = torch.empty_like(x)
    if not z.numel():
        return z
    is_left = torch.empty(z.numel() // n, dtype=torch.bool, device="cpu")
    _solve("khot_sigmoid_margin", x, k, temperature, mask, path, CDFS["sigmoid"], z.data_ptr(), is_left.data_ptr())
    if bool(is_left.any()):
        scores, size, heat = (t.reshape(len(is_left), -1)[is_left] for t in (x, k, temperature))
        allowed = None if mask is None else mask.reshape(-1, n)[is_left]
        rest = threshold.margin(scores, size[:, 0], heat[:, 0], allowed, None, SIGMOID, early_stop=True)
        z.view(-1, n)[is_left] = rest
    return z


def native_pull(
    g: Tensor, y: Tensor, temperature: PerRow, dk: Tensor | None = None, cdf: str = "sigmoid", path: int = WIDE
) -> Tensor:
    """Return the cotangent of x for that of y; write that of k to `dk` if it is given."""
    g, y = (g if g.dtype == y.dtype else g.to(y.dtype)).contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    if dx.numel():
        address = None if dk is None else dk.data_ptr()
        _solve("khot_topk_pull", y, 0.0, temperature, None, path, CDFS[cdf], g.data_ptr(), dx.data_ptr(), address)
    return dx


def hard_topk(x: Tensor, k: PerRow, mask: Mask, path: int = WIDE) -> Tensor:
    """Return what `_math.select.k_hot` does."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        _solve("khot_hard_topk", x, k, 1.0, mask, path, 0, out.data_ptr())
    return out


def pivotal(
    p: Tensor, is_integer: Tensor, seed: Tensor, order: Tensor | None, is_random: bool, draws: int, is_paired: bool
) -> Tensor:
    """Draw what `_math.pivotal.draw` does."""
    p, is_integer = _sampled(p), is_integer.contiguous()
    out = p.new_empty(draws * p.shape[0], p.shape[1])
    order = None if order is None else order.contiguous()
    address, stride = (None, 0) if order is None else (order.data_ptr(), 0 if len(order) == 1 else p.shape[1])
    request = _draws(p, seed, draws, is_paired)
    status = LIBRARY.khot_pivotal(request, is_integer.data_ptr(), address, stride, is_random, out.data_ptr())
    _require_memory(status, p)
    return out


def systematic(p: Tensor, k: Tensor, seed: Tensor, draws: int, is_paired: bool) -> Tensor:
    """Draw what `_math.systematic.draw` does."""
    p, k = _sampled(p), k.contiguous()
    out = p.new_empty(draws * p.shape[0], p.shape[1])
    LIBRARY.khot_systematic(_draws(p, seed, draws, is_paired), k.data_ptr(), out.data_ptr())
    return out


def uniform(seed: Tensor, stream: int, count: int) -> Tensor:
    """Return what `_math.noise.uniform` does."""
    out = torch.empty(count, dtype=torch.float64, device="cpu")
    LIBRARY.khot_uniform(int(seed), stream, count, torch.get_num_threads(), out.data_ptr())
    return out


def order(keys: Tensor, n: int) -> Tensor:
    """Return what `_math.noise.order` does."""
    keys = keys.contiguous()
    out = torch.empty(*keys.shape, n, dtype=torch.int64, device="cpu")
    status = LIBRARY.khot_order(keys.data_ptr(), keys.numel(), n, torch.get_num_threads(), out.data_ptr())
    _require_memory(status, out)
    return out


def pursues(x: Tensor) -> bool:
    """Return whether `orthogonal` takes these signals."""
    return LIBRARY is not None and x.device.type == "cpu" and x.dtype in _DTYPES


def orthogonal(
    x: Tensor, atoms: Tensor, gram: Tensor, counts: Tensor, k: int, tolerance: Tensor | None, path: int = WIDE
) -> pursuit.Support:
    """As `_math.pursuit.orthogonal`."""
    assert LIBRARY is not None
    alpha, counts, gram = (x @ atoms.mT).contiguous(), counts.contiguous(), gram.contiguous()
    square = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square()
    noise = pursuit.relative_noise(x.dtype) * square
    enough = noise if tolerance is None else torch.maximum(tolerance.square(), noise)
    support, coefs = torch.zeros(len(x), k, dtype=torch.int64), x.new_zeros(len(x), k)
    taken, is_close = torch.zeros_like(counts), torch.zeros(len(x), dtype=torch.bool)
    signals = _Signals(
        gram.data_ptr(),
        len(x),
        len(atoms),
        k,
        counts.data_ptr(),
        square.data_ptr(),
        enough.data_ptr(),
        noise.data_ptr(),
        _DTYPES[x.dtype],
        torch.get_num_threads(),
        path,
    )
    outputs = (alpha, support, coefs, taken, is_close)
    if LIBRARY.khot_pursue(signals, *(t.data_ptr() for t in outputs)):
        raise MemoryError(f"no memory to choose {k} atoms, {8 * k * (k + 2)} bytes for each thread; use a smaller k")
    return pursuit.finish(x, atoms, pursuit.Support(support, coefs, pursuit.first(k, taken)), is_close)


def _draws(p: Tensor, seed: Tensor, draws: int, is_paired: bool) -> _Draws:
    return _Draws(p.data_ptr(), *p.shape, int(seed), draws, is_paired, _DTYPES[p.dtype], torch.get_num_threads())


def _require_memory(status: int, rows: Tensor) -> None:
    """Raise MemoryError if the status of a call is not KHOT_OK."""
    if status:
        n = rows.shape[-1]
        raise MemoryError(f"no memory to sample rows of {n} items, {26 * n} bytes for each thread; use fewer threads")


def _sampled(p: Tensor) -> Tensor:
    """Return contiguous rows of a dtype that has a kernel."""
    return (p if p.dtype in _DTYPES else p.to(torch.float32)).contiguous()


def _mask(mask: Mask, n: int) -> tuple[Tensor | None, int | None, int, int]:
    """Return the mask as rows (to be kept while it is read), its address, and its strides."""
    if mask is None:
        return None, None, 0, 0
    if mask.ndim != 2:
        mask = mask.reshape(-1, n)  # a view, unless inner batch dimensions were broadcast
    row_stride, stride = mask.stride()
    return mask, mask.data_ptr(), row_stride, stride


def _column(value: Any) -> tuple[Any, int | None, int, float]:
    """Return one number per row: the tensor (to be kept while it is read), its address and stride; or the number."""
    if not isinstance(value, Tensor):
        return None, None, 0, value
    value = value.to(torch.float64)
    stride = int(any(value.stride()))
    if stride:
        value = value.contiguous()
    return value, value.data_ptr(), stride, 0.0
