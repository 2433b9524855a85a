"""Derivatives and transforms: a relaxation must pass through autograd, torch.func, torch.compile and autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

from ._laws import Subject, close, scores


def _call(s: Subject) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, k, temperature: s.fn(x, k, temperature=temperature)


def _numbers(s: Subject) -> Callable[[Tensor], Tensor]:
    return lambda x: s.fn(x, 2.5, temperature=0.7)


def _arguments() -> tuple[Tensor, Tensor, Tensor]:
    k = torch.tensor([1.5, 2.0, 3.2], dtype=torch.float64)
    temperature = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64)
    return tuple(t.requires_grad_() for t in (scores(3, 5), k, temperature))  # type: ignore[return-value]


def first_derivatives(s: Subject) -> None:
    gradcheck(_call(s), _arguments(), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    gradcheck(_numbers(s), _arguments()[:1], check_forward_ad=True, check_batched_grad=True)


def second_derivatives(s: Subject) -> None:
    if s.smooth:
        gradgradcheck(_call(s), _arguments(), check_fwd_over_rev=True, check_batched_grad=True)
        gradgradcheck(_numbers(s), _arguments()[:1], check_fwd_over_rev=True, check_batched_grad=True)


def masked_gradient_is_zero(s: Subject) -> None:
    x = scores(3, 9).requires_grad_()
    mask = torch.ones(9, dtype=torch.bool).index_fill(0, torch.tensor([2, 5]), False)
    for masked_x, given in ((x, mask), (x.masked_fill(~mask, -torch.inf), None)):
        y = s.fn(masked_x, 2.5, mask=given)
        (gradient,) = torch.autograd.grad((y * scores(3, 9, seed=1)).sum(), x)
        close(gradient[:, ~mask], 0.0, "the gradient of masked entries", 0.0)
        if not bool(gradient.isfinite().all()):
            raise AssertionError("a mask made the gradient infinite or NaN")


def saturated_gradient_is_finite(s: Subject) -> None:
    ties = torch.tensor([[1.0, 1.0, 1.0, 0.0, -1.0]])
    for x, k, temperature in ((scores(3, 9) * 1000, 2, 1.0), (ties, 2, 1e-6), (ties, 0, 1.0), (ties, 5, 1.0)):
        for dtype in (torch.float32, torch.float64):
            at = x.to(dtype).detach().requires_grad_()
            count = torch.tensor(float(k), dtype=dtype, requires_grad=True)
            heat = torch.tensor(temperature, dtype=dtype, requires_grad=True)
            y = s.fn(at, count, temperature=heat)
            weights = scores(*x.shape, dtype=dtype, seed=1)
            gradients = torch.autograd.grad((y * weights).sum(), (at, count, heat), create_graph=True)
            again = torch.autograd.grad(sum(g.sum() for g in gradients), (at, count, heat), allow_unused=True)  # type: ignore[arg-type]
            for g in (*gradients, *again):
                if g is not None and not bool(g.isfinite().all()):
                    raise AssertionError(f"an infinite or NaN gradient at T={temperature}, k={k}, {dtype}")


def nan_row_keeps_other_gradients(s: Subject) -> None:
    weights = scores(3, 9, seed=1)

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad((s.fn(x, 2.5) * weights).sum(), x)[0]

    x = scores(3, 9)
    good = gradient(x)
    x[1, 0] = torch.nan
    close(gradient(x)[[0, 2]], good[[0, 2]], "the gradient of the other rows")


def transforms_agree(s: Subject) -> None:
    x, k, temperature = (t.detach() for t in _arguments())
    fn = _call(s)
    rows = torch.stack([fn(*row) for row in zip(x, k, temperature, strict=True)])
    close(vmap(fn)(x, k, temperature), rows, "vmap against a loop")
    close(vmap(lambda row: s.fn(row, 2.5, temperature=0.5))(x), s.fn(x, 2.5, temperature=0.5), "vmap over rows alone")
    mask = torch.tensor([True, False, True, True, True])
    close(vmap(lambda m: s.fn(x, 1.5, mask=m))(mask.expand(2, 5))[0], s.fn(x, 1.5, mask=mask), "vmap over masks")
    for i, name in enumerate(("x", "k", "temperature")):
        close(jacfwd(fn, i)(x, k, temperature), jacrev(fn, i)(x, k, temperature), f"jacfwd against jacrev in {name}")
    per_row = vmap(jacrev(fn))(x, k, temperature)
    close(per_row, torch.stack([jacrev(fn)(*row) for row in zip(x, k, temperature, strict=True)]), "vmap of jacrev")
    if s.smooth:
        weights = scores(3, 5, seed=1)

        def scalar(x: Tensor) -> Tensor:
            return (weights * fn(x, k, temperature)).sum()

        close(hessian(scalar)(x), jacrev(jacrev(scalar))(x), "hessian against jacrev of jacrev")


def compiles(s: Subject) -> None:
    x = scores(3, 9)
    mask = torch.ones(9, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    weights = scores(3, 9, seed=1)

    def fn(x: Tensor, k: Tensor, temperature: Tensor) -> Tensor:
        return s.fn(x, k, temperature=temperature, mask=mask)

    fn.__code__ = fn.__code__.replace()  # torch allows so many compilations of one code object; this is another
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    results = []
    for call in (fn, compiled):
        arguments = [t.clone().requires_grad_() for t in (x, torch.full((3,), 2.5).to(x), torch.full((3,), 0.5).to(x))]
        y = call(*arguments)
        results.append((y, *torch.autograd.grad((weights * y).sum(), arguments)))
    for eager, graph, name in zip(*results, ("y", "∂x", "∂k", "∂T"), strict=True):
        close(graph, eager, f"{name} compiled against eager")


def autocasts(s: Subject) -> None:
    x = scores(3, 9, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = s.fn(x, 2.5)
    close(y.to(x.dtype), s.fn(x, 2.5), "under autocast", 1e-2 if y.dtype == torch.bfloat16 else None)


TRANSFORMS = (
    first_derivatives,
    second_derivatives,
    masked_gradient_is_zero,
    saturated_gradient_is_finite,
    nan_row_keeps_other_gradients,
    transforms_agree,
    compiles,
    autocasts,
)
