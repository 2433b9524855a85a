"""Token pruning: keep k of n tokens between two blocks of a transformer, hard forward and σ_k backward."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from .. import _check, _shape
from .._math import select
from .._torch import has_values, no_autocast, require_values
from ..relaxations import hard_topk, sigmoid_topk, straight_through
from . import selectors
from ._precision import KeepsPrecision, shown, wide_dtype

__all__ = ["PrunedTokens", "TokenBudget", "TokenPruner", "attention_received", "fast_then_slow", "filtering_layers"]
__all__ += ["layer_similarity", "weighted_attention"]

MOST_LOGIT = 2.0  # how far the logit of a dropped key counts as exceeding those of kept ones: e² bounds its gradient


def __dir__() -> list[str]:
    return __all__


class PrunedTokens(NamedTuple):
    """Hold what is left of tokens (batch, n, d): all n of them in training, the m kept ones in evaluation."""

    tokens: Tensor
    """(batch, m, d). In training m = n and nothing moves; in evaluation m is the largest number kept in a row."""
    weights: Tensor
    """(batch, m), 1 for kept tokens, else 0; in training with the gradient of σ_k. See `weighted_attention`."""
    mask: Tensor
    """(batch, m) booleans, True for kept tokens: the padding mask of the blocks that follow."""
    positions: Tensor
    """(batch, m), where each token stood before any was dropped; that of a token that is no longer there is 0."""


class TokenPruner(KeepsPrecision):
    """Keep k of n tokens, those with the largest scores: hard forward, with the gradient of σ_k to scores and k.

    In training all tokens stay in place, and `weights` say which count: give them to `weighted_attention`, in which a
    dropped token has no effect and still a gradient. In evaluation the dropped tokens are gone, and blocks are faster.

    Args:
        k: how many tokens to keep; a buffer, so that a `Schedule` can move it. None: it is given with each call.
        score: n for a learned linear score of n features, or a Module (batch, n, d) → (batch, n). None: scores are
            given with each call, such as `attention_received`.
        temperature: of σ_k; a buffer.
        selector: one of `khot.nn.selectors`.

    Examples:
        >>> pruner = khot.nn.TokenPruner(2).eval()
        >>> x, scores = torch.arange(5.0).view(1, 5, 1), torch.tensor([[0.1, 0.9, 0.3, 0.8, 0.2]])
        >>> pruner(x, scores=scores).positions
        tensor([[1, 3]])
        >>> first = torch.tensor([True, False, False, False, False])
        >>> pruner(x, scores=scores, special=first).positions
        tensor([[0, 1]])
    """

    k: Tensor | None
    temperature: Tensor

    def __init__(
        self,
        k: int | None = None,
        *,
        score: int | nn.Module | None = None,
        temperature: float = 1.0,
        selector: selectors.Selector = selectors.straight_through,
    ) -> None:
        super().__init__()
        _check.positive("temperature", temperature)
        _check.function("selector", selector)
        if k is not None:
            _check.at_least("k", k, 1)
        self.register_buffer("k", None if k is None else torch.tensor(int(k)))
        if score is None or isinstance(score, nn.Module):
            self.score = score
        else:
            _check.at_least("score", score, 1)
            self.score = nn.Linear(int(score), 1)
        self.selector = selector
        self.register_buffer("temperature", torch.tensor(float(temperature), dtype=wide_dtype()))

    def forward(
        self,
        x: Tensor,
        *,
        scores: Tensor | None = None,
        k: int | Tensor | None = None,
        mask: Tensor | None = None,
        special: Tensor | None = None,
        positions: Tensor | None = None,
        generator: Generator | None = None,
    ) -> PrunedTokens:
        """Keep k tokens of x (batch, n, d).

        Args:
            x: tokens.
            scores: (batch, n); None asks the layer's own score. A row with NaN has weights of NaN in training, and
                keeps nothing in evaluation.
            k: how many, a number or (batch,), for this call; a row that has fewer tokens keeps them all, and one with
                more special tokens keeps those.
            mask: boolean (batch, n), False for padding and for tokens that were dropped before.
            special: boolean, broadcasts to (batch, n): tokens that are always kept, such as [CLS].
            positions: (batch, n), if x is no longer in its first order.
            generator: for a random selector.
        """
        _check.vectors("x", x)
        if x.ndim != 3:
            raise ValueError(f"`x` must have the shape (batch, n, d); got {tuple(x.shape)}.")
        scores = self._scores(x, scores)
        for name, value in (("mask", mask), ("special", special)):
            if value is not None:
                _check.instance(name, value, Tensor)
                if value.dtype != torch.bool:
                    raise TypeError(f"`{name}` must be boolean; got {value.dtype}. Use `{name}.bool()`.")
                _check.broadcasts(name, value, tuple(scores.shape), "(batch, n)")
        mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
        forced = torch.zeros_like(mask) if special is None else special.expand(scores.shape) & mask
        found = self.selector(
            scores.masked_fill(forced, torch.inf).masked_fill(~mask, -torch.inf),
            self._count(k, mask, forced),
            temperature=self.temperature,
            generator=generator,
        )
        if positions is not None:
            _check.same_shape("positions", positions, scores, "scores")
        else:
            positions = torch.arange(x.shape[1], device=x.device).expand(scores.shape)
        is_kept = (found > 0.5) & mask
        if self.training:
            return PrunedTokens(x, found.to(x.dtype), is_kept, positions)
        require_values("How many tokens are kept", x)
        index = select.indices(is_kept)
        is_there, index = index >= 0, index.clamp(min=0)
        weights = is_there.to(x.dtype)
        tokens = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return PrunedTokens(tokens, weights, is_there, torch.where(is_there, positions.gather(1, index), 0))

    def _scores(self, x: Tensor, scores: Tensor | None) -> Tensor:
        if scores is None:
            if self.score is None:
                raise ValueError("`scores` must be given, because this layer has no score of its own.")
            scores = self.score(x)
            scores = scores.squeeze(-1) if scores.ndim == 3 else scores
        _check.floating("scores", scores)
        if scores.shape != x.shape[:2]:
            raise ValueError(f"`scores` must be (batch, n), {tuple(x.shape[:2])}; got {tuple(scores.shape)}.")
        return scores

    def _count(self, k: int | Tensor | None, mask: Tensor, forced: Tensor) -> Tensor:
        """Return how many to keep of each row, (batch,): no more than there are, and no fewer than are special."""
        k = self.k if k is None else k
        if k is None:
            raise ValueError("`k` must be given, because this layer has none of its own.")
        if not isinstance(k, Tensor):
            _check.at_least("k", k, 1)
        k = torch.as_tensor(k, device=mask.device).to(torch.float64).expand(len(mask))
        return torch.minimum(torch.maximum(k, forced.sum(-1).double()), mask.sum(-1).double())

    def extra_repr(self) -> str:
        return f"k={shown(self.k)}, temperature={shown(self.temperature)}"


class TokenBudget(KeepsPrecision):
    """Learn how many tokens each stage keeps, with a fixed total: fractions `f = σ_B(θ)`, `Σ f = B`, falling.

    σ_k over the stages meets the total at every step of training. Fractions are sorted, as a dropped token does not
    come back. Counts are integers, by largest remainders, with the gradient of the fractions.

    Args:
        stages: how many numbers to learn.
        share: of the tokens, the mean over stages: 0 < share < 1; B = share · stages.
        least: each stage keeps this share at least.
        temperature: of σ_k over the stages.
        costs: (stages,), what a token costs in each stage; then the weighted mean is at most `share`, and equal to it
            where fractions fall by themselves.

    Examples:
        >>> budget = khot.nn.TokenBudget(3, 0.5)
        >>> budget(torch.tensor([10, 7])).int()
        tensor([[5, 5, 5],
                [4, 4, 3]], dtype=torch.int32)
    """

    temperature: Tensor
    costs: Tensor | None

    def __init__(
        self,
        stages: int,
        share: float,
        *,
        least: float = 0.0,
        temperature: float = 1.0,
        costs: Tensor | None = None,
    ) -> None:
        super().__init__()
        _check.at_least("stages", stages, 1)
        _check.number("share", share, "a number")
        _check.fraction("least", least, is_open=True)
        if not least < share < 1:
            raise ValueError(f"`share` must satisfy {least} < share < 1 (`least` and all tokens); got {share}.")
        _check.positive("temperature", temperature)
        if costs is not None:
            _check.floating("costs", costs)
            _check.broadcasts("costs", costs, (stages,), "one number for each stage")
            if not costs.is_meta and not bool(((costs > 0) & costs.isfinite()).all()):
                raise ValueError(f"Every entry of `costs` must be > 0 and finite; got {costs.tolist()}.")
        self.stages, self.share, self.least = int(stages), float(share), float(least)
        self.logits = nn.Parameter(torch.zeros(self.stages))
        self.register_buffer("temperature", torch.tensor(float(temperature), dtype=wide_dtype()))
        self.register_buffer("costs", None if costs is None else (costs / costs.mean()).expand(self.stages).clone())

    def fractions(self) -> Tensor:
        """Return the share of tokens that each stage keeps, (stages,) float64, falling."""
        total = (self.share - self.least) / (1 - self.least) * self.stages
        costs = None if self.costs is None else self.costs.double()
        free = sigmoid_topk(self.logits.double(), total, temperature=self.temperature.double(), costs=costs)
        free = select.falling(free) if costs is None else select.never_rising(free)
        return self.least + (1 - self.least) * free

    def forward(self, n: int | Tensor) -> Tensor:
        """Return how many of n tokens, a number or (batch,), each stage keeps: (batch, stages) float64, integers."""
        n = torch.as_tensor(n, device=self.logits.device).double()
        soft = n.unsqueeze(-1) * self.fractions()
        exact = soft.detach()
        base = (exact + 1e-9).floor()
        extra = (exact.sum(-1) + 1e-9).round() - base.sum(-1)
        return straight_through(base + hard_topk(exact - base, extra.clamp(0, self.stages)), soft)

    def extra_repr(self) -> str:
        return f"stages={self.stages}, share={self.share}, least={self.least}"


def fast_then_slow(first: int, last: int, stages: int, *, power: float = 2.0) -> list[int]:
    """Return how many tokens to keep after each of a number of stages: many are dropped at first, and few at last.

    `last + (first − last)·(1 − s/stages)^power` for s = 1 … stages, rounded.

    Args:
        first: tokens before the first stage.
        last: tokens after the last one.
        stages: how many numbers.
        power: 1 is linear; larger drops more at first.

    Examples:
        >>> fast_then_slow(576, 64, 4)
        [352, 192, 96, 64]
    """
    _check.at_least("last", last, 1)
    _check.at_least("first", first, last)
    _check.at_least("stages", stages, 1)
    _check.above("power", power, 0)
    return [round(last + (first - last) * (1 - s / stages) ** power) for s in range(1, stages + 1)]


def attention_received(attention: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return how much attention each token receives, the mean over heads and queries: a score for `TokenPruner`.

    Args:
        attention: weights (batch, heads, queries, n), rows of which sum to 1.
        mask: boolean (batch, queries), False for queries that do not count.

    Returns:
        (batch, n), which sums to 1.

    Examples:
        >>> attention_received(torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]]))
        tensor([[0.7500, 0.2500]])
    """
    _check.floating("attention", attention)
    if attention.ndim != 4:
        raise ValueError(f"`attention` must have the shape (batch, heads, queries, n); got {tuple(attention.shape)}.")
    mean = attention.mean(1)
    if mask is None:
        return mean.mean(1)
    _check.mask(mask, mean[..., 0])
    share = mask.to(mean.dtype)
    return (mean * share.unsqueeze(-1)).sum(1) / share.sum(-1, keepdim=True).clamp(min=1)


