"""What every design has: parameters, sizes, and what follows from a sampler, a mean and a log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from .. import _check
from .._math import enumerate_subsets, noise, select
from ..constraints import k_hot
from ..relaxations import sigmoid_topk

OFF = 0.01
"""How far sums of probabilities may be from k before they are balanced."""
ENUMERABLE = 100_000
"""How many subsets are enumerated at most, where an exact answer is had in no other way."""


class Design(Distribution):
    """A law of k-hot vectors: exactly k of n items, each with its own probability.

    Abstract. A design says how to draw, and what it knows of its law.
    """

    has_rsample = False
    has_enumerate_support = True
    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "probs": constraints.independent(constraints.unit_interval, 1),
        "logits": constraints.real_vector,
    }
    takes_fractions: ClassVar[bool] = False
    """Whether the size may be fractional: then it is ⌊k⌋ or ⌈k⌉."""

    def __init__(
        self,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        _check.one_parameter(probs, logits, k)
        given = probs if logits is None else logits
        assert given is not None
        batch = torch.broadcast_shapes(given.shape[:-1], k.shape) if isinstance(k, Tensor) else given.shape[:-1]
        if given.shape[:-1] != batch:
            given = given.expand(*batch, -1)
        self._given, self._is_probs = given, logits is None
        self.k: float | Tensor = given.detach().sum(-1, dtype=torch.float64).round() if k is None else k
        super().__init__(batch, given.shape[-1:], validate_args=False)
        self._validate_args = Distribution._validate_args if validate_args is None else validate_args
        if self._validate_args:
            sizes = self._sizes
            if self._is_probs:
                _check.probabilities(given)
                _check.total(given, given.detach().sum(-1, dtype=torch.float64), sizes)
            _check.sizes(sizes, given.shape[-1], type(self).__name__, self.takes_fractions)
            if not self._is_probs:
                _check.natural_parameters(given, sizes)

    # What a design must say ------------------------------------------------------------------------------------------

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        """`draws` samples of every row, (draws, rows, n), in the dtype of the parameter."""
        raise NotImplementedError

    def _draw_pairs(self, draws: int, seed: Tensor) -> Tensor:
        """As `_draw`, in opposite pairs."""
        raise NotImplementedError(
            f"`{type(self).__name__}` has no antithetic samples; `Pivotal` and `Systematic` have."
        )

    def _log_prob(self, value: Tensor) -> Tensor:
        """The log-probability of k-hot values that broadcast with (*batch, n), in float64."""
        raise NotImplementedError(
            f"`{type(self).__name__}` has no tractable probabilities of subsets. "
            '`ConditionalPoisson`, `Sampford` and `Pivotal(order="given")` have.'
        )

    # Parameters ------------------------------------------------------------------------------------------------------

    @property
    def parameter(self) -> Tensor:
        """What the design was made from, `probs` or `logits`, over the whole batch; (*batch, n)."""
        return self._given

    @property
    def probs(self) -> Tensor:
        """The inclusion probabilities asked for, (*batch, n)."""
        return self._given if self._is_probs else self._target.to(self._given.dtype)

    @property
    def logits(self) -> Tensor:
        """Scores whose `sigmoid_topk` is `probs`, (*batch, n)."""
        return _logit(self._given) if self._is_probs else self._given

    @property
    def _target(self) -> Tensor:
        """The inclusion probabilities in float64, differentiable in the parameter, not rounded to sum to k."""
        if self._is_probs:
            return self._given.to(torch.float64).clamp(0, 1)
        return sigmoid_topk(self._given.to(torch.float64), self.k)

    @property
    def _balanced(self) -> Tensor:
        """`_target`, shifted by a common logit to sum to k to the last digit; the shift has no gradient."""
        target = self._target
        with torch.no_grad():
            shift = sigmoid_topk(torch.logit(target), self._sizes) - target
        return target + shift

    @property
    def _scores(self) -> Tensor:
        """The logits of `_balanced`, ±inf, without a gradient, where it is 0 or 1."""
        return _logit(self._balanced)

    @property
    def _sampled(self) -> Tensor:
        """The probabilities for a sampler that takes care of what rounding leaves, but not of a wrong size."""
        if not self._is_probs:
            return self._target.detach()
        given = self._given.detach()
        is_off = (given.sum(-1, dtype=torch.float64) - self._sizes).abs() > OFF
        return self._balanced.detach() if bool(is_off.any()) else given

    @property
    def _sizes(self) -> Tensor:
        """k for every row, (*batch) float64."""
        k = torch.as_tensor(self.k, dtype=torch.float64, device=self._given.device)
        return k.detach().expand(self._given.shape[:-1])

    @property
    def support(self) -> k_hot:
        """k-hot vectors."""
        return k_hot(self.k)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same design over a larger batch; (…, n) parameters are viewed, not copied."""
        new: Self = type(self).__new__(type(self)) if _instance is None else _instance
        shape = torch.Size(batch_shape)
        new.__dict__.update(self.__dict__)
        new._given = self._given.expand(*shape, -1)
        if isinstance(self.k, Tensor):
            new.k = self.k.expand(shape)
        new._batch_shape = shape
        return new

    def _detached(self) -> Self:
        """The same design with a parameter of its own, a leaf that takes gradients."""
        new = self.expand(self._batch_shape)
        new._given = self._given.detach().requires_grad_()
        return new

    # Drawing ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        sample_shape: Sequence[int] = (),
        *,
        generator: torch.Generator | None = None,
        antithetic: bool = False,
    ) -> Tensor:
        """Independent k-hot samples, (*sample_shape, *batch, n), in the dtype of the parameter.

        One number is taken from the `generator` (torch's own if None): the same state gives the same bits, at any
        number of threads. With `antithetic` (`Pivotal` and `Systematic`), samples 2j and 2j + 1 are an opposite pair:
        each by itself has the same law, and the mean of both varies less.
        """
        shape = torch.Size(sample_shape) + self._given.shape
        if shape.numel() == 0:
            return self._given.new_zeros(shape)
        draws = torch.Size(sample_shape).numel()
        seed = noise.seed(generator, self._given.device)
        if antithetic:
            _check.even("the number of samples", draws)
        return (self._draw_pairs(draws, seed) if antithetic else self._draw(draws, seed)).view(shape)

    def sample_indices(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """The same samples as indices, (*sample_shape, *batch, k), rising; rows with fewer are filled up with −1."""
        return select.indices(self.sample(sample_shape, generator=generator))

    # Moments ---------------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """The inclusion probabilities, (*batch, n)."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """π(1 − π), (*batch, n)."""
        mean = self.mean
        return mean * (1 - mean)

    def joint_probs(self) -> Tensor:
        """The joint inclusion probabilities P(i and j), (*batch, n, n), with P(i) on the diagonal."""
        subsets, log_p = self._enumerated()
        return torch.einsum("s...,s...i,s...j->...ij", log_p.exp(), subsets, subsets).to(self._given.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        """Cov(x), (*batch, n, n); its rows sum to 0 where the size is whole."""
        joint = self.joint_probs()
        mean = joint.diagonal(dim1=-2, dim2=-1)  # what has a gradient has it in both
        return joint - mean[..., :, None] * mean[..., None, :]

    def variance_of_sum(self, weights: Tensor) -> Tensor:
        """Var(Σ c_i x_i) over samples, (*batch), for `weights` c that broadcast to (*batch, n)."""
        c = weights.to(torch.float64)
        covariance = self.covariance_matrix.to(torch.float64)
        return (c * (covariance @ c[..., None])[..., 0]).sum(-1).to(self._given.dtype)

    @property
    def mode(self) -> Tensor:
        """The likeliest subset."""
        raise NotImplementedError(
            f"The mode of `{type(self).__name__}` is not tractable; that of `ConditionalPoisson` is."
        )

    # Probabilities ---------------------------------------------------------------------------------------------------

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(x = value), for k-hot values (…, n) that broadcast with the batch; differentiable in the parameters."""
        if self._validate_args:
            self._validate_sample(value)
        return self._log_prob(value.to(torch.float64)).to(self._given.dtype)

    def entropy(self) -> Tensor:
        """−Σ p log p in nats, (*batch)."""
        _, log_p = self._enumerated()
        is_possible = log_p > -torch.inf
        log_p = torch.where(is_possible, log_p, 0.0)
        return torch.where(is_possible, -log_p.exp() * log_p, 0.0).sum(0).to(self._given.dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All k-hot vectors in lexical order, (subsets, *batch, n); batch dims are 1 with `expand=False`."""
        k, n = self._one_size(), self._event_shape[0]
        _check.enumerable(n, enumerate_subsets.count(n, k), ENUMERABLE)
        subsets = enumerate_subsets.k_hot(n, k, self._given.device).to(self._given.dtype)
        subsets = subsets.view(-1, *(1,) * len(self._batch_shape), n)
        return subsets.expand(-1, *self._batch_shape, -1) if expand else subsets

    def _enumerated(self) -> tuple[Tensor, Tensor]:
        """All subsets in float64 and their log-probabilities, (subsets, *batch)."""
        subsets = self.enumerate_support().to(torch.float64)
        return subsets, self._log_prob(subsets)

    @staticmethod
    def _is_out(p: Tensor, value: Tensor) -> Tensor:
        """Whether a subset has an item that is never drawn, or lacks one that always is."""
        return (((p == 0) & (value != 0)) | ((p == 1) & (value != 1))).any(-1)

    def _one_size(self) -> float:
        """k, where all rows have the same."""
        if not isinstance(self.k, Tensor):
            return float(self.k)
        sizes = self._sizes.unique()
        _check.one_size(sizes)
        return float(sizes[0])

    def __repr__(self) -> str:
        shape = f"batch_shape={tuple(self._batch_shape)}, n={self._event_shape[0]}"
        k = self._sizes
        is_one = k.numel() > 0 and bool((k == k.flatten()[0]).all())
        return f"{type(self).__name__}({shape}, k={f'{float(k.flatten()[0]):g}' if is_one else 'per row'})"


def _logit(p: Tensor) -> Tensor:
    """±inf without a gradient where p is 0 or 1: there the derivative is infinite, and 0 times it NaN."""
    is_open = (p > 0) & (p < 1)
    return torch.where(is_open, torch.logit(torch.where(is_open, p, 0.5)), torch.logit(p.detach()))
