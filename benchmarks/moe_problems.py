"""Two small problems for mixtures of experts, the routers, and their training; behind benchmarks/moe.py.

Models are small, so many are trained at once: all seeds and settings of a router are members of one batched model, with
parameters, data and batches of their own. All experts are computed for all tokens, and the weights of those that are
not chosen are 0: outputs and gradients are those of `khot.nn.MoE`, which a test checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from khot import sigmoid_topk
from khot.nn import routing as r

Route = Callable[..., r.Routing]
"""Scores (tokens, n) and k to a `Routing`."""
EXPERTS = 8
BATCH = 256
TUNING = tuple(range(1000, 1013))
"""Settings are chosen on these seeds; results are of others."""
TEMPERATURES = (1.0, 0.3, 0.1)
DENSE_RATES = (0.01, 0.03, 0.1, 0.3)


class Problem(NamedTuple):
    """Data, and what an expert is."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    hidden: int
    """Units of an expert; 0 for a linear one."""
    outputs: int
    loss: Callable[[Tensor, Tensor], Tensor]
    """Of outputs (tokens, outputs) and targets, each token's."""
    error: Callable[[Tensor, Tensor], Tensor]
    """Less is better; each token's."""
    rates: tuple[float, ...]
    """Learning rates to choose from."""


def regression(seed: int) -> Problem:
    """Eight regions of R⁴, each with a linear function of its own, and a little noise; y has variance 1.

    The region is the greatest of eight linear scores, so that a linear router can find it.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = nn.functional.normalize(torch.randn(EXPERTS, 4, generator=generator), dim=-1)
    slopes = torch.randn(EXPERTS, 4, generator=generator)
    x = torch.randn(8000, 4, generator=generator)
    y = (slopes[(x @ centres.mT).argmax(-1)] * x).sum(-1)
    y = y / y.std() + 0.1 * torch.randn(8000, generator=generator)

    def squared(output: Tensor, target: Tensor) -> Tensor:
        return (output[..., 0] - target).square()

    return Problem(x[:4000], y[:4000], x[4000:], y[4000:], 0, 1, squared, squared, (0.03, 0.1))


@cache
def _images() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(v) for v in load_digits(return_X_y=True))
    return images.float() / 16, labels


def digits(seed: int) -> Problem:
    """Scikit-learn's digits: 1257 to train on, 540 to test on, the same for all seeds.

    A tuning seed sees no test: it divides the 1257, each in its own way.
    """
    x, labels = _images()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if seed in TUNING:
        order = order[:1257][torch.randperm(1257, generator=torch.Generator().manual_seed(seed))]
    train, test = order[: 1257 * len(order) // 1797], order[1257 * len(order) // 1797 :]
    x = x - x[train].mean(0)  # routers are linear: with a mean, all would go the same way

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)

    def error(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(-1) != target).float()

    return Problem(x[train], labels[train], x[test], labels[test], 16, 10, loss, error, (0.01, 0.03))


PROBLEMS: dict[str, Callable[[int], Problem]] = {"regression": regression, "digits": digits}


class Contender(NamedTuple):
    """A router, with the usual cure for uneven loads."""

    route: Callable[[int], Route]
    """For k."""
    cure: Callable[[r.Routing], Tensor] | None = None
    """A loss."""
    biased: bool = False
    least: int = 1
    """Experts a token, for it to differ from another contender."""
    joint: bool = False
    """Whether it looks at all tokens at once."""
    late: bool = False
    """Whether it samples data that were read often alone."""

    @property
    def balances(self) -> tuple[float, ...]:
        """Weights of the loss, or rates of the bias, to choose from; a router that needs neither has one."""
        if self.biased:
            return (0.001, 0.01)
        return (0.01, 0.1) if self.cure else (0.0,)


def _always(route: Route) -> Callable[[int], Route]:
    return lambda k: route


def _normalized(route: Route, **options: bool) -> Callable[[int], Route]:
    """Weights sum to 1, but for k = 1: a weight of 1 teaches the router nothing."""
    return lambda k: partial(route, normalize=k > 1, **options)


LATE = (10, 30)
"""From which reading of the data to which the share of samples rises from none to all, for routers that are late."""


def share_after(reads: float) -> float:
    """How much of the choice is sampled once the data were read so often, for routers that are late."""
    begin, end = LATE
    return min(1.0, max(0.0, (reads - begin) / (end - begin)))


def softmax_weights(logits: Tensor, k: int, *, sample: bool = True) -> r.Routing:
    """Chosen by a sample of σ_k, and weighted by a softmax over all experts: weights that sum to less than 1."""
    drawn = r.sigma_topk(logits, k, sample=sample)
    return drawn._replace(weights=logits.softmax(-1).gather(-1, drawn.indices))


ROUTERS = {
    "softmax_topk": Contender(_normalized(r.softmax_topk), r.load_balance_loss),
    "softmax_topk, not normalised": Contender(
        _always(partial(r.softmax_topk, normalize=False)), r.load_balance_loss, least=2
    ),
    "sigmoid_gates": Contender(_normalized(r.sigmoid_gates), biased=True),
    "noisy_topk": Contender(_normalized(r.noisy_topk), r.importance_loss),
    "expert_choice": Contender(_always(r.expert_choice), joint=True),
    "dselect_k": Contender(_always(r.dselect_k), r.importance_loss),
    "sigma_topk": Contender(_normalized(r.sigma_topk), r.importance_loss),
    "sigma_topk, sampled": Contender(_normalized(r.sigma_topk, sample=True), r.importance_loss),
    "sigma_topk, sampled, softmax weights": Contender(_always(softmax_weights), r.importance_loss),
    "sigma_topk, margin": Contender(_always(partial(r.sigma_topk, margin=True)), r.importance_loss),
    "sigma_topk, margin, sampled": Contender(
        _always(partial(r.sigma_topk, margin=True, sample=True)), r.importance_loss
    ),
    "sigma_topk, sampled late": Contender(
        lambda k: partial(r.sigma_topk, margin=k == 1, normalize=k > 1), r.importance_loss, late=True
    ),
    "sigma_topk, weights π": Contender(_always(r.sigma_topk), r.importance_loss, least=2),
    "sigma_topk, straight-through": Contender(_normalized(r.sigma_topk, straight_through=True), r.importance_loss),
    "balanced_sigma_topk": Contender(_normalized(r.balanced_sigma_topk), joint=True),
    "balanced_sigma_topk, sampled": Contender(_normalized(r.balanced_sigma_topk, sample=True), joint=True),
}
OURS = {1: "sigma_topk, margin, sampled", 2: "sigma_topk, sampled"}
"""For each k khot's formulation for data that are read often, as these are; chosen on tuning seeds, before scoring.

