"""The ops on rows in parts, and their derivatives.

A number that all processes hold alike (k, T, a sum over the row) has a cotangent that all hold alike: the whole one.
Two ops keep that so: `total` sums the processes' numbers into one that all hold, and `spread` hands such a number to
each process's own part. Each is the derivative of the other.

Groups cross the border by name, as cdfs do, so `torch.compile` and `torch.export` see strings.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._math import across, cdfs
from .._math.across import Over
from .._math.cdfs import Cdf, cdf_by_name, row_sum
from .._shape import Costs, Mask
from ..ops import sums_at, value_at
from ..ops._library import define, like

Groups = list[str]
KERNELS = across.Passes(sums_at, value_at)


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        with _torch.next_level():
            return total(t, groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return spread(g, ctx.groups), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        with _torch.next_level():
            return spread(t, groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return total(g, ctx.groups), None


total = define("total", "(Tensor t, str[] groups) -> Tensor", lambda t, groups: Over(groups).sum(t), like, _Total)
spread = define("spread", "(Tensor t, str[] groups) -> Tensor", lambda t, groups: t.clone(), like, _Spread)
largest = define("largest", "(Tensor t, str[] groups) -> Tensor", lambda t, groups: Over(groups).max(t), like)
gather = define(
    "gather_parts",
    "(Tensor t, str[] groups, SymInt parts) -> Tensor",
    lambda t, groups, parts: Over(groups).gather(t),
    lambda t, groups, parts: t.new_empty((parts, *t.shape)),
)


def _totals(groups: Groups, *terms: Tensor) -> list[Tensor]:
    """Return the sums over whole rows of tensors (…, m), as (…, 1) float64, in one message."""
    return list(total(torch.cat([row_sum(t) for t in terms], -1), groups).split(1, -1))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a/b, and 0 for a saturated row."""
    is_saturated = ~(b >= torch.finfo(torch.float32).tiny ** 8)
    return torch.where(is_saturated & ~b.isnan(), 0.0, a / torch.where(is_saturated & ~b.isnan(), 1.0, b))


# ── derivatives: the formulas of `_math.implicit`, with sums over ranks ──────────────────────────────────────────────
class _TopK(torch.autograd.Function):
    """Differentiate (x, k, T, mask, cdf, groups) → y; as that of `khot::topk`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, temperature: Tensor, mask: Mask, cdf: str, groups: Groups) -> Tensor:
        ctx.cdf, ctx.groups, ctx.needs = cdf_by_name(cdf), groups, ctx.needs_input_grad
        with _torch.next_level():
            y = topk(x, k, temperature, mask, cdf, groups)
        ctx.save_for_backward(y, temperature, *((x, k, mask) if ctx.needs[1] else ()))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, temperature, *rest = ctx.saved_tensors
        cdf, groups = ctx.cdf, ctx.groups
        is_plain = not torch.is_grad_enabled() and _torch.forward_level(torch.autograd.forward_ad) < 0
        if is_plain and not ctx.needs[1] and not ctx.needs[2]:
            return pull(g, y, temperature, cdf.name, groups), None, None, None, None, None
        if rest:
            x, k, mask = rest
            z = margin(x, k, temperature, mask, None, cdf.name, groups)
            z, v, weight, scale = _at_margin(z, None, cdf, groups)
        else:
            is_open = (y > 0) & (y < 1)
            inner = torch.where(is_open, y, 0.5)
            z, v = cdf.quantile(inner), torch.where(is_open, cdf.slope_at(inner), 0.0 * y)
            weight, scale = v, torch.ones_like(temperature)[..., None]
        mass, pulled, turned, both = _totals(groups, weight, weight * g, weight * z, weight * g * z)
        mean = _ratio(pulled, mass)
        heat = spread(temperature, groups)[..., None].to(y.dtype)
        dx = v * (g - spread(mean, groups).to(y.dtype)) / heat
        dt = -(scale * (both - mean * turned)).squeeze(-1) / temperature
        return dx, mean.squeeze(-1) if rest else None, dt if ctx.needs[2] else None, None, None, None


class _Margin(torch.autograd.Function):
    """Differentiate (x, k, T, mask, costs, cdf, groups) → z; as that of `khot::margin`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, temperature: Tensor, mask: Mask, costs: Costs, cdf: str, groups: Groups
    ) -> Tensor:
        ctx.cdf, ctx.groups = cdf_by_name(cdf), groups
        with _torch.next_level():
            z = margin(x, k, temperature, mask, costs, cdf, groups)
        ctx.save_for_backward(z, temperature, costs)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, temperature, costs = ctx.saved_tensors
        groups = ctx.groups
        g = torch.where(z.isinf(), 0.0, g)
        finite, _, weight, scale = _at_margin(z, costs, ctx.cdf, groups)
        mass, pulled, turned, both = _totals(groups, weight, g, weight * finite, g * finite)
        heat = spread(temperature, groups)[..., None].to(z.dtype)
        share = _ratio(pulled, mass)
        dx = (g - weight * spread(share, groups).to(z.dtype)) / heat
        dk = _ratio(pulled, mass * scale).squeeze(-1)
        dt = -(both - share * turned).squeeze(-1) / temperature
        dc = None if costs is None else -spread(dk, groups)[..., None].to(z.dtype) * cdfs.value(ctx.cdf, z)
        return dx, dk, dt, None, dc, None, None


