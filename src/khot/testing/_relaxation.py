"""`check_relaxation`: every law and every transform, on any function with the signature of `khot.sigmoid_topk`."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

from ._laws import TOLERANCE, broken_laws, close, must, scores

COUNTS = (0.5, 1, 2.5, 4, 8, 8.75)
Elementwise = Callable[[Tensor], Tensor]


def check_relaxation(
    fn: Callable[..., Tensor], *, quantile: Elementwise | None = None, symmetric: bool = True, smooth: bool = True
) -> None:
    """Raise AssertionError, naming each broken law, unless `fn` is a relaxation of top-k.

    Args:
        fn: `fn(x, k, *, dim=-1, temperature=1.0, mask=None)`, scores in, soft k-hot of the same shape out.
        quantile: the inverse of its cdf, if `fn(quantile(p), p.sum()) = p` is to be checked; `torch.logit` for σ_k.
        symmetric: whether `fn(−x, n − k) = 1 − fn(x, k)`.
        smooth: whether second derivatives exist everywhere.

    Examples:
        >>> check_relaxation(khot.sigmoid_topk, quantile=torch.logit)
        >>> check_relaxation(lambda x, k, *, dim=-1, temperature=1.0, mask=None: k * (x / temperature).softmax(dim))
        Traceback (most recent call last):
        AssertionError: not a relaxation of top-k:
        - range and sum: entries must lie in [0, 1]; got ... to 2.5 at k=2.5
        ...
    """
    if broken := broken_laws(Relaxation(fn, quantile, symmetric, smooth)):
        raise AssertionError("not a relaxation of top-k:" + broken)


@dataclass(frozen=True)
class Relaxation:
    """Hold a relaxation, what it promises, and its laws of values, autograd, torch.func, torch.compile and autocast."""

    fn: Callable[..., Tensor]  # (x, k, *, dim, temperature, mask), as `khot.sigmoid_topk`
    quantile: Elementwise | None
    symmetric: bool
    smooth: bool

    @property
    def _x(self) -> Tensor:
        return scores(4, 9)

    def _call(self, x: Tensor, k: float | Tensor = 2.5, temperature: float | Tensor = 0.7) -> Tensor:
        return self.fn(x, k, temperature=temperature)

    def range_and_sum(self) -> None:
        for dtype, k, temperature in product((torch.float64, torch.float32), COUNTS, (0.01, 1.0, 30.0)):
            y = self._call(self._x.to(dtype), k, temperature)
            must(y.shape == (4, 9) and y.dtype == dtype, f"(4, 9) {dtype} became {tuple(y.shape)} {y.dtype}")
            must((y >= 0) & (y <= 1), f"entries must lie in [0, 1]; got {y.min():.6g} to {y.max():.6g} at k={k}")
            close(y.sum(-1), float(k), f"the sum at k={k}, T={temperature}", TOLERANCE[dtype] * max(k, 1))

    def count_and_temperature_per_row(self) -> None:
        x, k, temperature = scores(3, 2, 9), torch.tensor([[1.0], [2.5], [7.0]]), torch.tensor([0.3, 2.0])
        y = self._call(x, k, temperature)
        for i, j in product(range(3), range(2)):
            row = self._call(x[i, j], k[i, 0].item(), temperature[j].item())
            close(y[i, j], row, f"row ({i}, {j}) alone and in a batch", 1e-7)  # float32 temperatures
        close(self.fn(x, torch.tensor(3)), self.fn(x, 3), "an integer tensor k")

    def translation(self) -> None:
        close(self.fn(self._x + 3, 2.5), self.fn(self._x, 2.5), "fn(x + 3)")

    def temperature_scales(self) -> None:
        close(self._call(self._x, 2.5, 0.25), self.fn(4 * self._x, 2.5), "fn(x, T=1/4) against fn(4x)")

    def permutation(self) -> None:
        order = torch.tensor([3, 0, 8, 1, 7, 2, 6, 5, 4])
        close(self.fn(self._x[:, order], 2.5), self.fn(self._x, 2.5)[:, order], "permuted scores")

    def order_preserved(self) -> None:
        must(self.fn(self._x.sort(-1).values, 2.5).diff(dim=-1) >= 0, "a larger score got a smaller weight")

    def complement(self) -> None:
        for k in COUNTS if self.symmetric else ():
            close(self.fn(-self._x, 9 - k), 1 - self.fn(self._x, k), f"fn(−x, n − k) against 1 − fn(x, k) at k={k}")

    def cold_limit(self) -> None:
        x = torch.tensor([1.0, 5.0, 1.0, -2.0, 1.0], dtype=torch.float64)
        close(self._call(x, 1, 1e-9), torch.tensor([0.0, 1, 0, 0, 0]), "T → 0, no ties", 1e-6)
        close(self._call(x, 2, 1e-9), torch.tensor([1 / 3, 1, 1 / 3, 0, 1 / 3]), "T → 0, ties shared", 1e-6)

    def hot_limit(self) -> None:
        close(self._call(self._x, 2.5, 1e9), 2.5 / 9, "T → ∞", 1e-6)

    def ends(self) -> None:
        for dtype in (torch.float64, torch.float32):
            x = self._x.to(dtype)
            close(self.fn(x, 0), 0.0, "k = 0", 0.0)
            close(self.fn(x, 9), 1.0, "k = n", 0.0)
            close(self.fn(x[:, :1], 0.25), 0.25, "n = 1")
        for empty, k in ((scores(0, 9), 2), (scores(4, 0), 0)):
            must(self.fn(empty, k).shape == empty.shape, "an empty tensor must keep its shape")

    def monotone_in_k(self) -> None:
        steps = torch.stack([self.fn(self._x, k) for k in (0, *COUNTS, 9)])
        must(steps.diff(dim=0) >= -1e-12, "a larger k made an entry smaller")

    def inverse(self) -> None:
        if self.quantile is not None:
            p = torch.tensor([[0.9, 0.5, 0.2, 0.1], [0.99, 0.01, 0.6, 0.4]], dtype=torch.float64)
            close(self.fn(self.quantile(p), p.sum(-1)), p, "fn(quantile(p), Σp)")

    def masked(self) -> None:
        x, mask = self._x, torch.tensor([True, True, False, True, True, False, True, True, True])
        y = self.fn(x, 2.5, mask=mask)
        close(y[:, ~mask], 0.0, "masked entries", 0.0)
        close(y[:, mask], self.fn(x[:, mask], 2.5), "masking against deleting")
        close(self.fn(x.masked_fill(~mask, -torch.inf), 2.5), y, "−inf against masked")
        close(self.fn(x.masked_fill(~mask, torch.nan), 2.5, mask=mask), y, "NaN under the mask")
        close(self.fn(x, 7, mask=mask), mask.to(x.dtype), "k = number allowed", 0.0)

    def forced(self) -> None:
        one, two, three = (self._x.index_fill(1, torch.tensor(at), torch.inf) for at in ([3], [3, 5], [3, 5, 8]))
        rest = [i for i in range(9) if i != 3]
        for k in (1, 2.5, 9):
            y = self.fn(one, k)
            close(y[:, 3], 1.0, "an entry of +inf", 0.0)
            close(y[:, rest], self.fn(one[:, rest], k - 1), f"the entries beside +inf at k={k}")
        for k in (2, 3.5):
            close(self.fn(two, k)[:, [3, 5]], 1.0, f"two entries of +inf at k={k}", 0.0)
        close(self.fn(three, 2), three.isinf() * (2 / 3), "three entries of +inf that share k = 2", 1e-7)

    def bad_rows_are_nan_alone(self) -> None:
        x, row, column = self._x, torch.tensor([[False], [True], [False], [False]]), torch.arange(9)
        good = self.fn(x, 2.5)[[0, 2, 3]]

        def check(what: str, *arguments: Any, **options: Tensor) -> None:
            y = self.fn(*arguments, **options)
            close(y[1], torch.nan, what)
            close(y[[0, 2, 3]], good, f"the other rows, with {what}")

        check("NaN in a row", x.masked_fill(row & (column == 4), torch.nan), 2.5)
        for k in (9.5, -0.5, torch.nan):
            check(f"k = {k} in a row", x, torch.tensor([2.5, k, 2.5, 2.5]))
        check("T = 0 in a row", x, 2.5, temperature=torch.tensor([1.0, 0.0, 1.0, 1.0]))
        check("fewer allowed than k in a row", x, 2.5, mask=~row | (column < 2))

    def layout(self) -> None:
        x, wide, row = scores(3, 9, 2), scores(3, 18)[:, ::2], scores(9)
        close(self.fn(x, 2.5, dim=1), self.fn(x.movedim(1, -1), 2.5).movedim(-1, 1), "dim=1")
        close(self.fn(x, 2.5, dim=-2), self.fn(x, 2.5, dim=1), "dim=−2")
        close(self.fn(wide, 2.5), self.fn(wide.contiguous(), 2.5), "strided scores")
        close(self.fn(row.expand(3, 9), 2.5), self.fn(row, 2.5).expand(3, 9), "expanded scores")

    def input_untouched(self) -> None:
        x, k = scores(3, 9).requires_grad_(), torch.tensor([2.5, 1.0, 3.0], dtype=torch.float64)
        temperature, mask = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64), torch.ones(9, dtype=torch.bool)
        arguments = (x, k, temperature, mask, upstream := scores(3, 9, seed=1))
        copies = [t.detach().clone() for t in arguments]
        y = self.fn(x, k, temperature=temperature, mask=mask)
        before = y.detach().clone()
        torch.autograd.grad(y, x, upstream)
        is_kept = all(torch.equal(t, copy) for t, copy in zip((*arguments, y), (*copies, before), strict=True))
        must(is_kept, "an argument or the result was written to")

    def precision(self) -> None:
        x = self._x
        close(self.fn(x.float(), 2.5), self.fn(x.float().double(), 2.5).float(), "float32 against float64")
        for dtype in (torch.float16, torch.bfloat16):
            rounded = self.fn(x.to(dtype).float(), 2.5).to(dtype)
            close(self.fn(x.to(dtype), 2.5), rounded, f"{dtype} against float32 rounded once", 0.0)

    def first_derivatives(self) -> None:
        options = {"check_forward_ad": True, "check_batched_grad": True}
        gradcheck(self._call, _arguments(), **options, check_batched_forward_grad=True)
        gradcheck(self._call, _arguments()[:1], **options)

    def second_derivatives(self) -> None:
        for count in (3, 1) if self.smooth else ():
            gradgradcheck(self._call, _arguments()[:count], check_fwd_over_rev=True, check_batched_grad=True)

    def masked_gradient_is_zero(self) -> None:
        x = scores(3, 9).requires_grad_()
        mask = torch.ones(9, dtype=torch.bool).index_fill(0, torch.tensor([2, 5]), False)
        for masked_x, given in ((x, mask), (x.masked_fill(~mask, -torch.inf), None)):
            y = self.fn(masked_x, 2.5, mask=given)
            (gradient,) = torch.autograd.grad((y * scores(3, 9, seed=1)).sum(), x)
            close(gradient[:, ~mask], 0.0, "the gradient of masked entries", 0.0)
            must(gradient.isfinite(), "a mask made the gradient infinite or NaN")

    def saturated_gradient_is_finite(self) -> None:
        ties = torch.tensor([[1.0, 1.0, 1.0, 0.0, -1.0]])
        cases = (scores(3, 9) * 1000, 2, 1.0), (ties, 2, 1e-6), (ties, 0, 1.0), (ties, 5, 1.0)
        for (x, k, temperature), dtype in product(cases, (torch.float32, torch.float64)):
            at = [torch.as_tensor(t).to(dtype).detach().clone().requires_grad_() for t in (x, k, temperature)]
            y = self._call(*at) * scores(*x.shape, dtype=dtype, seed=1)
            gradients = torch.autograd.grad(y.sum(), at, create_graph=True)
            total = torch.stack([g.sum() for g in gradients]).sum()
            for g in (*gradients, *torch.autograd.grad(total, at, allow_unused=True)):
                is_finite = g is None or g.isfinite()
                must(is_finite, f"an infinite or NaN gradient at T={temperature}, k={k}, {dtype}")

    def nan_row_keeps_other_gradients(self) -> None:
        x = scores(3, 9)
        leaves = [t.requires_grad_() for t in (x, x.masked_fill(torch.arange(27).view(3, 9) == 9, torch.nan))]
        good, got = (torch.autograd.grad(self.fn(t, 2.5), t, scores(3, 9, seed=1))[0] for t in leaves)
        close(got[[0, 2]], good[[0, 2]], "the gradient of the other rows")

    def transforms_agree(self) -> None:
        fn, at = self._call, [t.detach() for t in _arguments()]
        x, mask = at[0], torch.tensor([True, False, True, True, True])
        rows = list(zip(*at, strict=True))
        close(vmap(fn)(*at), torch.stack([fn(*row) for row in rows]), "vmap against a loop")
        close(vmap(fn)(x), fn(x), "vmap over rows alone")
        each_mask = vmap(lambda m: self.fn(x, 1.5, mask=m))(mask.expand(2, 5))
        close(each_mask[0], self.fn(x, 1.5, mask=mask), "vmap over masks")
        for i, name in enumerate(("x", "k", "temperature")):
            close(jacfwd(fn, i)(*at), jacrev(fn, i)(*at), f"jacfwd against jacrev in {name}")
        close(vmap(jacrev(fn))(*at), torch.stack([jacrev(fn)(*row) for row in rows]), "vmap of jacrev")
        if self.smooth:
            weights = scores(3, 5, seed=1)

            def scalar(x: Tensor) -> Tensor:
                return (weights * fn(x, *at[1:])).sum()

            close(hessian(scalar)(x), jacrev(jacrev(scalar))(x), "hessian against jacrev of jacrev")

    def compiles(self) -> None:
        mask = torch.arange(9) != 2

        def fn(x: Tensor, k: Tensor, temperature: Tensor) -> Tensor:
            return self.fn(x, k, temperature=temperature, mask=mask)

        fn.__code__ = fn.__code__.replace()  # torch allows so many compilations of one code object; this is another
        results = []
        for call in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
            values = scores(3, 9), torch.full((3,), 2.5).double(), torch.full((3,), 0.5).double()
            at = [t.requires_grad_() for t in values]
            y = call(*at)
            results.append((y, *torch.autograd.grad((scores(3, 9, seed=1) * y).sum(), at)))
        for eager, graph, name in zip(*results, ("y", "∂x", "∂k", "∂T"), strict=True):
            close(graph, eager, f"{name} compiled against eager")

    def autocasts(self) -> None:
        x = scores(3, 9, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fn(x, 2.5)
        close(y.to(x.dtype), self.fn(x, 2.5), "under autocast", 1e-2 if y.dtype == torch.bfloat16 else None)


def _arguments() -> tuple[Tensor, Tensor, Tensor]:
    k = torch.tensor([1.5, 2.0, 3.2], dtype=torch.float64)
    temperature = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64)
    return tuple(t.requires_grad_() for t in (scores(3, 5), k, temperature))  # type: ignore[return-value]
