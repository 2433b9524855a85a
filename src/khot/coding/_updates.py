"""Updates of a dictionary, given signals and their code. Each returns the dictionary and the code after it.

An update of your own is a function `(signals (m, d), dictionary (n, d), code) → (dictionary, code)`.
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import _check
from .._math.pursuit import first, least_squares
from .._shape import compute_dtype
from .._sparse import SparseCode
from .._torch import without_autocast
from ._pursuit import SoftCode, check_signals, soft_pursuit

LONGEST = 0.1  # the length of a step: where the choice between two atoms is close, gradients are huge
SOFT = partial(soft_pursuit, temperature=0.003, steps=2)
LEAST = 0.1  # of the mean square of the coefficients: atoms with less do not take longer steps
_P = ParamSpec("_P")


def _checked(update: Callable[_P, tuple[Tensor, SparseCode]]) -> Callable[_P, tuple[Tensor, SparseCode]]:
    """Let an update raise unless signals, dictionary and code fit, and compute half precision in float32."""

    @wraps(update)
    @without_autocast
    def run(*args: _P.args, **kwargs: _P.kwargs) -> tuple[Tensor, SparseCode]:
        given: Any = signature(update).bind(*args, **kwargs).arguments
        signals, dictionary, code = given["signals"], given["dictionary"], given["code"]
        check_signals(signals, dictionary)
        if signals.ndim != 2:
            raise ValueError(f"`signals` must have the shape (m, d); got {tuple(signals.shape)}. Use `flatten(0, -2)`.")
        _check.instance("code", code, SparseCode)
        if tuple(code.shape) != (want := (len(signals), len(dictionary))):
            raise ValueError(f"`code` must have the shape {want}, (signals, atoms); got {tuple(code.shape)}.")
        _check.finite("code.values", code.values)
        dtype, inner = signals.dtype, compute_dtype(signals.dtype)
        given |= {"signals": signals.to(inner), "dictionary": dictionary.to(inner)}
        atoms, new = update(**{**given, "code": code._replace(values=code.values.to(inner))})  # type: ignore[call-arg]
        return atoms.to(dtype), new._replace(values=new.values.to(dtype))

    return run


@_checked
def svd_update(signals: Tensor, dictionary: Tensor, code: SparseCode) -> tuple[Tensor, SparseCode]:
    """Replace each atom and its coefficients by the best rank-one fit of what the other atoms leave: K-SVD.

    Examples:
        >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> atoms = torch.nn.functional.normalize(x[:12], dim=-1)
        >>> code = khot.coding.omp(x, atoms, 2)
        >>> better, again = khot.coding.svd_update(x, atoms, code)
        >>> bool((x - again.decode(better)).norm() < (x - code.decode(atoms)).norm())
        True

    Reference: Aharon, Elad and Bruckstein, "K-SVD" (2006).
    """

    def rank_one(left: Tensor, weights: Tensor) -> Tensor:
        best: Tensor = torch.linalg.eigh(left.mT @ left).eigenvectors[:, -1]
        return best if float(weights @ (left @ best)) >= 0 else -best

    return _each_atom(signals, dictionary, code, rank_one)


@_checked
def power_update(signals: Tensor, dictionary: Tensor, code: SparseCode) -> tuple[Tensor, SparseCode]:
    """Do `svd_update` with one step of the power method instead of an SVD: as good in the end, and faster.

    Reference: Rubinstein, Zibulevsky and Elad, "Efficient implementation of the K-SVD algorithm" (2008).
    """
    return _each_atom(signals, dictionary, code, lambda left, weights: weights @ left)


@_checked
def least_squares_update(signals: Tensor, dictionary: Tensor, code: SparseCode) -> tuple[Tensor, SparseCode]:
    """Solve for all atoms at once, `argmin_D ‖X − C·D‖²`, then give them norm 1: the method of optimal directions.

    Reference: Engan, Aase and Husøy (1999).
    """
    dense = code.dense()
    gram = dense.mT @ dense
    tiny = torch.finfo(gram.dtype).eps * gram.diagonal().amax().clamp(min=torch.finfo(gram.dtype).tiny)
    atoms = torch.linalg.solve(gram + tiny * torch.eye(len(gram)).to(gram), dense.mT @ signals)
    size = torch.linalg.vector_norm(atoms, dim=-1)
    is_used = size > 0
    atoms = torch.where(is_used.unsqueeze(-1), atoms / torch.where(is_used, size, 1.0).unsqueeze(-1), dictionary)
    return atoms, code._replace(values=code.values * size[code.columns])


@_checked
def gradient_update(
    signals: Tensor,
    dictionary: Tensor,
    code: SparseCode,
    *,
    pursuit: Callable[..., SoftCode] = SOFT,
    rate: float = 0.5,
) -> tuple[Tensor, SparseCode]:
    """Step down the gradient of `‖X − C(D)·D‖²/2`, where C(D) is the soft code: it counts that supports change with D.

    The step of an atom is divided by the square of its coefficients, as Newton's would be if C were constant.

    Args:
        signals, dictionary, code: as for the others; the code says how many atoms each signal has.
        pursuit: a `functools.partial` of `khot.coding.soft_pursuit` with a relaxation and a temperature. If omitted,
            two steps down to T = 0.003: after more steps, or colder ones, the gradient is that of few signals.
        rate: the length of the step; 1 is the longest that is sensible.

    Returns:
        The dictionary, and the code with the least squares on its old support.

    Examples:
        >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> atoms = torch.nn.functional.normalize(x[:12], dim=-1)
        >>> first = code = khot.coding.omp(x, atoms, 2)
        >>> error = (x - first.decode(atoms)).norm()
        >>> for turn in range(20):
        ...     atoms, _ = khot.coding.gradient_update(x, atoms, code)
        ...     code = khot.coding.omp(x, atoms, 2)
        >>> bool((x - code.decode(atoms)).norm() < 0.95 * error)
        True
    """
    _check.above("rate", rate, 0)
    _check.function("pursuit", pursuit)
    if bool((dictionary[code.columns] == 0).all(-1).any()):
        raise ValueError("`dictionary` must have no atom of norm 0 that the code uses; got one. Draw another for it.")
    counts = torch.bincount(code.rows, minlength=len(signals))
    with torch.enable_grad():
        free = dictionary.detach().clone().requires_grad_()
        unit = normalize(free, dim=-1)
        values = pursuit(signals.detach(), unit, counts.to(signals.dtype)).values
        (gradient,) = torch.autograd.grad((signals.detach() - values @ unit).square().sum() / 2, free)
    size = values.detach().square().sum(0)
    step = gradient / (size + LEAST * size.mean()).clamp(min=torch.finfo(size.dtype).tiny).unsqueeze(-1)
    step = rate * step
    step = step * (LONGEST / torch.linalg.vector_norm(step, dim=-1, keepdim=True)).clamp(max=1.0)
    atoms = normalize(dictionary.detach() - step, dim=-1)
    if not len(code.rows):
        return atoms, code
    slot = torch.arange(len(code.rows), device=counts.device) - (counts.cumsum(0) - counts)[code.rows]
    used = first(int(counts.max()) if len(counts) else 0, counts)
    support = torch.zeros_like(used, dtype=torch.long)
    support[code.rows, slot] = code.columns
    return atoms, code._replace(values=least_squares(signals, atoms[support], used)[code.rows, slot])


def _each_atom(
    signals: Tensor, dictionary: Tensor, code: SparseCode, direction: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, SparseCode]:
    """Update atom after atom: its direction from what the others leave, then its coefficients. Unused atoms stay."""
    atoms, values = dictionary.clone(), code.values.clone()
    residual = signals - code.decode(dictionary)
    order = code.columns.argsort(stable=True)
    for j, at in enumerate(order.split(torch.bincount(code.columns, minlength=len(atoms)).tolist())):
        if not len(at):
            continue
        rows, weights = code.rows[at], values[at]
        left = residual[rows] + weights.unsqueeze(-1) * atoms[j]
        atom = direction(left, weights)
        size = torch.linalg.vector_norm(atom)
        if not bool(size > 0):
            continue
        atoms[j], values[at] = atom / size, left @ (atom / size)
        residual[rows] = left - values[at].unsqueeze(-1) * atoms[j]
    return atoms, code._replace(values=values)
