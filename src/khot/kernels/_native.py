"""The native CPU library: plain C functions over raw pointers, called with ctypes."""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._math import pursuit, threshold
from .._math.cdfs import SIGMOID
from .._shape import Costs, Mask, PerRow, per_row

HERE = Path(__file__).parent
# The path: the widest vectors that a call may use, if the machine has them.
AVX512, AVX2, PORTABLE = 2, 1, 0
WIDE = AVX512
_BASELINE = "NEON" if platform.machine() in ("arm64", "aarch64") else "portable"
PATHS = {AVX512: "AVX-512", AVX2: "AVX2", PORTABLE: _BASELINE}
CDFS = {"sigmoid": 0, "laplace": 1, "euclidean": 2, "normal": 3, "cauchy": 4}  # the cdfs of native/khot.h
IN_EVERY_DTYPE = ("sigmoid", "laplace", "euclidean")  # the others, and powers, are in float32 alone
_POWER, MOST_POWER = 5, 4.0  # a larger exponent would multiply the roundings of margins beyond 1e-6
DTYPES = {torch.float32: 0, torch.float64: 1}
HALVES = {torch.bfloat16: 2, torch.float16: 3}  # for `half_topk` and `half_pull` alone
_NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "int": ctypes.c_int32, "double": ctypes.c_double}
_NUMBERS["uint32_t"] = ctypes.c_uint32


def _declared(header: Path) -> tuple[dict[str, Any], dict[str, tuple[list[Any], Any]]]:
    """Return the structures that native/khot.h declares, and the types of each function's arguments and result.

    A program that was packed with khot's Python files alone has no header, and no library to call.
    """
    text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8") if header.exists() else "", flags=re.DOTALL)
    structures: dict[str, Any] = {}

    def kind(name: str, star: str) -> Any:
        pointer = ctypes.POINTER(structures[name]) if name in structures else ctypes.c_void_p
        return pointer if star else _NUMBERS[name]

    for body, name in re.findall(r"typedef struct {(.*?)} (\w+);", text, re.DOTALL):
        lines = re.findall(r"(?:const )?(\w+)(\*?) ([^;]+);", body)
        fields = [(field, kind(of, star)) for of, star, names in lines for field in names.split(", ")]
        structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    functions = re.findall(r"KHOT_API (\w+) (\w+)\((.*?)\)", text, re.DOTALL)
    arguments = {name: re.findall(r"(\w+)(\*?) \w+(?:,|$)", listed) for _, name, listed in functions}
    return structures, {name: ([kind(*of) for of in arguments[name]], _NUMBERS.get(to)) for to, name, _ in functions}


_STRUCTURES, _SIGNATURES = _declared(HERE / "native" / "khot.h")
_Rows: Any = _STRUCTURES.get("khot_rows")
Draws: Any = _STRUCTURES.get("khot_draws")
_Signals: Any = _STRUCTURES.get("khot_signals")
_Cells: Any = _STRUCTURES.get("khot_cells")


def _load() -> tuple[Any, str]:
    """Load the library; return it, or None, and a line that says what serves the CPU and why."""
    note = HERE / "build.txt"
    built = note.read_text().split("\n")[0] if note.exists() else "not built: khot was not installed by its own build"
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
    width = PATHS[library.khot_path()]
    what = "top-k (sigmoid, Laplace, Euclidean, float32 normal, Cauchy and power, with costs too, hard, statistical), "
    what += "logarithms, thresholds and losses of float32 rows, "
    what += "pivotal, systematic, Sampford and conditional Poisson samples, matching pursuit, certified attention"
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


def _load_extensions() -> tuple[dict[str, Any], str]:
    """Load the extensions that call the library without ctypes, by name and the best first; and say what is missing.

    `_direct_torch` was built with the headers of one version of torch, and must not be loaded beside another.
    """
    note = HERE / "build.txt"
    headers = re.search("with the headers of torch (.+)", note.read_text() if note.exists() else "")
    fits = {"_direct_torch": bool(headers and headers[1] == torch.__version__)}
    found: dict[str, Any] = {}
    for name, does_fit in (fits | {"_direct": _torch.dlpack_table is not None}).items():
        with contextlib.suppress(ImportError):
            found |= {name: importlib.import_module(f".{name}", __package__)} if does_fit else {}
    if any(extension.abi != LIBRARY.khot_abi() for extension in found.values()):
        return {}, "; calls by ctypes: the extension for small calls is another version's, reinstall khot"
    if not found:
        lack = (
            "no extension for small calls"
            if _torch.dlpack_table
            else f"torch {torch.__version__} has no `{_torch.DLPACK}`"
        )
        return {}, f"; calls by ctypes: {lack}"
    is_lost = headers and "_direct_torch" not in found
    return found, f"; its node in C++ does not serve torch {torch.__version__}: reinstall khot" if is_lost else ""


