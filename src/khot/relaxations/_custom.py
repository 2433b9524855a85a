"""Relaxations of your own, made from a cdf."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._math import cdfs
from .._shape import Costs, Group, Mask, PerRow
from .._torch import derivative
from ._family import relax

UNDERFLOW = 1e-37  # a value of F below this counts as 0, in float32 and float64 alike
PROBES = (-1e30, -1e3, -10.0, -1.0, 0.0, 1.0, 10.0, 1e3, 1e30)
Elementwise = Callable[[Tensor], Tensor]


def relaxation(
    cdf: Elementwise,
    *,
    survival: Elementwise | None = None,
    density: Elementwise | None = None,
    quantile: Elementwise | None = None,
    symmetric: bool = False,
    smooth: bool = True,
    name: str | None = None,
) -> "CustomRelaxation":
    """Make a relaxation of your own from its cdf: `y = F((x − τ)/T)` with `Σ y = k`.

    Args:
        cdf: F, an elementwise function of a float tensor in torch operations; continuous, rising from 0 to 1, accurate
            where it is small.
        survival: 1 − F, accurate where that is small; if omitted, `F(−z)` if `symmetric`, else `1 − F(z)`, which cannot
            represent numbers below a rounding of 1.
        density: F′; if omitted, `cdf` is differentiated.
        quantile: F⁻¹ on (0, 1), which saves a bisection at each call.
        symmetric: whether F(−z) = 1 − F(z).
        smooth: whether F′ is continuous.
        name: how exported and saved programs call it, together with a fingerprint of F; if omitted, the name of `cdf`.

    Returns:
        A function of scores (…, n) with the signature and the promises of `sigmoid_topk`;
        `khot.testing.check_relaxation` tells whether your F keeps them. It can be pickled if the functions can. A
        process that loads an exported program makes the same relaxation first; otherwise the program raises LookupError
        with the name of what is missing.

    Examples:
        >>> student = relaxation(lambda z: 0.5 + 0.5 * z / (2 + z.square()).sqrt(), symmetric=True)
        >>> student(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8638, 0.6667, 0.3333, 0.1362])
    """
    functions = {"survival": survival, "density": density, "quantile": quantile}
    remake = partial(relaxation, cdf, **functions, symmetric=symmetric, smooth=smooth, name=name)
    values = cdf(_points(PROBES))
    ends = _points((0.0, 1.0)).to(values.dtype)
    if not (values.diff() >= 0).all() or not torch.allclose(values[[0, -1]], ends, rtol=0, atol=1e-3):
        points = ", ".join(f"{point:g}".replace("-", "−") for point in PROBES)
        raise ValueError(f"`cdf` must rise from 0 to 1, elementwise; at {points} got {values.tolist()}.")
    rest = survival or ((lambda z: cdf(-z)) if symmetric else (lambda z: 1 - cdf(z)))
    # Where F is 0 or 1 to rounding, the derivative of its formula may overflow, as that of exp(−exp(−z)) does. So no
    # function is called there.
    low = _quantile(cdf, UNDERFLOW)
    high = -_quantile(lambda z: rest(-z), UNDERFLOW if symmetric or survival else torch.finfo(torch.float64).eps)

    def bounded(fn: Elementwise) -> Elementwise:
        return lambda z: fn(z.clamp(low, high))

    def given(density: Elementwise) -> Elementwise:
        return lambda z: torch.where((z < low) | (z > high), 0.0, density(z.clamp(low, high)))

    made = cdfs.Cdf(
        f"{name or getattr(cdf, '__name__', type(cdf).__name__)}#{_fingerprint(bounded(cdf))}",
        bounded(cdf),
        bounded(rest),
        given(density) if density else derivative(bounded(cdf)),
        quantile,
        0.0 if symmetric else _quantile(cdf, 0.5),
        smooth,
        steer=None if density else cdfs.difference(bounded(cdf)),
    )
    return CustomRelaxation(cdfs.register(made), remake)


class CustomRelaxation:
    """Hold a relaxation made by `khot.relaxation`; call it as `khot.sigmoid_topk`."""

    def __init__(self, cdf: cdfs.Cdf, remake: "Callable[[], CustomRelaxation]") -> None:
        self._cdf, self._remake = cdf, remake
        self.__name__ = cdf.name

    def __call__(
        self,
        x: Tensor,
        k: PerRow,
        *,
        dim: int = -1,
        temperature: PerRow = 1.0,
        mask: Mask = None,
        costs: Costs = None,
        group: Group = None,
    ) -> Tensor:
        """Return a soft k-hot tensor like `x`; arguments as for `khot.sigmoid_topk`."""
        return relax(self._cdf, x, k, dim, temperature, mask, costs, group)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._remake, ()

    def __repr__(self) -> str:
        return f"<khot.relaxation {self.__name__}>"


def _fingerprint(cdf: Elementwise) -> str:
    """Return a short hash of F's values: the same function has the same hash in every process, another has another."""
    values = cdf(torch.linspace(-8, 8, 33, dtype=torch.float64, device="cpu").sinh())
    return hashlib.sha256(",".join(f"{v:.5e}" for v in values.tolist()).encode()).hexdigest()[:8]


def _quantile(cdf: Elementwise, share: float) -> float:
    return float(cdfs.bisect(cdf, _points((share,))))


def _points(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")  # whatever the default device is
