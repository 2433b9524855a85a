"""Constraints for torch.distributions: the sets of soft and of hard k-hot tensors."""

from typing import Self

import torch
from torch import Tensor
from torch.distributions import constraints, transforms
from torch.distributions.constraint_registry import biject_to, transform_to

from . import _check
from .relaxations import sigmoid_topk as _sigmoid_topk
from .relaxations import threshold as _threshold

__all__ = ["CappedSimplexTransform", "SigmoidTopKTransform", "capped_simplex", "k_hot"]


def __dir__() -> list[str]:
    return __all__


class _OfSize(constraints.Constraint):
    event_dim = 1

    def __init__(self, k: float | Tensor) -> None:
        _check.not_negative("k", k)
        self.k = k
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k})"


class capped_simplex(_OfSize):
    """Δ_k: entries in [0, 1] that sum to `k` over the last dim, within 1e-6·max(k, 1) (half precision: its rounding).

    `torch.distributions.transform_to(capped_simplex(k))` is σ_k: unconstrained scores to a point of Δ_k.

    Args:
        k: a number, or a tensor of the batch shape.

    Examples:
        >>> capped_simplex(2).check(torch.tensor([[1.0, 0.75, 0.25], [1.0, 1.0, 1.0]]))
        tensor([ True, False])
    """

    def check(self, value: Tensor) -> Tensor:
        k = torch.as_tensor(self.k, device=value.device)
        in_range = ((value >= 0) & (value <= 1)).all(-1)
        tolerance = max(1e-6, torch.finfo(value.dtype).eps if value.is_floating_point() else 0)
        return in_range & ((value.sum(-1, dtype=torch.float64) - k).abs() <= tolerance * k.clamp(min=1))


class k_hot(_OfSize):
    """Corners of Δ_k: entries 0 or 1, exactly `k` ones over the last dim; ⌊k⌋ or ⌈k⌉ where k is fractional.

    Args:
        k: a number, or a tensor of the batch shape.

    Examples:
        >>> k_hot(2).check(torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.5, 0.5]]))
        tensor([ True, False])
    """

    is_discrete = True

    def check(self, value: Tensor) -> Tensor:
        k = torch.as_tensor(self.k, device=value.device)
        return ((value == 0) | (value == 1)).all(-1) & ((value.sum(-1, dtype=torch.float64) - k).abs() < 1)


class _ToCappedSimplex(transforms.Transform):
    domain = constraints.real_vector

    def __init__(self, k: float | Tensor, cache_size: int = 0) -> None:
        self.k = k
        super().__init__(cache_size=cache_size)

    @property
    def codomain(self) -> capped_simplex:  # type: ignore[override]  # torch types it as an attribute
        return capped_simplex(self.k)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ToCappedSimplex) or type(other) is not type(self):
            return False
        return torch.equal(*(torch.as_tensor(t.k, dtype=torch.float64) for t in (self, other)))

    __hash__ = None  # type: ignore[assignment]

    def with_cache(self, cache_size: int = 1) -> Self:
        """Return the same transform with a cache of that size."""
        return self if self._cache_size == cache_size else type(self)(self.k, cache_size)


class SigmoidTopKTransform(_ToCappedSimplex):
    """Map scores to Δ_k by σ_k; the inverse is the logit, up to a constant that σ_k ignores."""

    bijective = False

    def _call(self, x: Tensor) -> Tensor:
        return _sigmoid_topk(x, self.k)

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.logit(y)


class CappedSimplexTransform(_ToCappedSimplex):
    """Map n − 1 real numbers one to one to the inside of Δ_k: `y = σ_k(x, 0)`, smooth both ways, for 0 < k < n.

    With v = y(1 − y), log |det ∂y/∂x| = Σ log v − log Σv, of any n − 1 entries of y.
    `torch.distributions.biject_to(capped_simplex(k))` is it, so that Hamiltonian Monte Carlo and normal guides work.

    Examples:
        >>> transform = CappedSimplexTransform(2)
        >>> y = transform(torch.tensor([2.0, 1.0, 0.0]))
        >>> y, transform.inv(y)
        (tensor([0.7811, 0.5676, 0.3257, 0.3257]), tensor([2.0000, 1.0000, 0.0000]))
    """

    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        return _sigmoid_topk(torch.nn.functional.pad(x, (0, 1)), self.k)

    def _inverse(self, y: Tensor) -> Tensor:
        z = torch.logit(y)
        return z[..., :-1] - z[..., -1:]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.nn.functional.pad(x, (0, 1))
        z = scores - _threshold(scores, self.k)[..., None]
        log_v = torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)
        return log_v.sum(-1) - log_v.logsumexp(-1)

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[:-1], shape[-1] + 1))

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[:-1], shape[-1] - 1))


transform_to.register(capped_simplex, lambda constraint: SigmoidTopKTransform(constraint.k))
biject_to.register(capped_simplex, lambda constraint: CappedSimplexTransform(constraint.k))
