"""Selections: how the next k beams are chosen among all continuations of the present ones."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from .. import _check
from .._math import select as order
from ..designs import MakesDesign, Pivotal
from ..relaxations import Relaxation, ordered_topk, sigmoid_topk


class Choice(NamedTuple):
    """Hold the continuations that a selection chose."""

    slots: Tensor | None
    """(batch, k), places among the n continuations, the best first if there is an order; −1 where there are too few."""
    log_inclusion_probs: Tensor | None = None
    """(batch, k), of the chosen ones, given the present beams; None if the choice is not random."""
    joint_probs: Tensor | None = None
    """(batch, k, k), of their pairs, if the design has them."""
    weights: Tensor | None = None
    """(batch, k, n), the soft slots, instead of `slots`."""


class Select(Protocol):
    """Choose k of n continuations: the signature that `beam_search` calls, and that the functions here have.

    A selection of your own is hard unless it has an attribute `is_random = True` (it then returns inclusion
    probabilities) or `is_soft = True` (it then returns weights).

    Args:
        log_probs: (batch, n), of the paths up to and including each continuation; −inf cannot be chosen.
        log_weights: (batch, n), the same minus the log-inclusion probabilities of the present beams.
        k: how many.
        generator: of what is random; torch's own if None.
    """

    def __call__(
        self, log_probs: Tensor, log_weights: Tensor, k: int, /, *, generator: Generator | None = None
    ) -> Choice: ...


def hard(log_probs: Tensor, log_weights: Tensor, k: int, *, generator: Generator | None = None) -> Choice:
    """Take the k most likely continuations, as classic beam search does.

    Examples:
        >>> x = torch.tensor([[-1.0, -3.0, -2.0]])
        >>> khot.search.hard(x, x, 2).slots
        tensor([[0, 2]])
    """
    _check.scores(log_probs, name="log_probs")
    _check.at_least("k", k, 0)
    top = log_probs.detach().topk(min(k, log_probs.shape[-1]))
    return Choice(_filled(torch.where(top.values == -torch.inf, -1, top.indices), k))


def proportional(x: Tensor, k: float | Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Return inclusion probabilities proportional to e^{x/T}, as far as they stay ≤ 1: `π = min(1, e^{x/T}/c)`.

    In `sampled` it gives Fearnhead and Clifford's optimal resampling (2003): what is likely is kept with its own
    weight, the others share one weight, and all weights sum to 1 on every draw. If one slot only is left to chance,
    its candidates are never drawn together.

    Args:
        x: scores, (…, n).
        k: how many, 0 ≤ k ≤ n, an integer or a tensor (…).
        temperature: T > 0.

    Returns:
        (…, n), in [0, 1], with the sum k; no gradient. NaN where k exceeds the number of scores above −inf.

    Examples:
        >>> khot.search.proportional(torch.tensor([0.7, 0.2, 0.1]).log(), 2)
        tensor([1.0000, 0.6667, 0.3333])
    """
    _check.call(x, k, -1, temperature)
    size, heat = (torch.as_tensor(t, device=x.device) for t in (k, temperature))
    most = int(size.max()) if size.numel() else 0
    return order.proportional(x.detach() / heat[..., None], size.expand(x.shape[:-1]), most)


NEIGHBOURS = partial(Pivotal, order="given")


def sampled(
    log_probs: Tensor,
    log_weights: Tensor,
    k: int,
    *,
    design: MakesDesign = NEIGHBOURS,
    relaxation: Callable[..., Tensor] = proportional,
    temperature: float | Tensor = 1.0,
    generator: Generator | None = None,
) -> Choice:
    """Draw k distinct continuations with exact inclusion probabilities π, proportional to their weights.

    `π = min(1, u/c)` with `Σπ = k`, where u = p/Q is the Horvitz–Thompson weight that a continuation brings along: its
    probability over the inclusion probability of its beam. If fewer than k are possible, all of them are taken.

    Args:
        log_probs, log_weights, k, generator: as for `Select`.
        design: the law of the draw, a class of `khot.designs` or a `functools.partial` of one. The default is `Pivotal`
            with the order "given": continuations of a beam are neighbours, so that each beam keeps close to its share.
            With `ConditionalPoisson` the pairs are known too, and `expectation` has a variance.
        relaxation: the function of log-weights to π. With `khot.sigmoid_topk`, π = u/(u + c) < 1, and any two can be
            drawn together, which the variance needs; the estimates vary more.
        temperature: T > 0 of the relaxation; larger explores more, and only 1 keeps the sum of the weights at 1.

    Examples:
        >>> x = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> choice = khot.search.sampled(x, x, 2, generator=torch.Generator().manual_seed(0))
        >>> choice.slots, choice.log_inclusion_probs.exp()
        (tensor([[0, 1]]), tensor([[1.0000, 0.6000]], dtype=torch.float64))
    """
    _check.scores(log_weights, name="log_weights")
    _check.at_least("k", k, 0)
    _check.function("relaxation", relaxation)
    _check.function("design", design)
    x = log_weights.detach().to(torch.float64)
    sizes = (x > -torch.inf).sum(-1).clamp(max=k)
    probs = relaxation(x, sizes, temperature=temperature)
    law = design(probs.detach(), sizes, validate_args=False)
    index = _filled(law.sample_indices(generator=generator), k)
    at = index.clamp(min=0)
    log_probs = law.mean.gather(-1, at).log().masked_fill(index < 0, 0.0)
    pairs = getattr(law, "joint_probs_of", None)
    return Choice(index, log_probs, None if pairs is None else pairs(at))


def soft(
    log_probs: Tensor,
    log_weights: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 0.1,
    relaxation: Relaxation = sigmoid_topk,
    generator: Generator | None = None,
) -> Choice:
    """Mix all continuations into k soft slots, by `khot.ordered_topk`: differentiable, and `hard` as T → 0.

    Args:
        log_probs, log_weights, k, generator: as for `Select`. At least k continuations must be possible.
        temperature: T > 0, well below the spacing of the scores for slots that do not overlap.
        relaxation: the member of the family, such as `khot.sigmoid_topk`.

    Examples:
        >>> x = torch.tensor([[-1.0, -3.0, -2.0]])
        >>> khot.search.soft(x, x, 2).weights.round(decimals=2)
        tensor([[[0.9900, 0.0000, 0.0100],
                 [0.0100, 0.0100, 0.9900]]])
    """
    _check.scores(log_probs, name="log_probs")
    _check.integer("k", k)
    most = int((log_probs > -torch.inf).sum(-1).min()) if len(log_probs) else k
    if k > most:
        fix = "Take a smaller k for the first steps: `k` may be a list."
        raise ValueError(f"`k` must satisfy k ≤ {most} (possible continuations) for soft beams; got {k}. {fix}")
    return Choice(None, weights=ordered_topk(log_probs, k, relaxation=relaxation, temperature=temperature))


vars(sampled)["is_random"] = vars(soft)["is_soft"] = True


def _filled(index: Tensor, k: int) -> Tensor:
    """Return indices (batch, ≤ k) with −1 in the slots that are left; (batch, k)."""
    return torch.nn.functional.pad(index, (0, k - index.shape[-1]), value=-1)
