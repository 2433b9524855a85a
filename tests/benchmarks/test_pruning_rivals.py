"""The rivals of the study of sparse networks keep what they say, and do what defines them."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import khot
from benchmarks.rivals import darts
from benchmarks.rivals.pruning import METHODS, flat, layer_counts, projected, prunable, top
from benchmarks.sparsity_problems import Data, Problem, train
from khot.nn import Choice

STEPS, DENSITY = 40, 0.25


def network():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


def data(seed):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return Data(x, x[:, :4].argmax(1), x, x[:, :4].argmax(1))


PROBLEM = Problem(network, data, steps=STEPS, batch=16)
K = int(DENSITY * (8 * 12 + 12 * 4))


def started(name, knob=None, density=DENSITY):
    """A method at the start, on a fixed network and a fixed batch."""
    torch.manual_seed(0)
    model, known = network(), data(0)
    method = METHODS[name](
        model,
        density,
        steps=STEPS,
        knob=METHODS[name].knobs[1] if knob is None else knob,
        loss=lambda weights: cross_entropy(functional_call(model, weights, (known.train,)), known.train_y),
    )
    return model, method


def stepped(name, watch, knob=None):
    """Train by SGD, and call `watch(method)` after each step."""
    model, method = started(name, knob)
    known = data(0)
    optimiser = torch.optim.SGD([{"params": list(model.parameters()), "lr": 0.3}, *method.extra(0.3)])
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = cross_entropy(functional_call(model, method.weights(), (known.train,)), known.train_y)
        (loss + method.penalty()).backward()
        method.after_backward()
        optimiser.step()
        method.after_step()
        watch(method)
    return method


@pytest.mark.parametrize("name", METHODS)
def test_the_final_weights_have_the_density_asked_for(name):
    for knob in METHODS[name].knobs:
        make = partial(METHODS[name], density=DENSITY, knob=knob)
        model, method = train(PROBLEM, make, data(1), rate=0.01, seed=1)
        weights = method.final()
        kept = sum(int(w.count_nonzero()) for w in weights.values())
        assert weights.keys() == prunable(model).keys()
        assert kept == {"dense": 144}.get(name, K) or (name == "STR" and kept < K)


def test_top_keeps_exactly_k_of_equal_scores():
    assert top(torch.ones(9), 4).sum() == 4


def test_layers_share_the_weights_by_erdos_renyi():
    shapes = [(10, 20), (20, 30), (5, 4)]
    assert layer_counts(shapes, 410, 0.0) == [100, 300, 10]
    counts = layer_counts(shapes, 100, 1.0)
    scale = 100 / sum(map(sum, shapes))  # density ∝ (a + b)/(a·b), so the count ∝ a + b
    assert counts == pytest.approx([scale * sum(shape) for shape in shapes], abs=1)
    assert sum(counts) == 100
    assert layer_counts(shapes, 790, 1.0)[2] == 20  # never more than there are


def test_a_random_mask_stays():
    masks = []
    stepped("random", lambda method: masks.append(method.mask.clone()))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_one_shot_keeps_the_largest_of_its_moment():
    sizes = {}
    method = stepped("one-shot magnitude", lambda m: sizes.setdefault(m.done, m.flat_weights().detach().abs().clone()))
    assert torch.equal(method.mask, top(sizes[STEPS // 2], K))


def test_gradual_pruning_follows_the_cube_and_never_goes_back():
    masks = []
    stepped("gradual magnitude", lambda method: masks.append(method.mask.clone()), knob=0.75)
    for step, mask in enumerate(masks, 1):
        assert int(mask.sum()) == round(K + (144 - K) * max(0, 1 - step / 30) ** 3)
    assert all(bool((later <= earlier).all()) for earlier, later in pairwise(masks))


def test_snip_takes_the_largest_derivative_by_the_mask():
    model, method = started("SNIP", knob=1)
    known = data(0)
    mask = torch.ones(144, requires_grad=True)
    masked = {
        name: p.detach() * part
        for (name, p), part in zip(method.params.items(), method.shaped(mask).values(), strict=True)
    }
    cross_entropy(functional_call(model, masked, (known.train,)), known.train_y).backward()
    assert torch.equal(method.mask, top(mask.grad.abs(), K))


def test_rigl_moves_a_falling_share_to_the_largest_gradients():
    seen = [None]

    def watch(method):
        w = method.flat_weights().detach()
        assert [int(part.sum()) for part in method.mask.split(method.sizes)] == method.counts
        assert bool((w[~method.mask] == 0).all())
        if seen[-1] is not None:
            grown = method.mask & ~seen[-1]
            assert bool((w[grown] == 0).all())
            for part, new, old, g in zip(
                *(each.split(method.sizes) for each in (method.mask, grown, seen[-1], method.gradient.abs())),
                strict=True,
            ):
                if new.any():  # no larger gradient was left out
                    assert g[new].min() >= g[~part & ~old].max()
        seen.append(method.mask.clone())

    stepped("RigL", watch, knob=0.5)
    moves = [int((a & ~b).sum()) for a, b in zip(seen[2:], seen[1:], strict=False)]
    assert sum(moves[:10]) > sum(moves[20:30])
    assert sum(moves[31:]) == 0  # after 75 % of the steps


def test_top_kast_uses_a_and_learns_b():
    _, method = started("Top-KAST", knob=2.0)
    used = flat(method.weights().values())
    g = torch.randn(144)
    used.backward(g)
    w = method.flat_weights().detach()
    assert torch.equal(used.detach(), w * method.used)
    assert (int(method.used.sum()), int(method.learned.sum())) == (K, 2 * K)
    assert torch.equal(flat(p.grad for p in method.params.values()), g * method.learned)
    rest = method.learned & ~method.used
    expected = 1e-4 * (w.abs()[method.used].sum() + w.abs()[rest].sum() / DENSITY)
    assert float(method.penalty().detach()) == pytest.approx(float(expected), rel=1e-5)


def test_str_is_a_soft_threshold_with_a_gradient():
    s = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([0.9, -0.1, -0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, s: w.sign() * (w.abs() - s.sigmoid()).relu(), (w, s))
    _, method = started("STR")
    for (name, p), theta in zip(method.params.items(), method.s, strict=True):
        limit = 1 / (1 + math.exp(-theta.item()))
        expected = p.detach().sign() * (p.detach().abs() - limit).clamp(min=0)
        torch.testing.assert_close(method.weights()[name].detach(), expected)


def test_prob_mask_projects_on_the_budget():
    s = torch.randn(200, dtype=torch.float64) + 0.5
    torch.testing.assert_close(projected(s, 30.0), khot.euclidean_topk(s, 30.0), rtol=0, atol=1e-4)
    inside = torch.rand(20) / 10
    assert torch.equal(projected(inside, 5.0), inside)
    method = stepped("ProbMask", lambda method: None)
    assert float(method.s.detach().sum()) <= K + 1e-3


def test_spartan_cuts_forward_and_not_backward():
    _, method = started("Spartan", knob=20.0)
    method.done = 16
    beta, k = 1 + 19 * 16 / 32, K  # β half way to the last 20 %; the budget is reached at 20 %
    used = flat(method.weights().values())
    g = torch.randn(144)
    used.backward(g)
    w = method.flat_weights().detach().double().requires_grad_()
    low, high = -50.0, 50.0
    for _ in range(80):  # the shift μ with Σ σ(β|w| + μ) = k
        shift = (low + high) / 2
        low, high = (shift, high) if (beta * w.detach().abs() + shift).sigmoid().sum() < k else (low, shift)
    soft = (beta * w.detach().abs() + shift).sigmoid()
    torch.testing.assert_close(used.detach().double(), w.detach() * soft * top(w.detach().abs(), k), rtol=0, atol=1e-6)
    (w * khot.sigmoid_topk(w.abs(), k, temperature=1 / beta)).backward(g.double())
    torch.testing.assert_close(flat(p.grad for p in method.params.values()).double(), w.grad, rtol=0, atol=1e-6)


def test_spartan_freezes_its_mask():
    masks = {}
    stepped("Spartan", lambda m: masks.setdefault(m.done, m.frozen))
    assert masks[31] is None
    assert masks[32] is masks[40]


def right_operation(search, **more):
    """Let a search choose between doubling, which is right, and two others; return the scores."""
    torch.manual_seed(0)
    operations = [nn.Identity(), nn.Sigmoid(), nn.Tanh()]
    model = nn.Sequential(nn.Linear(2, 2), Choice(operations))
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(2))
        model[0].bias.zero_()
    x = 3 * torch.randn(64, 2)
    loss = lambda model: (model(x) - 2 * x).square().mean()  # noqa: E731
    (scores,) = search(model, (loss, loss), spent=600, rate=0.001, score_rate=0.1, **more)
    return scores


def test_searches_find_the_right_operation():
    assert right_operation(darts.darts).argmax() == 0
    assert right_operation(darts.rarts).argmax() == 0
    x = torch.randn(64, 2)
    fit = lambda model: -float((model(x) - 2 * x).square().mean())  # noqa: E731
    assert right_operation(darts.darts_pt, evaluate=fit).argmax() == 0


def test_a_charge_leads_to_a_cheaper_operation():
    """The expected cost is in the loss of θ: with a heavy charge the right but dear operation loses."""

    def dear(model, *rest, **options):
        model[1].costs.copy_(torch.tensor([100.0, 1.0, 1.0]))
        return darts.darts(model, *rest, charge=10.0, **options)

    assert right_operation(dear).argmax() != 0
