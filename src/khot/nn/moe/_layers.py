"""The layers of a mixture of experts: a router, and the experts behind it."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ... import _check
from ..._shape import Group
from ..._torch import no_autocast, require_values
from .._precision import KeepsPrecision, wide_dtype
from ._routes import sigma_topk
from ._routing import BoundRoute, Route, Routing, check_capacity, check_mask, load, name_of, widened


class Router(KeepsPrecision):
    """Send each token to k of n experts: a linear map to scores, and a route.

    Scores are computed in float32 or wider, whatever the dtype of the tokens.

    Args:
        dim: of the tokens.
        num_experts: n.
        k: experts for each token.
        route: how scores become a routing: a function of `khot.nn.routing`, or any other `khot.nn.routing.Route`.
        biased: keep a `bias` buffer and choose by it (`sigmoid_gates`, `softmax_topk`, `sigma_topk`); call
            `khot.nn.routing.update_bias(router.bias, routing)` after each step of the optimiser. The bias stays in
            float32 or wider when the router is cast, because its steps are small.
        share: keep a `share` buffer, and give it to the route as `sample` in training: how much of the choice is
            sampled (`sigma_topk`, `balanced_sigma_topk`). A `khot.nn.Schedule` moves it.

    Examples:
        >>> router = Router(16, 8, 2)
        >>> routing = router(torch.randn(4, 10, 16))
        >>> routing.weights.shape, routing.probs.sum(-1).allclose(torch.tensor(2.0))
        (torch.Size([4, 10, 2]), True)
    """

    bias: Tensor
    share: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        route: Route = sigma_topk,
        biased: bool = False,
        share: float | None = None,
    ) -> None:
        super().__init__()
        _check.at_least("dim", dim, 1)
        _check.at_least("num_experts", num_experts, 1)
        _check.at_least("k", k, 1)
        _check.integer_at_most("k", k, num_experts, "number of experts")
        self.num_experts, self.k = int(num_experts), int(k)
        options = ("bias", "generator", "mask", "num_experts", "training", "sample")
        self._bound = BoundRoute(route, self.num_experts, self.k, options)
        if biased and "bias" not in self._bound.takes:
            which = "a `route` that takes a bias, such as sigmoid_gates or sigma_topk"
            raise ValueError(f"`biased` needs {which}; {name_of(route)} takes none.")
        if share is not None:
            _check.fraction("share", share)
            if "sample" not in self._bound.takes:
                which = "a `route` that takes a sample, such as sigma_topk"
                raise ValueError(f"`share` needs {which}; {name_of(route)} takes none.")
        bound = 1 / math.sqrt(dim)
        self.weight = nn.Parameter(torch.empty(self._bound.width, int(dim)).uniform_(-bound, bound))
        self.register_buffer("bias", torch.zeros(self.num_experts, dtype=wide_dtype()) if biased else None)
        self.register_buffer("share", None if share is None else torch.tensor(float(share), dtype=wide_dtype()))

    @property
    def route(self) -> Route:
        """Return the route, which is fixed, since the number of scores depends on it."""
        return self._bound.route

    def forward(self, x: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Routing:
        """Route tokens (…, dim) to k experts each, (…, k). Noise and samples are for training alone.

        Where the mask (…) is False, there is padding, which goes to no expert.
        """
        _check.last_dim("x", x, self.weight.shape[1])
        _check.generator(generator)
        check_mask(mask, x)
        with no_autocast(x):
            weight = widened(self.weight)
            x = x if mask is None else x.masked_fill(~mask[..., None], 0)  # padding may be NaN
            logits = linear(x.to(weight.dtype), weight)
            given = {"bias": self.bias, "generator": generator, "sample": self.share}
            return self._bound(logits, self.k, training=self.training, mask=mask, **given)

    def extra_repr(self) -> str:
        return f"dim={self.weight.shape[1]}, num_experts={self.num_experts}, k={self.k}, route={name_of(self.route)}"


class MoEOutput(NamedTuple):
    """Hold the output of a mixture of experts.

    Args:
        output: (…, d).
        routing: for losses and measures of the load.
        dropped: how many assignments of tokens to experts had no place.
    """

    output: Tensor
    routing: Routing
    dropped: int


class MoE(nn.Module):
    """Compute `y = Σ_i w_i E_i(x)` over the experts that the router chose; no other expert is computed.

    Assignments are sorted by expert, so that each expert runs once, on a contiguous block.

    Args:
        router: a `Router`, or a Module like it: `num_experts`, `k`, `forward(x, *, generator)` → `Routing`, with `mask`
            if the mixture is given one.
        experts: Modules (tokens, dim) → (tokens, d), one for each of the router's.
        capacity_factor: an expert takes at most ⌈factor·assignments/n⌉ tokens, those with the largest weights; None
            for as many as come. Raises where so few places cannot hold all tokens; with 1 or more they can.
        group: a process group over which the experts are divided; `experts` are then those of this process, in the
            order of the ranks, the same number on each. Tokens travel to their experts and back. An expert's gradient
            is the sum over all processes' tokens, so DDP must leave the experts out.

    Examples:
        >>> experts = [torch.nn.Linear(16, 16) for _ in range(8)]
        >>> y, routing, dropped = MoE(khot.nn.Router(16, 8, 2), experts)(torch.randn(4, 10, 16))
        >>> y.shape, dropped
        (torch.Size([4, 10, 16]), 0)
    """

    def __init__(
        self,
        router: Router,
        experts: Iterable[nn.Module],
        *,
        capacity_factor: float | None = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None:
            _check.above("capacity_factor", capacity_factor, 0)
        _check.instance("router", router, nn.Module)
        if not (hasattr(router, "num_experts") and hasattr(router, "k")):
            kind = type(router).__name__
            raise TypeError(f"`router` must have `num_experts` and `k`, as `khot.nn.Router` has; got {kind}.")
        self.router, self.experts = router, nn.ModuleList(_check.modules("experts", experts))
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        if (got := len(self.experts)) * ranks != (n := router.num_experts):
            divided = "" if group is None else f" divided by the {ranks} processes of the group"
            raise ValueError(f"`experts` must be {n} Modules{divided}, as many as the router has; got {got}.")
        if group is not None and capacity_factor is not None:
            raise NotImplementedError("`capacity_factor` must be None if experts are divided over processes.")
        self.group = group
        self.capacity_factor = None if capacity_factor is None else float(capacity_factor)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None) -> MoEOutput:
        """Map tokens (…, dim) to (…, d), in the dtype of the experts' outputs; 0 where the mask (…) is False."""
        require_values("How many tokens each expert gets", x)
        _check.scores(x, -1)
        flat, padding = x.reshape(-1, x.shape[-1]), {}
        if mask is not None:
            check_mask(mask, x)
            padding["mask"] = mask.reshape(-1)
        routing = self.router(flat, **padding, generator=generator)
        _check_dispatch(routing, self.router.num_experts)
        capacity = None
        if self.capacity_factor is not None:
            n, k = self.router.num_experts, self.router.k
            tokens = len(flat) if mask is None else int(mask.sum())
            capacity = math.ceil(self.capacity_factor * tokens * k / n)
            check_capacity(capacity, tokens, n, k)
        order, counts, dropped = _sort_by_expert(routing, capacity)
        token = order // routing.indices.shape[-1]
        computed = self._computed(flat[token], counts) if self.group is None else self._travelled(flat[token], counts)
        weighted = computed * routing.weights.reshape(-1)[order, None].to(computed.dtype)
        result = computed.new_zeros(len(flat), computed.shape[-1]).index_add(0, token, weighted)
        shaped = Routing(*(part.reshape(*x.shape[:-1], part.shape[-1]) for part in routing))
        return MoEOutput(result.reshape(*x.shape[:-1], result.shape[-1]), shaped, dropped)

    def _computed(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return what the experts make of rows that are sorted by expert."""
        blocks = rows.split(counts)
        outputs = [expert(block) for expert, block in zip(self.experts, blocks, strict=True) if len(block)]
        outputs = outputs or [self.experts[0](rows[:0])]
        lengths = [length for length in counts if length] or [0]
        wanted = outputs[0].shape[-1] if outputs[0].ndim else 0
        for output, length in zip(outputs, lengths, strict=True):
            if output.shape != (length, wanted):
                which = f"({length}, {wanted}) for {length} tokens, as the others do"
                raise ValueError(
                    f"`experts` must map (tokens, dim) to (tokens, d), {which}; got {tuple(output.shape)}."
                )
        return torch.cat(outputs)

    def _travelled(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Send rows, sorted by expert, to the processes of their experts, and return what came back."""
        from ...distributed import exchange, exchange_counts

        own = len(self.experts)
        wanted = torch.tensor(counts, device=rows.device).view(-1, own)  # (processes, experts of each)
        coming = exchange_counts(wanted, self.group)
        sent, received = wanted.sum(1).tolist(), coming.sum(1).tolist()
        arrived = exchange(rows, sent, received, self.group)  # by process, then by expert
        expert = torch.arange(own, device=rows.device).repeat(len(coming)).repeat_interleave(coming.flatten())
        order = expert.argsort(stable=True)
        computed = self._computed(arrived[order], coming.sum(0).tolist())
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=rows.device))
        return exchange(computed[back], received, sent, self.group)

    def extra_repr(self) -> str:
        return f"capacity_factor={self.capacity_factor}"


