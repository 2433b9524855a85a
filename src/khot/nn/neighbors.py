"""Nearest neighbours that learn: `SoftNeighbors`, the loss of a k-NN classifier, and metrics.

A metric is a function of queries (…, q, d) and keys (…, m, d) to distances (…, q, m); write your own like those here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import _check, _shape
from .._torch import no_autocast
from ..designs import Design
from ..estimators import straight_through_sample
from ..relaxations import Relaxation, ordered_topk, sigmoid_topk
from ._precision import KeepsPrecision, hold, shown

__all__ = ["Neighbors", "SoftNeighbors", "cosine", "euclidean", "neighbors_loss", "squared_euclidean"]

CHUNK = 2**22  # distances that are computed at once while candidates are searched: 16 MB in float32
Number = float | Tensor
Metric = Callable[[Tensor, Tensor], Tensor]


def __dir__() -> list[str]:
    return __all__


def squared_euclidean(queries: Tensor, keys: Tensor) -> Tensor:
    """Return `‖q − x‖²` for queries (…, q, d) and keys (…, m, d), as (…, q, m), by a matrix product.

    Examples:
        >>> khot.nn.neighbors.squared_euclidean(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[25.,  1.]])
    """
    _check_vectors(queries, keys, None)
    # Subtract the same vector everywhere, so that a large common part does not round; NaN stays in its own column.
    center = keys.detach().nan_to_num(0.0, 0.0, 0.0).mean(-2, keepdim=True)
    a, b = queries - center, keys - center
    return (a @ (-2 * b).mT).add_(a.square().sum(-1).unsqueeze(-1)).add_(b.square().sum(-1).unsqueeze(-2))


def euclidean(queries: Tensor, keys: Tensor) -> Tensor:
    """Return `‖q − x‖` for queries (…, q, d) and keys (…, m, d), as (…, q, m); the gradient at distance 0 is 0.

    Examples:
        >>> khot.nn.neighbors.euclidean(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[5., 1.]])
    """
    _check_vectors(queries, keys, None)
    return torch.cdist(queries, keys)


def cosine(queries: Tensor, keys: Tensor) -> Tensor:
    """Return 1 − the cosine between queries (…, q, d) and keys (…, m, d), as (…, q, m).

    Examples:
        >>> khot.nn.neighbors.cosine(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
        tensor([[0., 1.]])
    """
    return 1 - normalize(queries, dim=-1) @ normalize(keys, dim=-1).mT


class Neighbors(NamedTuple):
    """Hold the result of `SoftNeighbors`. c is m, or the number of candidates."""

    weights: Tensor
    """(…, q, c), in [0, 1] with sum k; k-hot if a design draws them. If ordered: (…, q, k, c), rows sum to 1."""
    values: Tensor | None
    """(…, q, e), the mean of the neighbours' values. If ordered: (…, q, k, e), one for each slot."""
    probs: Tensor
    """(…, q, c), the weights before a design draws or slots order them: the inclusion probabilities of a sample."""
    indices: Tensor | None
    """(…, q, c), which keys the candidates are, nearest first; None if all keys are."""
    dropped: Tensor | None
    """(…, q), the total weight δ that all keys that are no candidates would have; None if all keys are candidates."""


class SoftNeighbors(KeepsPrecision):
    """Weigh the keys of each query as soft k nearest neighbours, with gradients to queries, keys, k and temperature.

    `w = relaxation(−metric(q, x)/T, k)`: numbers in [0, 1] that sum to k. As T → 0 they are 1 for the k nearest keys.

    With `candidates=c`, the c nearest keys of each query are searched without a gradient, in chunks, and w is computed
    among them. Neither pass then holds a q × m tensor. Let δ be the weight that all other keys would have (the field
    `dropped`). The weights change by 2δ in all, and each mean of values by at most δ/k times their range. For
    `sigmoid_topk`, `laplace_topk` and `cauchy_topk`, the gradient in the distances changes by at most
    `4·δ/T·(max g − min g)` in all, where g is the gradient in the weights.

    Args:
        k: how many neighbours, > 0; a number, a tensor (kept as a buffer) or a Parameter (learned).
        relaxation: scores to weights, any of `khot`'s.
        temperature: T > 0, in units of distance: a buffer that a `Schedule` may change, or a Parameter (learned).
        metric: distances of queries (…, q, d) to keys (…, m, d); a function of `khot.nn.neighbors` or your own.
        ordered: give k slots, by `khot.ordered_topk`: the nearest, the second nearest and so on; k is then an int.
        design: draw k-hot neighbours with the weights as inclusion probabilities and their gradient; a class of
            `khot.designs` such as `Pivotal`.
        candidates: how many of the nearest keys of each query keep a weight and a gradient; None for all of them.

    Examples:
        >>> keys, values = torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> found = SoftNeighbors(2, temperature=2.0)(torch.tensor([[0.5]]), keys, values)
        >>> found.weights
        tensor([[0.8535, 0.8535, 0.2248, 0.0683]])
        >>> found.values
        tensor([[1.7540]])
    """

    k: Number
    temperature: Tensor

    def __init__(
        self,
        k: Number,
        *,
        relaxation: Relaxation = sigmoid_topk,
        temperature: Number = 1.0,
        metric: Metric = squared_euclidean,
        ordered: bool = False,
        design: Callable[..., Design] | None = None,
        candidates: int | None = None,
    ) -> None:
        super().__init__()
        _check.positive("temperature", temperature)
        _check.positive("k", k)
        if ordered:
            _check.integer("k", k)
        if ordered and design is not None:
            raise ValueError("`design` must be None if `ordered` is True: slots are not drawn. Choose one of the two.")
        if candidates is not None:
            _check.at_least("candidates", candidates, 1 if isinstance(k, Tensor) else math.ceil(k))
        for name, value in (("relaxation", relaxation), ("metric", metric), ("design", design)):
            if value is not None or name != "design":
                _check.function(name, value)
        hold(self, k, temperature)
        self.relaxation, self.metric, self.ordered, self.design = relaxation, metric, ordered, design
        self.candidates = candidates

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        leave_one_out: bool | Tensor = False,
        temperature: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Neighbors:
        """Find the soft neighbours of each query.

        Args:
            queries: (…, q, d).
            keys: (…, m, d).
            values: (…, m, e), to be averaged over the neighbours.
            mask: boolean, broadcasts to (…, q, m); True = may be a neighbour.
            leave_one_out: True if query i is key i, or integers (…, q): which key the query itself is, −1 for none. A
                query is never its own neighbour.
            temperature: instead of the layer's, for example predicted for each query, (…, q).
            generator: where samples come from; torch's own if None.

        Returns:
            weights, values, probs, indices and dropped. A query that holds NaN, or that has fewer than k keys to choose
            from (by the mask, or by a tensor k), gets NaN; if samples are drawn, it raises ValueError. A key that holds
            NaN does so to all queries.
        """
        batch = _check_vectors(queries, keys, values)
        _check_k(self.k, keys.shape[-2] - (leave_one_out is True))
        dtype, inner = queries.dtype, _shape.compute_dtype(queries.dtype)
        q, heat = queries.to(inner).expand(*batch, -1, -1), self.temperature if temperature is None else temperature
        x = keys.to(inner).expand(*batch, -1, -1)
        own = _own(leave_one_out, q, x)
        if mask is not None:
            _check.mask(mask, q[..., :1].expand(*q.shape[:-1], x.shape[-2]))
            mask = mask.expand(*q.shape[:-1], x.shape[-2])
        indices = dropped = None
        with no_autocast(queries):
            if self.candidates is None:
                scores, allowed = -self.metric(q, x), _allowed(mask, own, x.shape[-2])
            else:
                indices, dropped = self._search(q, x, heat, mask, own)
                scores = -self.metric(q.unsqueeze(-2), _take(x, indices)).squeeze(-2)
                allowed = _allowed(mask, own, x.shape[-2], indices)
            weights, probs = self._weigh(scores, heat, allowed, generator)
            mean = None if values is None else self._mean(weights, values.to(inner).expand(*batch, -1, -1), indices)
        mean = None if mean is None else mean.to(dtype)
        return Neighbors(weights.to(dtype), mean, probs.to(dtype), indices, dropped)

    @torch.no_grad()
    def _search(
        self, q: Tensor, x: Tensor, heat: Number, mask: Tensor | None, own: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the nearest candidates (…, q, c) and the weight of all others (…, q), a chunk of queries at a time."""
        m, c = x.shape[-2], min(int(self.candidates or x.shape[-2]), x.shape[-2])
        step = max(1, CHUNK // max(1, m * q.shape[:-2].numel()))
        indices, dropped = q.new_empty(*q.shape[:-1], c, dtype=torch.int64), q.new_empty(q.shape[:-1])
        for start in range(0, q.shape[-2], step):
            part = slice(start, start + step)
            k, T = (t[..., part] if isinstance(t, Tensor) and t.ndim and t.shape[-1] > 1 else t for t in (self.k, heat))
            scores = -self.metric(q[..., part, :], x)
            some = None if mask is None else mask[..., part, :]
            allowed = _allowed(some, None if own is None else own[..., part], m)
            weights = self.relaxation(scores, k, temperature=T, mask=allowed)
            if allowed is not None:
                scores.masked_fill_(~allowed, -torch.inf)
            found = scores.topk(c).indices
            indices[..., part, :], dropped[..., part] = found, weights.scatter_(-1, found, 0.0).sum(-1)
        return indices, dropped

    def _weigh(
        self, scores: Tensor, heat: Number, allowed: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        if self.design is None:
            if not self.ordered:
                probs = self.relaxation(scores, self.k, temperature=heat, mask=allowed)
                return probs, probs
            slots = ordered_topk(scores, int(self.k), relaxation=self.relaxation, temperature=heat, mask=allowed)
            return slots, slots.sum(-2)
        probs = self.relaxation(scores.double(), self.k, temperature=heat, mask=allowed)
        if bool(probs.isnan().any()):
            raise ValueError("Every query must have k keys to draw from, and no NaN; got rows that have not.")
        law = self.design(probs, self.k, validate_args=False)
        return straight_through_sample(law, generator=generator), probs

    def _mean(self, weights: Tensor, values: Tensor, indices: Tensor | None) -> Tensor:
        if self.ordered:
            values = values.unsqueeze(-3) if indices is None else _take(values, indices)
            return weights.to(values.dtype) @ values
        k = self.k if not isinstance(self.k, Tensor) else self.k.unsqueeze(-1).to(values.dtype)
        shares = weights.to(values.dtype) / k
        if indices is None:
            return shares @ values
        return (shares.unsqueeze(-2) @ _take(values, indices)).squeeze(-2)

    def extra_repr(self) -> str:
        parts = (self.relaxation, self.metric, self.design)
        relaxation, metric, design = (getattr(part, "__name__", repr(part)) for part in parts)
        text = f"k={shown(self.k)}, relaxation={relaxation}, temperature={shown(self.temperature)}, metric={metric}"
        return f"{text}, ordered={self.ordered}, design={design}, candidates={self.candidates}"


def neighbors_loss(
    embeddings: Tensor,
    labels: Tensor,
    k: Number,
    *,
    relaxation: Relaxation = sigmoid_topk,
    temperature: Number = 1.0,
    metric: Metric = squared_euclidean,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the share of an example's k soft nearest neighbours in the batch that have another label.

    `1 − Σ_j w_ij [y_j = y_i]/k`, where w are the weights of `SoftNeighbors` without the example itself. For regression,
    compare `SoftNeighbors(…)(z, z, y, leave_one_out=True).values` with y.

    Args:
        embeddings: (…, n, d); each row is a query, and a key for all others.
        labels: (…, n), integers or booleans.
        k: how many neighbours, 0 < k < n; a number, or a tensor that broadcasts to (…, n).
        relaxation, temperature, metric, mask: as for `SoftNeighbors`.
        reduction: "mean" (over examples), "sum", or "none" (…, n).

    Returns:
        The loss, in [0, 1]; as T → 0 it is the share of wrong votes of a leave-one-out k-NN classifier.

    Examples:
        >>> z = torch.tensor([[0.0], [0.1], [1.0], [1.1]])
        >>> neighbors_loss = khot.nn.neighbors_loss
        >>> neighbors_loss(z, torch.tensor([0, 0, 1, 1]), 1, temperature=0.1)
        tensor(0.0134)
        >>> neighbors_loss(z, torch.tensor([0, 1, 0, 1]), 1, temperature=0.1)
        tensor(0.9954)

    Reference: Grover, Wang, Zweig and Ermon, "Stochastic optimization of sorting networks via continuous relaxations"
    (2019), whose loss is this one times −k, plus k.
    """
    _check.vectors("embeddings", embeddings)
    _check.function("relaxation", relaxation)
    _check.function("metric", metric)
    _check.one_of("reduction", reduction, ("mean", "sum", "none"))
    _check_k(k, embeddings.shape[-2] - 1)
    _check.instance("labels", labels, Tensor)
    if labels.is_floating_point() or labels.is_complex() or labels.shape != embeddings.shape[:-1]:
        want = f"integers or booleans of the shape {tuple(embeddings.shape[:-1])}"
        raise ValueError(f"`labels` must be {want}; got {labels.dtype}, {tuple(labels.shape)}.")
    z = embeddings.to(_shape.compute_dtype(embeddings.dtype))
    own = _own(True, z, z)
    with no_autocast(z):
        scores = -metric(z, z)
        if mask is not None:
            _check.mask(mask, scores)
        weights = relaxation(scores, k, temperature=temperature, mask=_allowed(mask, own, z.shape[-2]))
    same = labels.unsqueeze(-1) == labels.unsqueeze(-2)
    loss = 1 - (weights * same).sum(-1) / k
    return (loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()).to(embeddings.dtype)


def _check_vectors(queries: Tensor, keys: Tensor, values: Tensor | None) -> torch.Size:
    """Raise unless queries (…, q, d), keys (…, m, d) and values (…, m, e) go together; return the batch shape."""
    _check.floating("queries", queries)
    if queries.ndim < 2 or queries.shape[-1] == 0:
        raise ValueError(f"`queries` must have the shape (…, q, d) with d ≥ 1; got {tuple(queries.shape)}.")
    _check.vectors("keys", keys)
    _check.last_dim("queries", queries, keys.shape[-1])
    if values is not None:
        _check.vectors("values", values)
        if values.shape[-2] != keys.shape[-2]:
            got = (
                f"`values` must have the shape (…, {keys.shape[-2]}, e), a row for each key; got {tuple(values.shape)}."
            )
            raise ValueError(f"{got} For one number for each key, use `values.unsqueeze(-1)`.")
    for name, t in (("keys", keys), ("values", values)):
        if t is not None:
            _check.same_device(name, t, queries, "queries")
    parts = [t.shape[:-2] for t in (queries, keys, values) if t is not None]
    try:
        return torch.Size(torch.broadcast_shapes(*parts))
    except RuntimeError:
        got = ", ".join(str(tuple(part)) for part in parts)
        raise ValueError(f"`queries`, `keys` and `values` must have batch shapes that broadcast; got {got}.") from None


def _check_k(k: Number, most: int) -> None:
    if not isinstance(k, Tensor):
        _check.positive("k", k)
        if k > most:
            raise ValueError(f"`k` must satisfy 0 < k ≤ {most} (keys other than the query itself); got {k}.")


def _own(leave_one_out: bool | Tensor, q: Tensor, x: Tensor) -> Tensor | None:
    """Return which key each query is, (…, q), or None."""
    if isinstance(leave_one_out, Tensor):
        if leave_one_out.is_floating_point() or leave_one_out.dtype == torch.bool:
            raise TypeError(f"`leave_one_out` must be a bool or integers (…, q); got {leave_one_out.dtype}.")
        _check.broadcasts("leave_one_out", leave_one_out, tuple(q.shape[:-1]), "the queries")
        return leave_one_out.expand(q.shape[:-1])
    if not leave_one_out:
        return None
    if q.shape[-2] != x.shape[-2]:
        wrong = f"as many queries as keys, {x.shape[-2]}, if `leave_one_out` is True; got {q.shape[-2]}"
        raise ValueError(f"There must be {wrong}. Otherwise give the index of each query among the keys.")
    return torch.arange(q.shape[-2], device=q.device).expand(q.shape[:-1])


def _allowed(mask: Tensor | None, own: Tensor | None, m: int, indices: Tensor | None = None) -> Tensor | None:
    """Return which keys, or which candidates, each query may choose; None for all."""
    if mask is not None and indices is not None:
        mask = mask.gather(-1, indices)
    if own is None:
        return mask
    others = own.unsqueeze(-1) != (torch.arange(m, device=own.device) if indices is None else indices)
    return others if mask is None else others & mask


def _take(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows (…, q, c, d) of x (…, m, d) that indices (…, q, c) name."""
    many = x.shape[:-2].numel()
    if many > 1:
        first = torch.arange(many, device=x.device).view(*x.shape[:-2], 1, 1) * x.shape[-2]
        indices = indices + first
    return x.reshape(-1, x.shape[-1]).index_select(0, indices.flatten()).view(*indices.shape, x.shape[-1])
