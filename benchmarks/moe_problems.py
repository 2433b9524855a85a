"""Two small problems for mixtures of experts, the routers, and their training; behind benchmarks/moe.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from khot.nn import MoE, Router
from khot.nn import routing as r

Route = Callable[..., r.Routing]
"""Scores (tokens, n) and k to a `Routing`."""
EXPERTS = 8
BATCH = 256
TUNING = (1000, 1001, 1002)
"""Settings are chosen on these seeds; results are of others."""
TEMPERATURES = (1.0, 0.3, 0.1)
DENSE_RATES = (0.01, 0.03, 0.1, 0.3)


class Problem(NamedTuple):
    """Data, and what an expert is."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    expert: Callable[[], nn.Module]
    perceptron: Callable[[int], nn.Module]
    """A dense network with so many hidden units."""
    linear: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    error: Callable[[Tensor, Tensor], Tensor]
    """Less is better."""
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
    y = (slopes[(x @ centres.mT).argmax(-1)] * x).sum(-1, keepdim=True)
    y = y / y.std() + 0.1 * torch.randn(8000, 1, generator=generator)

    def perceptron(hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    expert = partial(nn.Linear, 4, 1)
    parts = x[:4000], y[:4000], x[4000:], y[4000:]
    return Problem(*parts, expert, perceptron, expert, mse_loss, mse_loss, (0.03, 0.1))


def digits(seed: int) -> Problem:
    """Scikit-learn's digits: 1257 to train on, 540 to test on, the same for all seeds.

    A tuning seed sees no test: it divides the 1257, each in its own way.
    """
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(v) for v in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if seed in TUNING:
        order = order[:1257][torch.randperm(1257, generator=torch.Generator().manual_seed(seed))]
    train, test = order[: 1257 * len(order) // 1797], order[1257 * len(order) // 1797 :]
    x = images.float() / 16
    x = x - x[train].mean(0)  # routers are linear: with a mean, all would go the same way

    def perceptron(hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def error(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(-1) != target).float().mean()

    linear = partial(nn.Linear, 64, 10)
    parts = x[train], labels[train], x[test], labels[test]
    return Problem(*parts, partial(perceptron, 16), perceptron, linear, cross_entropy, error, (0.01, 0.03))


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


ROUTERS = {
    "softmax_topk": Contender(_normalized(r.softmax_topk), r.load_balance_loss),
    "sigmoid_gates": Contender(_normalized(r.sigmoid_gates), biased=True),
    "noisy_topk": Contender(_normalized(r.noisy_topk), r.importance_loss),
    "expert_choice": Contender(_always(r.expert_choice)),
    "dselect_k": Contender(_always(r.dselect_k), r.importance_loss),
    "sigma_topk": Contender(_normalized(r.sigma_topk), r.importance_loss),
    "sigma_topk, sampled": Contender(_normalized(r.sigma_topk, sample=True), r.importance_loss),
    "sigma_topk, weights π": Contender(_always(r.sigma_topk), r.importance_loss, least=2),
    "sigma_topk, straight-through": Contender(_normalized(r.sigma_topk, straight_through=True), r.importance_loss),
    "balanced_sigma_topk": Contender(_normalized(r.balanced_sigma_topk)),
    "balanced_sigma_topk, sampled": Contender(_normalized(r.balanced_sigma_topk, sample=True)),
}
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


class Tempered(Router):
    """Scores divided by a temperature, whatever the router."""

    temperature = 1.0

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> r.Routing:
        """As `Router`."""
        return super().forward(x / self.temperature, generator=generator)


def mixture(problem: Problem, contender: Contender, k: int, temperature: float) -> MoE:
    """Eight experts behind the router."""
    router = Tempered(problem.x.shape[-1], EXPERTS, k, route=contender.route(k), biased=contender.biased)
    router.temperature = temperature
    return MoE(router, [problem.expert() for _ in range(EXPERTS)])


def dense(problem: Problem, k: int) -> nn.Module:
    """The perceptron with as many parameters as a token meets in a mixture: the router's and those of k experts."""
    size = problem.x.shape[-1] * EXPERTS + k * _count(problem.expert())
    one, two = (_count(problem.perceptron(hidden)) for hidden in (1, 2))
    return problem.perceptron(max(1, round((size - one) / (two - one)) + 1))


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def train(
    name: str, problem: Problem, k: int, setting: Setting, *, seed: int, steps: int, when: Sequence[int]
) -> Iterator[tuple[int, Measures]]:
    """Adam, with a rate that falls to 0 as a cosine; measures `when` asked for."""
    torch.manual_seed(seed)
    contender = ROUTERS.get(name)
    model = (
        mixture(problem, contender, k, setting.temperature)
        if contender
        else dense(problem, k)
        if name == "dense"
        else problem.linear()
    )
    adam = torch.optim.Adam(model.parameters(), lr=setting.rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for step in range(steps + 1):
        if step in when:
            yield step, measure(model, problem)
        if step == steps:
            break
        batch = torch.randint(len(problem.x), (BATCH,))
        loss = _loss(model, contender, problem, batch, setting.balance)
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()


def _loss(model: nn.Module, contender: Contender | None, problem: Problem, batch: Tensor, balance: float) -> Tensor:
    x, y = problem.x[batch], problem.y[batch]
    if contender is None:
        return problem.loss(model(x), y)
    output, routing, _ = model(x)
    if contender.biased:
        r.update_bias(model.router.bias, routing, rate=balance)
    loss = problem.loss(output, y)
    return loss + balance * contender.cure(routing) if contender.cure and balance else loss


@torch.no_grad()
def measure(model: nn.Module, problem: Problem) -> Measures:
    """On the test data, without noise."""
    model.eval()
    found = model(problem.test_x)
    model.train()
    if isinstance(found, Tensor):
        error = float(problem.error(found, problem.test_y))
        return Measures(error=error, violation=0.0, dead=0, entropy=0.0, active=0.0)
    output, routing, _ = found
    return Measures(
        error=float(problem.error(output, problem.test_y)),
        violation=r.max_violation(routing),
        dead=r.dead_experts(routing),
        entropy=r.routing_entropy(routing),
        active=float(r.load(routing).sum()) / len(output),
    )
