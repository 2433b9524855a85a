"""What `khot.relaxations` asks for if a row is in parts: solves, corrected values, and sums over whole rows."""

import torch
from torch import Tensor

from .. import _shape
from .._math import cdfs
from .._math.across import Over
from .._math.cdfs import Cdf
from .._shape import Costs, Group
from . import _ops
from ._layout import names_of


def topk(rows: _shape.Rows, cdf: Cdf, group: Group) -> Tensor:
    """Return this process's part of y = F((x − τ)/T), differentiable in x, k and T; as `ops.topk`."""
    k, temperature = _shape.per_row(rows.k, rows.x), _shape.per_row(rows.temperature, rows.x)
    return _ops.topk(rows.x, k, temperature, rows.mask, cdf.name, names_of(group))


def margin(rows: _shape.Rows, costs: Costs, cdf: Cdf, group: Group) -> Tensor:
    """Return this process's part of z = (x − τ)/T, differentiable in x, k, T and costs; as `ops.margin`."""
    k, temperature = _shape.per_row(rows.k, rows.x), _shape.per_row(rows.temperature, rows.x)
    return _ops.margin(rows.x, k, temperature, rows.mask, costs, cdf.name, names_of(group))


def smooth_value(cdf: Cdf, z: Tensor, k: Tensor, costs: Costs, group: Group) -> Tensor:
    """Return this process's part of y = F(z), as `_math.threshold.smooth_value`."""
    y = cdfs.value(cdf, z)
    exact = _ops.value(z.detach(), k.detach(), None if costs is None else costs.detach(), cdf.name, names_of(group))
    return y + (exact - y.detach())


def hard_topk(rows: _shape.Rows, group: Group) -> Tensor:
    """Return this process's part of hard top-k; as `ops.hard_topk`."""
    return _ops.hard_topk(rows.x, _shape.per_row(rows.k, rows.x), rows.mask, names_of(group))


def total(t: Tensor, group: Group) -> Tensor:
    """Return Σ over the processes of the group, which all of them hold alike; differentiable."""
    return _ops.total(t, names_of(group))


def spread(t: Tensor, group: Group) -> Tensor:
    """Return a tensor that all processes hold alike, for use by each on its own part; differentiable."""
    return _ops.spread(t, names_of(group))


def of_best_part(values: Tensor, rank: Tensor, group: Group) -> Tensor:
    """Return the values (…) of the process with the least `rank` (…), held alike by all; differentiable."""
    names = names_of(group)
    over = Over(names)
    is_mine = _ops.gather(rank.detach(), names, over.size).argmin(0) == over.rank
    return _ops.total(torch.where(is_mine, values, 0.0), names)
