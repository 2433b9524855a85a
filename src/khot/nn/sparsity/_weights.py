"""Masked weights: the product of weights and masks, with a gradient to both, once for each step of training.

The product is computed when masks are, and every forward pass until the next step uses it. Its gradient graph survives
any number of backward passes, so a model may be called several times between two steps. If weights change before a
backward pass, autograd's own check of versions raises.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ... import _check, ops
from ..._math.cdfs import SIGMOID
from ..._torch import version, was_changed

CHUNK = 2**18  # entries that are computed at once: they stay in the cache


class Answer(NamedTuple):
    """Hold the masks of tensors, one each, that broadcast to them."""

    masks: Sequence[Tensor]  # constants
    sources: Sequence[Tensor]  # what the gradient of the masks flows through
    flows: Sequence[Tensor | None]  # what the gradient of the weights is multiplied by; None for 1


class MaskedWeights(torch.autograd.Function):
    """Multiply weights by the masks that `answer` makes of leaves: first the weights, then learned scores."""

    @staticmethod
    def forward(
        ctx: Any, answer: Callable[..., Answer], keep: Callable[..., None] | None, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with torch.enable_grad():
            ctx.answer = answer(*ctx.leaves)
        ctx.keep = keep
        ctx.versions = [version(leaf) for leaf in ctx.leaves]
        ctx.set_materialize_grads(False)
        masks = (mask.to(w.dtype) for w, mask in zip(leaves, ctx.answer.masks, strict=False))
        return tuple(weight.detach() * mask for weight, mask in zip(leaves, masks, strict=False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(map(was_changed, ctx.leaves, ctx.versions)):
            raise RuntimeError("Weights must not change between forward and backward; call `step()` after backward.")
        if ctx.keep is not None:
            ctx.keep(gradients)
        return (None, None, *pulled_back(ctx.answer, ctx.leaves, gradients))


def pulled_back(answer: Answer, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of leaves, from those of the products of weights and masks."""
    found: list[Tensor | None] = [None] * len(leaves)
    sources, cotangents = [], []
    for i, (g, source, flow) in enumerate(zip(gradients, answer.sources, answer.flows, strict=True)):
        if g is None:
            continue
        found[i] = g if flow is None else g * flow.to(g.dtype)
        if source.requires_grad:
            sources.append(source)
            cotangents.append((g * leaves[i].detach()).sum_to_size(source.shape).to(source.dtype))
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    if sources:
        few = [leaves[i] for i in wanted]
        parts = torch.autograd.grad(sources, few, cotangents, retain_graph=True, allow_unused=True)
        for i, part in zip(wanted, parts, strict=True):
            if part is not None:
                before = found[i]
                found[i] = part if before is None else part + before
    return [g if i in wanted else None for i, g in enumerate(found)]


class Memory:
    """Keep large tensors that every step uses again: new memory costs more than the arithmetic."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        count = sum(t.numel() for t in tensors)
        self.scores, self.soft = (tensors[0].new_empty(count) for _ in range(2))
        self.products = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        self.sizes = [t.numel() for t in tensors]
        self.values = self.soft  # the mask in force
        self.uses = 0

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Let the scores be the magnitudes of tensors."""
        for w, x in zip(tensors, self.scores.split(self.sizes), strict=True):
            torch.abs(w.detach().reshape(-1), out=x)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors still have the dtype and sizes of the memory."""
        is_same = self.sizes == [t.numel() for t in tensors]
        return is_same and all(t.dtype == self.scores.dtype and t.device == self.scores.device for t in tensors)


class FusedMagnitude(torch.autograd.Function):
    """Compute what `MaskedWeights` does for single weights with the score |w| and equal costs, in few passes.

    With m = σ_k(|w|/T), h = g·w and v = m(1 − m):  dw = g·flow + sgn(w)·v/T·(h − Σv·h/Σv). |w| is in the memory.
    """

    @staticmethod
    def forward(
        ctx: Any, memory: Memory, k: float, heat: float, hard: bool, direct: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        memory.uses += 1
        ops.topk_into(memory.soft, memory.scores, k, heat, SIGMOID)
        values = ops.hard_topk(memory.scores, float(int(k)), None) if hard else memory.soft
        for w, m, out in zip(weights, values.split(memory.sizes), memory.products, strict=True):
            torch.mul(w.detach(), m.view(w.shape), out=out)
        memory.values = values
        ctx.memory, ctx.uses, ctx.heat, ctx.weights = memory, memory.uses, heat, [w.detach() for w in weights]
        ctx.versions = [version(w) for w in ctx.weights]
        ctx.flow = (values, memory.soft, None)[direct]
        ctx.set_materialize_grads(False)
        return tuple(product.detach() for product in memory.products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        memory = ctx.memory
        if ctx.uses != memory.uses or any(map(was_changed, ctx.weights, ctx.versions)):
            raise RuntimeError("Weights must not change between forward and backward; call `step()` after backward.")
        parts = [
            (w.reshape(-1), None if g is None else g.reshape(-1), m, flow)
            for w, g, m, flow in zip(
                ctx.weights,
                gradients,
                memory.soft.split(memory.sizes),
                [None] * len(gradients) if ctx.flow is None else ctx.flow.split(memory.sizes),
                strict=True,
            )
        ]
        mean = _mean(parts)
        return (None,) * 5 + tuple(
            _pulled(*part, mean, ctx.heat).view(w.shape) for part, w in zip(parts, ctx.weights, strict=True)
        )


def _mean(parts: list[tuple[Any, ...]]) -> float:
    """Return Σv·g·w/Σv, in float64."""
    top, bottom = [], []
    for w, g, m, _ in parts:
        v = torch.empty(min(CHUNK, len(w)), dtype=w.dtype)
        pieces = zip(w.split(CHUNK), m.split(CHUNK), w.split(CHUNK) if g is None else g.split(CHUNK), strict=True)
        for weight, mask, gradient in pieces:
            slope = torch.addcmul(mask, mask, mask, value=-1, out=v[: len(mask)])
            bottom.append(slope.sum())
            if g is not None:
                top.append(slope.mul_(gradient).dot(weight))
    total = float(torch.stack(bottom).sum(dtype=torch.float64))
    return float(torch.stack(top).sum(dtype=torch.float64)) / total if total and top else 0.0


def _pulled(w: Tensor, g: Tensor | None, m: Tensor, flow: Tensor | None, mean: float, heat: float) -> Tensor:
    """Return g·flow + sgn(w)·v/T·(g·w − mean) for one tensor, (entries,)."""
    out = torch.empty_like(w)
    v, rest = (torch.empty(min(CHUNK, len(w)), dtype=w.dtype) for _ in range(2))
    for start in range(0, len(w), CHUNK):
        here = slice(start, start + CHUNK)
        mask, target = m[here], out[here]
        slope, part = v[: len(mask)], rest[: len(mask)]
        torch.addcmul(mask, mask, mask, value=-1, out=slope).mul_(torch.sgn(w[here], out=part))
        if g is None:
            torch.mul(slope, -mean / heat, out=target)
            continue
        torch.mul(g[here], w[here], out=part).sub_(mean)
        if flow is None:
            target.copy_(g[here])
        else:
            torch.mul(g[here], flow[here], out=target)
        target.addcmul_(slope, part, value=1 / heat)
    return out


class _Product(torch.autograd.Function):
    """Multiply weights by a constant mask; the gradient is that of the product times `flow`, or all of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, flow: Tensor | None) -> Tensor:
        ctx.save_for_backward(flow)
        return weight * mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (flow,) = ctx.saved_tensors
        return g if flow is None else g * flow, None, None


