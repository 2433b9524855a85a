"""What a routing is, how a route is called, and how even the load of a routing is."""

import inspect
import math
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import _check
from ..._math.prices import HERE, Total
from ..._shape import Group
from ..._torch import assert_in_graph, require_values, warn_of_ranks


class Routing(NamedTuple):
    """Hold which experts each token goes to, and with what weight.

    Args:
        logits: (…, n) scores, in float32 or wider.
        weights: (…, k) of the experts' outputs.
        indices: (…, k) experts; n stands for none, with weight 0.
        probs: (…, n) how much each expert is wanted, differentiable; what it sums to depends on the route.

    Examples:
        >>> khot.nn.routing.softmax_topk(torch.eye(2), 1).indices
        tensor([[0],
                [1]])
    """

    logits: Tensor
    weights: Tensor
    indices: Tensor
    probs: Tensor


class Route(Protocol):
    """Send tokens to experts: a route maps scores (…, n) and k to a `Routing`.

    The functions of `khot.nn.routing` are routes, and so are a `functools.partial` of one, a function of your own, or
    an object with `__call__`. A router passes the options that the signature names, out of `bias`, `generator`, `mask`,
    `num_experts`, `training` and `sample` (the last two are False in evaluation).

    A route that wants another number of scores than n for each token has an attribute `width`, a function
    `(n, k) → int`, such as `noisy_topk.width`. Wrap one with `functools.wraps`, or set `wrapper.width` yourself.

    Examples:
        >>> def doubled(logits, k):
        ...     return khot.nn.routing.sigma_topk(2 * logits, k)
        >>> khot.nn.Router(16, 8, 2, route=doubled)(torch.zeros(5, 16)).weights.shape
        torch.Size([5, 2])
    """

    def __call__(self, logits: Tensor, k: int, /, *args: Any, **options: Any) -> Routing: ...


