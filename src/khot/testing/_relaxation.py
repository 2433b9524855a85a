"""`check_relaxation`: every law and every transform, on any function with the signature of `khot.sigmoid_topk`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ._laws import LAWS, Relaxation, Subject, broken_laws
from ._transforms import TRANSFORMS


def check_relaxation(
    fn: Relaxation,
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
    if broken := broken_laws((*LAWS, *TRANSFORMS), Subject(fn, quantile, symmetric, smooth)):
        raise AssertionError("not a relaxation of top-k:" + broken)
