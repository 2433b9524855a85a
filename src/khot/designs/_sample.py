"""The two algorithms in a call each: a k-hot sample, and a relaxed one."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .. import _check, _shape
from ..relaxations import hard_topk, sigmoid_topk, straight_through
from ._design import Design
from ._pivotal import Pivotal
from ._relaxed import gumbel


class MakesDesign(Protocol):
    """A class of designs, or a `functools.partial` of one."""

    def __call__(self, probs: Tensor, k: float | Tensor, /) -> Design: ...


def sample_khot(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    design: MakesDesign = Pivotal,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A k-hot sample whose inclusion probabilities are `π = sigmoid_topk(x, k)`, and whose gradient is that of π.

    Algorithm 1: π = σ_k(x/T); x ~ design(π); straight-through.

    Args:
        x: scores, (…, n) with n at `dim`.
        k: how many, 0 ≤ k ≤ n; a number, or a tensor that broadcasts to the shape of `x` without `dim`. A fractional k
            gives ⌊k⌋ or ⌈k⌉ ones (`Pivotal` and `Systematic`).
        dim: the dimension to choose along.
        temperature: T > 0, larger is more random.
        mask: boolean, broadcasts to `x`; True = may be chosen.
        design: the law; a class of `khot.designs`, or a `functools.partial` of one.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        A tensor like `x` of zeros and ones, k of them, with `E = π` exactly (if the design is exact) and the
        derivatives of π. Masked and −inf entries are never drawn, +inf always (up to k of them). A row that cannot be
        satisfied raises
        ValueError.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> y = sample_khot(x, 2, generator=torch.Generator().manual_seed(0))
        >>> y
        tensor([1., 1., 0., 0.], grad_fn=<ToCopyBackward0>)
        >>> torch.autograd.grad(y[0], x)
        (tensor([ 0.1202, -0.0456, -0.0456, -0.0290]),)
    """
    _check.call(x, k, dim, temperature, mask)
    soft = sigmoid_topk(x.to(torch.float64), k, dim=dim, temperature=temperature, mask=mask)
    _check.feasible(soft, dim)
    rows = _shape.last(soft.detach(), dim)
    hard = _shape.from_rows(design(rows, k).sample(generator=generator), dim, torch.float64)
    return straight_through(hard, soft).to(x.dtype)


def sample_relaxed_khot(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    hard: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A relaxed k-hot sample, `σ_k((x + Gumbel noise)/T)`: Gumbel-softmax for k-hot.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, mask: as for `sigmoid_topk`.
        temperature: T > 0; at T → 0 the sample is that of Gumbel top-k.
        hard: round it to the k-hot top-k of `x + noise`, with the gradient of the soft one; k is then a whole number.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        A tensor like `x` with entries in [0, 1] that sum to k, differentiable. Masked and −inf entries are 0. Its mean
        is not `sigmoid_topk(x, k)`; `sample_khot` has that. A row that cannot be satisfied raises ValueError.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0])
        >>> sample_relaxed_khot(x, 2, temperature=0.5, generator=torch.Generator().manual_seed(0))
        tensor([1.0000, 0.7486, 0.2046, 0.0467])
        >>> sample_relaxed_khot(x, 2, hard=True, generator=torch.Generator().manual_seed(0))
        tensor([1., 1., 0., 0.])
    """
    _check.call(x, k, dim, temperature, mask)
    noisy = x.to(_shape.compute_dtype(x.dtype))  # noise in half precision would have ties
    noisy = noisy + gumbel(x.shape, noisy, generator)
    soft = sigmoid_topk(noisy, k, dim=dim, temperature=temperature, mask=mask)
    sample = straight_through(hard_topk(noisy, k, dim=dim, mask=mask), soft) if hard else soft
    _check.feasible(sample, dim)
    return sample.to(x.dtype)
