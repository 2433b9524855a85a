"""Attention whose weights are σ_k: each key counts at most once, and k keys' worth of weight are shared out."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import _check
from ._precision import KeepsPrecision, hold, shown
from .selectors import Selector, hard, sampled, soft

Number = float | Tensor


class SigmoidTopKAttention(KeepsPrecision):
    """Attend by k-hot weights in the place of softmax, with several heads: `σ_k(q·kᵀ/(√d T)) v`, divided by k or not.

    Weights are in [0, 1] and sum to k: as T → 0 the k best keys have the weight 1. With `normalize` the output is a
    mean of the values, and no key has more than 1/k of it; as k → 0 that is softmax attention. A query with fewer than
    k keys uses all of them, and one with none gets 0 (before the last linear map).

    Args:
        embed_dim: of queries, keys, values and output.
        num_heads: divides `embed_dim`.
        k: how many keys for each query, > 0; a number, or for each head a tensor (num_heads,), which may be a Parameter
            (learned).
        kv_heads: heads of keys and values, a divisor of `num_heads`; each serves a group. All if None.
        selector: of `khot.nn.selectors`: `soft` is σ_k, `straight_through` and `hard` choose the k best keys (k is
            rounded), and `sampled` draws k keys with the probabilities σ_k in training, and takes the best in
            evaluation.
        temperature: T > 0; a buffer that a `Schedule` may change, or a Parameter (learned).
        normalize: divide by k.
        bias: whether the linear maps have one.

    Examples:
        >>> layer = khot.nn.SigmoidTopKAttention(8, 2, k=3)
        >>> output, weights = layer(torch.randn(4, 10, 8))
        >>> output.shape, weights.shape, weights.sum(-1).allclose(torch.tensor(3.0))
        (torch.Size([4, 10, 8]), torch.Size([4, 2, 10, 10]), True)
    """

    k: Number
    temperature: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        k: Number,
        *,
        kv_heads: int | None = None,
        selector: Selector | Callable[..., Tensor] = soft,
        temperature: Number = 1.0,
        normalize: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        _check.at_least("embed_dim", embed_dim, 1)
        _check.at_least("num_heads", num_heads, 1)
        _check.positive("k", k)
        _check.positive("temperature", temperature)
        _check.function("selector", selector)
        kv_heads = num_heads if kv_heads is None else kv_heads
        _check.at_least("kv_heads", kv_heads, 1)
        if embed_dim % num_heads or num_heads % kv_heads:
            want = "`embed_dim` must be a multiple of `num_heads`, and that of `kv_heads`"
            raise ValueError(f"{want}; got {embed_dim}, {num_heads} and {kv_heads}.")
        if isinstance(k, Tensor):
            _check.broadcasts("k", k, (num_heads,), "the heads")
        hold(self, k, temperature)
        self.num_heads, self.kv_heads = int(num_heads), int(kv_heads)
        self.selector, self.normalize = selector, normalize
        width = embed_dim // num_heads * kv_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, width, bias=bias)
        self.v_proj = nn.Linear(embed_dim, width, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from each query to k keys.

        Args:
            query: (…, queries, embed_dim).
            key: (…, n, embed_dim); the queries if None.
            value: (…, n, embed_dim); the keys if None.
            mask: boolean, broadcasts to (…, heads, queries, n); True = may be attended to. A padding mask (batch, n) is
                given as `mask[:, None, None]`, a causal one as `torch.ones(n, n).tril().bool()`.
            generator: where samples come from; torch's own if None.

        Returns:
            The output (…, queries, embed_dim), and the weights (…, heads, queries, n) before a division by k.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check.scores(x, -1, name)
            _check.last_dim(name, x, self.q_proj.in_features)
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(-2, -3)  # (…, heads, length, d)
            for layer, x, heads in (
                (self.q_proj, query, self.num_heads),
                (self.k_proj, key, self.kv_heads),
                (self.v_proj, value, self.kv_heads),
            )
        )
        if self.kv_heads < self.num_heads:
            k, v = (t.repeat_interleave(self.num_heads // self.kv_heads, -3) for t in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        count: Number = scores.shape[-1]
        if mask is not None:
            _check.mask(mask, scores)
            scores = scores.masked_fill(~mask, -torch.inf)
            count = mask.sum(-1).expand(scores.shape[:-1])
        wanted = torch.as_tensor(self.k, dtype=torch.float64, device=scores.device).clamp(min=0)
        wanted = wanted.expand(self.num_heads).unsqueeze(-1).expand(scores.shape[:-1])
        wanted = torch.minimum(wanted, torch.as_tensor(count, dtype=torch.float64, device=scores.device))
        select = hard if self.selector is sampled and not self.training else self.selector
        weights = select(scores, wanted, temperature=self.temperature, generator=generator)
        shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) if self.normalize else weights
        return self.out_proj((shares.to(v.dtype) @ v).transpose(-2, -3).flatten(-2)), weights

    def extra_repr(self) -> str:
        selector = getattr(self.selector, "__name__", repr(self.selector))
        text = f"k={shown(self.k)}, heads={self.num_heads}, kv_heads={self.kv_heads}, selector={selector}"
        return f"{text}, temperature={shown(self.temperature)}, normalize={self.normalize}"
