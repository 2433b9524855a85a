"""The parameter and the size of a distribution over k-hot vectors, and the checks of both."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributions import Distribution, constraints

from .. import _check
from .._torch import forward_level, has_values, version
from ..relaxations import sigmoid_topk

PER_ROW, PER_ITEM = ("k", "temperature"), ("parameter", "_permutation")  # what `expand` expands, where it is a tensor


class Parameters(Distribution):
    """Describe a distribution over hard or soft k-hot vectors, made from `probs` or `logits` and a size k. Abstract."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "probs": constraints.independent(constraints.unit_interval, 1),
        "logits": constraints.real_vector,
    }
    takes_fractions: ClassVar[bool] = True  # whether the size may be fractional; samples then have ⌊k⌋ or ⌈k⌉ ones
    parameter: Tensor
    """The tensor that it was made from, `probs` or `logits`, over the whole batch; (*batch, n)."""

    def __init__(
        self,
        probs: Tensor | None = None,
        k: float | Tensor | None = None,
        *,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        given = self.parameter = _check_parameter(probs, logits, k)
        self._is_probs = logits is None
        self._kept: dict[str, tuple[list[int], Tensor]] = {}
        self.k: float | Tensor = given.detach().sum(-1, dtype=torch.float64).round() if k is None else k
        super().__init__(given.shape[:-1], given.shape[-1:], validate_args=False)
        self._validate_args = has_values(given) and (
            Distribution._validate_args if validate_args is None else validate_args
        )
        if self._validate_args:
            if self._is_probs:
                _check_probs(given, self._sizes)
                if k is None:
                    _check_sum_is_known(given.detach())
            self._check_sizes()
            if not self._is_probs:
                _check_choice(given, self._sizes, "logits", "−inf", "+inf")

    def _check_sizes(self) -> None:
        k, n = self._sizes, self._event_shape[0]
        if not ((k >= 0) & (k <= n)).all():
            raise ValueError(f"`k` must satisfy 0 ≤ k ≤ {n} (number of items); got {extremes(k)}.")
        if not self.takes_fractions and not (k == k.round()).all():
            got = f"got {k[k != k.round()][0].item():.9g}. `Pivotal` and `Systematic` take fractions."
            raise ValueError(f"`k` must be an integer for `{type(self).__name__}`; {got}")

    @property
    def probs(self) -> Tensor:
        """Return the inclusion probabilities asked for, (*batch, n)."""
        return self.parameter if self._is_probs else self._asked.to(self.parameter.dtype)

    @property
    def logits(self) -> Tensor:
        """Return scores whose `sigmoid_topk` is `probs`, (*batch, n)."""
        return logit(self.parameter) if self._is_probs else self.parameter

    @property
    def _asked(self) -> Tensor:
        """Return `probs` in float64, not yet rounded to the parameter's dtype; differentiable in the parameter."""
        given = self.parameter.to(torch.float64)
        if self._is_probs:
            return given.clamp(0, 1)
        return self._probs_of(given) if self._is_moving() else self._once("asked", lambda: self._probs_of(given))

    def _probs_of(self, logits: Tensor) -> Tensor:
        """Return the inclusion probabilities for float64 logits."""
        return sigmoid_topk(logits, self.k)

    def _once(self, name: str, solve: Callable[[], Tensor]) -> Tensor:
        """Return `solve()` without a gradient, (*batch, n), solved once for the present values of the parameter.

        It is solved for anew after the parameter, k or the result was changed in place. Nothing is kept if an optimizer
        may change the parameter unnoticed, or while torch traces.
        """
        if self._is_moving():
            with torch.no_grad():
                return solve()
        if name not in self._kept or self._kept[name][0] != self._versions(self._kept[name][1]):
            with torch.inference_mode(False), torch.no_grad():  # it may be asked for again with gradients
                value = solve()
            self._kept[name] = self._versions(value), value
        return self._kept[name][1]

    def _is_moving(self) -> bool:
        """Tell whether logits or k take gradients (fused optimizers change them uncounted), or torch traces."""
        tensors = () if self._is_probs else (self.parameter, self.k)
        is_traced = not has_values(self.parameter) or forward_level(forward_ad) >= 0
        return is_traced or any(isinstance(t, Tensor) and t.requires_grad for t in tensors)

    def _versions(self, value: Tensor) -> list[Any]:
        """Return a version of each tensor that a kept value depends on, to notice changes in place."""
        tensors = (self.parameter, self.k, value)
        return [version(t) for t in tensors if isinstance(t, Tensor) and not t.is_inference()]

    @property
    def _sizes(self) -> Tensor:
        """Return the size of every row, (*batch) float64."""
        k = torch.as_tensor(self.k, dtype=torch.float64, device=self.parameter.device)
        return k.detach().expand(self.parameter.shape[:-1])

    def with_parameter(self, value: Tensor) -> Self:
        """Return the same distribution with another value of its `parameter`, of the same shape.

        Its values are not checked. With `parameter.detach().requires_grad_()` it is a copy with a leaf of its own.
        """
        _check.same_shape("value", value, self.parameter, "parameter")
        new = self.expand(self._batch_shape)
        new.parameter, new._kept = value, {}
        return new

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """Return the same distribution over a larger batch; (…, n) parameters are viewed, not copied."""
        new: Self = type(self).__new__(type(self)) if _instance is None else _instance
        shape = torch.Size(batch_shape)
        new.__dict__.update(self.__dict__)
        for name in (*PER_ROW, *PER_ITEM):
            if isinstance(value := self.__dict__.get(name), Tensor):
                new.__dict__[name] = value.expand(shape) if name in PER_ROW else value.expand(*shape, -1)
        new._kept = {name: (versions, t.expand(*shape, -1)) for name, (versions, t) in self._kept.items()}
        new._batch_shape = shape
        return new

    def __repr__(self) -> str:
        sizes = self._sizes.unique().tolist()
        k = f"{sizes[0]:g}" if len(sizes) == 1 else "per row"
        return f"{type(self).__name__}(batch_shape={tuple(self._batch_shape)}, n={self._event_shape[0]}, k={k})"


def logit(p: Tensor) -> Tensor:
    """Return logit p; ±inf with gradient 0 where p is 0 or 1: the derivative there is infinite, and 0 times it NaN."""
    is_open = (p > 0) & (p < 1)
    return torch.where(is_open, torch.logit(torch.where(is_open, p, 0.5)), torch.logit(p.detach()))


def extremes(values: Tensor) -> str:
    """Describe the range of a tensor's values."""
    least, most = values.min().item(), values.max().item()
    return f"{least:g}" if least == most else f"values from {least:g} to {most:g}"


def _check_parameter(probs: Any, logits: Any, k: Any) -> Tensor:
    """Return the parameter given, over the whole batch; raise unless it is exactly one, with a count that fits."""
    if (probs is None) == (logits is None):
        raise ValueError("Give one of `probs` and `logits`; got " + ("both." if probs is not None else "neither."))
    name = "probs" if logits is None else "logits"
    value: Tensor = probs if logits is None else logits
    _check.scores(value, -1, name)
    if value.shape[-1] == 0:
        raise ValueError(f"`{name}` must have at least one item in its last dim; got {tuple(value.shape)}.")
    if k is None and logits is not None:
        raise ValueError("`k` must be given with `logits`; only `probs` have a sum.")
    batch = value.shape[:-1]
    if isinstance(k, Tensor):
        if k.dtype == torch.bool or k.is_complex():
            raise TypeError(f"`k` must be an integer or floating tensor; got {k.dtype}.")
        try:
            batch = torch.broadcast_shapes(k.shape, batch)
        except RuntimeError:
            got = f"{tuple(k.shape)} and {tuple(batch)}"
            raise ValueError(f"`k` must broadcast with the batch of `{name}`; got {got}.") from None
        _check.same_device("k", k, value, name)
    elif k is not None:
        _check.count(k, value, -1)
    return value.expand(*batch, -1) if value.shape[:-1] != batch else value


def _check_choice(scores: Tensor, k: Tensor, name: str, never: str, always: str) -> None:
    """Raise unless k of the items can be drawn and at most k must be."""
    if scores.isnan().any():
        raise ValueError(f"`{name}` must not hold NaN.")
    possible, forced = (scores > -torch.inf).sum(-1), (scores == torch.inf).sum(-1)
    if not (possible >= k).all():
        got = possible.flatten()[(possible - k).argmin()].item()
        raise ValueError(f"`{name}` must exceed {never} for at least k items; got a row with {got}.")
    if not (forced <= k).all():
        got = forced.flatten()[(k - forced).argmin()].item()
        raise ValueError(f"`{name}` must be {always} for at most k items; got a row with {got}.")


def _check_sum_is_known(probs: Tensor) -> None:
    """Raise if the rounding of half precision (of some eps·‖π‖ in the sum) may make k another integer."""
    if probs.dtype in (torch.float16, torch.bfloat16) and probs.numel():
        off = 3 * torch.finfo(probs.dtype).eps * float(probs.float().norm(dim=-1).max())
        if off >= 0.5:
            got = f"got a sum that may be off by {off:.2g} in {probs.dtype}"
            raise ValueError(f"`k` must be given if rounding hides which integer `probs` sum to; {got}.")


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far rounding may move a probability, or a sum in proportion to k."""
    return {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 1e-3)


def _check_probs(probs: Tensor, k: Tensor) -> None:
    """Raise unless all lie in [0, 1] and sum to k, within what their dtype allows."""
    probs = probs.detach()
    least, most = torch.aminmax(probs) if probs.numel() else (probs.new_zeros(()), probs.new_zeros(()))
    tolerance = tolerance_of(probs.dtype)
    if not (least >= -tolerance and most <= 1 + tolerance):
        raise ValueError(f"`probs` must lie in [0, 1]; got values from {least.item():g} to {most.item():g}.")
    total = probs.sum(-1, dtype=torch.float64)
    error = (total - k).abs()
    if (error >= 0.5).any():  # the tolerance of a large k may hide one item too few or too many
        choice = torch.where(probs >= 1, torch.inf, torch.where(probs > 0, 0.0, -torch.inf))
        _check_choice(choice, k, "probs", "0", "1")
    if not (error <= tolerance * k.clamp(min=1)).all():
        worst, size = (t.flatten()[error.argmax()].item() for t in (total, k))
        raise ValueError(
            f"`probs` must sum to k, within {tolerance:g}·max(k, 1) for {probs.dtype}; got the sum {worst:.9g} where "
            f"k = {size:g}. Use `logits=` with `k=`, or, for a fractional size, give `k=` too."
        )
