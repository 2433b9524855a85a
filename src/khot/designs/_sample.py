"""Samples with a gradient, each as a function and as a distribution."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .. import _check, _shape, ops
from .._math import noise
from .._shape import Group
from .._torch import has_values
from ..constraints import capped_simplex
from ..relaxations import hard_topk, sigmoid_topk, straight_through, threshold
from ._design import SUM_TOLERANCE, Design
from ._high_entropy import ConditionalPoisson
from ._parameters import Parameters, extremes
from ._pivotal import Pivotal, Systematic


class MakesDesign(Protocol):
    """Make a design: a class of designs, or a `functools.partial` of one."""

    def __call__(self, probs: Tensor, k: float | Tensor, /, *, validate_args: bool) -> Design: ...


def sample_khot(
    x: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    design: MakesDesign = Pivotal,
    sample_shape: Sequence[int] = (),
    generator: torch.Generator | None = None,
    group: Group = None,
) -> Tensor:
    """Draw a k-hot sample whose inclusion probabilities are `π = sigmoid_topk(x, k)`, and whose gradient is that of π.

    Algorithm 1: π = σ_k(x/T); x ~ design(π); straight-through.

    Args:
        x: scores, (…, n) with n at `dim`.
        k: how many, 0 ≤ k ≤ n; a number, or a tensor that broadcasts to the shape of `x` without `dim`. A fractional k
            gives ⌊k⌋ or ⌈k⌉ ones (`Pivotal` and `Systematic`).
        dim: the dimension to choose along.
        temperature: T > 0, larger is more random.
        mask: boolean, broadcasts to `x`; True = may be chosen.
        design: the law; a class of `khot.designs`, or a `functools.partial` of one.
        sample_shape: of independent samples, whose dims come first.
        generator: where the randomness comes from; torch's own if None.
        group: as for `sigmoid_topk`; the `design` is then `Systematic`, `partial(Pivotal, order="given")` or
            `ConditionalPoisson`, and the first process of the group gives the seed.

    Returns:
        A tensor like `x`, or (*sample_shape, *x.shape), of zeros and ones, k of them, with `E = π` exactly (if the
        design is exact) and the derivatives of π. Masked and −inf entries are never drawn, +inf always (up to k of
        them). A row that cannot be satisfied raises ValueError; inside `torch.compile` and transforms of `torch.func`,
        where values cannot be read, it is NaN.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> y = sample_khot(x, 2, generator=torch.Generator().manual_seed(0))
        >>> y.detach(), *torch.autograd.grad(y[0], x)
        (tensor([1., 1., 0., 0.]), tensor([ 0.1202, -0.0456, -0.0456, -0.0290]))
    """
    if _check.is_dtensor(x):
        _check.no_group(group)
        if sample_shape:
            raise NotImplementedError("`sample_shape` must be () for a DTensor; expand it instead.")
        return _sample_dtensor(x, k, dim, temperature, mask, design, generator)
    _check.scores(x, dim)
    _check.function("design", design)
    soft = sigmoid_topk(x.to(torch.float64), k, dim=dim, temperature=temperature, mask=mask, group=group)
    rows = _shape.last(soft.detach(), dim)
    if group is not None:
        drawn = sample_parts(design, rows, k, sample_shape=sample_shape, generator=generator, group=group)
    else:
        _check_feasible(soft, dim)
        if not has_values(rows):  # a bad row is drawn as zeros, and NaN again in the end
            rows = rows.nan_to_num(0.0)
        drawn = design(rows, k, validate_args=False).sample(sample_shape, generator=generator)
    hard = _shape.from_rows(drawn, dim if dim < 0 else dim - x.ndim, torch.float64)
    return straight_through(hard, soft.expand(hard.shape)).to(x.dtype)


def sample_parts(
    design: MakesDesign,
    probs: Tensor,
    k: float | Tensor | None = None,
    *,
    sample_shape: Sequence[int] = (),
    antithetic: bool = False,
    generator: torch.Generator | None = None,
    group: Group,
) -> Tensor:
    """Draw from inclusion probabilities of which each process of a group holds a part.

    Args:
        design: `Systematic`, `functools.partial(Pivotal, order="given")` or `ConditionalPoisson`.
        probs: this process's part of each row, (…, m) with any m ≥ 0; whole rows sum to k.
        k: how many in the whole row, the same on all processes; by default the nearest integer to the sum.
        sample_shape, antithetic: as for `Design.sample`.
        generator: where the seed comes from; that of the group's first process counts.
        group: the process group, or a list of groups, outermost first.

    Returns:
        This process's part of the samples, (*sample_shape, *batch, m). `Systematic` and `Pivotal` give the same bits as
        `design(probs, k).sample(…)` on one process, at any number and length of parts. `ConditionalPoisson` has the
        same law, and other bits.
    """
    from .. import distributed  # it imports torch.distributed

    kind = design if design is ConditionalPoisson else require_in_order(design, "A row in parts")
    _check.floating("probs", probs)
    over = distributed.Over(distributed.names_of(group))
    p = probs.detach().to(_shape.compute_dtype(probs.dtype)).reshape(probs.shape[:-1].numel(), probs.shape[-1])
    sums = over.sum(p.sum(-1, dtype=torch.float64))
    sizes = sums.round() if k is None else torch.as_tensor(k, dtype=torch.float64).expand(probs.shape[:-1]).reshape(-1)
    if not bool(((sums - sizes).abs() <= SUM_TOLERANCE).all()):  # NaN is not
        raise ValueError(f"`probs` of whole rows must sum to k, within {SUM_TOLERANCE}; got sums {sums.tolist()[:4]}.")
    seed = over.gather(noise.seed(generator, probs.device))[0]
    draws, parts = _check.sample_shape(sample_shape).numel(), distributed.layout(p.shape[-1], over, p.device)
    if antithetic and draws % 2:
        raise ValueError(f"With `antithetic`, the number of samples must be even; got {draws}.")
    if kind is ConditionalPoisson:
        if antithetic or not bool((sizes == sizes.round()).all()):
            raise ValueError("`ConditionalPoisson` takes integers `k`, and has no antithetic samples.")
        drawn = distributed.draw_conditional_poisson(p, sizes, seed, draws, parts, over)
    elif kind is Systematic:
        drawn = distributed.draw_systematic(p, sizes, seed, draws, antithetic, parts, over)
    else:
        drawn = distributed.draw_pivotal(p, sizes == sizes.round(), seed, draws, antithetic, parts, over)
    return drawn.to(probs.dtype).view(*sample_shape, *probs.shape)


def require_in_order(design: MakesDesign, what: str) -> type[Pivotal] | type[Systematic]:
    """Return the class of a design that draws from items as they come; raise for another one."""
    kind, options = (design.func, design.keywords) if isinstance(design, partial) else (design, {})
    if kind is Systematic and not options:
        return Systematic
    if kind is Pivotal and options == {"order": "given"}:
        return Pivotal
    name = getattr(kind, "__name__", str(kind))
    why = f" with {options}" if options else " in a random order, which would move all items" if kind is Pivotal else ""
    fix = '`Systematic` or `functools.partial(Pivotal, order="given")`'
    raise NotImplementedError(f"{what} cannot be drawn from by `{name}`{why}; use {fix}.")


def _sample_dtensor(
    x: Any,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    design: MakesDesign,
    generator: torch.Generator | None,
) -> Tensor:
    """Return `sample_khot` of a DTensor whose rows are split, or which all processes hold alike."""
    from .. import distributed

    _check.plain_order(x, dim)
    if any(p.is_shard() and not p.is_shard(dim % x.ndim) for p in x.placements):
        raise NotImplementedError(
            "`sample_khot` takes a DTensor that is split along `dim` only, because other processes would draw the same "
            f"samples; got {x.placements}. Use `x.to_local()`, with another seed on each process."
        )

    def part(x: Tensor, k: Any, heat: Any, mask: Any, group: Group) -> Tensor:
        return sample_khot(x, k, dim=dim, temperature=heat, mask=mask, design=design, generator=generator, group=group)

    y: Tensor = distributed.on_parts(part, x, dim, per_row=(k, temperature), per_entry=(mask,))
    return y


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
    """Draw a relaxed k-hot sample, `σ_k((x + Gumbel noise)/T)`: Gumbel-softmax for k-hot.

    Args:
        x: scores, (…, n) with n at `dim`.
        k, dim, mask: as for `sigmoid_topk`.
        temperature: T > 0; at T → 0 the sample is that of Gumbel top-k.
        hard: round it to the k-hot top-k of `x + noise`, with the gradient of the soft one; k is then an integer.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        A tensor like `x` with entries in [0, 1] that sum to k, differentiable. Masked and −inf entries are 0. Its mean
        is not `sigmoid_topk(x, k)`; `sample_khot` has that. A row that cannot be satisfied raises ValueError, or is NaN
        as in `sample_khot`.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0])
        >>> sample_relaxed_khot(x, 2, temperature=0.5, generator=torch.Generator().manual_seed(0))
        tensor([1.0000, 0.7486, 0.2046, 0.0467])
        >>> sample_relaxed_khot(x, 2, hard=True, generator=torch.Generator().manual_seed(0))
        tensor([1., 1., 0., 0.])
    """
    _check.scores(x, dim)
    noisy = x.to(_shape.compute_dtype(x.dtype))  # noise in half precision would have ties
    noisy = noisy + noise.gumbel(x.shape, noisy, generator, ops.uniform)
    soft = sigmoid_topk(noisy, k, dim=dim, temperature=temperature, mask=mask)
    sample = straight_through(hard_topk(noisy, k, dim=dim, mask=mask), soft) if hard else soft
    _check_feasible(sample, dim)
    return sample.to(x.dtype)


def _check_feasible(soft: Tensor, dim: int) -> None:
    """Raise if a row of a relaxation is NaN, because a sample cannot be, and if values can be read."""
    if has_values(soft) and (is_bad := soft.detach().isnan().any(dim)).any():
        first = f", the first at index {tuple(is_bad.nonzero()[0].tolist())}" if is_bad.ndim else ""
        raise ValueError(
            "`k` must satisfy 0 ≤ k ≤ the number of entries of its row that are neither masked nor −inf, and `x` must "
            f"not hold NaN; got {int(is_bad.sum())} rows of {is_bad.numel()} that cannot be drawn from{first}."
        )


class KHotStraightThrough(Pivotal):
    """Draw as `Pivotal`, with an `rsample` that has the gradient of the inclusion probabilities.

    The k-hot counterpart of torch's `OneHotCategoricalStraightThrough`, with the arguments of `Pivotal`: for `log_prob`
    and `entropy`, give `order="given"`.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> KHotStraightThrough(logits=x, k=2).rsample(generator=torch.Generator().manual_seed(0))
        tensor([1., 1., 0., 0.], grad_fn=<AddBackward0>)
    """

    has_rsample = True

    def rsample(
        self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Tensor:
        """Draw as `sample`, (*sample_shape, *batch, n), with the derivatives of `probs`."""
        hard = self.sample(sample_shape, generator=generator, antithetic=antithetic)
        return straight_through(hard, self.probs.expand(hard.shape))


class RelaxedKHot(Parameters):
    """Draw relaxed k-hot samples, `σ_k((θ + Gumbel noise)/T)`: the k-hot counterpart of Gumbel-softmax.

    At T → 0 a sample is k-hot, with the law of `PlackettLuce`. Reference: Wijk et al., "Differentiable Top-k: From
    One-Hot to k-Hot" (2025), Algorithm 2.

    Args:
        temperature: T > 0, a number or a tensor that broadcasts to the batch.
        probs: a point of the capped simplex, (…, n), whose logits are θ.
        k: how many, by default the nearest integer to the sum of `probs`; may be fractional.
        logits: θ instead, (…, n), with `k`. −inf is 0 in every sample.
        validate_args: whether to check what the tensors hold.

    Examples:
        >>> design = RelaxedKHot(0.5, logits=torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> design.rsample(generator=torch.Generator().manual_seed(0))
        tensor([1.0000, 0.7486, 0.2046, 0.0467])
    """

    has_rsample = True

    def __init__(
        self,
        temperature: float | Tensor,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(probs, k, logits=logits, validate_args=validate_args)
        _check.temperature(temperature, self.parameter, -1)
        if self._validate_args and isinstance(temperature, Tensor) and not (temperature > 0).all():
            raise ValueError(f"`temperature` must be > 0; got {extremes(temperature)}.")
        self.temperature = temperature

    @property
    def support(self) -> capped_simplex:
        """Return the points of [0, 1]ⁿ that sum to k, as a constraint."""
        return capped_simplex(self.k)

    def rsample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw soft k-hot samples, (*sample_shape, *batch, n), differentiable in the parameters."""
        return sigmoid_topk(self._perturbed(sample_shape, generator), self.k, temperature=self.temperature)

    def rsample_logits(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw as `rsample`, and return logit y of the sample y: it tells 1 − y where y rounds to 1."""
        noisy = self._perturbed(sample_shape, generator).to(torch.float64)
        tau = threshold(noisy, self.k, temperature=self.temperature)
        logits = (noisy - tau[..., None]) / self._temperature[..., None]
        return torch.where(noisy.isinf(), noisy, logits).to(self.logits.dtype)

    def _perturbed(self, sample_shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        theta = self.logits
        return theta + noise.gumbel(_check.sample_shape(sample_shape) + theta.shape, theta, generator, ops.uniform)

    @property
    def _temperature(self) -> Tensor:
        return torch.as_tensor(self.temperature, dtype=torch.float64, device=self.parameter.device)

    def sample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw soft k-hot samples without a gradient, (*sample_shape, *batch, n)."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density on the capped simplex, (…), with respect to any n − 1 of the coordinates.

        It depends on 1 − y, which is lost where y rounds to 1, as it often does in float32 at T ≤ 0.5; a warning says
        so. `rsample_logits` and `log_prob_of_logits` have the same density to every digit.
        """
        _check.real("value", value)
        if self._validate_args:
            self._validate_sample(value)
        is_open = self.logits.isfinite()
        is_lost = (1 - value < 64 * torch.finfo(value.dtype).eps) & is_open
        if has_values(value) and is_lost.any():
            got = f"{int(is_lost.sum())} entries of {is_lost.numel()} round to 1, or nearly"
            fix = "Use `rsample_logits` and `log_prob_of_logits`."
            warnings.warn(f"The density of a relaxed sample in {value.dtype} is not right: {got}. {fix}", stacklevel=2)
        y = value.to(torch.float64).clamp(torch.finfo(torch.float64).tiny, 1 - 2.0**-53)
        return torch.where(self.support.check(value), self.log_prob_of_logits(torch.logit(y)), -torch.inf)

    def log_prob_of_logits(self, value: Tensor) -> Tensor:
        """Return `log_prob` of the sample y = σ(value), from its logits; (…).

        With z = T logit y − θ and d = y(1 − y): `(n − 1) log T + log Γ(n) − Σz − n log Σe^{−z} − Σ log d + log Σd`.
        Items with θ = ±inf are left out. It is a density of y, not of the logits; a difference of two is the same.
        """
        theta, T = self.logits.to(torch.float64), self._temperature
        is_open = theta.isfinite()
        n = is_open.sum(-1).to(torch.float64)
        m = torch.where(is_open, value.to(torch.float64), 0.0)
        z = T[..., None] * m - torch.where(is_open, theta, 0.0)
        log_d = logsigmoid(m) + logsigmoid(-m)
        flat = torch.where(is_open, z + log_d, 0.0).sum(-1)
        spread, rest = (torch.where(is_open, t, -torch.inf).logsumexp(-1) for t in (log_d, -z))
        return ((n - 1) * T.log() + torch.lgamma(n) - flat - n * rest + spread).to(self.logits.dtype)

    def __repr__(self) -> str:
        return f"RelaxedKHot(temperature={self.temperature}, {super().__repr__().partition('(')[2]}"