class BoundRoute:
    """Bind a route to k of n experts, with its width, and what it takes of what the caller `gives`, looked up once."""

    def __init__(self, route: Route, n: int, k: int, gives: tuple[str, ...] = ()) -> None:
        _check.function("route", route)
        parameters = list(inspect.signature(route).parameters.values())
        needs = [p for p in parameters[2:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if missing := [p.name for p in needs if p.name not in gives]:
            raise ValueError(f"`route` must take (logits, k) and options; {name_of(route)} needs {', '.join(missing)}.")
        self.route, self.n = route, n
        self.takes = frozenset(p.name for p in parameters) & frozenset(gives)
        plain = route
        while isinstance(plain, partial) and not hasattr(plain, "width"):
            plain = plain.func
        self.width: int = getattr(plain, "width", lambda n, k: n)(n, k)

    def __call__(self, logits: Tensor, k: int, *, training: bool, mask: Tensor | None = None, **given: Any) -> Routing:
        """Route scores (…, width), with those of the options given that the route takes and that are not None."""
        given["mask"] = mask
        given |= {"num_experts": self.n, "training": training}
        if not training:
            given["sample"] = False
        options = {name: value for name, value in given.items() if name in self.takes and value is not None}
        routing = self.route(logits, k, **options)
        if (found := routing.probs.shape[-1]) != self.n:
            raise ValueError(
                f"`route` must give {self.n} probabilities for each token, one for each expert; got {found} from "
                f"{logits.shape[-1]} scores. If {name_of(self.route)} wants another number of scores, give it a "
                "`width`, a function (n, k) → int, such as `route.width = khot.nn.routing.noisy_topk.width`."
            )
        return present(routing, mask)


def name_of(route: Route) -> str:
    """Return what a route is called in messages."""
    return str(getattr(route, "__name__", repr(route)))


def checked(logits: Any, k: Any) -> tuple[Tensor, int]:
    """Return scores, widened, and k as an int; raise unless there are scores of at least k ≥ 1 experts."""
    _check.scores(logits, -1, "logits")
    _check.at_least("k", k, 1)
    if k > logits.shape[-1]:
        raise ValueError(f"`k` must satisfy 1 ≤ k ≤ {logits.shape[-1]} (number of experts); got {k}.")
    return widened(logits), int(k)


def widened(logits: Tensor) -> Tensor:
    """Return scores in float32, or in float64 if they are: routing in half precision is unstable."""
    return logits if logits.dtype == torch.float64 else logits.float()


def check_bias(bias: Tensor | None, n: int) -> None:
    """Raise unless there is one number for each expert, or none at all."""
    if bias is None:
        return
    _check.instance("bias", bias, Tensor)
    if bias.shape != (n,):
        raise ValueError(f"`bias` must have the shape ({n},), one for each expert; got {tuple(bias.shape)}.")


def check_capacity(capacity: float, tokens: int, n: int, k: int) -> float:
    """Return a capacity of n experts as a float; raise if they cannot take k·tokens assignments with it."""
    _check.number("capacity", capacity, "a number or None")
    if torch.compiler.is_compiling():  # tokens that a mask leaves in are counted in the graph, and checked there
        places = math.floor(min(capacity * n * (1 + 1e-12), 2.0**62))
        assert_in_graph(k * tokens <= places, "`capacity` must be ≥ k·tokens/experts.")
        return float(capacity)
    capacity, mean = float(capacity), k * tokens / n
    if not capacity >= mean * (1 - 1e-12):
        dropped = math.ceil(tokens * k - max(0, capacity) * n)
        would = f"{dropped} of {tokens * k} assignments would be dropped"
        raise ValueError(f"`capacity` must be ≥ {mean:g} (k·tokens/experts); got {capacity:g}: {would}.")
    return capacity


def over(group: Group, what: str) -> Total:
    """Return what brings the tokens of all processes together; without a group, warn once if there are others."""
    if group is None:
        warn_of_ranks(what, "Give it `group=`, or ignore this warning if that is what you want.")
        return HERE
    from ...distributed import Over, names_of

    return Over(names_of(group))


def count_of(rows: Tensor, mask: Tensor | None, total: Total) -> int:
    """Return how many tokens all processes have, padding left out."""
    if mask is None and total is HERE:
        return len(rows)
    tokens = torch.tensor(len(rows), device=rows.device) if mask is None else mask.sum()
    return int(total.sum(tokens))


def check_mask(mask: Tensor | None, logits: Tensor) -> None:
    """Raise unless a mask says of each token whether it is one."""
    if mask is None:
        return
    _check.instance("mask", mask, Tensor)
    if mask.dtype != torch.bool or mask.shape != logits.shape[:-1]:
        got = f"{tuple(mask.shape)} of {mask.dtype}"
        raise ValueError(f"`mask` must be a boolean tensor of shape {tuple(logits.shape[:-1])}; got {got}.")


def present(routing: Routing, mask: Tensor | None) -> Routing:
    """Return a routing in which tokens that the mask leaves out go to no expert, and want none."""
    if mask is None:
        return routing
    logits, weights, indices, probs = routing
    absent, none = ~mask[..., None], probs.shape[-1]
    return Routing(
        logits, weights.masked_fill(absent, 0), indices.masked_fill(absent, none), probs.masked_fill(absent, 0)
    )


def _mean_of_present(values: Tensor, routing: Routing) -> Tensor:
    """Return the mean over tokens (…) that want or have an expert: padding does neither."""
    is_present = (routing.probs.detach() != 0).any(-1) | (routing.indices < routing.probs.shape[-1]).any(-1)
    return torch.where(is_present, values, 0).sum() / is_present.sum().clamp(min=1)


def load(routing: Routing, *, group: Group = None) -> Tensor:
    """Return how many tokens each expert has, (n).

    Args:
        routing: what a route or a `Router` returned for some tokens.
        group: the process group whose processes hold the tokens of one batch; then all of them count.

    Examples:
        >>> load(khot.nn.routing.softmax_topk(torch.eye(3)[:2], 1))
        tensor([1, 1, 0])
    """
    _check.instance("routing", routing, Routing)
    n, chosen = routing.probs.shape[-1], routing.indices.reshape(-1)
    counts = chosen.new_zeros(n + 1).scatter_add(0, chosen, torch.ones_like(chosen))[:n]
    return counts if group is None else over(group, "").sum(counts)


def load_balance_loss(routing: Routing, *, group: Group = None) -> Tensor:
    """Return `n Σ_i f_i P_i`: the share f of the choices times the mean share P of the probability; 1 if even.

    Switch Transformer's loss (k = 1) and GShard's. Its gradient goes to P alone.

    Args:
        routing, group: as for `load`. With a group, the loss is that of all tokens, and its gradient is such that the
            mean over the processes, which DDP takes, is that of one large batch.

    Examples:
        >>> load_balance_loss(khot.nn.routing.softmax_topk(torch.eye(3)[:2], 1))
        tensor(1.1821)
    """
    _check.instance("routing", routing, Routing)
    n = routing.probs.shape[-1]
    tokens, probs = load(routing, group=group).to(routing.probs.dtype), routing.probs.reshape(-1, n).sum(0)
    if group is not None:
        probs = _whole(probs, group)
    share = tokens / tokens.sum().clamp(min=1)
    return n * (share * probs / probs.sum().clamp(min=1e-20)).sum()


def _whole(t: Tensor, group: Group) -> Tensor:
    """Return Σ over the processes, with the gradient that DDP's mean makes whole."""
    import torch.distributed as dist

    mine = dist.get_world_size(group) * t
    return mine + (over(group, "").sum(t.detach()) - mine.detach())


def importance_loss(routing: Routing, *, group: Group = None) -> Tensor:
    """Return `CV²` of the experts' total probabilities, var/mean²: 0 if even. Shazeer's loss.

    Args:
        routing, group: as for `load_balance_loss`.

    Examples:
        >>> importance_loss(khot.nn.routing.softmax_topk(torch.eye(3)[:2], 1))
        tensor(0.0663)
    """
    _check.instance("routing", routing, Routing)
    probs = routing.probs.reshape(-1, routing.probs.shape[-1]).sum(0)
    return cv_squared(probs if group is None else _whole(probs, group))


def cv_squared(x: Tensor) -> Tensor:
    """Return the squared coefficient of variation, var/mean², of a vector.

    Args:
        x: (n), of any numbers.

    Examples:
        >>> cv_squared(torch.tensor([1.0, 3.0]))
        tensor(0.2500)
    """
    _check.floating("x", x)
    mean = x.mean()
    return (x - mean).square().mean() / mean.square().clamp(min=1e-20)


def z_loss(routing: Routing) -> Tensor:
    """Return `mean (log Σ exp logits)²`, which keeps scores small, so that half precision does no harm (ST-MoE).

    Args:
        routing: as for `load`.

    Examples:
        >>> z_loss(khot.nn.routing.softmax_topk(torch.zeros(5, 3), 1))  # log² 3
        tensor(1.2069)
    """
    _check.instance("routing", routing, Routing)
    return _mean_of_present(routing.logits.logsumexp(-1).square(), routing)


@torch.no_grad()
def update_bias(bias: Tensor, routing: Routing, *, rate: float = 1e-3, group: Group = None) -> None:
    """Move a bias, in place, towards an even load: up for experts with less than the mean load, down for the others.

    Call it after each step of the optimiser. It is ascent, by sign, on the price of a load constraint.

    Args:
        bias: (n), that `sigmoid_gates`, `softmax_topk` or `sigma_topk` chose by.
        routing: as for `load`.
        rate: the size of a step.
        group: as for `load`; without it, the biases of processes under DDP drift apart.

    Examples:
        >>> bias = torch.zeros(3)
        >>> update_bias(bias, khot.nn.routing.sigma_topk(torch.eye(3)[:2], 1, bias=bias))
        >>> bias
        tensor([-0.0010, -0.0010,  0.0010])
    """
    _check.floating("bias", bias)
    _check.instance("routing", routing, Routing)
    check_bias(bias, routing.probs.shape[-1])
    _check.number("rate", rate)
    over(group, "`update_bias`")
    tokens = load(routing, group=group).to(bias.dtype)
    bias += rate * (tokens.mean() - tokens).sign()


def max_violation(routing: Routing) -> float:
    """Return MaxVio: the largest load over the mean load, minus 1; 0 if even.

    Args:
        routing: as for `load`.

    Examples:
        >>> max_violation(khot.nn.routing.softmax_topk(torch.eye(3)[:2], 1))
        0.5
    """
    _check.instance("routing", routing, Routing)
    require_values("A number", routing.indices)
    tokens = load(routing).to(torch.float64)
    return float(tokens.max() / tokens.mean() - 1) if tokens.any() else 0.0


def dead_experts(routing: Routing) -> int:
    """Return how many experts have no token.

    Args:
        routing: as for `load`.

    Examples:
        >>> dead_experts(khot.nn.routing.softmax_topk(torch.eye(3)[:2], 1))
        1
    """
    _check.instance("routing", routing, Routing)
    require_values("A number", routing.indices)
    return int((load(routing) == 0).sum())


def routing_entropy(routing: Routing) -> float:
    """Return the mean entropy of a token's probabilities, normalised to sum 1, in nats; log n if all are equal.

    Args:
        routing: as for `load`.

    Examples:
        >>> round(routing_entropy(khot.nn.routing.softmax_topk(torch.zeros(5, 3), 1)), 4)  # log 3
        1.0986
    """
    _check.instance("routing", routing, Routing)
    require_values("A number", routing.probs)
    probs = routing.probs.detach() / routing.probs.detach().sum(-1, keepdim=True).clamp(min=1e-20)
    return float(_mean_of_present(torch.special.entr(probs).sum(-1), routing))
