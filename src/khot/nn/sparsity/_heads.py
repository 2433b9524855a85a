"""The heads of attention: those of modules with a layer for each projection, and of `torch.nn.MultiheadAttention`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._structure import set_sizes, take
from ._units import Group, Layers, Masked, Unit, own_weights


def heads(inputs: Sequence[str] = ("query", "key", "value"), *, output: str = "output", count: str = "heads") -> Unit:
    """Return a unit that chooses among the heads of attention modules: rows of the inputs and columns of the output.

    It takes every `torch.nn.MultiheadAttention`, and every module that has Linear layers of these names and the number
    of its heads as an attribute. At the end heads are removed, and the attribute becomes the number that is left; the
    module should compute the width of a head from the size of its layers. A MultiheadAttention becomes a
    `PrunedAttention`. Every module keeps a head at least.

    Args:
        inputs: the names of the layers that project to heads.
        output: the name of the layer after them.
        count: the name of the attribute.
    """
    return _Heads(tuple(inputs), output, count)


class PrunedAttention(nn.MultiheadAttention):
    """Attend as `torch.nn.MultiheadAttention` does, with fewer heads than the width has room for.

    `Sparsifier.finalize` makes it. It is called in the same way. The attention weights that it returns are those of the
    heads that are left.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, like query, and the attention weights or None; arguments as for MultiheadAttention."""
        if is_causal and attn_mask is None:
            raise ValueError("`attn_mask` must be given if `is_causal` is, which only says what it is; got None.")
        given, is_single = (query, key, value), query.ndim == 2
        if not self.batch_first or is_single:
            given = tuple(t.unsqueeze(0) if is_single else t.transpose(0, 1) for t in given)  # type: ignore[assignment]
        own = list(own_weights(self).values())
        parts = own[0].chunk(3) if len(own) == 1 else own
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(t, w, b).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for t, w, b in zip(given, parts, biases, strict=True)
        )  # (batch, heads, length, width)
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask, q.dtype)
            mask = mask if mask.ndim == 2 else mask.view(len(q), self.num_heads, *mask.shape[1:])
        if key_padding_mask is not None:
            hidden = _added(key_padding_mask, q.dtype).view(len(q), 1, 1, -1)
            mask = hidden if mask is None else mask + hidden
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout)
            seen = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if is_single else weights
        else:
            seen = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        result = self.out_proj(seen.transpose(1, 2).flatten(2))
        return result.squeeze(0) if is_single else result if self.batch_first else result.transpose(0, 1), weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores: −inf where a bool one says that a place is not seen."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


# ── the unit ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class _Heads:
    inputs: tuple[str, ...]
    output: str
    count: str

    def __call__(self, model: nn.Module, layers: Layers) -> list[Group]:
        names = {id(layer): name for name, layer in layers.items()}
        encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
        groups = []
        for path, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                if id(module) in names and id(module.out_proj) in names:
                    groups.append(_packed(path, module, names[id(module.out_proj)], encoders))
                continue
            children = dict(module.named_children())
            parts = [children[key] for key in (*self.inputs, self.output) if id(children.get(key)) in names]
            if isinstance(getattr(module, self.count, None), int) and len(parts) == len(self.inputs) + 1:
                groups.append(self._group(path, module, [(names[id(part)], part) for part in parts]))
        if not groups:
            what = f"Linear layers {', '.join(map(repr, (*self.inputs, self.output)))} and a number {self.count!r}"
            raise ValueError(
                f"The model must have a MultiheadAttention, or a module with {what}, none of it excluded; it has none."
            )
        return groups

    def _group(self, path: str, module: nn.Module, parts: list[tuple[str, nn.Module]]) -> Group:
        heads = getattr(module, self.count)
        *inputs, (name, last) = parts
        for own, layer in parts:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            size = weight.shape[1 if layer is last else 0]
            if size % heads:
                raise ValueError(f"The width of {own!r} must be a multiple of the {heads} heads; got {size}.")
        found = [
            (Masked(tensor, [(own, layer, key)]), 0, 1)
            for own, layer in inputs
            for key in ("weight", "bias")
            if (tensor := getattr(layer, key)) is not None
        ]
        found.append((Masked(last.weight, [(name, last, "weight")]), 1, 1))  # type: ignore[arg-type]
        return Attention(module, self.count, found).group(path)


def _packed(path: str, module: nn.MultiheadAttention, output: str, encoders: list[nn.TransformerEncoder]) -> Group:
    if type(module) not in (nn.MultiheadAttention, PrunedAttention):
        kind = f"{type(module).__name__}, a kind of MultiheadAttention of its own"
    elif module.bias_k is not None or module.add_zero_attn:
        kind = "MultiheadAttention with `add_bias_kv` or `add_zero_attn`"
    else:
        own = own_weights(module)
        found = [(Masked(t, [(path, module, key)]), 0, 3 if len(own) == 1 else 1) for key, t in own.items()]
        if module.in_proj_bias is not None:
            bias: nn.Parameter = module.in_proj_bias
            found.append((Masked(bias, [(path, module, "in_proj_bias")]), 0, 3))
        last: nn.Parameter = module.out_proj.weight  # type: ignore[assignment]
        found.append((Masked(last, [(output, module.out_proj, "weight")]), 1, 1))
        return Attention(module, "num_heads", found, [e for e in encoders if module in e.modules()]).group(path)
    raise ValueError(f"The heads of {path!r} ({kind}) cannot be removed. Leave it out with `exclude`.")


@dataclass
class Attention:
    """Tensors whose rows or columns are heads; an item is a range of them in each. It is made smaller at the end."""

    module: nn.Module
    count: str
    found: list[tuple[Masked, int, int]]  # each with the dim of the heads, and how many times they follow each other
    encoders: Sequence[nn.TransformerEncoder] = ()

    def group(self, path: str) -> Group:
        """Return the heads as a group."""
        self.heads = int(getattr(self.module, self.count))
        self.shapes = [masked.tensor.shape for masked, _, _ in self.found]
        return Group(
            [masked for masked, _, _ in self.found], self.heads, self.reduce, self.spread, structure=self, name=path
        )

    def reduce(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return sums over heads; those with one dim, biases, have no score."""
        sums = [
            t.sum(1 - dim).view(copies, self.heads, -1).sum((0, 2))
            for t, (_, dim, copies) in zip(tensors, self.found, strict=True)
            if t.ndim > 1
        ]
        return torch.stack(sums).sum(0)

    def _wide(self, items: Tensor) -> list[Tensor]:
        """Return what is said of heads for each row or column of the tensors."""
        parts = zip(self.shapes, self.found, strict=True)
        return [
            items.repeat_interleave(shape[dim] // (self.heads * copies)).repeat(copies)
            for shape, (_, dim, copies) in parts
        ]

    def spread(self, items: Tensor) -> list[Tensor]:
        """Return a mask for each tensor."""
        parts = zip(self._wide(items), self.shapes, self.found, strict=True)
        return [wide if len(shape) == 1 else wide.unsqueeze(1 - dim) for wide, shape, (_, dim, _) in parts]

    def remove(self, kept: Tensor) -> None:
        """Make the layers smaller; kept (heads,) bool."""
        for wide, (masked, dim, _) in zip(self._wide(kept), self.found, strict=True):
            ((_, module, key),) = masked.places
            index = wide.nonzero().flatten()
            take(module, key, dim, index)
            if key == "weight":
                set_sizes(module, len(index), "in_features" if dim else "out_features")
        setattr(self.module, self.count, int(kept.sum()))
        if isinstance(self.module, nn.MultiheadAttention):
            self.module.__class__ = PrunedAttention
            self.module._qkv_same_embed_dim = False  # no fast path, which assumes that heads fill the width
            for encoder in self.encoders:
                encoder.use_nested_tensor = False
