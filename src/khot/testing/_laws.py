"""What checks are made of: scores to try, comparisons, laws, and those that the numbers of a relaxation obey."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
COUNTS = (0.5, 1, 2.5, 4, 8, 8.75)
_EMPTY = partial(torch.empty, dtype=torch.float64)
_KINDS: dict[str, Callable[[int, Generator], Tensor]] = {
    "normal": lambda n, rng: _EMPTY(n).normal_(generator=rng),
    "uniform": lambda n, rng: _EMPTY(n).uniform_(generator=rng),
    "cauchy": lambda n, rng: _EMPTY(n).cauchy_(generator=rng),
    "constant": lambda n, rng: _EMPTY(n).fill_(0.7),
    "ties": lambda n, rng: torch.randint(4, (n,), generator=rng).double(),
    "bimodal": lambda n, rng: _EMPTY(n).normal_(generator=rng) + 20.0 * torch.randint(2, (n,), generator=rng) - 10.0,
    "offset": lambda n, rng: _EMPTY(n).normal_(mean=1000.0, generator=rng),
    "sorted": lambda n, rng: _EMPTY(n).normal_(generator=rng).sort().values,
    "exponential": lambda n, rng: _EMPTY(n).exponential_(generator=rng),
    "outlier": lambda n, rng: _EMPTY(n).normal_(generator=rng).index_fill_(0, torch.tensor([n // 3]), 1e4),
}
SCORE_KINDS = tuple(_KINDS)
"""The names that `score_vector` knows."""


def score_vector(kind: str, n: int, *, seed: int = 0) -> Tensor:
    """Return n float64 scores of a named kind, one of `SCORE_KINDS`; the same at every call.

    >>> score_vector("constant", 3)
    tensor([0.7000, 0.7000, 0.7000], dtype=torch.float64)
    """
    if kind not in _KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(SCORE_KINDS)}; got {kind!r}.")
    return _KINDS[kind](n, Generator().manual_seed(seed))


def scores(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return normal scores, the same at every call."""
    return torch.randn(shape, dtype=torch.float64, generator=Generator().manual_seed(seed)).to(dtype)


def must(holds: bool | Tensor, otherwise: str) -> None:
    """Raise AssertionError with that text unless something holds, or all of it."""
    if not bool(torch.as_tensor(holds).all()):
        raise AssertionError(otherwise)


def close(actual: Tensor, expected: Tensor | float, what: str, tolerance: float | None = None) -> None:
    """Raise, with the largest difference, unless `actual` is `expected` within the dtype's tolerance."""
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device).expand(actual.shape)
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    errors = torch.where(same, 0.0, (actual - expected).abs().nan_to_num(torch.inf))
    error = errors.max().item() if errors.numel() else 0.0
    must(error <= tolerance, f"{what}: off by {error:.3g}, allowed {tolerance:.3g}")


def laws(kind: type) -> list[Callable[[Any], None]]:
    """Return the laws of a class: its public methods, which raise if the subject breaks them; inherited ones first."""
    members = [member for base in reversed(kind.__mro__) for member in vars(base).items()]
    return [law for name, law in members if isfunction(law) and not name.startswith("_")]


def broken_laws(subject: object) -> str:
    """Return a list of the laws that the subject breaks, a line each, or "" if there are none."""
    broken = []
    for law in laws(type(subject)):
        try:
            law(subject)
        except Exception as error:  # a law is broken by a wrong number and by a crash alike
            said = next(iter(str(error).splitlines()), "failed without a message")
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            broken.append(f"\n- {law.__name__.replace('_', ' ')}: {kind}{said}")
    return "".join(broken)


