"""The laws of design: what the numbers of a relaxation must satisfy. Each is a function that raises if it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Relaxation(Protocol):
    """The signature of `khot.sigmoid_topk`."""

    def __call__(
        self,
        x: Tensor,
        k: float | Tensor,
        /,
        *,
        dim: int = -1,
        temperature: float | Tensor = 1.0,
        mask: Tensor | None = None,
    ) -> Tensor: ...


class Subject(NamedTuple):
    """What is being checked, and what it promises."""

    fn: Relaxation
    quantile: Callable[[Tensor], Tensor] | None
    symmetric: bool
    smooth: bool


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
COUNTS = (0.5, 1, 2.5, 4, 8, 8.75)


def close(actual: Tensor, expected: Tensor | float, what: str, tolerance: float | None = None) -> None:
    """Raise, with the largest difference, unless `actual` is `expected` within the dtype's tolerance."""
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device).expand(actual.shape)
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (
        torch.where(same, 0.0, (actual - expected).abs().nan_to_num(torch.inf)).max().item() if actual.numel() else 0.0
    )
    if not error <= tolerance:
        raise AssertionError(f"{what}: off by {error:.3g}, allowed {tolerance:.3g}")


def scores(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal scores, the same at every call."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def range_and_sum(s: Subject) -> None:
    for dtype in (torch.float64, torch.float32):
        x = scores(4, 9, dtype=dtype)
        for k in COUNTS:
            for temperature in (0.01, 1.0, 30.0):
                y = s.fn(x, k, temperature=temperature)
                if y.shape != x.shape or y.dtype != x.dtype:
                    raise AssertionError(f"{tuple(x.shape)} {x.dtype} became {tuple(y.shape)} {y.dtype}")
                if not bool(((y >= 0) & (y <= 1)).all()):
                    raise AssertionError(f"entries must lie in [0, 1]; got {y.min():.6g} to {y.max():.6g} at k={k}")
                close(y.sum(-1), float(k), f"the sum at k={k}, T={temperature}", TOLERANCE[dtype] * max(k, 1))


def count_and_temperature_per_row(s: Subject) -> None:
    x, k, temperature = scores(3, 2, 9), torch.tensor([[1.0], [2.5], [7.0]]), torch.tensor([0.3, 2.0])
    y = s.fn(x, k, temperature=temperature)
    for i in range(3):
        for j in range(2):
            row = s.fn(x[i, j], k[i, 0].item(), temperature=temperature[j].item())
            close(y[i, j], row, f"row ({i}, {j}) alone and in a batch", 1e-7)  # float32 temperatures
    close(s.fn(x, torch.tensor(3)), s.fn(x, 3), "an integer tensor k")


def translation(s: Subject) -> None:
    x = scores(4, 9)
    close(s.fn(x + 3, 2.5), s.fn(x, 2.5), "fn(x + 3)")


def temperature_scales(s: Subject) -> None:
    x = scores(4, 9)
    close(s.fn(x, 2.5, temperature=0.25), s.fn(4 * x, 2.5), "fn(x, T=1/4) against fn(4x)")


def permutation(s: Subject) -> None:
    x, order = scores(4, 9), torch.tensor([3, 0, 8, 1, 7, 2, 6, 5, 4])
    close(s.fn(x[:, order], 2.5), s.fn(x, 2.5)[:, order], "permuted scores")


def order_preserved(s: Subject) -> None:
    y = s.fn(scores(4, 9).sort(-1).values, 2.5)
    if bool((y.diff(dim=-1) < 0).any()):
        raise AssertionError("a greater score got a smaller weight")


def complement(s: Subject) -> None:
    if s.symmetric:
        x = scores(4, 9)
        for k in COUNTS:
            close(s.fn(-x, 9 - k), 1 - s.fn(x, k), f"fn(−x, n − k) against 1 − fn(x, k) at k={k}")


def cold_limit(s: Subject) -> None:
    x = torch.tensor([1.0, 5.0, 1.0, -2.0, 1.0], dtype=torch.float64)
    close(s.fn(x, 1, temperature=1e-9), torch.tensor([0.0, 1, 0, 0, 0]), "T → 0, no ties", 1e-6)
    close(s.fn(x, 2, temperature=1e-9), torch.tensor([1 / 3, 1, 1 / 3, 0, 1 / 3]), "T → 0, ties shared", 1e-6)


def hot_limit(s: Subject) -> None:
    close(s.fn(scores(4, 9), 2.5, temperature=1e9), 2.5 / 9, "T → ∞", 1e-6)


def ends(s: Subject) -> None:
    for dtype in (torch.float64, torch.float32):
        x = scores(4, 9, dtype=dtype)
        close(s.fn(x, 0), 0.0, "k = 0", 0.0)
        close(s.fn(x, 9), 1.0, "k = n", 0.0)
        close(s.fn(x[:, :1], 0.25), 0.25, "n = 1")
    if s.fn(scores(0, 9), 2).shape != (0, 9) or s.fn(scores(4, 0), 0).shape != (4, 0):
        raise AssertionError("an empty tensor must keep its shape")


def monotone_in_k(s: Subject) -> None:
    x = scores(4, 9)
    steps = torch.stack([s.fn(x, k) for k in (0, *COUNTS, 9)])
    if bool((steps.diff(dim=0) < -1e-12).any()):
        raise AssertionError("a larger k made an entry smaller")


def inverse(s: Subject) -> None:
    if s.quantile is not None:
        p = torch.tensor([[0.9, 0.5, 0.2, 0.1], [0.99, 0.01, 0.6, 0.4]], dtype=torch.float64)
        close(s.fn(s.quantile(p), p.sum(-1)), p, "fn(quantile(p), Σp)")


def masked(s: Subject) -> None:
    x = scores(4, 9)
    mask = torch.tensor([True, True, False, True, True, False, True, True, True])
    y = s.fn(x, 2.5, mask=mask)
    close(y[:, ~mask], 0.0, "masked entries", 0.0)
    close(y[:, mask], s.fn(x[:, mask], 2.5), "masking against deleting")
    close(s.fn(x.masked_fill(~mask, -torch.inf), 2.5), y, "−inf against masked")
    close(s.fn(x.masked_fill(~mask, torch.nan), 2.5, mask=mask), y, "NaN under the mask")
    close(s.fn(x, 7, mask=mask), mask.to(x.dtype), "k = number allowed", 0.0)


def forced(s: Subject) -> None:
    x = scores(4, 9)
    x[:, 3] = torch.inf
    rest = [i for i in range(9) if i != 3]
    for k in (1, 2.5, 9):
        y = s.fn(x, k)
        close(y[:, 3], 1.0, "an entry of +inf", 0.0)
        close(y[:, rest], s.fn(x[:, rest], k - 1), f"the entries beside +inf at k={k}")
    two = scores(4, 9).index_fill(1, torch.tensor([3, 5]), torch.inf)
    for k in (2, 3.5):
        close(s.fn(two, k)[:, [3, 5]], 1.0, f"two entries of +inf at k={k}", 0.0)
    shared = torch.zeros(4, 9).index_fill(1, torch.tensor([3, 5, 8]), 2 / 3)
    x[:, [5, 8]] = torch.inf
    close(s.fn(x, 2), shared, "three entries of +inf that share k = 2", 1e-7)


def bad_rows_are_nan_alone(s: Subject) -> None:
    x = scores(4, 9)
    good = s.fn(x, 2.5)
    x[1, 4] = torch.nan
    _nan_only(s.fn(x, 2.5), good, 1, "NaN in a row")
    x = scores(4, 9)
    for k in (9.5, -0.5, torch.nan):
        _nan_only(s.fn(x, torch.tensor([2.5, k, 2.5, 2.5])), good, 1, f"k = {k} in a row")
    _nan_only(s.fn(x, 2.5, temperature=torch.tensor([1.0, 0.0, 1.0, 1.0])), good, 1, "T = 0 in a row")
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1, 2:] = False
    _nan_only(s.fn(x, 2.5, mask=mask), good, 1, "fewer allowed than k in a row")


