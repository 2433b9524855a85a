"""Distributions with an rsample, after torch's RelaxedOneHotCategorical and OneHotCategoricalStraightThrough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import clamp_probs

from .. import _check, ops
from .._math import noise, order_sampling
from ..constraints import capped_simplex
from ..relaxations import sigmoid_topk, straight_through
from ._pivotal import Pivotal


class KHotStraightThrough(Pivotal):
    """`Pivotal` whose `rsample` is a k-hot sample with the gradient of the inclusion probabilities.

    The k-hot counterpart of torch's `OneHotCategoricalStraightThrough`, with the arguments of `Pivotal`.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> KHotStraightThrough(logits=x, k=2).rsample(generator=torch.Generator().manual_seed(0))
        tensor([1., 1., 0., 0.], grad_fn=<AddBackward0>)
    """

    has_rsample = True

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """k-hot samples, (*sample_shape, *batch, n), whose derivatives are those of `probs`."""
        hard = self.sample(sample_shape, generator=generator)
        return straight_through(hard, self.probs.expand(hard.shape))


class RelaxedKHot(Distribution):
    """Relaxed k-hot samples: `σ_k((θ + Gumbel noise)/T)`, the k-hot counterpart of Gumbel-softmax.

    At T → 0 a sample is k-hot, with the law of `PlackettLuce`.

    Args:
        temperature: T > 0, a number or a tensor that broadcasts to the batch.
        probs: a point of the capped simplex, (…, n), whose logits are θ.
        k: how many, by default the nearest whole number to the sum of `probs`; may be fractional.
        logits: θ instead, (…, n), with `k`. −inf is 0 in every sample.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> design = RelaxedKHot(0.5, logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> design.rsample(generator=torch.Generator().manual_seed(0))
        tensor([1.0000, 0.7486, 0.2046, 0.0467])

    Reference: Wijk et al., "Differentiable Top-k: From One-Hot to k-Hot" (2025), Algorithm 2.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "probs": constraints.independent(constraints.unit_interval, 1),
        "logits": constraints.real_vector,
    }

    def __init__(
        self,
        temperature: float | Tensor,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        # The base is a design for its parameters alone; `Pivotal` takes any size.
        self._base = Pivotal(probs, k, logits=logits, validate_args=validate_args)
        _check.temperature(temperature, self._base.logits, -1)
        if self._base._validate_args:
            _check.all_positive("temperature", temperature)
        self.temperature = temperature
        super().__init__(self._base.batch_shape, self._base.event_shape, validate_args=False)
        self._validate_args = self._base._validate_args

    @property
    def k(self) -> float | Tensor:
        """How many; a number, or (*batch)."""
        return self._base.k

    @property
    def logits(self) -> Tensor:
        """θ, (*batch, n)."""
        return self._base.logits

    @property
    def probs(self) -> Tensor:
        """σ_k(θ), (*batch, n)."""
        return self._base.probs

    @property
    def support(self) -> capped_simplex:
        """Points of [0, 1]ⁿ that sum to k."""
        return capped_simplex(self.k)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same distribution over a larger batch."""
        new: Self = type(self).__new__(type(self)) if _instance is None else _instance
        new._base = self._base.expand(batch_shape)
        new.temperature = self.temperature
        if isinstance(self.temperature, Tensor):
            new.temperature = self.temperature.expand(batch_shape)
        Distribution.__init__(new, new._base.batch_shape, self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Soft k-hot samples, (*sample_shape, *batch, n), differentiable in the parameters."""
        theta = self.logits
        shape = torch.Size(sample_shape) + theta.shape
        noisy = theta + gumbel(shape, theta, generator)
        return sigmoid_topk(noisy, self.k, temperature=self.temperature)

    def sample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Soft k-hot samples without a gradient, (*sample_shape, *batch, n)."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density on the capped simplex, (…), with respect to any n − 1 of the coordinates.

        With z = T logit y − θ and d = y(1 − y): `(n − 1) log T + log Γ(n) − Σz − n log Σe^{−z} − Σ log d + log Σd`.
        Items with θ = ±inf are left out.
        """
        if self._validate_args:
            self._validate_sample(value)
        theta = self.logits.to(torch.float64)
        is_open = theta.isfinite()
        y = clamp_probs(value.to(torch.float64))
        T = torch.as_tensor(self.temperature, dtype=torch.float64, device=theta.device)
        n = is_open.sum(-1).to(torch.float64)
        z = torch.where(is_open, T[..., None] * torch.logit(y) - torch.where(is_open, theta, 0.0), torch.inf)
        d = torch.where(is_open, y * (1 - y), 0.0)
        spread = (-z).logsumexp(-1)
        flat = (torch.where(is_open, z, 0.0) + torch.where(is_open, d, 1.0).log()).sum(-1)
        density = (n - 1) * T.log() + torch.lgamma(n) - flat - n * spread + d.sum(-1).log()
        return density.to(self.logits.dtype)

    def __repr__(self) -> str:
        return f"RelaxedKHot(temperature={self.temperature}, {repr(self._base).partition('(')[2]}"


def gumbel(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gumbel noise in the dtype and on the device of `like`."""
    u = noise.inside(ops.uniform(noise.seed(generator, like.device), 0, shape.numel()))
    return order_sampling.GUMBEL.quantile(u).view(shape).to(like.dtype)