def weighted_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with a weight w in [0, 1] for each key, `A_ij ∝ w_j·exp(q_i·k_j·scale)`, differentiable in w at 0 too.

    With weights 0 and 1 it is attention over the keys of weight 1. An additive mask log w has no gradient at 0. The
    gradient of a key of weight 0 counts its logit as at most 2 above those of the others: it tells which way to go, and
    its size at 0 would be e^d for a key that is d above, though letting it in never changes more than its share.

    Args:
        query, key, value: (batch, heads, queries or n, d).
        weights: (batch, n), ≥ 0.
        mask: boolean, broadcasts to (batch, heads, queries, n); True = may be attended to.
        scale: 1/√d if None.

    Returns:
        The output (batch, heads, queries, d), and A. A query without any key of positive weight gets zeros.

    Examples:
        >>> q = k = v = torch.eye(3).view(1, 1, 3, 3)
        >>> weighted_attention(q, k, v, torch.tensor([[1.0, 1.0, 0.0]]))[1][0, 0, 2]
        tensor([0.5000, 0.5000, 0.0000])
    """
    for name, given in {"query": query, "key": key, "value": value}.items():
        _check.floating(name, given)
        if given.ndim != 4:
            raise ValueError(f"`{name}` must have the shape (batch, heads, tokens, d); got {tuple(given.shape)}.")
    _check.instance("weights", weights, Tensor)
    if weights.ndim != 2:
        raise ValueError(f"`weights` must have the shape (batch, n); got {tuple(weights.shape)}.")
    _check.broadcasts("weights", weights, (len(query), key.shape[-2]), "(batch, n)")
    if scale is not None:
        _check.number("scale", scale, "a number or None")
    _check.mask(mask, weights.new_empty(()).expand(*query.shape[:-1], key.shape[-2]))
    if has_values(weights) and not bool((weights >= 0).all()):
        raise ValueError(f"`weights` must be ≥ 0, the weight of each key; got {float(weights.min()):g}.")
    with no_autocast(query):
        inner = _shape.compute_dtype(query.dtype)  # e^30 is more than float16 holds
        q, k, v, w = (t.to(inner) for t in (query, key, value, weights[:, None, None]))
        logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
        is_open = w > 0 if mask is None else mask & (w > 0)
        top = torch.where(is_open, logits, -torch.inf).detach().amax(-1, keepdim=True)
        grown = (logits - torch.where(top.isfinite(), top, 0.0)).clamp(max=MOST_LOGIT).exp() * w
        grown = grown if mask is None else torch.where(mask, grown, 0.0)
        attention = grown / grown.sum(-1, keepdim=True).clamp(min=torch.finfo(grown.dtype).tiny)
        return (attention @ v).to(value.dtype), attention.to(query.dtype)


def layer_similarity(received: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return how alike the attention that tokens receive is in neighbouring layers (ILVAS): a cosine for each pair.

    Args:
        received: (layers, batch, n), such as `attention_received` of each layer.
        mask: boolean (batch, n) of the tokens to look at.

    Returns:
        (layers − 1,), the mean over the batch; entry i compares the layers i and i + 1.

    Examples:
        >>> layer_similarity(torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]], [[0.0, 1.0]]]))
        tensor([1.0000, 0.7071])

    Reference: "HiDrop: hierarchical vision token reduction" (2026).
    """
    _check.floating("received", received)
    if received.ndim != 3 or len(received) < 2:
        raise ValueError(f"`received` must be (layers, batch, n) with 2 layers or more; got {tuple(received.shape)}.")
    values = received if mask is None else torch.where(mask, received, 0.0)
    return torch.nn.functional.cosine_similarity(values[1:], values[:-1], dim=-1).mean(-1)


def filtering_layers(similarity: Tensor, count: int) -> list[int]:
    """Return the layers after which to drop tokens: the largest local maxima of `layer_similarity`.

    Args:
        similarity: (layers − 1,).
        count: how many layers; where there are fewer maxima, all of them.

    Returns:
        Layers, rising from 0.

    Examples:
        >>> filtering_layers(torch.tensor([0.5, 0.9, 0.6, 0.8, 0.7]), 2)
        [1, 3]
    """
    _check.at_least("count", count, 1)
    _check.floating("similarity", similarity)
    values = [-torch.inf, *similarity.tolist(), -torch.inf]
    peaks = [i - 1 for i in range(1, len(values) - 1) if values[i - 1] < values[i] >= values[i + 1]]
    return sorted(sorted(peaks, key=lambda i: -values[i + 1])[:count])
