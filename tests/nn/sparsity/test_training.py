"""What masks do in training: what is counted, and what reaches weights that are masked."""

import pytest
import torch
from torch import nn

from khot.nn import sparsity
from khot.nn.schedules import between, cubic
from khot.nn.sparsity import Sparsifier
from tests.sparse_models import mlp, size

FLAT = between(cubic, 0, 0)


def test_biases_and_norms_are_not_counted_and_go_with_their_channel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    sparsifier = Sparsifier(model, 0.5, steps=0, units=sparsity.channels)
    (pool,) = sparsifier.pools
    assert pool.total == size(model) == 9 * (16 + 32)  # and not the 12 biases and 16 numbers of the norm
    sparsifier.finalize()
    assert size(model) == sparsifier.cost() == 4 * 9 * (2 + 4)
    kept = [model[0].bias, model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var]
    assert {len(t) for t in kept} == {4}
    biased = nn.Linear(10, 10)
    before = biased.bias.clone()
    assert Sparsifier(biased, 0.5, steps=0).cost() == 50
    assert torch.equal(biased.bias, before)


def test_a_table_of_latencies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    Sparsifier(model, 0.5, steps=0, cost=sparsity.Latency({"0": 300, "1": 100})).finalize()
    counts = [int(layer.weight.count_nonzero()) for layer in model]
    assert 3 * counts[0] + counts[1] == 200  # half of 400
    assert counts[1] >= 2 * counts[0]  # equal weights, one third of the price


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weight_decay_shrinks_masked_weights_and_they_have_no_gradient(decay):
    torch.manual_seed(0)
    model = nn.Linear(10, 10, bias=False)
    sparsifier = Sparsifier(model, 0.3, steps=10, mask=sparsity.hard, density_schedule=FLAT)
    weight = model.parametrizations.weight.original
    before, out = weight.detach().clone(), sparsifier.masks()["weight"] == 0
    optimizer = torch.optim.SGD(model.parameters(), 0.5, weight_decay=decay)
    model(torch.randn(4, 10)).square().sum().backward()
    assert (weight.grad[out] == 0).all()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of what is kept alone
    assert float(weight.grad.norm()) == pytest.approx(1.0)
    assert float(norm) > 1
    optimizer.step()
    torch.testing.assert_close(weight.detach()[out], before[out] * (1 - 0.5 * decay))
    assert not torch.equal(weight.detach()[~out], before[~out] * (1 - 0.5 * decay))


def test_samples_have_the_size_and_the_probabilities_of_the_soft_mask():
    torch.manual_seed(0)
    model, draws = nn.Linear(6, 5, bias=False), []
    options = {"mask": sparsity.sampled, "density_schedule": FLAT, "freeze": 1.0, "temperature": (0.5, 0.5)}
    sparsifier = Sparsifier(model, 9, steps=2000, generator=torch.Generator().manual_seed(0), **options)
    (pool,) = sparsifier.pools
    pool.values = None  # the unit of the temperature is then that of all weights
    for _ in range(2000):
        sparsifier.step()
        draws.append(sparsifier.masks()["weight"].flatten())
        assert int(draws[-1].sum()) == 9
        probs, pool.values = pool.problem.soft().detach(), None
    error = (torch.stack(draws).mean(0) - probs).abs()
    assert float((error / (probs * (1 - probs) / 2000).sqrt()).max()) < 4  # of 30: one in 500 by chance


def test_the_mask_follows_a_model_that_is_clipped_and_copied():
    model, x = mlp(), torch.randn(4, 12)
    sparsifier = Sparsifier(model, 0.5, steps=4, density_schedule=FLAT)
    model(x).square().sum().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for p, g in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, g * float(0.1 / (norm + 1e-6)))
    sparsifier.step()
    assert sparsifier.cost() == pytest.approx(0.5 * size(mlp()), rel=1e-6)
