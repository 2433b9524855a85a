"""`check_relaxation`: every law and every transform, on any function with the signature of `khot.sigmoid_topk`."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

from ._laws import Numbers, broken_laws, close, must, scores


def check_relaxation(
    fn: Callable[..., Tensor],
    *,
    quantile: Callable[[Tensor], Tensor] | None = None,
    symmetric: bool = True,
    smooth: bool = True,
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


class Relaxation(Numbers):
    """All laws of a relaxation: it must also pass through autograd, torch.func, torch.compile and autocast."""

    def _call(self, x: Tensor, k: float | Tensor = 2.5, temperature: float | Tensor = 0.7) -> Tensor:
        return self.fn(x, k, temperature=temperature)

    def first_derivatives(self) -> None:
        options = {"check_forward_ad": True, "check_batched_grad": True}
        gradcheck(self._call, _arguments(), **options, check_batched_forward_grad=True)
        gradcheck(self._call, _arguments()[:1], **options)

    def second_derivatives(self) -> None:
        if self.smooth:
            gradgradcheck(self._call, _arguments(), check_fwd_over_rev=True, check_batched_grad=True)
            gradgradcheck(self._call, _arguments()[:1], check_fwd_over_rev=True, check_batched_grad=True)

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
        weights = scores(3, 9, seed=1)

        def gradient(x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return torch.autograd.grad((self.fn(x, 2.5) * weights).sum(), x)[0]

        x = scores(3, 9)
        good = gradient(x)
        x[1, 0] = torch.nan
        close(gradient(x)[[0, 2]], good[[0, 2]], "the gradient of the other rows")

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