LIBRARY, REASON = _load()
EXTENSIONS, _why = ({}, "") if LIBRARY is None else _load_extensions()
REASON += _why


def direct(**names: Any) -> tuple[Any, Any, Any]:
    """Return two functions that call the library without ctypes.

    They are (x, k, T, dim, cdf, mask) → y and (g, y, T, cdf) → dx. They return None for a call that is not simple: not
    an ordinary contiguous CPU tensor, say. Without an extension they always do. The third makes the method by which
    nodes of a type call the second, or is None. `names` are the functions of torch and khot that the extensions call.
    """
    if not EXTENSIONS:
        return (lambda *_: None), (lambda *_: None), None
    topk, pull = (ctypes.cast(f, ctypes.c_void_p).value for f in (LIBRARY.khot_topk, LIBRARY.khot_topk_pull))
    for extension in EXTENSIONS.values():
        extension.bind(topk=topk, topk_pull=pull, path=WIDE, exchange=_torch.dlpack_table, **names)
    best = next(iter(EXTENSIONS.values()))
    return best.topk, best.pull, best.method_of


@functools.lru_cache(64)  # powers are many
def has_kernel(cdf: str, dtype: torch.dtype) -> bool:
    """Return whether `native_topk` and `native_pull` take the cdf."""
    if LIBRARY is None or dtype != torch.float32:
        return LIBRARY is not None and cdf in IN_EVERY_DTYPE
    return cdf in CDFS or (cdf.startswith("power:") and 1.0 <= _law(cdf)[1] <= MOST_POWER)


def _law(cdf: str) -> tuple[int, float]:
    """Return the number of a cdf in native/khot.h, and the exponent of a power."""
    return (_POWER, 1 / (float(cdf.removeprefix("power:")) - 1)) if cdf.startswith("power:") else (CDFS[cdf], 0.0)


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
    return _solve("khot_topk", x, k, temperature, mask, path, cdf, result=out)


def _solve(
    name: str,
    x: Tensor,
    k: Any,
    temperature: Any,
    mask: Mask,
    path: int,
    cdf: str = "sigmoid",
    inputs: tuple[int, ...] = (),
    outputs: tuple[int | None, ...] = (),
    result: Tensor | None = None,
) -> Tensor:
    """Return what a function of rows writes, a tensor like x; it may take more inputs, and write to more outputs.

    `result` is where to write, contiguous; a new tensor if None.
    """
    x = x.contiguous()
    result = torch.empty_like(x) if result is None else result
    if result.numel():
        call(name, x, k, temperature, mask, path, cdf, *inputs, result.data_ptr(), *outputs)
    return result


def call(
    name: str,
    x: Tensor,
    k: Any,
    temperature: Any,
    mask: Mask,
    path: int,
    cdf: str,
    *rest: float | None,
    costs: Costs = None,
) -> None:
    """Call a function of rows; x is contiguous, and the rest are numbers and addresses. Costs are of x's dtype."""
    n = x.shape[-1]
    k, k_address, k_stride, k_of_all = _column(k)
    temperature, address, stride, of_all = _column(temperature)
    mask, mask_address, mask_row_stride, mask_stride = _mask(mask, n)
    if costs is not None:
        costs = costs.reshape(-1, n)  # as in `_mask`
        costs = costs if costs.stride(1) == 1 or n == 1 else costs.contiguous()
    rows = _Rows(
        x.data_ptr(), x.numel() // n, n, k_address, k_stride, address, stride, mask_address, mask_row_stride,
        mask_stride, k_of_all, of_all, (DTYPES | HALVES)[x.dtype], torch.get_num_threads(), path, *_law(cdf),
        _address(costs), 0 if costs is None else costs.stride(0),
    )  # fmt: skip
    if getattr(LIBRARY, name)(rows, *rest):
        raise MemoryError(f"no memory for rows of {n} scores as float32; use fewer threads")


