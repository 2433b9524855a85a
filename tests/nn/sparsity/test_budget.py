"""The budget is held at every step, exactly, and `finalize` keeps it."""

import copy
import math

import pytest
import torch
from torch import nn

from khot.nn import sparsity
from khot.nn.schedules import between, cubic, linear
from khot.nn.sparsity import Sparsifier
from tests.sparse_models import MODELS, flops, mlp, nonzero, size, train, weights

RULES = {rule.__name__: rule for rule in (sparsity.soft, sparsity.straight_through, sparsity.sampled, sparsity.hard)}
UNITS = {
    "weights": sparsity.weights,
    "rows": sparsity.rows,
    "columns": sparsity.columns,
    "blocks": sparsity.blocks(3),
}


def budget_now(sparsifier, final):
    """The budget that the default schedule asks for, by its own formula."""
    total = sum(pool.total for pool in sparsifier.pools)
    fraction = min(1.0, sparsifier.done / sparsifier.steps / 0.75)
    return total * (final + (1 - final) * (1 - fraction) ** 3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", MODELS)
def test_the_budget_is_held_at_every_step(name, units, rule):
    torch.manual_seed(0)
    make, example = MODELS[name]
    model, x = make(), example()
    dense, names = size(model), list(model.state_dict())
    sparsifier = Sparsifier(model, 0.3, steps=10, units=UNITS[units], mask=RULES[rule])
    seen = []

    def look():
        budget = 0.3 * dense if sparsifier.done >= 8 else budget_now(sparsifier, 0.3)
        masks = sparsifier.masks()
        tensors = {m.path: m.tensor for pool in sparsifier.pools for m in pool.masked}
        cost = sum(float(masks[path].expand(t.shape).double().sum()) for path, t in tensors.items())
        assert cost == pytest.approx(sparsifier.cost(), rel=1e-6)
        assert cost <= budget * (1 + 1e-6)
        if rule == "soft" and sparsifier.done < 8:
            assert cost == pytest.approx(budget, rel=1e-6)
        if units == "weights" and rule != "soft":
            assert cost == math.floor(budget + 1e-6)
        seen.append(cost)

    look()
    train(model, sparsifier, x, steps=10, after=look)
    assert seen[0] > seen[-1]
    model.eval()
    masked = model(x)
    assert sparsifier.finalize() is model
    assert nonzero(model) <= 0.3 * dense
    if units == "weights":
        assert nonzero(model) == math.floor(0.3 * dense + 1e-9)
    torch.testing.assert_close(model(x), masked, rtol=0, atol=1e-6)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "mixed", "resnet"])
def test_a_budget_of_flops(name, rule):
    """Costs differ by layer; a greedy choice leaves nothing that fits."""
    torch.manual_seed(1)
    make, example = MODELS[name]
    model, x = make(), example()
    model.eval()
    dense = flops(model, x[:1])
    model.train()
    sparsifier = Sparsifier(model, 0.25, steps=10, cost=sparsity.Flops(x), mask=RULES[rule])
    assert sum(pool.total for pool in sparsifier.pools) == dense
    train(model, sparsifier, x, steps=4)
    if rule == "soft":
        assert sparsifier.cost() == pytest.approx(budget_now(sparsifier, 0.25), rel=1e-6)
    train(model, sparsifier, x, steps=6)
    (pool,) = sparsifier.pools
    left = 0.25 * dense - sparsifier.cost()
    costs = torch.ones(len(pool.values)) if pool.costs is None else pool.costs
    assert sparsifier.cost() == int((pool.values.double() * costs * pool.price).sum())
    assert 0 <= left < float((costs * pool.price)[pool.values == 0].min())


@pytest.mark.parametrize("share", [sparsity.uniformly, sparsity.by_erdos_renyi])
def test_shares_give_each_layer_its_own_budget(share):
    torch.manual_seed(0)
    model = mlp()
    sparsifier = Sparsifier(model, 0.2, steps=0, share=share)
    sparsifier.finalize()
    densities = [float((w != 0).float().mean()) for w in weights(model)]
    assert nonzero(model) <= 0.2 * size(model)
    assert nonzero(model) > 0.2 * size(model) - 3
    if share is sparsity.uniformly:
        assert densities == pytest.approx([0.2] * 3, abs=1 / 32)
    else:
        raw = [sum(w.shape) / w.numel() for w in weights(model)]
        scale = 0.2 * size(model) / sum(sum(w.shape) for w in weights(model))
        assert densities == pytest.approx([scale * r for r in raw], abs=1 / 32)