def _at_margin(z: Tensor, costs: Costs, cdf: Cdf, groups: Groups) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return finite margins, v = F′, weights that are proportional to c·v, and (…, 1) c·v divided by them."""
    infinite = z.isinf()
    finite = torch.where(infinite, cdf.center, z)
    if cdf.log_density is None:
        v = torch.where(infinite, 0.0, cdf.density(finite))
        return finite, v, v if costs is None else costs * v, torch.ones_like(z[..., :1]).new_ones((*z.shape[:-1], 1))
    log_v = cdf.log_density(finite)
    v = torch.where(infinite, 0.0, log_v.exp())
    log_w = torch.where(infinite, -torch.inf, log_v if costs is None else costs.log() + log_v)
    top = torch.cat((log_w.detach(), torch.full_like(z[..., :0].sum(-1, keepdim=True), -torch.inf)), -1).amax(-1)
    top = largest(top.to(torch.float64), groups)[..., None]
    top = torch.where(top.isinf(), 0.0, top)
    weight = (log_w - top.to(z.dtype)).exp()
    return finite, v, torch.where(infinite, 0.0, weight), top.exp()


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _pull(g: Tensor, y: Tensor, temperature: Tensor, cdf: str, groups: Groups) -> Tensor:
    law = cdf_by_name(cdf)
    assert law.slope_at is not None
    is_open = (y > 0) & (y < 1)
    v = torch.where(is_open, law.slope_at(torch.where(is_open, y, 0.5)), 0.0 * y)
    mass, pulled = Over(groups).sum(torch.cat((row_sum(v), row_sum(v * g)), -1)).split(1, -1)
    return (v * (g - _ratio(pulled, mass).to(y.dtype)) / temperature[..., None].to(y.dtype)).contiguous()


# As `khot::topk`, `khot::margin`, `khot::topk_pull` and `khot::hard_topk`, for this process's part (…, m) of each row.
topk = define(
    "topk_across",
    "(Tensor x, Tensor k, Tensor temperature, Tensor? mask, str cdf, str[] groups) -> Tensor",
    lambda x, k, t, mask, cdf, groups: across.topk(x, k, t, mask, cdf_by_name(cdf), Over(groups, KERNELS)),
    like,
    _TopK,
)
margin = define(
    "margin_across",
    "(Tensor x, Tensor k, Tensor temperature, Tensor? mask, Tensor? costs, str cdf, str[] groups) -> Tensor",
    lambda x, k, t, mask, costs, cdf, groups: across.margin(
        x, k, t, mask, costs, cdf_by_name(cdf), Over(groups, KERNELS)
    ),
    like,
    _Margin,
)
value = define(
    "value_across",
    "(Tensor z, Tensor k, Tensor? costs, str cdf, str[] groups) -> Tensor",
    lambda z, k, costs, cdf, groups: across.value(cdf_by_name(cdf), z, k, costs, Over(groups)),
    like,
)
pull = define(
    "pull_across",
    "(Tensor g, Tensor y, Tensor temperature, str cdf, str[] groups) -> Tensor",
    _pull,
    lambda g, y, *_: like(y),
)
hard_topk = define(
    "hard_topk_across",
    "(Tensor x, Tensor k, Tensor? mask, str[] groups) -> Tensor",
    lambda x, k, mask, groups: across.k_hot(x, k, mask, Over(groups)),
    like,
)
