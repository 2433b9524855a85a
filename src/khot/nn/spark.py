"""Spark layers: a low-rank predictor chooses about k neurons or keys, and inference reads those rows alone."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, softplus

from .. import _check
from .._sparse import weighted_rows
from .._torch import is_shape_only
from ..relaxations import statistical_logits, statistical_topk

__all__ = ["SparkAttention", "SparkCache", "SparkFFN"]

Activation = Callable[[Tensor], Tensor]
_FAST = (torch.float32, torch.float64)  # dtypes of the sparse path


def __dir__() -> list[str]:
    return __all__


class SparkFFN(nn.Module):
    """Apply a gated FFN in which about k of d_ff neurons are active: `V·(act(top_k(K₁ᵀq₁)) ⊙ (K₂ᵀq₂))`.

    q₁ is the first r entries of the input and q₂ the rest, so that a product with r inputs predicts which neurons are
    active; `top_k` is `khot.statistical_topk`. The layer has 2·d_model·d_ff parameters, as a gated FFN with two thirds
    of the neurons. Training is dense. Without gradient, on the CPU, `few` tokens or fewer are computed sparsely: of K₂
    and V only the rows of active neurons are read.

    Args:
        d_model, d_ff: inputs, and neurons.
        k: neurons to be active, 0 < k < d_ff; Spark Transformers take 8 %.
        r: inputs of the predictor, 0 < r < d_model; half of d_model if None.
        activation: of the gate, a function that is 0 at 0.
        exact, smooth: as for `khot.statistical_topk`.
        keep: give the activation the scores above θ as they are, not less θ: the form for converted models.
        project: let a learned r × d_model matrix make q₁, and q₂ be the whole input. Then there are
            2·d_model·d_ff + r·(d_model + d_ff) parameters; `from_gated` makes this form.
        few: how many tokens at most are computed sparsely.
        generator: of the initial weights.

    Examples:
        >>> ffn = khot.nn.SparkFFN(64, 256, 20, generator=torch.Generator().manual_seed(0)).eval()
        >>> x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
        >>> with torch.no_grad():
        ...     print(ffn(x).shape, int(ffn.active(x).sum()))
        torch.Size([1, 64]) 20
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        k: int,
        r: int | None = None,
        *,
        activation: Activation = gelu,
        exact: bool = False,
        smooth: float = 0.0,
        keep: bool = False,
        project: bool = False,
        few: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check.at_least("d_model", d_model, 2)
        _check.at_least("d_ff", d_ff, 2)
        r = d_model // 2 if r is None else r
        _inside("k", k, d_ff, "neurons")
        _inside("r", r, d_model + int(project), "inputs")
        _check.not_negative("smooth", smooth)
        _check.at_least("few", few, 0)
        _check.function("activation", activation)
        _check.generator(generator)
        at_zero = activation(torch.zeros(1, device="cpu"))
        if not is_shape_only(at_zero) and float(at_zero) != 0:
            raise ValueError("`activation` must be 0 at 0, because the neurons that are not chosen must stay silent.")
        self.k, self.r, self.few = int(k), int(r), int(few)
        self.activation, self.exact, self.smooth, self.keep = activation, exact, float(smooth), keep

        def weights(rows: int, columns: int, inputs: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) / math.sqrt(inputs))

        self.projection = weights(self.r, d_model, d_model) if project else None
        rest = d_model if project else d_model - self.r
        self.first = weights(d_ff, self.r, self.r)  # K₁, K₂ and V by neuron, so that a neuron is a row of each
        self.second = weights(d_ff, rest, rest)
        self.out = weights(d_ff, d_model, self.k)

    @classmethod
    def from_gated(
        cls, gate: Tensor, up: Tensor, down: Tensor, k: int, r: int, *, activation: Activation, **options: Any
    ) -> Self:
        """Return a layer from the weights of a gated FFN, `down·(act(gate·x) ⊙ (up·x))`.

        The gate becomes its best approximation of rank r, `gate ≈ K₁·P` by the singular values; up and down stay. With
        r = d_model only the neurons that are not chosen differ.

        Args:
            gate, up: (d_ff, d_model).
            down: (d_model, d_ff).
            k, r, activation: as for the layer.
            options: others of the layer; `keep` is True if it is not given.

        Examples:
            >>> gate, up, down = torch.randn(32, 8), torch.randn(32, 8), torch.randn(8, 32)
            >>> khot.nn.SparkFFN.from_gated(gate, up, down, 4, 6, activation=torch.relu)
            SparkFFN(d_model=8, d_ff=32, k=4, r=6)
        """
        if gate.ndim != 2 or up.shape != gate.shape or down.shape != gate.shape[::-1]:
            got = ", ".join(str(tuple(t.shape)) for t in (gate, up, down))
            raise ValueError(f"`gate`, `up` and `down` must be (d_ff, d_model) twice and (d_model, d_ff); got {got}.")
        options = {"activation": activation, "keep": True, **options, "project": True}
        with torch.device("meta"):
            layer = cls(gate.shape[1], len(gate), k, r, **options)
        layer = layer.to_empty(device=gate.device).to(gate.dtype)
        with torch.no_grad():
            wide = gate.detach().to(torch.promote_types(gate.dtype, torch.float32))
            u, s, v = torch.linalg.svd(wide, full_matrices=False)
            root = s[:r].sqrt()
            parts = {"first": u[:, :r] * root, "projection": root[:, None] * v[:r], "second": up, "out": down.mT}
            for name, value in parts.items():
                getattr(layer, name).copy_(value)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (…, d_model) to (…, d_model)."""
        q, rest, scores = self._scores(x)
        gates = statistical_topk(scores, self.k, exact=self.exact, smooth=self.smooth)
        if _is_sparse(self, x) and len(q) <= self.few:
            rows, columns = gates.nonzero(as_tuple=True)
            values = self.activation((scores if self.keep else gates)[rows, columns])
            values = values * _products(rest, self.second, rows, columns)
            y = weighted_rows(rows, columns, values, self.out, len(q))
        else:
            active = self.activation(torch.where(gates > 0, scores, 0.0) if self.keep else gates)
            y = (active * linear(rest, self.second)) @ self.out
        return y.view(x.shape)

    def active(self, x: Tensor) -> Tensor:
        """Return which neurons are active for tokens (…, d_model): booleans (…, d_ff)."""
        gates = statistical_topk(self._scores(x)[2], self.k, exact=self.exact)
        return (gates > 0).view(*x.shape[:-1], len(self.out))

    def _scores(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q₁ (tokens, r), q₂ and the scores of neurons (tokens, d_ff)."""
        _check.last_dim("x", x, self.out.shape[1])
        flat = x.reshape(-1, x.shape[-1])
        if self.projection is not None:
            q, rest = linear(flat, self.projection), flat
        else:
            q, rest = flat[:, : self.r], flat[:, self.r :]
        return q, rest, linear(q, self.first)

    def extra_repr(self) -> str:
        return f"d_model={self.out.shape[1]}, d_ff={len(self.out)}, k={self.k}, r={self.r}"


