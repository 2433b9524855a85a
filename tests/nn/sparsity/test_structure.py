"""Channels and heads: what is dropped together, what it costs, and its removal."""

import pytest
import torch
from torch import nn

from khot.nn import sparsity
from khot.nn.sparsity import Sparsifier
from tests.sparse_models import ResNet, Transformer, flops, size, train

RULES = [sparsity.soft, sparsity.straight_through, sparsity.sampled, sparsity.hard]
CASES = {
    "resnet": (ResNet, sparsity.channels, (), lambda: torch.randn(6, 1, 8, 8)),
    "feed-forward": (Transformer, sparsity.channels, ["attention"], lambda: torch.randn(6, 5, 16)),
    "heads": (Transformer, sparsity.heads(), ["up", "down"], lambda: torch.randn(6, 5, 16)),
    "both": (Transformer, sparsity.combine(sparsity.heads(), sparsity.channels), (), lambda: torch.randn(6, 5, 16)),
}


def counted(model, excluded):
    """The weights of the layers that are not excluded, by a look at their shapes."""
    return size(model) - sum(size(model.get_submodule(name)) for name in excluded)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", CASES)
def test_the_model_becomes_smaller_and_computes_the_same(name, rule):
    torch.manual_seed(0)
    make, units, exclude, example = CASES[name]
    model, x = make(), example()
    dense = counted(model, exclude)
    sparsifier = Sparsifier(model, 0.5, steps=12, units=units, exclude=exclude, mask=rule)
    assert sum(pool.total for pool in sparsifier.pools) == pytest.approx(dense)

    def look():
        u = max(0.0, 1 - sparsifier.done / 9) ** 3
        budget = dense * (0.5 + 0.5 * u)
        if rule is sparsity.soft and sparsifier.done < 9:
            assert sparsifier.cost() == pytest.approx(budget, rel=1e-6)
        assert sparsifier.cost() <= budget * (1 + 1e-6)

    train(model, sparsifier, x, steps=12, after=look)
    model.eval()
    before, cost, names = model(x), sparsifier.cost(), list(make().state_dict())
    (pool,) = sparsifier.pools
    sparsifier.finalize()
    # Smaller matrices add in another order: some 16 roundings of float32, whatever the processor.
    torch.testing.assert_close(
        model(x), before, rtol=0, atol=16 * 1.2e-7 * float(before.detach().abs().max().clamp(min=1))
    )
    assert counted(model, exclude) == cost <= 0.5 * dense
    assert list(model.state_dict()) == names
    for i in torch.nonzero(pool.values == 0).flatten():  # not one more would fit
        assert float(pool.charge(pool.values.double().index_fill(0, i, 1.0))) > 0.5 * dense
    train(model, NoSteps(), x, steps=2)  # it can be trained on


class NoSteps:
    def step(self):
        pass


def test_channels_within_a_budget_of_flops():
    torch.manual_seed(0)
    model, x = ResNet(), torch.randn(4, 1, 8, 8)
    dense = flops(model.eval(), x[:1])
    sparsifier = Sparsifier(model.train(), 0.4, steps=10, units=sparsity.channels, cost=sparsity.Flops(x))
    train(model, sparsifier, x, steps=10)
    cost = sparsifier.cost()
    sparsifier.finalize()
    assert flops(model.eval(), x[:1]) == pytest.approx(cost)
    assert cost <= 0.4 * dense


def test_the_gradient_of_soft_channels_is_that_of_finite_differences():
    """The budget of σ_k depends on the scores, because channels multiply each other's cost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    sparsifier = Sparsifier(model, 0.6, steps=0, units=sparsity.channels)
    (pool,) = sparsifier.pools
    x = torch.rand(9, dtype=torch.float64, requires_grad=True)

    def mask(x):
        return pool.pose(x, 0.0, torch.tensor(0.1, dtype=torch.float64), 0).soft()

    assert float(pool.charge(mask(x.detach()))) == pytest.approx(pool.final, rel=1e-8)
    assert torch.autograd.gradcheck(mask, x, atol=1e-5)


def test_joined_channels_are_dropped_together():
    model = ResNet()
    sparsifier = Sparsifier(model, 0.4, steps=0, units=sparsity.channels)
    names = {g.name: {p for m in g.masked for p, _, _ in m.places} for pool in sparsifier.pools for g in pool.groups}
    assert names["stem"] == {"stem", "norm", "one.second", "one.last"}  # the sum of the first block
    assert names["two.second"] == {"two.second", "two.last", "two.short.0", "two.short.1", "depthwise"}
    assert names["one.first"] == {"one.first", "one.norm"}
    sparsifier.finalize()
    assert model.stem.out_channels == model.one.second.out_channels == model.one.first.in_channels
    assert model.depthwise.groups == model.two.second.out_channels
    assert model.head.in_features == 4 * model.depthwise.out_channels


class Odd(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.second, self.middle = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), middle

    def forward(self, x):
        return self.second(self.middle(self.first(x)))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Roll(nn.Module):
    def forward(self, x):
        return x.roll(1, 1)


def test_what_cannot_be_traced_is_refused_by_name():
    for middle, match in (
        (Branch(), "cannot be traced by torch.fx"),
        (Roll(), "'first' cannot be traced through 'roll'"),
        (nn.Conv2d(4, 4, 3, groups=2), "'middle', a convolution with 2 groups"),
    ):
        model = Odd(middle)
        names = list(model.state_dict())
        with pytest.raises(ValueError, match=match):
            Sparsifier(model, 0.5, steps=1, units=sparsity.channels)
        assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="no channels that may be dropped"):
        Sparsifier(nn.Sequential(nn.Linear(4, 4)), 0.5, steps=1, units=sparsity.channels)
    with pytest.raises(ValueError, match="must be `globally`"):
        Sparsifier(Odd(nn.ReLU()), 0.5, steps=1, units=sparsity.channels, share=sparsity.uniformly)
    with pytest.raises(ValueError, match="must have a MultiheadAttention, or a module with Linear layers 'query'"):
        Sparsifier(Odd(nn.ReLU()), 0.5, steps=1, units=sparsity.heads())
    model = Odd(nn.Sigmoid())  # it maps 0 to 1/2, so nothing before it is dropped
    with pytest.raises(ValueError, match="no channels that may be dropped"):
        Sparsifier(model, 0.5, steps=1, units=sparsity.channels)


def test_every_space_keeps_a_channel():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    Sparsifier(model, 0.2, steps=0, units=sparsity.channels).finalize()
    assert model[0].out_features >= 1
    with pytest.raises(ValueError, match="must be ≥ 9, the least that can be kept; got 5"):
        Sparsifier(
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 4)), 5, steps=0, units=sparsity.channels
        )