def _check_dispatch(routing: Routing, n: int) -> None:
    """Raise unless there are n finite scores for each token; read on the host, as dispatch reads them anyway."""
    if (got := routing.probs.shape[-1]) != n:
        raise ValueError(
            f"`router` must give {n} probabilities for each token, as many as there are experts; got {got}: "
            "its `num_experts` does not say what its forward does."
        )
    logits = routing.logits.detach().reshape(-1, routing.logits.shape[-1])
    if (bad := (logits.isnan() | (logits == torch.inf)).any(-1)).any():
        what = "NaN" if logits.isnan().any() else "+inf"
        where = f"{int(bad.sum())} of {len(bad)} tokens, first {int(bad.nonzero()[0])}"
        raise ValueError(f"`logits` must not be NaN or +inf; got {what} for {where}.")


@torch.no_grad()
def _sort_by_expert(routing: Routing, capacity: int | None) -> tuple[Tensor, list[int], int]:
    """Return assignments (flat places in `indices`) by expert, how many each has, and how many were dropped."""
    expert, counts = routing.indices.reshape(-1), load(routing)
    total = int(counts.sum())
    if capacity is None or int(counts.max()) <= capacity:
        return expert.argsort(stable=True)[:total], counts.tolist(), 0
    by_weight = routing.weights.reshape(-1).argsort(descending=True, stable=True)
    order = by_weight[expert[by_weight].argsort(stable=True)][:total]  # by expert, the largest weights first
    place = torch.arange(total, device=expert.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    kept = counts.clamp(max=capacity)
    return order[place < capacity], kept.tolist(), total - int(kept.sum())