For data that are read fewer than about 60 times it has no samples: "sigma_topk, margin" and "sigma_topk".
"""
DENSE = ("dense", "linear")
"""What they are compared with."""


class Setting(NamedTuple):
    """What is chosen for each router."""

    rate: float
    temperature: float = 1.0
    balance: float = 0.0
    """The weight of the loss, or the rate of the bias."""


def grid(name: str, problem: Problem) -> list[Setting]:
    """All that are tried."""
    contender = ROUTERS.get(name)
    if contender is None:
        return [Setting(rate) for rate in DENSE_RATES]
    return [Setting(*each) for each in product(problem.rates, TEMPERATURES, contender.balances)]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of the test data."""

    error: float
    """Mean squared error in units of the variance, or the share of wrong digits."""
    violation: float
    """MaxVio"""
    dead: int
    entropy: float
    active: float
    """Experts for each token, on average."""


def _uniform(generators: Sequence[torch.Generator], inputs: int, *shape: int) -> nn.Parameter:
    """As `nn.Linear` begins, for each member."""
    drawn = torch.stack([torch.rand(shape, generator=generator) for generator in generators])
    return nn.Parameter((2 * drawn - 1) / inputs**0.5)


class Networks(nn.Module):
    """For each member, a sum of n networks with weights."""

    def __init__(self, generators: Sequence[torch.Generator], n: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.n, self.hidden = n, hidden
        if hidden:
            self.w1 = _uniform(generators, inputs, inputs, n * hidden)
            self.b1 = _uniform(generators, inputs, 1, n * hidden)
        self.w2 = _uniform(generators, hidden or inputs, n, hidden or inputs, outputs)
        self.b2 = _uniform(generators, hidden or inputs, n, outputs)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Tokens (members, tokens, inputs) and weights (members, tokens, n) → (members, tokens, outputs)."""
        each = torch.baddbmm(self.b1, x, self.w1).relu().unflatten(-1, (self.n, -1)) if self.hidden else x[..., None, :]
        weighted = (each * weights[..., None]).flatten(-2)  # (members, tokens, n·hidden)
        return weighted @ self.w2.flatten(1, 2) + weights @ self.b2


Routings = r.Routing | list[r.Routing]
"""Of all members, members first, or one for each; an empty list without a router."""


class Mixtures(nn.Module):
    """For each member, eight experts behind a router."""

    bias: Tensor
    share: Tensor
    prices: Tensor

    def __init__(
        self, contender: Contender, k: int, problem: Problem, seeds: Sequence[int], temperature: Sequence[float]
    ) -> None:
        super().__init__()
        generators, inputs = [torch.Generator().manual_seed(seed) for seed in seeds], problem.x.shape[-1]
        self.experts = Networks(generators, EXPERTS, inputs, problem.hidden, problem.outputs)
        self.contender, self.k, self.route = contender, k, contender.route(k)
        plain: Any = self.route
        while isinstance(plain, partial):
            plain = plain.func
        self.takes = inspect.signature(plain).parameters
        width = getattr(plain, "width", lambda n, k: n)(EXPERTS, k)
        self.weight = _uniform(generators, inputs, inputs, width)
        self.register_buffer("temperature", torch.tensor(temperature).view(-1, 1, 1))
        self.register_buffer("bias", torch.zeros(len(seeds), EXPERTS))
        self.register_buffer("share", torch.zeros(()))
        self.register_buffer("prices", torch.zeros(len(seeds), EXPERTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Routings]:
        """Tokens (members, tokens, inputs) → (members, tokens, outputs), and the routing."""
        given: dict[str, Any] = {"num_experts": EXPERTS, "training": self.training}
        if self.contender.late or not self.training:
            given["sample"] = self.share if self.training else False
        call = partial(self.route, k=self.k, **{name: v for name, v in given.items() if name in self.takes})
        logits = x @ self.weight / self.temperature
        if self.training and getattr(self.route, "func", None) is r.balanced_sigma_topk:
            routing = self._balanced(logits, **self.route.keywords)
            return self.experts(x, _dense(routing)), routing
        if self.contender.biased or self.contender.joint:
            bias = ({"bias": each} if self.contender.biased else {} for each in self.bias)
            routings = [call(each, **more) for each, more in zip(logits, bias, strict=True)]
            return self.experts(x, torch.stack([_dense(routing) for routing in routings])), routings
        routing = call(logits)
        return self.experts(x, _dense(routing)), routing

    def _balanced(self, logits: Tensor, *, normalize: bool, sample: bool = False) -> r.Routing:
        """As `balanced_sigma_topk` of each member, but all prices are found together: a tenth of the time."""
        self.prices = prices(logits.detach().double(), self.k, self.prices)
        routing = r.sigma_topk(logits - self.prices[:, None].to(logits), self.k, sample=sample)
        if not normalize:
            return routing._replace(logits=logits)
        log_probs = routing.probs.gather(-1, routing.indices).clamp(min=torch.finfo(logits.dtype).tiny).log()
        weights = (logits.gather(-1, routing.indices) + log_probs).softmax(-1)  # prices choose, and do not weight
        return routing._replace(logits=logits, weights=weights)


CLOSE, NEWTON, HALVINGS = 1e-4, 30, 6
"""How far a load may be from its share; and how many steps, and halvings of a step, `prices` takes at most."""


def prices(x: Tensor, k: int, found: Tensor) -> Tensor:
    """Prices (members, n) with which all loads of σ_k(x − prices) are equal; x is (members, tokens, n).

    By Newton's method, from the prices of another batch.
    """
    capacity, tiny = k * x.shape[1] / x.shape[2], torch.finfo(x.dtype).tiny
    probs = sigmoid_topk(x - found[:, None], k)
    excess = probs.sum(1) - capacity
    for _ in range(NEWTON):
        if bool((excess.abs() <= CLOSE * capacity).all()):
            return found
        slope = probs * (1 - probs)
        jacobian = slope.sum(1).diag_embed() - (slope / slope.sum(-1, keepdim=True).clamp(min=tiny)).mT @ slope
        size = jacobian.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None] + tiny
        step = torch.linalg.solve(jacobian + size / len(found[0]) + 1e-9 * size * torch.eye(len(found[0])), excess)
        share, before = x.new_ones(len(x), 1), excess.norm(dim=-1, keepdim=True)
        for _ in range(HALVINGS):
            probs = sigmoid_topk(x - (found + share * step)[:, None], k)
            excess = probs.sum(1) - capacity
            is_worse = excess.norm(dim=-1, keepdim=True) > before
            if not bool(is_worse.any()):
                break
            share = torch.where(is_worse, share / 2, share)
        found = found + share * step
    return found


def _dense(routing: r.Routing) -> Tensor:
    """Weights (…, n), 0 where an expert was not chosen."""
    zeros = routing.weights.new_zeros(*routing.weights.shape[:-1], routing.probs.shape[-1] + 1)
    return zeros.scatter(-1, routing.indices, routing.weights)[..., :-1]


class Plain(nn.Module):
    """What the mixtures are compared with: one network for each member, linear or with hidden units."""

    def __init__(self, hidden: int, problem: Problem, seeds: Sequence[int]) -> None:
        super().__init__()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.network = Networks(generators, 1, problem.x.shape[-1], hidden, problem.outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Routings]:
        """As `Mixtures`, without a routing."""
        return self.network(x, torch.ones_like(x[..., :1])), []


def units(problem: Problem, k: int) -> int:
    """Hidden units with as many parameters as a token meets in a mixture: the router's and those of k experts."""

    def size(hidden: int) -> int:
        inputs, outputs = problem.x.shape[-1], problem.outputs
        return hidden * (inputs + 1 + outputs) + outputs if hidden else (inputs + 1) * outputs

    wanted = problem.x.shape[-1] * EXPERTS + k * size(problem.hidden)
    return max(1, round((wanted - size(1)) / (size(2) - size(1))) + 1)


Found = list[tuple[int, list[Measures]]]
"""Steps, and what each member measured at each."""


def train(
    name: str,
    make: Callable[[int], Problem],
    k: int,
    members: Sequence[tuple[int, Setting]],
    *,
    steps: int,
    when: Sequence[int],
) -> Found:
    """Train members (seed and setting; one learning rate) by Adam, with a rate that falls to 0 as a cosine."""
    rate, contender = members[0][1].rate, ROUTERS.get(name)
    assert all(setting.rate == rate for _, setting in members)
    seeds = [seed for seed, _ in members]
    problems = {seed: make(seed) for seed in seeds}
    one = problems[seeds[0]]
    torch.manual_seed(sum(seeds))  # of noise and samples
    if contender:
        model: nn.Module = Mixtures(contender, k, one, seeds, [setting.temperature for _, setting in members])
    else:
        model = Plain(units(one, k) if name == "dense" else 0, one, seeds)
    balance = torch.tensor([setting.balance for _, setting in members])
    x, y, test_x, test_y = (torch.stack([problems[seed][part] for seed in seeds]) for part in range(4))
    adam = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    batches = {seed: torch.Generator().manual_seed(seed) for seed in problems}  # the same for every router
    rows, found = torch.arange(len(members))[:, None], []
    for step in range(steps + 1):
        if step in when:
            found.append((step, measure(model, one, test_x, test_y)))
        if step == steps:
            break
        if contender and contender.late:
            model.share.fill_(share_after(step * BATCH / len(one.x)))
        drawn = {seed: torch.randint(len(one.x), (BATCH,), generator=each) for seed, each in batches.items()}
        batch = torch.stack([drawn[seed] for seed in seeds])
        output, routing = model(x[rows, batch])
        loss = one.loss(output, y[rows, batch]).mean(-1).sum()
        if contender and contender.cure:
            loss = loss + (balance * torch.vmap(contender.cure)(routing)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        if contender and contender.biased:
            for bias, each, size in zip(model.bias, routing, balance.tolist(), strict=True):
                r.update_bias(bias, each, rate=size)
    return found


@torch.no_grad()
def measure(model: nn.Module, problem: Problem, x: Tensor, y: Tensor) -> list[Measures]:
    """On the test data, without noise; of each member."""
    model.eval()
    output, found = model(x)
    model.train()
    routings = [r.Routing(*parts) for parts in zip(*found, strict=True)] if isinstance(found, r.Routing) else found
    errors = problem.error(output, y).mean(-1).tolist()
    if not routings:
        return [Measures(error=error, violation=0.0, dead=0, entropy=0.0, active=0.0) for error in errors]
    return [
        Measures(
            error=error,
            violation=r.max_violation(routing),
            dead=r.dead_experts(routing),
            entropy=r.routing_entropy(routing),
            active=float(r.load(routing).sum()) / x.shape[1],
        )
        for error, routing in zip(errors, routings, strict=True)
    ]