def _whole(mask: Tensor, weight: Tensor) -> Tensor:
    """Return a mask for a whole weight: FSDP2 gathers weights for the time that they are used, and so are masks."""
    if _check.is_dtensor(mask) and not _check.is_dtensor(weight):
        mask = mask.full_tensor()  # type: ignore[attr-defined]
    return mask.to(weight.dtype)


class Owner(Protocol):
    """Say what a mask asks its Sparsifier for."""

    @property
    def wants_gradient(self) -> bool:
        """Return whether the gradient of this step is needed for the next masks."""

    def refresh(self) -> None:
        """Compute the masks for the weights of now."""

    def refresh_kept(self) -> None:
        """Compute the hard masks that evaluation uses, if they are out of date."""

    def probs(self, mask: "Mask") -> Tensor:
        """Return the soft mask that a mask is drawn with."""


class Mask(nn.Module):
    """Parametrize a tensor: multiply by the mask of the sparsifier, in evaluation by the hard one."""

    def __init__(self, owner: Owner, tensor: Tensor) -> None:
        super().__init__()
        self.owner = owner
        self.mask = self.kept = torch.ones((), dtype=tensor.dtype, device=tensor.device)
        self.product: Tensor | None = None  # weight · mask of this step, with its graph
        self.version: Any = -1  # of the weight in that product
        self.flow: Tensor | None = None
        self.is_plain = True  # whether the gradient of a weight is that of the product
        self.gradient: Tensor | None = None

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return weight * _whole(self.kept, weight)
        if self.product is not None:
            if not torch.compiler.is_compiling() and version(weight) != self.version:
                self.owner.refresh()  # and not only before the whole model is called
            return self.product
        mask = _whole(self.mask, weight)
        if self.is_plain:
            result = weight * mask
        else:
            result = _Product.apply(weight, mask, None if self.flow is None else _whole(self.flow, weight))
        if self.owner.wants_gradient and result.requires_grad:
            result.register_hook(self.keep)
        return result

    def probs(self) -> Tensor:
        """Return the soft mask that this one is drawn with, differentiable in scores."""
        return self.owner.probs(self)

    def keep(self, gradient: Tensor | None) -> None:
        """Remember the size of the gradient of the product."""
        self.gradient = None if gradient is None else gradient.detach().abs()

    def train(self, mode: bool = True) -> "Mask":
        super().train(mode)
        if not mode:
            self.owner.refresh_kept()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Mask":
        """Move the masks with the model; the next forward pass computes them anew, unless they are fixed."""
        super()._apply(fn, recurse)
        self.mask, self.kept, self.product = fn(self.mask.detach()), fn(self.kept), None
        self.flow = None if self.flow is None else fn(self.flow)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copy masks as constants: a tensor with a graph cannot be copied. The next step computes them anew."""
        return {**self.__dict__, "mask": self.mask.detach(), "product": None, "gradient": None}