@dataclass(frozen=True)
class Numbers:
    """A relaxation, what it promises, and the laws of its values."""

    fn: Callable[..., Tensor]  # (x, k, *, dim, temperature, mask), as `khot.sigmoid_topk`
    quantile: Callable[[Tensor], Tensor] | None
    symmetric: bool
    smooth: bool

    def range_and_sum(self) -> None:
        for dtype, k, temperature in product((torch.float64, torch.float32), COUNTS, (0.01, 1.0, 30.0)):
            y = self.fn(scores(4, 9, dtype=dtype), k, temperature=temperature)
            must(y.shape == (4, 9) and y.dtype == dtype, f"(4, 9) {dtype} became {tuple(y.shape)} {y.dtype}")
            got = f"got {y.min():.6g} to {y.max():.6g} at k={k}"
            must((y >= 0) & (y <= 1), f"entries must lie in [0, 1]; {got}")
            close(y.sum(-1), float(k), f"the sum at k={k}, T={temperature}", TOLERANCE[dtype] * max(k, 1))

    def count_and_temperature_per_row(self) -> None:
        x, k, temperature = scores(3, 2, 9), torch.tensor([[1.0], [2.5], [7.0]]), torch.tensor([0.3, 2.0])
        y = self.fn(x, k, temperature=temperature)
        for i, j in product(range(3), range(2)):
            row = self.fn(x[i, j], k[i, 0].item(), temperature=temperature[j].item())
            close(y[i, j], row, f"row ({i}, {j}) alone and in a batch", 1e-7)  # float32 temperatures
        close(self.fn(x, torch.tensor(3)), self.fn(x, 3), "an integer tensor k")

    def translation(self) -> None:
        x = scores(4, 9)
        close(self.fn(x + 3, 2.5), self.fn(x, 2.5), "fn(x + 3)")

    def temperature_scales(self) -> None:
        x = scores(4, 9)
        close(self.fn(x, 2.5, temperature=0.25), self.fn(4 * x, 2.5), "fn(x, T=1/4) against fn(4x)")

    def permutation(self) -> None:
        x, order = scores(4, 9), torch.tensor([3, 0, 8, 1, 7, 2, 6, 5, 4])
        close(self.fn(x[:, order], 2.5), self.fn(x, 2.5)[:, order], "permuted scores")

    def order_preserved(self) -> None:
        y = self.fn(scores(4, 9).sort(-1).values, 2.5)
        must(y.diff(dim=-1) >= 0, "a greater score got a smaller weight")

    def complement(self) -> None:
        if self.symmetric:
            x = scores(4, 9)
            for k in COUNTS:
                close(self.fn(-x, 9 - k), 1 - self.fn(x, k), f"fn(−x, n − k) against 1 − fn(x, k) at k={k}")

    def cold_limit(self) -> None:
        x = torch.tensor([1.0, 5.0, 1.0, -2.0, 1.0], dtype=torch.float64)
        close(self.fn(x, 1, temperature=1e-9), torch.tensor([0.0, 1, 0, 0, 0]), "T → 0, no ties", 1e-6)
        close(self.fn(x, 2, temperature=1e-9), torch.tensor([1 / 3, 1, 1 / 3, 0, 1 / 3]), "T → 0, ties shared", 1e-6)

    def hot_limit(self) -> None:
        close(self.fn(scores(4, 9), 2.5, temperature=1e9), 2.5 / 9, "T → ∞", 1e-6)

    def ends(self) -> None:
        for dtype in (torch.float64, torch.float32):
            x = scores(4, 9, dtype=dtype)
            close(self.fn(x, 0), 0.0, "k = 0", 0.0)
            close(self.fn(x, 9), 1.0, "k = n", 0.0)
            close(self.fn(x[:, :1], 0.25), 0.25, "n = 1")
        for empty, k in ((scores(0, 9), 2), (scores(4, 0), 0)):
            must(self.fn(empty, k).shape == empty.shape, "an empty tensor must keep its shape")

    def monotone_in_k(self) -> None:
        x = scores(4, 9)
        steps = torch.stack([self.fn(x, k) for k in (0, *COUNTS, 9)])
        must(steps.diff(dim=0) >= -1e-12, "a larger k made an entry smaller")

    def inverse(self) -> None:
        if self.quantile is not None:
            p = torch.tensor([[0.9, 0.5, 0.2, 0.1], [0.99, 0.01, 0.6, 0.4]], dtype=torch.float64)
            close(self.fn(self.quantile(p), p.sum(-1)), p, "fn(quantile(p), Σp)")

    def masked(self) -> None:
        x = scores(4, 9)
        mask = torch.tensor([True, True, False, True, True, False, True, True, True])
        y = self.fn(x, 2.5, mask=mask)
        close(y[:, ~mask], 0.0, "masked entries", 0.0)
        close(y[:, mask], self.fn(x[:, mask], 2.5), "masking against deleting")
        close(self.fn(x.masked_fill(~mask, -torch.inf), 2.5), y, "−inf against masked")
        close(self.fn(x.masked_fill(~mask, torch.nan), 2.5, mask=mask), y, "NaN under the mask")
        close(self.fn(x, 7, mask=mask), mask.to(x.dtype), "k = number allowed", 0.0)

    def forced(self) -> None:
        x = scores(4, 9)
        x[:, 3] = torch.inf
        rest = [i for i in range(9) if i != 3]
        for k in (1, 2.5, 9):
            y = self.fn(x, k)
            close(y[:, 3], 1.0, "an entry of +inf", 0.0)
            close(y[:, rest], self.fn(x[:, rest], k - 1), f"the entries beside +inf at k={k}")
        two = scores(4, 9).index_fill(1, torch.tensor([3, 5]), torch.inf)
        for k in (2, 3.5):
            close(self.fn(two, k)[:, [3, 5]], 1.0, f"two entries of +inf at k={k}", 0.0)
        x[:, [5, 8]] = torch.inf
        shared = (x == torch.inf) * (2 / 3)
        close(self.fn(x, 2), shared, "three entries of +inf that share k = 2", 1e-7)

    def bad_rows_are_nan_alone(self) -> None:
        x, row = scores(4, 9), torch.tensor([[False], [True], [False], [False]])
        good = self.fn(x, 2.5)
        _nan_only(self.fn(x.masked_fill(row & (torch.arange(9) == 4), torch.nan), 2.5), good, "NaN in a row")
        for k in (9.5, -0.5, torch.nan):
            _nan_only(self.fn(x, torch.tensor([2.5, k, 2.5, 2.5])), good, f"k = {k} in a row")
        _nan_only(self.fn(x, 2.5, temperature=torch.tensor([1.0, 0.0, 1.0, 1.0])), good, "T = 0 in a row")
        _nan_only(self.fn(x, 2.5, mask=~row | (torch.arange(9) < 2)), good, "fewer allowed than k in a row")

    def layout(self) -> None:
        x = scores(3, 9, 2)
        close(self.fn(x, 2.5, dim=1), self.fn(x.movedim(1, -1), 2.5).movedim(-1, 1), "dim=1")
        close(self.fn(x, 2.5, dim=-2), self.fn(x, 2.5, dim=1), "dim=−2")
        wide = scores(3, 18)
        close(self.fn(wide[:, ::2], 2.5), self.fn(wide[:, ::2].contiguous(), 2.5), "strided scores")
        row = scores(9)
        close(self.fn(row.expand(3, 9), 2.5), self.fn(row, 2.5).expand(3, 9), "expanded scores")

    def input_untouched(self) -> None:
        x, k = scores(3, 9).requires_grad_(), torch.tensor([2.5, 1.0, 3.0], dtype=torch.float64)
        temperature, mask = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64), torch.ones(9, dtype=torch.bool)
        upstream = scores(3, 9, seed=1)
        arguments = (x, k, temperature, mask, upstream)
        copies = [t.detach().clone() for t in arguments]
        y = self.fn(x, k, temperature=temperature, mask=mask)
        before = y.detach().clone()
        torch.autograd.grad(y, x, upstream)
        is_kept = all(torch.equal(t, copy) for t, copy in zip((*arguments, y), (*copies, before), strict=True))
        must(is_kept, "an argument or the result was written to")

    def precision(self) -> None:
        x = scores(4, 9)
        close(self.fn(x.float(), 2.5), self.fn(x.float().double(), 2.5).float(), "float32 against float64")
        for dtype in (torch.float16, torch.bfloat16):
            rounded = self.fn(x.to(dtype).float(), 2.5).to(dtype)
            close(self.fn(x.to(dtype), 2.5), rounded, f"{dtype} against float32 rounded once", 0.0)


def _nan_only(y: Tensor, good: Tensor, what: str) -> None:
    close(y[1], torch.nan, what)
    close(y[[0, 2, 3]], good[[0, 2, 3]], f"the other rows, with {what}")
