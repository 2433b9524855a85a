"""Layers that choose k of n: `SigmoidTopK` for any scores, `KHotGate` for features."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from .._shape import Group
from ..designs import Design, Pivotal, sample_khot
from ..estimators import straight_through_sample, takes_objective
from ..relaxations import Relaxation, hard_topk, sigmoid_topk, straight_through
from ._precision import KeepsPrecision, hold, shown, wide_dtype


class SigmoidTopK(KeepsPrecision):
    """Apply `khot.sigmoid_topk`; with `hard=True`, forward is `khot.hard_topk` and the gradient stays that of σ_k.

    Buffers stay in float32 or wider when the layer is cast to half precision.

    Args:
        k: how many to choose; a number, a tensor (kept as a buffer) or a Parameter (learned).
        dim: the dimension to choose along.
        temperature: kept as a buffer, so that it moves, saves and loads with the model; schedules write to it:
            `layer.temperature.fill_(0.5)`. A Parameter is learned.
        hard: choose exactly k, straight through.

    Examples:
        >>> SigmoidTopK(2, temperature=0.5)(torch.tensor([[2.0, 1.0, 0.0]]))
        tensor([[0.9573, 0.7519, 0.2909]])
    """

    k: float | Tensor
    temperature: Tensor

    def __init__(
        self, k: float | Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, hard: bool = False
    ) -> None:
        super().__init__()
        _check.positive("temperature", temperature)
        _check.not_negative("k", k)
        _check.integer("dim", dim)
        hold(self, k, temperature)
        self.dim, self.hard = dim, hard

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map scores (…, n) to k-hot (…, n); `mask` as for `khot.sigmoid_topk`."""
        soft = sigmoid_topk(x, self.k, dim=self.dim, temperature=self.temperature, mask=mask)
        return straight_through(hard_topk(x, self.k, dim=self.dim, mask=mask), soft) if self.hard else soft

    def extra_repr(self) -> str:
        return f"k={shown(self.k)}, dim={self.dim}, temperature={shown(self.temperature)}, hard={self.hard}"