class SparkCache:
    """Keep the keys and values of `SparkAttention` while a sequence grows.

    Rows are appended in place; the room doubles when it is full, so that a step does not copy what is there.

    Examples:
        >>> layer, cache = khot.nn.SparkAttention(16, 2, 4, is_causal=True).eval(), khot.nn.SparkCache()
        >>> with torch.no_grad():
        ...     steps = [layer(token, cache=cache) for token in torch.randn(1, 5, 16).split(1, dim=1)]
        >>> len(cache)
        5
    """

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, *new: Tensor) -> list[Tensor]:
        """Append tensors (batch, heads, n, ·), and return all so far; views."""
        n = new[0].shape[2]
        if not self._rooms:
            self._rooms = [t.new_empty(*t.shape[:2], max(16, n), t.shape[3]) for t in new]
        if (got := self._rooms[0].shape[:2]) != new[0].shape[:2]:
            raise ValueError(f"`cache` holds (batch, heads) = {tuple(got)}; got {tuple(new[0].shape[:2])}.")
        end = self._length + n
        if end > self._rooms[0].shape[2]:
            larger = [t.new_empty(*t.shape[:2], max(end, 2 * t.shape[2]), t.shape[3]) for t in self._rooms]
            for to, at in zip(larger, self._rooms, strict=True):
                to[:, :, : self._length] = at[:, :, : self._length]
            self._rooms = larger
        for room, t in zip(self._rooms, new, strict=True):
            room[:, :, self._length : end] = t
        self._length = end
        return [room[:, :, :end] for room in self._rooms]