def test_erdos_renyi_caps_small_layers_at_dense():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))
    sparsifier = Sparsifier(model, 0.5, steps=0, share=sparsity.by_erdos_renyi)
    assert [pool.final for pool in sparsifier.pools] == pytest.approx([840 - 80, 80])


def test_a_fraction_that_rounds_badly_keeps_its_item():
    """0.29·100 is 28.999999999999996 in floats, and one weight was lost."""
    model = nn.Linear(10, 10)
    assert nonzero(Sparsifier(model, 0.29, steps=0).finalize()) == 29
    assert nonzero(Sparsifier(nn.Linear(10, 10), 7, steps=0).finalize()) == 7


def test_the_largest_weights_stay():
    """Against `torch.nn.utils.prune`, globally."""
    from torch.nn.utils import prune

    torch.manual_seed(0)
    model = mlp()
    other = copy.deepcopy(model)
    Sparsifier(model, 0.1, steps=0).finalize()
    layers = [(m, "weight") for m in other if isinstance(m, nn.Linear)]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=size(model) - int(0.1 * size(model)))
    for ours, theirs in zip(weights(model), weights(other), strict=True):
        assert torch.equal(ours, theirs)


def test_a_schedule_of_ones_own():
    model = nn.Linear(10, 10)
    flat = Sparsifier(model, 0.5, steps=10, mask=sparsity.soft, density_schedule=between(cubic, 0, 0), freeze=1.0)
    assert flat.density() == pytest.approx(0.5)
    flat.finalize()
    late = Sparsifier(model, 0.5, steps=10, mask=sparsity.soft, density_schedule=between(linear, 0.5, 1.0), freeze=1.0)
    seen = []
    for _ in range(10):
        late.step()
        seen.append(late.density())
    assert seen == pytest.approx([1.0] * 5 + [0.9, 0.8, 0.7, 0.6, 0.5], rel=1e-6)


@pytest.mark.parametrize("units", [sparsity.n_of_m(2, 4), sparsity.n_of_m(1, 4)])
@pytest.mark.parametrize("rule", RULES)
def test_n_of_m_is_exact_everywhere(rule, units):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(5, 16)
    sparsifier = Sparsifier(model, None, steps=20, units=units, mask=RULES[rule])
    train(model, sparsifier, x, steps=16)  # the schedule is over, and the mask is not frozen
    for mask in sparsifier.masks().values():
        torch.testing.assert_close(mask.view(-1, 4).sum(1), torch.full((mask.numel() // 4,), float(units.n)))
    train(model, sparsifier, x, steps=5)
    sparsifier.finalize()
    for w in weights(model):
        assert (w.view(-1, 4).count_nonzero(1) == units.n).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor is in prototype")
def test_two_of_four_is_what_torch_calls_semi_structured():
    """torch's own checks and packing, as far as they go without CUDA: only the check of the device is passed over."""
    from torch.sparse import SparseSemiStructuredTensorCUTLASS, to_sparse_semi_structured

    class OnCuda(torch.Tensor):
        is_cuda = True

    torch.manual_seed(0)
    model = nn.Linear(128, 64).half()
    dense = model.weight.detach().clone()
    Sparsifier(model, None, steps=0, units=sparsity.n_of_m(2, 4)).finalize()
    weight = model.weight.detach()
    with pytest.raises(RuntimeError, match="Only CUDA tensors"):
        to_sparse_semi_structured(weight)

    def packed(w):
        return SparseSemiStructuredTensorCUTLASS.from_dense(w.as_subclass(OnCuda)).to_dense().as_subclass(torch.Tensor)

    assert torch.equal(packed(weight), weight)
    assert not torch.equal(packed(dense), dense)  # packing keeps two of four, and a dense weight loses the others
    with pytest.raises(RuntimeError, match="must be larger or equal than and a multiple of"):
        packed(weight[:, :20].contiguous())