def margin(x: Tensor, k: PerRow, temperature: PerRow, mask: Mask, path: int = WIDE) -> Tensor:
    """Return z as `_math.threshold.margin` does for the logistic cdf without costs.

    The kernel leaves rows with an infinite threshold, or one that is decided by numbers too small to be summed, to it.
    """
    is_left = torch.empty(x.shape[:-1].numel(), dtype=torch.bool, device="cpu")
    z = _solve("khot_sigmoid_margin", x, k, temperature, mask, path, outputs=(is_left.data_ptr(),))
    if z.numel() and bool(is_left.any()):
        of_rows = (x, per_row(k, x), per_row(temperature, x))
        scores, size, heat = (t.reshape(len(is_left), -1)[is_left] for t in of_rows)
        allowed = None if mask is None else mask.reshape(-1, x.shape[-1])[is_left]
        rest = threshold.margin(scores, size[:, 0], heat[:, 0], allowed, None, SIGMOID, early_stop=True)
        z.view(-1, x.shape[-1])[is_left] = rest
    return z


def native_pull(
    g: Tensor, y: Tensor, temperature: PerRow, dk: Tensor | None = None, cdf: str = "sigmoid", path: int = WIDE
) -> Tensor:
    """Return the cotangent of x for that of y; write that of k to `dk` if it is given."""
    g, address = (g if g.dtype == y.dtype else g.to(y.dtype)).contiguous(), None if dk is None else dk.data_ptr()
    return _solve("khot_topk_pull", y, 0.0, temperature, None, path, cdf, (g.data_ptr(),), (address,))


def half_topk(
    x: Tensor,
    k: PerRow,
    temperature: PerRow,
    mask: Mask,
    cdf: str = "sigmoid",
    path: int = WIDE,
    roots: Tensor | None = None,
) -> Tensor:
    """Return `native_topk` of scores in half precision: computed in float32, a few rows at a time, and rounded once.

    What `half_pull` needs beside the scores is written to `roots`, (rows, 2) float64.
    """
    return _solve("khot_half_topk", x, k, temperature, mask, path, cdf, outputs=(_address(roots),))


def half_pull(
    g: Tensor,
    x: Tensor,
    roots: Tensor,
    k: PerRow,
    temperature: PerRow,
    mask: Mask,
    cdf: str = "sigmoid",
    path: int = WIDE,
) -> Tensor:
    """Return the cotangent of x for that of y, from the scores x and their roots."""
    g = (g if g.dtype == x.dtype else g.to(x.dtype)).contiguous()
    return _solve("khot_half_pull", x, k, temperature, mask, path, cdf, (roots.data_ptr(), g.data_ptr()))


def hard_topk(x: Tensor, k: PerRow, mask: Mask, path: int = WIDE) -> Tensor:
    """Return what `_math.select.k_hot` does."""
    return _solve("khot_hard_topk", x, k, 1.0, mask, path)


def statistical(
    x: Tensor, k: float, y: Tensor | None = None, *, smooth: float = 0.0, exact: bool = False, path: int = WIDE
) -> Tensor:
    """Return θ of unmasked rows (…, n), (…, 1) float64, not finite where x is not; write `above` of them to `y`.

    As `_math.statistical`; k is the multiplier of the deviation, or if `exact` a count. `y` is contiguous, like `x`.
    """
    x = x.contiguous()
    y = torch.empty_like(x) if exact and y is None else y  # it is used in the search, too
    theta = torch.empty((*x.shape[:-1], 1), dtype=torch.float64, device="cpu")
    if x.numel():
        call("khot_statistical", x, k, 1.0, None, path, "sigmoid", smooth, exact, _address(y), theta.data_ptr())
    return theta


def sums_at(x: Tensor, anchor: Tensor, shift: Tensor, temperature: Tensor, cdf: str, path: int = WIDE) -> Tensor:
    """Return what `_math.threshold.sums_at` does; x (rows, n) with n ≥ 1, the others (rows, 1) float64."""
    x, sums = x.contiguous(), torch.empty(len(x), 5, dtype=torch.float64, device="cpu")
    anchor, shift = anchor.contiguous(), shift.contiguous()
    addresses = (t.data_ptr() for t in (anchor, shift, sums))
    call("khot_sums_at", x, 0.0, temperature, None, path, cdf, *addresses)
    return sums


