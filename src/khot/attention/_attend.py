"""Attention to as few keys as a certificate allows, within ε of attention to all of them."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import _check, _shape
from .._math import select, tails
from .._shape import Mask, PerRow
from .._torch import no_autocast, require_values
from ._cells import Group, KeyCells
from ._tails import check_epsilon, tail_mass

CHUNK = 2**22  # scores that are sorted, or numbers of keys that are gathered, at once
Rule = Callable[..., Tensor]


class Certificate(NamedTuple):
    """Hold what is known of each query's attention; all (…, queries)."""

    k: Tensor
    """int64: how many keys the output uses."""
    bound: Tensor
    """float64: no less than the total variation distance from attention to all keys; ≤ ε. NaN if the query is."""
    scored: Tensor
    """int64: how many scores were computed."""
    refused: Tensor
    """bool: no smaller head could be certified, and the query attends to all its keys; its bound is 0."""
    output_bound: Tensor | None
    """float64: no less than the distance of the output; None unless `output_epsilon` was given."""


def certified_attention(
    q: Tensor,
    k: Tensor | KeyCells,
    v: Tensor,
    *,
    epsilon: PerRow | None = None,
    output_epsilon: float | None = None,
    mask: Mask = None,
    scale: float | None = None,
    certificate: Rule = tail_mass,
) -> tuple[Tensor, Certificate]:
    """Attend to the smallest certified head of each query: softmax(q·kᵀ·scale) on it, normalised, times v.

    The weights are within ε of softmax over all keys in total variation, for every query; or the output is within
    `output_epsilon` of attention to all keys in Euclidean norm. Give one of the two. A query whose certificate cannot
    be had attends to all its keys. Differentiable in q, k and v, with the head as a constant.

    Args:
        q: (…, queries, d), such as (batch, heads, queries, d).
        k: the keys (…, n, d); or their `KeyCells`, which are then searched and give no gradient. With fewer heads than
            `q`, each serves a group of query heads.
        v: the values (…, n, e).
        epsilon: in (0, 1), a number or a tensor that broadcasts to (…, queries). Values of a tensor are not checked:
            all keys serve 0 or less and NaN, and one key serves 1 or more.
        output_epsilon: > 0. The head is certified to ε = output_epsilon/D, D ≥ all distances between values.
        mask: boolean, broadcasts to (…, queries, n); True = may be attended to. A query that may attend to nothing gets
            0, as from torch's attention.
        scale: of the scores; 1/√d if None.
        certificate: for keys as a tensor: `tail_mass`, which scores all keys and finds the smallest head, `known_head`,
            `multi_gap`, `single_gap`, or a function of yours. For each it is said what the head would be.

    Returns:
        The output (…, queries, e) in the dtype of q, and a `Certificate`. Bounds hold for the numbers q, k, v as given,
        whatever the rounding of scores; the output itself is rounded as always. NaN stays in its query: output and
        bound are NaN where a score is NaN or +inf. Masked keys and values must be finite, as for torch's attention.

    Examples:
        >>> q, k, v = torch.eye(2, 4) * 8, torch.eye(4) * 4, torch.eye(4)
        >>> output, certificate = khot.attention.certified_attention(q, k, v, epsilon=0.01)
        >>> output
        tensor([[1., 0., 0., 0.],
                [0., 1., 0., 0.]])
        >>> certificate.k, certificate.refused
        (tensor([1, 1]), tensor([False, False]))
    """
    call = _Call.make(q, k, mask, scale)
    values = call.values(v)
    epsilons, diameter = _budget(call, values, epsilon, output_epsilon)
    with no_autocast(q):
        if isinstance(k, KeyCells):
            if certificate is not tail_mass:
                raise ValueError("`certificate` must be left out if `k` is `KeyCells`: the cells are the certificate.")
            output, found = _search(call, k, values, epsilons)
        else:
            head, found = _heads(call, epsilons, certificate)
            output = scaled_dot_product_attention(call.q, call.keys, values, attn_mask=head, scale=1.0)
    if diameter is not None:
        found = found._replace(output_bound=found.bound * diameter)
    return call.restored(output).to(q.dtype), call.certified(found)


