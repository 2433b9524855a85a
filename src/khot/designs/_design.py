"""What every design has: samples, moments and probabilities, all from a sampler and a log-probability."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _check, _shape
from .._math import noise, select, subsets
from .._torch import has_values, require_values
from ..constraints import k_hot
from ..relaxations import sigmoid_topk
from ._parameters import Parameters, extremes

SUM_TOLERANCE = 0.01  # rebalance `probs` if their sum differs from k by more than this
MOST_SUBSETS = 100_000  # to enumerate, where there is no other way to an exact answer
MOST_PAIRS = 1 << 32  # numbers of a matrix


class Design(Parameters):
    """Describe a law of k-hot vectors: exactly k of n items, each with its own probability. Abstract.

    A design says how to draw (`_draw`) and, if it can, how likely a subset is (`_log_prob`).

    Args:
        probs: inclusion probabilities, (…, n), that sum to k. Items at 0 are never drawn, at 1 always.
        k: how many, an integer or a tensor of them that broadcasts with the batch; by default the nearest integer to
            the sum. `Pivotal` and `Systematic` take fractions too.
        logits: scores instead of `probs`, with `k`: then `probs = sigmoid_topk(logits, k)`. −inf is never drawn, +inf
            always.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> design = khot.designs.Pivotal(torch.tensor([0.2, 0.5, 0.5, 0.8]))
        >>> isinstance(design, khot.designs.Design), design.k, design.variance
        (True, tensor(2., dtype=torch.float64), tensor([0.1600, 0.2500, 0.2500, 0.1600]))
    """

    # `parameter` is the tensor given, `probs` the probabilities asked for, `mean` those of the law, the same unless it
    # is approximate. Inside, in float64: `_asked` is `probs` unrounded; formulas use `_pi`, which is `_asked` with all
    # logits of a row shifted so that it sums to k to the last digit; samplers that correct rounding use `_drawn`.

    has_rsample = False
    has_enumerate_support = True
    takes_fractions: ClassVar[bool] = False
    has_pairs: ClassVar[bool] = False  # whether `_draw` takes `is_paired=True`, for antithetic samples

    def _draw(self, draws: int, seed: Tensor) -> Tensor:
        """Draw `draws` samples of every row: (draws, rows, n), or a view of it."""
        raise NotImplementedError

    def _draw_rows(self, op: Callable[..., Tensor], p: Tensor, seed: Tensor, *arguments: Any) -> Tensor:
        """Call a sampler of rows, (rows, n) and sizes (rows), with probabilities (*batch, n) or their scores."""
        return op(p.detach().reshape(-1, p.shape[-1]), self._sizes.reshape(-1), seed, *arguments)

    def _log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of k-hot values that broadcast with (*batch, n), in float64."""
        raise NotImplementedError(
            f"`{type(self).__name__}` has no tractable probabilities of subsets. "
            '`ConditionalPoisson`, `Sampford` and `Pivotal(order="given")` have.'
        )

    @property
    def _pi(self) -> Tensor:
        """Return `_asked`, shifted by a constant to sum to k; (*batch, n) float64, differentiable in the parameter."""
        asked = self._asked
        return asked + self._once("shift", lambda: sigmoid_topk(torch.logit(asked), self._sizes) - asked)

    @property
    def _drawn(self) -> Tensor:
        """Return probabilities for a sampler that corrects rounding, but not a wrong size; (*batch, n), no gradient."""
        if not self._is_probs:
            return self._asked.detach()
        given = self.parameter.detach().to(_shape.compute_dtype(self.parameter.dtype))
        is_off = ((given.sum(-1, dtype=torch.float64) - self._sizes).abs() > SUM_TOLERANCE).any()
        if has_values(given):
            return self._pi.detach() if is_off else given
        return torch.where(is_off, self._pi.detach(), given.to(torch.float64))

    @property
    def mean(self) -> Tensor:
        """Return the inclusion probabilities, (*batch, n)."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """Return π(1 − π), (*batch, n)."""
        mean = self.mean
        return mean * (1 - mean)

    @property
    def support(self) -> k_hot:
        """Return the k-hot vectors, as a constraint."""
        return k_hot(self.k)

    def sample(
        self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Tensor:
        """Draw independent k-hot samples, (*sample_shape, *batch, n), in the dtype of the parameter.

        One number is taken from the `generator` (torch's own if None): the same state gives the same bits, at any
        number of threads. With `antithetic` (`Pivotal` and `Systematic`), samples 2j and 2j + 1 are an opposite pair:
        each by itself has the same law, and the mean of both varies less. Under `torch.vmap`, `randomness="different"`
        gives each entry a draw of its own, and `"same"` gives all of them the same one.
        """
        size = _check.sample_shape(sample_shape)
        shape, draws = size + self.parameter.shape, size.numel()
        if shape.numel() == 0:
            return self.parameter.new_zeros(shape)
        seed = noise.seed(generator, self.parameter.device)
        if antithetic and draws % 2:
            raise ValueError(f"With `antithetic`, the number of samples must be even; got {draws}.")
        if antithetic and not self.has_pairs:
            name = type(self).__name__
            raise NotImplementedError(f"`{name}` has no antithetic samples; `Pivotal` and `Systematic` have.")
        with torch.no_grad():  # not as a decorator, which torch.compile cannot trace
            drawn = self._draw(draws, seed, **({"is_paired": True} if antithetic else {}))
            return drawn.to(self.parameter.dtype).view(shape)

    def sample_indices(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw as `sample`, and return rising indices, (*sample_shape, *batch, k), with −1 where a row has fewer."""
        require_values("How many indices there are", self.parameter)
        x = self.sample(sample_shape, generator=generator)
        if x.numel():
            return select.indices(x)
        k = torch.as_tensor(self.k)
        return torch.full((*x.shape[:-1], math.ceil(k.max()) if k.numel() else 0), -1, device=x.device)

    def joint_probs(self) -> Tensor:
        """Return the joint inclusion probabilities P(i and j), (*batch, n, n), with P(i) on the diagonal."""
        self._check_pairs()
        x, log_p = self._enumerated()
        return torch.einsum("s...,s...i,s...j->...ij", log_p.exp(), x, x).to(self.parameter.dtype)

    def _check_pairs(self) -> None:
        """Raise if a number for each pair of items would not fit into memory."""
        if (count := self.parameter.numel() * self._event_shape[0]) > MOST_PAIRS:
            fix = "For variances use `variance_of_sum` or `khot.survey`, which need no such matrix"
            one = "; `ConditionalPoisson.joint_probs_of` has the pairs of some items."
            got = f"{tuple(self.parameter.shape)} probabilities have {count * 8 / 1e9:.0f} GB of pairs"
            raise MemoryError(
                f"At most {MOST_PAIRS * 8 / 1e9:.0f} GB of pairs of items are computed; {got}. {fix}{one}"
            )

    @property
    def covariance_matrix(self) -> Tensor:
        """Return Cov(x), (*batch, n, n); its rows sum to 0 where the size is an integer."""
        joint = self.joint_probs()
        return joint - outer(joint.diagonal(dim1=-2, dim2=-1))  # what has a gradient has it in both

    def variance_of_sum(self, weights: Tensor) -> Tensor:
        """Return Var(Σ c_i x_i) over samples, (*batch), for `weights` c that broadcast to (*batch, n)."""
        c = weights.to(torch.float64)
        covariance = self.covariance_matrix.to(torch.float64)
        return (c * (covariance @ c[..., None])[..., 0]).sum(-1).to(self.parameter.dtype)

    @property
    def mode(self) -> Tensor:
        """Return the likeliest subset."""
        name = type(self).__name__
        raise NotImplementedError(f"The mode of `{name}` is not tractable; that of `ConditionalPoisson` is.")

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log P(x = value), for k-hot values (…, n) that broadcast with the batch; differentiable.

        A value of another size is an error; −inf, as for any value that cannot be drawn, if `validate_args` is off.
        """
        _check.real("value", value)
        if self._validate_args:
            self._validate_sample(value)
        value = value.to(torch.float64)
        is_of_size = (value.sum(-1).round() - self._sizes).abs() < 1
        log = self._log_prob(
            torch.where(is_of_size[..., None], value, 0.0)
        )  # a large subset may be costly, or too much
        return torch.where(is_of_size, log, -torch.inf).to(self.parameter.dtype)

    def entropy(self) -> Tensor:
        """Return −Σ p log p in nats, (*batch)."""
        _, log_p = self._enumerated()
        log_p = log_p.masked_fill(~(log_p > -torch.inf), 0.0)  # 0 · log 0 = 0
        return (-log_p.exp() * log_p).sum(0).to(self.parameter.dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """List all k-hot vectors in lexical order, (subsets, *batch, n); batch dims are 1 with `expand=False`."""
        n, sizes = self._event_shape[0], self._sizes.unique() if isinstance(self.k, Tensor) else [float(self.k)]
        if len(sizes) != 1:
            got = extremes(self._sizes) if len(sizes) else "no row"
            raise NotImplementedError(f"All rows must have the same k to enumerate subsets; got {got}.")
        k = float(sizes[0])
        if (digits := subsets.log_number_of_subsets(n, k)) > math.log10(MOST_SUBSETS):
            got = f"{n} items have about 10^{digits:.1f} of size {k:g}"
            raise NotImplementedError(f"At most {MOST_SUBSETS} subsets are enumerated; {got}.")
        x = subsets.all_subsets(n, k, self.parameter.device).to(self.parameter.dtype)
        x = x.view(-1, *(1,) * len(self._batch_shape), n)
        return x.expand(-1, *self._batch_shape, -1) if expand else x

    def _enumerated(self) -> tuple[Tensor, Tensor]:
        """Return all subsets, (subsets, *batch, n) float64, and their log-probabilities."""
        x = self.enumerate_support().to(torch.float64)
        return x, self._log_prob(x)


def outer(p: Tensor) -> Tensor:
    """Return p_i p_j, (…, n, n)."""
    return p[..., :, None] * p[..., None, :]


def is_out(p: Tensor, value: Tensor) -> Tensor:
    """Tell whether a subset has an item that is never drawn, or lacks one that always is."""
    return (((p == 0) & (value != 0)) | ((p == 1) & (value != 1))).any(-1)