def _nan_only(y: Tensor, good: Tensor, row: int, what: str) -> None:
    others = [i for i in range(len(y)) if i != row]
    close(y[row], torch.nan, what)
    close(y[others], good[others], f"the other rows, with {what}")


def layout(s: Subject) -> None:
    x = scores(3, 9, 2)
    close(s.fn(x, 2.5, dim=1), s.fn(x.movedim(1, -1), 2.5).movedim(-1, 1), "dim=1")
    close(s.fn(x, 2.5, dim=-2), s.fn(x, 2.5, dim=1), "dim=−2")
    wide = scores(3, 18)
    close(s.fn(wide[:, ::2], 2.5), s.fn(wide[:, ::2].contiguous(), 2.5), "strided scores")
    row = scores(9)
    close(s.fn(row.expand(3, 9), 2.5), s.fn(row, 2.5).expand(3, 9), "expanded scores")


def input_untouched(s: Subject) -> None:
    x, k = scores(3, 9).requires_grad_(), torch.tensor([2.5, 1.0, 3.0], dtype=torch.float64)
    temperature, mask = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64), torch.ones(9, dtype=torch.bool)
    upstream = scores(3, 9, seed=1)
    arguments = (x, k, temperature, mask, upstream)
    copies = [t.detach().clone() for t in arguments]
    y = s.fn(x, k, temperature=temperature, mask=mask)
    before = y.detach().clone()
    torch.autograd.grad(y, x, upstream)
    if not all(torch.equal(t, copy) for t, copy in zip((*arguments, y), (*copies, before), strict=True)):
        raise AssertionError("an argument or the result was written to")


def precision(s: Subject) -> None:
    x = scores(4, 9)
    close(s.fn(x.float(), 2.5), s.fn(x.float().double(), 2.5).float(), "float32 against float64")
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype)
        close(s.fn(half, 2.5), s.fn(half.float(), 2.5).to(dtype), f"{dtype} against float32 rounded once", 0.0)


def broken_laws(laws: Iterable[Callable[[Any], None]], subject: Any) -> str:
    """Return a list of the laws that the subject breaks, a line each, or "" if there are none."""
    broken = []
    for law in laws:
        try:
            law(subject)
        except Exception as error:  # a law is broken by a wrong number and by a crash alike
            said = next(iter(str(error).splitlines()), "failed without a message")
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            broken.append(f"\n- {law.__name__.replace('_', ' ')}: {kind}{said}")
    return "".join(broken)


LAWS = (
    range_and_sum,
    count_and_temperature_per_row,
    translation,
    temperature_scales,
    permutation,
    order_preserved,
    complement,
    cold_limit,
    hot_limit,
    ends,
    monotone_in_k,
    inverse,
    masked,
    forced,
    bad_rows_are_nan_alone,
    layout,
    input_untouched,
    precision,
)