@torch.no_grad()
def certified_mask(
    q: Tensor,
    k: Tensor | KeyCells,
    *,
    epsilon: PerRow,
    mask: Mask = None,
    scale: float | None = None,
    certificate: Rule = tail_mass,
) -> tuple[Tensor, Certificate]:
    """Return the certified head of each query as a boolean mask, for torch's `scaled_dot_product_attention`.

    Args and Returns:
        As for `certified_attention`: the mask is (…, queries, n), True for the keys of the head.

    Examples:
        >>> q, k = torch.eye(2, 4) * 8, torch.eye(4) * 4
        >>> khot.attention.certified_mask(q, k, epsilon=0.01)[0]
        tensor([[ True, False, False, False],
                [False,  True, False, False]])
    """
    call = _Call.make(q, k, mask, scale)
    epsilons, _ = _budget(call, None, epsilon, None)
    with no_autocast(q):
        if isinstance(k, KeyCells):
            head = torch.zeros(*call.q.shape[:2], len(k), dtype=torch.bool, device=q.device)
            _, found = _search(call, k, None, epsilons, head)
        else:
            head, found = _heads(call, epsilons, certificate)
    return call.restored(head), call.certified(found)


def block_mask(head: Tensor, *, block_size: int = 128) -> Any:
    """Return a mask of `certified_mask` as a `BlockMask` of FlexAttention, which skips blocks without a key of a head.

    Args:
        head: boolean (batch, heads, queries, n).
        block_size: queries and keys of a block.

    Examples:
        >>> head = torch.eye(256, dtype=torch.bool)[None, None]
        >>> khot.attention.block_mask(head).sparsity()
        50.0
    """
    if not isinstance(head, Tensor) or head.dtype != torch.bool or head.ndim != 4:
        got = (head.dtype, tuple(head.shape)) if isinstance(head, Tensor) else type(head).__name__
        raise ValueError(f"`head` must be boolean (batch, heads, queries, n); got {got}.")
    from torch.nn.attention.flex_attention import create_block_mask  # it takes a second to import

    sizes: dict[str, Any] = {"device": str(head.device), "BLOCK_SIZE": block_size}
    return create_block_mask(lambda b, h, i, j: head[b, h, i, j], *head.shape, **sizes)


class _Call(NamedTuple):
    """Hold queries as rows of the heads of the keys: (B, R, d) with B = batch · heads of keys, R = group · queries."""

    q: Tensor  # (B, R, d), scaled
    keys: Tensor  # (B, n, d); the means of the cells if there are cells
    mask: Tensor | None  # (B, R, n)
    largest: Tensor  # (B): no key is longer
    slack: float  # no score is off by more than this, times the lengths of query and key
    n: int
    batch: tuple[int, ...]  # of the keys, with q's where those broadcast
    shape: tuple[int, ...]  # of q without d
    dtype: torch.dtype

    @classmethod
    def make(cls, q: Tensor, k: Tensor | KeyCells, mask: Mask, scale: float | None) -> "_Call":
        """Check the arguments, and bring them to rows."""
        if isinstance(k, KeyCells):
            require_values("Which cells are opened", q)
        _check.vectors("q", q)
        if not isinstance(k, KeyCells):
            _check.vectors("k", k)
            _check.same_device("k", k, q, "q")
        d, n, batch = q.shape[-1], len(k) if isinstance(k, KeyCells) else k.shape[-2], _batch(k)
        _check.last_dim("q", q, k._keys.shape[-1] if isinstance(k, KeyCells) else k.shape[-1])
        if scale is not None:
            _check.number("scale", scale, "a number")
        if isinstance(k, KeyCells) and q.dtype == torch.float64 != k._keys.dtype:
            raise TypeError(
                f"`q` must not be more precise than the cells, {k._keys.dtype}; use `KeyCells(keys.double())`."
            )
        lead, groups = tuple(q.shape[:-2]), 1
        if lead != batch and lead[:-1] == batch[:-1] and lead and batch and batch[-1] and lead[-1] % batch[-1] == 0:
            groups = lead[-1] // batch[-1]
        elif lead != batch:
            if isinstance(k, KeyCells):
                raise ValueError(f"`k` must have the batch shape of `q`, {lead}, or fewer heads; got {batch}.")
            try:
                batch = tuple(torch.broadcast_shapes(lead, batch))
            except RuntimeError:
                fix = "equal batch shapes, or a number of heads in `q` that is a multiple of that in `k`"
                raise ValueError(f"`q` and `k` must have {fix}; got {lead} and {batch}.") from None
            q = q.expand(*batch, *q.shape[-2:])
        many = math.prod(batch)
        inner = _shape.compute_dtype(torch.promote_types(q.dtype, k.dtype))
        rows = (q.to(inner) * (d**-0.5 if scale is None else scale)).reshape(many, groups * q.shape[-2], d)
        keys = k._centre if isinstance(k, KeyCells) else k.to(inner).expand(*batch, n, d).reshape(many, n, d)
        if mask is not None:
            _check.mask(mask, torch.empty((), device=q.device).expand(*q.shape[:-1], n))
            mask = mask.expand(*q.shape[:-1], n).reshape(*rows.shape[:2], n)
        with torch.no_grad():
            largest = k._largest if isinstance(k, KeyCells) else keys.norm(dim=-1).amax(-1)
        slack = (d + 8 + (k.size if isinstance(k, KeyCells) else 0)) * _unit(inner)
        return cls(rows, keys, mask, largest, slack, n, batch, tuple(q.shape[:-1]), inner)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return how much scores may be off by rounding, (B, R) float64."""
        length: Tensor = self.q.double().norm(dim=-1)
        return self.slack * length * self.largest.double().unsqueeze(-1)

    def values(self, v: Tensor) -> Tensor:
        """Check the values, and return them as (B, n, e)."""
        _check.vectors("v", v)
        _check.same_device("v", v, self.q, "q")
        if v.shape[-2] != self.n:
            raise ValueError(f"`v` must have the shape (…, {self.n}, e), a row for each key; got {tuple(v.shape)}.")
        _check.broadcasts("v", v[..., 0, 0], self.batch, "the batch shape of the keys")
        return v.to(self.dtype).expand(*self.batch, *v.shape[-2:]).reshape(len(self.q), *v.shape[-2:])

    def restored(self, t: Tensor) -> Tensor:
        """Return rows (B, R, …) in the shape of the queries."""
        return t.reshape(*self.shape, *t.shape[2:])

    def certified(self, found: Certificate) -> Certificate:
        """Return a certificate of rows in the shape of the queries."""
        k, bound, scored, refused = map(self.restored, found[:4])
        last = found.output_bound
        return Certificate(k, bound, scored, refused, None if last is None else self.restored(last))


def _batch(k: Tensor | KeyCells) -> tuple[int, ...]:
    return tuple(k.batch) if isinstance(k, KeyCells) else tuple(k.shape[:-2])


def _unit(dtype: torch.dtype) -> float:
    """Return the relative rounding of one product; matrix products in float32 may be asked to use fewer bits."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-8
    return torch.finfo(dtype).eps