class SparkAttention(nn.Module):
    """Attend to about k keys for each query and head: `Vᵀ·(softmax(top_k(K₁q₁)) ⊙ softplus(K₂q₂))`.

    q₁ is the first r entries of a head's query and q₂ the rest; `top_k` is `khot.statistical_logits`. Training is
    dense. Without gradient, on the CPU, `few` queries or fewer are computed sparsely: of K₂ and V only the rows of
    chosen keys are read.

    Args:
        d_model, heads: the width, and the number of heads, which divides it.
        k: keys to attend to, > 0; a query with no more keys than that attends to all.
        r: entries of the predictor in each head, 0 < r < d_model/heads; half of them if None.
        is_causal: let a query see the keys up to its own place only.
        exact: as for `khot.statistical_logits`.
        few: how many queries at most are computed sparsely.

    Examples:
        >>> layer = khot.nn.SparkAttention(16, 2, 3)
        >>> layer(torch.randn(4, 10, 16)).shape
        torch.Size([4, 10, 16])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        k: int,
        r: int | None = None,
        *,
        is_causal: bool = False,
        exact: bool = False,
        few: int = 8,
    ) -> None:
        super().__init__()
        _check.at_least("heads", heads, 1)
        _check.at_least("d_model", d_model, 2 * heads)
        if d_model % heads:
            raise ValueError(f"`heads` must divide `d_model`, {d_model}; got {heads}.")
        width = d_model // heads
        r = width // 2 if r is None else r
        _check.at_least("k", k, 1)
        _inside("r", r, width, "entries of a head")
        _check.at_least("few", few, 0)
        self.heads, self.k, self.r, self.few = int(heads), int(k), int(r), int(few)
        self.is_causal, self.exact = is_causal, exact
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, cache: SparkCache | None = None) -> Tensor:
        """Map tokens (batch, n, d_model) to (batch, n, d_model).

        Args:
            x: tokens; with a cache, those that are new.
            mask: boolean (batch, keys); False is padding. Keys are all of the cache's and the new ones.
            cache: keeps keys and values, for decoding; without gradient.
        """
        _check.last_dim("x", x, self.out.in_features)
        if x.ndim != 3:
            raise ValueError(f"`x` must have the shape (batch, n, d_model); got {tuple(x.shape)}.")
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        first, second = k[..., : self.r], k[..., self.r :]
        if cache is not None:
            if torch.is_grad_enabled() and k.requires_grad:
                raise ValueError("`cache` is for decoding and keeps no gradient; use torch.no_grad(), or no cache.")
            first, second, v = cache.append(first, second, v)
        scores = q[..., : self.r] @ first.mT / math.sqrt(self.r)  # (batch, heads, queries, keys)
        weights = statistical_logits(scores, self.k, mask=self._allowed(scores, mask), exact=self.exact).softmax(-1)
        scale, rest = 1 / math.sqrt(max(q.shape[-1] - self.r, 1)), q[..., self.r :]
        if _is_sparse(self, x) and q.shape[2] <= self.few:
            y = self._gathered(weights, rest * scale, second, v)
        else:
            y = (weights * softplus(rest @ second.mT * scale)) @ v
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return which keys each query may see, (batch or 1, 1, queries or 1, keys)."""
        queries, keys = scores.shape[-2:]
        allowed = None
        if mask is not None:
            _check.mask(mask[:, None, None] if isinstance(mask, Tensor) and mask.ndim == 2 else mask, scores)
            allowed = mask[:, None, None]
        if self.is_causal and queries > 1:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
            allowed = seen[None, None] if allowed is None else allowed & seen
        return allowed

    def _gathered(self, weights: Tensor, rest: Tensor, second: Tensor, v: Tensor) -> Tensor:
        """Return Σ weight·softplus(q₂·k₂)·v over the chosen keys, (batch, heads, queries, width)."""
        rows, columns = weights.flatten(0, 2).nonzero(as_tuple=True)
        values = weights.flatten(0, 2)[rows, columns]
        batch_head = rows // weights.shape[2]
        table, step = _table(second)
        products = _products(rest.flatten(0, 2), table, rows, batch_head * step + columns)
        table, step = _table(v)
        places = batch_head * step + columns
        y = weighted_rows(rows, places, values * softplus(products), table, rest.shape[:3].numel())
        return y.view(*rest.shape[:3], v.shape[-1])

    def extra_repr(self) -> str:
        return f"heads={self.heads}, k={self.k}, r={self.r}, is_causal={self.is_causal}"


def _table(t: Tensor) -> tuple[Tensor, int]:
    """Return (batch, heads, n, d) as rows (·, d), and how many each head has; a cache's room is not copied."""
    (batch, heads, n, d), (outer, head, row, one) = t.shape, t.stride()
    is_room = (row, one) == (d, 1) and head % d == 0 and head >= n * d and (batch == 1 or outer == heads * head)
    if not is_room:
        return t.reshape(-1, d), n
    step = head // d
    return t.as_strided(((batch * heads - 1) * step + n, d), (d, 1)), step


def _products(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ⟨x[row], weight[column]⟩ for each pair, (entries,)."""
    chosen = weight.index_select(0, columns)
    return chosen @ x[0] if len(x) == 1 else torch.linalg.vecdot(chosen, x.index_select(0, rows))


def _is_sparse(module: nn.Module, x: Tensor) -> bool:
    """Return whether chosen rows alone may be read: no gradient is wanted, and torch can on this device and dtype."""
    if x.device.type != "cpu" or x.dtype not in _FAST or torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in module.parameters()))


def _inside(name: str, value: int, bound: int, what: str) -> None:
    """Raise unless 0 < value < bound."""
    _check.integer(name, value)
    if not 0 < value < bound:
        raise ValueError(f"`{name}` must satisfy 0 < {name} < {bound} ({what}); got {value}.")
