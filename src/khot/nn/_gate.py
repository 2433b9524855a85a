"""A gate that lets k of n features through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from .. import _check
from ..designs import Design, Pivotal
from ..estimators import straight_through_sample, takes_objective
from ..relaxations import hard_topk, sigmoid_topk

Relaxation = Callable[..., Tensor]
"""Like `khot.sigmoid_topk`: `(scores, k, *, temperature) → soft k-hot`."""


class MakesDesign(Protocol):
    """A class of designs, or a `functools.partial` of one."""

    def __call__(self, probs: Tensor, k: float | Tensor, /, *, validate_args: bool) -> Design: ...


class KHotGate(nn.Module):
    """Lets k of n features through: `x ⊙ m`, m k-hot, sampled or relaxed in training and `hard_topk` after it.

    In training `π = relaxation(θ, budget, temperature)`, and m is a surrogate sample `estimator(design(π))` for each
    row of x, or π itself if there is no design. In evaluation m has ones at the k greatest scores θ.

    Args:
        scores: n for one learned vector of scores θ, zero at first, that all rows share; or a network, x → (…, n), for
            a choice of features for each row (as in L2X).
        k: how many features to let through.
        relaxation: scores to inclusion probabilities: any of `khot`'s.
        design: what m is drawn from, a class of `khot.designs`; None lets `x ⊙ π` through.
        estimator: how the gradient gets past the sample: a function of `khot.estimators` that gives surrogate samples.
        temperature: of the relaxation; a buffer, which a `Schedule` may move.

    Attributes:
        budget: an integer buffer, the size of m in training: k, unless a `Schedule` moves it, as from n to k: then
            features are dropped one after the other, and those that matter only together are seen together at first.

    Examples:
        >>> gate = KHotGate(4, 2)
        >>> gate(torch.ones(3, 4), generator=torch.Generator().manual_seed(0))
        tensor([[1., 1., 0., 0.],
                [0., 1., 1., 0.],
                [1., 0., 1., 0.]], grad_fn=<MulBackward0>)
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
        design: MakesDesign | None = Pivotal,
        estimator: Callable[..., Tensor] = straight_through_sample,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        _check.positive("temperature", temperature)
        if isinstance(scores, nn.Module):
            _check.at_least("k", k, 0)
        else:
            _check.at_least("scores", scores, 1)
            _check.whole("k", k, scores, "features")
        self.scores = scores if isinstance(scores, nn.Module) else nn.Parameter(torch.zeros(scores))
        self.k = int(k)
        self.relaxation, self.design, self.estimator = relaxation, design, estimator
        self.register_buffer("temperature", torch.tensor(float(temperature)))
        self.register_buffer("budget", torch.tensor(int(k)))  # an integer keeps its value in half precision

    def scores_of(self, x: Tensor) -> Tensor:
        """The scores θ for x (…, n): (n,), or (…, n) if a network gives them."""
        if not isinstance(self.scores, nn.Module):
            _check.last_dim("x", x, self.scores.shape[-1])
            return self.scores
        theta: Tensor = self.scores(x)
        _check.same_shape("scores(x)", theta, x, "x")
        _check.whole("k", self.k, x.shape[-1], "features")
        return theta

    def probs(self, x: Tensor) -> Tensor:
        """The inclusion probabilities π in training, like the scores."""
        return self.relaxation(self.scores_of(x), self._size(x), temperature=self.temperature)

    def law(self, x: Tensor) -> Design:
        """What samples in training are drawn from; estimators that want the objective, such as `rloo`, take it."""
        if self.design is None:
            raise ValueError("`design` is None: this gate is relaxed and has no samples. Give it one, such as Pivotal.")
        return self.design(self.probs(x).to(torch.float64), self._size(x), validate_args=False)

    def mask(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """m for x (…, n): a sample for each row in training, k-hot of the greatest scores after it; shape of x."""
        if not self.training:
            return hard_topk(self.scores_of(x), self.k).to(x.dtype).expand(x.shape)
        if self.design is None:
            return self.probs(x).to(x.dtype).expand(x.shape)
        if takes_objective(self.estimator):
            raise TypeError(
                "`estimator` must give surrogate samples; this one wants the objective: call it with `gate.law(x)`."
            )
        law = self.law(x)
        drawn = self.estimator(law, x.shape[: x.ndim - 1 - len(law.batch_shape)], generator=generator)
        return drawn.to(x.dtype)

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """x (…, n) with all but the chosen features zero."""
        return x * self.mask(x, generator=generator)

    def _size(self, x: Tensor) -> Tensor:
        """Of samples in training."""
        return self.budget.clamp(max=x.shape[-1])

    def extra_repr(self) -> str:
        names = (getattr(part, "__name__", repr(part)) for part in (self.relaxation, self.design, self.estimator))
        relaxation, design, estimator = names
        return f"k={self.k}, relaxation={relaxation}, design={design}, estimator={estimator}"