def value_at(
    x: Tensor, anchor: Tensor, shift: Tensor, temperature: Tensor, step: Tensor, cdf: str, path: int = WIDE
) -> Tensor:
    """Return what `_math.threshold.value_at` does; shapes are those of `sums_at`."""
    points = tuple(t.contiguous() for t in (anchor, shift, step))
    addresses = tuple(t.data_ptr() for t in points)
    return _solve("khot_value_at", x, 0.0, temperature, None, path, cdf, addresses)


def serves(x: Tensor) -> bool:
    """Return whether `orthogonal` and `attend` take signals or queries of this kind, which no tracer watches.

    torch.compile must not trace them: the addresses that they give to the library would be those of other memory.
    """
    is_watched = torch.compiler.is_compiling() or _torch.transforms_active() or _torch.is_tracing()
    return LIBRARY is not None and x.device.type == "cpu" and x.dtype in DTYPES and not is_watched


def _require(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """Raise unless tensors have the dtype that the library is told: it would read others beyond their end."""
    for t in tensors:
        if t is not None and t.dtype != dtype:
            raise TypeError(f"the native library needs {dtype} here; got {t.dtype}. Turn autocast off, or convert it.")


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
    _require(x.dtype, gram, alpha)
    signals = _Signals(
        gram.data_ptr(), len(x), len(atoms), k, counts.data_ptr(), square.data_ptr(), enough.data_ptr(),
        noise.data_ptr(), DTYPES[x.dtype], torch.get_num_threads(), path,
    )  # fmt: skip
    outputs = (alpha, support, coefs, taken, is_close)
    if LIBRARY.khot_pursue(signals, *(t.data_ptr() for t in outputs)):
        raise MemoryError(f"no memory to choose {k} atoms, {8 * k * (k + 2)} bytes for each thread; use a smaller k")
    return pursuit.finish(x, atoms, pursuit.Support(support, coefs, pursuit.first(k, taken)), is_close)


def attend(
    q: Tensor,
    cells: tuple[Tensor, ...],
    values: Tensor | None,
    mask: Mask,
    epsilon: Tensor,
    largest: Tensor,
    *,
    slack: float,
    used: int,
    bounded: int,
    limit: int,
    head: Tensor | None = None,
    path: int = WIDE,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Return the output (B, R, e); and of each query (B, R) the keys used, the bound, the keys scored, and the refusal.

    As the search of `khot.attention`; `cells` are the keys, means, radii, shares, positions and counts of cells. Those
    after the first `bounded` are always opened. A score may be off by `slack`·‖q‖·`largest` (B).
    """
    assert LIBRARY is not None
    (heads, rows, d), (room, size) = q.shape, cells[0].shape[1:3]
    q, epsilon = q.contiguous(), epsilon.contiguous()
    mask = None if mask is None else mask.contiguous()
    k, scored = torch.empty(2, heads, rows, dtype=torch.int64, device="cpu")
    bound, is_refused = torch.empty_like(epsilon), torch.empty(heads, rows, dtype=torch.bool, device="cpu")
    output, n, e, head_stride, stride = None, 0, 0, 0, 0
    if values is not None:
        values = values if values.stride(-1) == 1 else values.contiguous()
        n, e, head_stride, stride = values.shape[1], values.shape[2], values.stride(0), values.stride(1)
        output = q.new_empty(heads, rows, e)
    n = n if head is None else head.shape[-1]
    _require(q.dtype, *cells[:4], values, largest)
    request = _Cells(
        q.data_ptr(), *(t.data_ptr() for t in cells), _address(values), _address(mask), epsilon.data_ptr(),
        largest.data_ptr(), slack, heads, rows, d, room, used, bounded, size, n, e, head_stride, stride, limit,
        DTYPES[q.dtype], torch.get_num_threads(), path,
    )  # fmt: skip
    outputs = (output, k, bound, scored, is_refused, head)
    if LIBRARY.khot_attend(request, *map(_address, outputs)):
        raise MemoryError(f"no memory to search {used} cells of {size} keys; use fewer threads")
    return output, k, bound, scored, is_refused


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


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
    if type(value) is float:  # isinstance is slow
        return None, None, 0, value
    value = value.to(torch.float64)
    stride = int(any(value.stride()))
    if stride:
        value = value.contiguous()
    return value, value.data_ptr(), stride, 0.0
