"""What all searches share: the beams, steps of a model, and states that follow the beams."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check, _shape

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
Reorder = Callable[[Any, Tensor], Any]
EMPTY = -1  # the token of a place without one


class Beams(NamedTuple):
    """Hold k sequences for each row of the batch, by falling score."""

    tokens: Tensor
    """(batch, k, length) without the start; −1 after the end of a sequence, and in an empty slot."""
    scores: Tensor
    """(batch, k), log-probability/length^penalty; −inf in an empty slot. Differentiable."""
    log_probs: Tensor
    """(batch, k), of the sequences. Differentiable."""
    lengths: Tensor
    """(batch, k), the number of tokens, with the end token."""
    back_pointers: Tensor
    """(batch, k, length), the slot of the beam before that each token continued; −1 as for `tokens`."""
    log_inclusion_probs: Tensor | None = None
    """(batch, k) float64, of sampled beams: the sum over steps, each given the beams drawn before."""
    log_joint_probs: Tensor | None = None
    """(batch, k, k) float64, the same of pairs, if the design has them."""
    soft_tokens: Tensor | None = None
    """(batch, k, length, V), of soft beams: weights of tokens along the soft back-pointers. Differentiable.

    At each place they sum to the share of the slot that has a token there: 1, and less after soft ends.
    """
    soft_back_pointers: tuple[Tensor, ...] | None = None
    """For each step (batch, k, k before), of soft beams that go on; rows sum to 1. Differentiable."""

    @property
    def inclusion_probs(self) -> Tensor | None:
        """Return the product of the inclusion probabilities along each path, (batch, k) float64."""
        return None if self.log_inclusion_probs is None else self.log_inclusion_probs.exp()


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up embeddings of tokens, or mix them: what `step` needs to serve hard and soft beams alike.

    Args:
        tokens: (…) integers, or (…, V) distributions.
        weight: (V, d), the embeddings.

    Returns:
        (…, d).

    Examples:
        >>> weight = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
        >>> embed(torch.tensor([1]), weight), embed(torch.tensor([[0.5, 0.5]]), weight)
        (tensor([[2., 3.]]), tensor([[1., 2.]]))
    """
    _check.real("tokens", tokens)
    _check.floating("weight", weight)
    return tokens @ weight if tokens.is_floating_point() else weight[tokens]


def reordered(state: Any, index: Tensor) -> Any:
    """Return the state with its rows in another order: `index_select(0, index)` on each tensor."""
    return mapped(state, lambda x: x.index_select(0, index))


def mapped(state: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of lists, tuples, named tuples and dicts."""
    if isinstance(state, Tensor):
        return fn(state)
    if isinstance(state, Mapping):
        return type(state)({key: mapped(value, fn) for key, value in state.items()})  # type: ignore[call-arg]
    if isinstance(state, (list, tuple)):
        parts = [mapped(value, fn) for value in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    name = type(state).__name__
    raise TypeError(f"`state` must be tensors in lists, tuples and dicts; got {name}. Reorder it with `reorder=`.")


def continued(
    step: Step, last: Tensor, state: Any, log_probs: Tensor, t: int, is_ended: Tensor | None = None
) -> tuple[Tensor, Any, int]:
    """Take a step; return the log-probabilities of all continuations (batch, m · V), the state and V."""
    batch, m = log_probs.shape
    scores, state = step(last if last.is_floating_point() else last.clamp(min=0), state)
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != batch * m or not scores.shape[1]:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"`step` must return log-probabilities ({batch * m}, V) at step {t}; got {got}.")
    _check.scores(scores, name="log-probabilities")
    width = scores.shape[1]
    scores = scores.to(_shape.compute_dtype(scores.dtype)).view(batch, m, width)
    if is_ended is not None:
        only = torch.where(torch.arange(width, device=last.device) == 0, 0.0, -torch.inf).to(scores.dtype)
        scores = torch.where(is_ended[..., None], only, scores)
    return (log_probs[..., None] + scores).flatten(1), state, width


def gather(t: Tensor, slot: Tensor) -> Tensor:
    """Return the slots (batch, k) of a tensor (batch, m, …)."""
    return t.gather(1, slot if t.ndim == 2 else slot[..., None].expand(-1, -1, t.shape[-1]))


def check_scores(scores: Tensor, t: int) -> None:
    """Raise if log-probabilities (batch, …) hold NaN or +inf."""
    is_bad = ~(scores.detach() < torch.inf).flatten(1).all(1)
    if is_bad.any():
        row = int(is_bad.nonzero()[0])
        what = "NaN" if scores[row].isnan().any() else "+inf"
        raise ValueError(f"`step` must return numbers < inf; got {what} at step {t}, in row {row} of the batch.")