class KHotGate(KeepsPrecision):
    """Let k of n features through: `x ⊙ m`, m k-hot, sampled or relaxed in training and `hard_topk` in evaluation.

    In training `π = relaxation(θ, budget, temperature)`, and m is a surrogate sample `estimator(design(π))` for each
    row of x, or π itself if there is no design. In evaluation m has ones at the k largest scores θ.

    Args:
        scores: n for one learned vector of scores θ, zero at first, that all rows share; or a network, x → (…, n), for
            a choice of features for each row (as in L2X).
        k: how many features to let through.
        relaxation: maps scores to inclusion probabilities: any of `khot`'s.
        design: what m is drawn from, a class of `khot.designs` or a `functools.partial` of one; None lets `x ⊙ π`
            through.
        estimator: how the gradient passes the sample: a function of `khot.estimators` that gives surrogate samples.
        temperature: of the relaxation; a buffer, which a `Schedule` may change.
        group: the process group over which features are divided; `scores` and x are then this process's part of them,
            and k is that of the whole. Samples need `sigmoid_topk`, `straight_through_sample` and the design
            `Systematic` or `partial(Pivotal, order="given")`. A DTensor of scores needs no group, and x is a DTensor.

    Attributes:
        budget: an integer buffer, the size of m in training: k, unless a `Schedule` moves it, for example from n to k.
            Then features are dropped one by one, and those that matter only together are seen together at first.
        takes_objective: whether the estimator wants the objective; then call it with `gate.law(x)` instead of the gate.

    Examples:
        >>> gate = KHotGate(4, 2)
        >>> gate(torch.ones(3, 4), generator=torch.Generator().manual_seed(0))
        tensor([[0., 0., 1., 1.],
                [1., 0., 0., 1.],
                [0., 1., 0., 1.]], grad_fn=<MulBackward0>)
        >>> gate.eval()(torch.ones(1, 4))
        tensor([[1., 1., 0., 0.]])
    """

    temperature: Tensor
    budget: Tensor

    def __init__(
        self,
        scores: int | nn.Module,
        k: int,
        *,
        relaxation: Relaxation = sigmoid_topk,
        design: Callable[..., Design] | None = Pivotal,
        estimator: Callable[..., Tensor] = straight_through_sample,
        temperature: float = 1.0,
        group: Group = None,
    ) -> None:
        super().__init__()
        _check.positive("temperature", temperature)
        _check.at_least("k", k, 0)
        for name, value in (("relaxation", relaxation), ("design", design), ("estimator", estimator)):
            if value is not None or name != "design":
                _check.function(name, value)
        if not isinstance(scores, nn.Module):
            _check.at_least("scores", scores, 1 if group is None else 0)
        if not isinstance(scores, nn.Module) and group is None:
            _check.integer_at_most("k", k, scores, "features")
        self.scores = scores if isinstance(scores, nn.Module) else nn.Parameter(torch.zeros(int(scores)))
        self.k, self.group = int(k), group
        self.relaxation, self.design, self.estimator = relaxation, design, estimator
        self.takes_objective = takes_objective(estimator)
        self.register_buffer("temperature", torch.tensor(float(temperature), dtype=wide_dtype()))
        self.register_buffer("budget", torch.tensor(self.k))

    def scores_of(self, x: Tensor) -> Tensor:
        """Return the scores θ for x (…, n): (n,), or (…, n) if a network gives them."""
        if not isinstance(self.scores, nn.Module):
            _check.last_dim("x", x, self.scores.shape[-1])
            return self.scores
        theta: Tensor = self.scores(x)
        _check.same_shape("scores(x)", theta, x, "x")
        if self.group is None:
            _check.integer_at_most("k", self.k, x.shape[-1], "features")
        return theta

    def probs(self, x: Tensor) -> Tensor:
        """Return the inclusion probabilities π of training, in the shape of the scores."""
        more = {} if self.group is None else {"group": self.group}
        return self.relaxation(self.scores_of(x), self._count(x), temperature=self.temperature, **more)

    def _count(self, x: Tensor) -> Tensor:
        return self.budget.clamp(max=x.shape[-1]) if self.group is None else self.budget

    def law(self, x: Tensor) -> Design:
        """Return the design that training draws from; estimators that want the objective, such as `rloo`, take it."""
        if self.design is None:
            raise ValueError("`design` is None: this gate is relaxed and has no samples. Give it one, such as Pivotal.")
        if self.group is not None or _check.is_dtensor(self.scores_of(x)):
            raise NotImplementedError("A law of features that are divided over processes is not there as an object.")
        return self.design(self.probs(x).to(torch.float64), self._count(x), validate_args=False)

    def mask(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return m for x (…, n), in its shape: a sample for each row in training, else the k largest scores."""
        if not self.training:
            return hard_topk(self.scores_of(x), self.k, group=self.group).to(x.dtype).expand(x.shape)
        if self.design is None:
            return self.probs(x).to(x.dtype).expand(x.shape)
        if self.takes_objective:
            how = "this one wants the objective: call it with `gate.law(x)`"
            raise TypeError(f"`estimator` must give surrogate samples; {how}.")
        theta = self.scores_of(x)
        if self.group is not None or _check.is_dtensor(theta):
            return self._drawn_in_parts(theta, x, generator).to(x.dtype)
        law = self.law(x)
        return self.estimator(law, x.shape[: x.ndim - 1 - len(law.batch_shape)], generator=generator).to(x.dtype)

    def _drawn_in_parts(self, theta: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a sample for each row of x, whose features are divided over processes."""
        if self.relaxation is not sigmoid_topk or self.estimator is not straight_through_sample:
            wanted = "`relaxation` must be `sigmoid_topk` and `estimator` `straight_through_sample`"
            raise NotImplementedError(f"{wanted} if features are divided over processes; got others.")
        assert self.design is not None
        how: dict[str, Any] = {"temperature": self.temperature, "design": self.design, "generator": generator}
        if self.group is None:
            return sample_khot(theta.expand(x.shape), self._count(x), **how)
        return sample_khot(theta, self.budget, sample_shape=x.shape[: x.ndim - theta.ndim], group=self.group, **how)

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return x (…, n) with all but the chosen features set to zero."""
        return x * self.mask(x, generator=generator)

    def extra_repr(self) -> str:
        parts = (self.relaxation, self.design, self.estimator)
        relaxation, design, estimator = (getattr(part, "__name__", repr(part)) for part in parts)
        return f"k={self.k}, relaxation={relaxation}, design={design}, estimator={estimator}"