def _budget(
    call: _Call, values: Tensor | None, epsilon: PerRow | None, output_epsilon: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return ε for each row, (B, R), and D ≥ the distances between values, (B, 1), if the output has a budget."""
    if (epsilon is None) == (output_epsilon is None):
        raise ValueError("Give one of `epsilon`, for the weights, and `output_epsilon`, for the output; not both.")
    if epsilon is not None:
        check_epsilon("epsilon", epsilon)
        if isinstance(epsilon, Tensor):
            _check.broadcasts("epsilon", epsilon, call.shape, "the queries")
            return epsilon.double().expand(call.shape).reshape(call.q.shape[:2]), None
        return torch.full(call.q.shape[:2], float(epsilon), dtype=torch.float64, device=call.q.device), None
    _check.above("output_epsilon", output_epsilon, 0)
    assert values is not None
    assert output_epsilon is not None
    v = values.detach().double()
    radius = (v - v.mean(-2, keepdim=True)).norm(dim=-1).amax(-1, keepdim=True)
    diameter = 2 * radius * (1 + tails.ROUNDING)
    return (output_epsilon / diameter).clamp(max=1 - 2.0**-20).expand(call.q.shape[:2]), diameter


@torch.no_grad()
def _heads(call: _Call, epsilon: Tensor, rule: Rule) -> tuple[Tensor, Certificate]:
    """Score all keys, and return the smallest head of each row that a rule certifies, as a mask (B, R, n)."""
    _check.function("certificate", rule)
    head = torch.empty(*call.q.shape[:2], call.n, dtype=torch.bool, device=call.q.device)
    found, delta = _blank(call), call.delta()
    for part in _parts(call, call.n * len(call.q)):
        scores = call.q[:, part] @ call.keys.mT
        allowed = None if call.mask is None else call.mask[:, part]
        _, order, count = tails.falling(scores, allowed)
        bound = tails.rounded_up(rule(scores, None, mask=allowed), call.n, count, delta[:, part, None])
        k = tails.first_within(bound, epsilon[:, part], count)
        head[:, part] = select.ranks(order) < k.unsqueeze(-1)
        is_whole = k == count
        value = bound.gather(-1, (k - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        is_bad = ~(scores < torch.inf) if allowed is None else ~(scores < torch.inf) & allowed  # NaN too
        value = torch.where(is_bad.any(-1), torch.nan, torch.where(is_whole, 0.0, value))
        _put(found, (slice(None), part), Certificate(k, value, count, is_whole & (count > 1), None))
    return head, found


def _search(
    call: _Call, cells: KeyCells, values: Tensor | None, epsilon: Tensor, head: Tensor | None = None
) -> tuple[Tensor, Certificate]:
    """Search the cells; return the output (B, R, e), and fill in `head` (B, R, n) if it is given."""
    if values is None or not (torch.is_grad_enabled() and values.requires_grad):
        by_kernel = cells.native(call.q.detach(), values, call.mask, epsilon, slack=call.slack, head=head)
        if by_kernel is not None:
            output, k, bound, scored, is_refused = by_kernel
            return output, Certificate(k, bound, scored, is_refused, None)
    values = call.q.new_ones(len(call.q), call.n, 1) if values is None else values
    many, found, delta = call.q.shape[1], _blank(call), call.delta()
    output = values.new_zeros(*call.q.shape[:2], values.shape[-1])
    flat_values = values.flatten(0, 1)
    for part in _parts(call, cells.length * call.q.shape[-1] * len(call.q)):
        q, allowed = call.q[:, part].detach(), None if call.mask is None else call.mask[:, part]
        is_open = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
        group = cells.search(q, epsilon[:, part], allowed, delta[:, part])
        if group is not None:
            b, i = group.rows // q.shape[1], group.rows % q.shape[1]
            at = (b, i + part.start)
            scores, positions, result = _smallest(group, epsilon[at], delta[at])
            taken = flat_values.index_select(0, (positions + b.unsqueeze(-1) * call.n).flatten())
            output[at] = (scores.softmax(-1).unsqueeze(-2) @ taken.view(*positions.shape, -1)).squeeze(-2)
            _put(found, at, result)
            is_open[b, i] = False
            if head is not None:
                is_kept = scores > -torch.inf
                rows = (b * many + at[1]).unsqueeze(-1).expand_as(positions)
                head.view(-1, call.n)[rows[is_kept], positions[is_kept]] = True
        for j in is_open.any(-1).nonzero().flatten().tolist():
            row = is_open[j].nonzero().squeeze(-1)
            scores, positions = cells.dense(q[j, row], j)
            some = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed[j, row][:, positions]
            count = some.sum(-1)
            weights = scores.masked_fill(~some, -torch.inf).softmax(-1).masked_fill(count.unsqueeze(-1) == 0, 0.0)
            in_order = torch.empty_like(weights)
            in_order[:, positions] = weights
            output[j, row + part.start] = in_order @ values[j]
            bound = torch.where(weights.isnan().any(-1), torch.nan, 0.0).double()
            _put(found, (j, row + part.start), Certificate(count, bound, count, count > 1, None))
            if head is not None:
                head[j, row[:, None] + part.start, positions] = some
    return output, found


def _smallest(group: Group, epsilon: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Certificate]:
    """Return the scores and positions of the smallest head among the keys that were read, and what certifies it."""
    order = select.order(group.scores)
    scores = group.scores.gather(-1, order)
    scored = (scores > -torch.inf).sum(-1)
    bound = tails.read_bounds(scores.double(), group.unread, delta)
    k = tails.first_within(bound, epsilon, scored)
    most = int(k.max())
    is_head = torch.arange(most, device=k.device) < k.unsqueeze(-1)
    scores = scores[:, :most].masked_fill(~is_head, -torch.inf)
    value = bound.gather(-1, (k - 1).unsqueeze(-1)).squeeze(-1)
    result = Certificate(k, value, scored, torch.zeros_like(k, dtype=torch.bool), None)
    return scores, group.positions.gather(-1, order[:, :most]).clamp(min=0), result


def _parts(call: _Call, each: int) -> Iterator[slice]:
    """Yield slices of the rows, so that not much more than CHUNK numbers are held at a time; `each` row has so many."""
    step = max(1, CHUNK // max(1, each))
    for start in range(0, call.q.shape[1], step):
        yield slice(start, min(start + step, call.q.shape[1]))


def _blank(call: _Call) -> Certificate:
    shape, device = call.q.shape[:2], call.q.device
    ints = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    bound, refused = torch.zeros(shape, dtype=torch.float64, device=device), torch.zeros(shape, device=device).bool()
    return Certificate(next(ints), bound, next(ints), refused, None)


def _put(found: Certificate, at: Any, part: Certificate) -> None:
    for whole, some in zip(found[:4], part[:4], strict=True):
        whole[at] = some
