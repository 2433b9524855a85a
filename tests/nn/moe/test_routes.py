"""Routes, and the losses and measures of their load."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import khot
from khot.nn import MoE, Router, routing
from khot.nn.routing import Routing

TOPK = [
    routing.softmax_topk,
    routing.sigmoid_gates,
    partial(routing.sigma_topk, normalize=True),
    partial(routing.balanced_sigma_topk, normalize=True),
    partial(routing.sigma_topk, normalize=True, sample=True),
    partial(routing.sigma_topk, normalize=True, straight_through=True),
]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def logits(tokens=50, n=8, seed=0, dtype=torch.float32):
    return 2 * torch.randn(tokens, n, generator=seeded(seed), dtype=dtype)


# Routers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", TOPK, ids=lambda f: getattr(f, "__name__", str(getattr(f, "keywords", ""))))
def test_k_different_experts_with_positive_weights(route):
    x = logits().reshape(5, 10, 8)
    found = route(x, 3)
    assert found.weights.shape == found.indices.shape == (5, 10, 3)
    assert found.logits.shape == found.probs.shape == (5, 10, 8)
    assert all(len(set(row)) == 3 for row in found.indices.reshape(-1, 3).tolist())
    assert (found.weights > 0).all()
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(5, 10))


@pytest.mark.parametrize("route", [routing.sigma_topk, routing.balanced_sigma_topk])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_probabilities_of_sigma_routers_sum_to_k(route, k):
    for scale in (0.01, 1.0, 30.0):
        probs = route(scale * logits(200), k).probs
        assert (probs.sum(-1) - k).abs().max() < 1e-6 * k
        assert probs.min() >= 0
        assert probs.max() <= 1


def gradient_of_unchosen(route):
    """How much the scores of experts that were not chosen get, from a loss of the chosen experts' weights alone."""
    x = logits(dtype=torch.float64).requires_grad_()
    found = route(x, 2)
    values = torch.randn(found.weights.shape, dtype=torch.float64, generator=seeded(1))
    (gradient,) = torch.autograd.grad((found.weights * values).sum(), x)
    unchosen = torch.ones_like(x, dtype=torch.bool).scatter(-1, found.indices, False)
    return gradient[unchosen].abs()


@pytest.mark.parametrize(
    "route",
    [
        routing.sigma_topk,
        partial(routing.sigma_topk, normalize=True),
        partial(routing.sigma_topk, straight_through=True),
        routing.balanced_sigma_topk,
    ],
)
def test_experts_that_were_not_chosen_learn_with_sigma(route):
    assert (gradient_of_unchosen(route) > 0).all()


@pytest.mark.parametrize("route", [routing.softmax_topk, routing.sigmoid_gates])
def test_and_do_not_with_softmax_over_the_chosen(route):
    """The negative control: to the last bit but one."""
    assert gradient_of_unchosen(route).max() < 1e-15


def test_softmax_is_that_over_the_chosen():
    x = logits()
    found = routing.softmax_topk(x, 2)
    best = x.topk(2, -1)
    torch.testing.assert_close(found.weights, best.values.softmax(-1))
    assert torch.equal(found.indices, best.indices)
    raw = routing.softmax_topk(x, 2, normalize=False)
    torch.testing.assert_close(raw.weights, x.softmax(-1).topk(2, -1).values)


@pytest.mark.parametrize("route", [routing.sigmoid_gates, routing.softmax_topk])
def test_a_bias_chooses_and_does_not_weigh(route):
    x, bias = logits(), torch.tensor([0.0] * 7 + [10.0])
    found = route(x, 2, bias=bias, normalize=False)
    assert (found.indices == 7).any(-1).all()
    torch.testing.assert_close(found.weights, route(x, 8, normalize=False).probs.gather(-1, found.indices))
    masked = x.masked_fill(torch.arange(8) == 7, -torch.inf)
    assert (route(masked, 2, bias=bias).indices != 7).all()  # whatever the bias
    assert torch.equal(route(x, 2, bias=torch.zeros(8)).indices, route(x, 2).indices)


def test_samples_have_the_probabilities_of_sigma():
    x = logits(1).expand(20_000, 8)
    found = routing.sigma_topk(x, 3, sample=True, generator=seeded())
    share = torch.bincount(found.indices.flatten(), minlength=8) / 20_000
    torch.testing.assert_close(share, found.probs[0], rtol=0, atol=0.015)
    again = routing.sigma_topk(x, 3, sample=True, generator=seeded())
    assert torch.equal(again.indices, found.indices)


def test_samples_of_bad_and_of_no_tokens():
    x = logits()
    x[3, 2] = math.nan
    found = routing.sigma_topk(x, 2, sample=True, generator=seeded())
    assert found.indices.shape == (50, 2)
    assert found.weights.isnan().any(-1).nonzero().flatten().tolist() == [3]
    moe = MoE(Router(8, 8, 2, route=partial(routing.sigma_topk, sample=True)), [nn.Identity()] * 8)
    with pytest.raises(ValueError, match="got NaN for 1 of 50 tokens, first 3"):
        moe(x)
    assert routing.sigma_topk(x[:0], 2, sample=True).indices.shape == (0, 2)
    assert moe(x[:0]).output.shape == (0, 8)


def test_no_tokens_have_no_loss():
    found = routing.sigma_topk(logits(0), 2)
    losses = routing.load_balance_loss, routing.importance_loss, routing.z_loss
    assert [float(loss(found)) for loss in losses] == [0, 0, 0]
    assert routing.max_violation(found) == routing.routing_entropy(found) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: routing.noisy_topk(logits(n=5), 2), "must have 2n entries, scores and scales; got 5"),
        (lambda: routing.dselect_k(logits(n=5), 0, num_experts=4), "`k` must be ≥ 1; got 0"),
        (lambda: routing.dselect_k(logits(n=5), 1, num_experts=0), "`num_experts` must be ≥ 1; got 0"),
    ],
)
def test_routes_say_what_they_take(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_bias_has_one_number_for_each_expert():
    for route in (routing.sigma_topk, routing.sigmoid_gates):
        with pytest.raises(ValueError, match=r"`bias` must have the shape \(8,\).* got \(50, 1\)"):
            route(logits(), 2, bias=torch.zeros(50, 1))


def test_straight_through_is_a_mean_of_experts():
    x = logits().requires_grad_()
    found = routing.sigma_topk(x, 2, straight_through=True, normalize=True)
    assert torch.equal(found.weights, torch.full((50, 2), 0.5))
    (gradient,) = torch.autograd.grad(found.weights[:, 0].sum(), x)
    (expected,) = torch.autograd.grad(khot.sigmoid_topk(x, 2).gather(-1, found.indices[:, :1]).sum() / 2, x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("temperature", [0.5, torch.tensor(0.5), torch.linspace(0.1, 2, 50)])
def test_normalised_weights_can_be_peaked_and_reach_every_score(temperature):
    x = (5 * logits()).requires_grad_()
    found = routing.sigma_topk(x, 2, temperature=temperature, normalize=True)
    heat = torch.as_tensor(temperature).expand(50)[:, None]
    raw = (found.probs * (x.double() / heat).exp()).gather(-1, found.indices)
    torch.testing.assert_close(found.weights.double(), raw / raw.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert found.weights.max() > 0.95
    soft = 0.2 * x.detach().requires_grad_()
    weights = routing.sigma_topk(soft, 2, normalize=True).weights
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), soft)
    assert (gradient != 0).all()


def test_the_two_sided_router_has_one_temperature():
    x = logits()
    one = routing.balanced_sigma_topk(x, 2, temperature=torch.tensor(0.5))
    torch.testing.assert_close(one.probs, routing.balanced_sigma_topk(x, 2, temperature=0.5).probs)
    with pytest.raises(ValueError, match="one number; got a tensor of shape \\(50,\\)"):
        routing.balanced_sigma_topk(x, 2, temperature=torch.ones(50))


@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0, 1000.0])
@pytest.mark.parametrize("skew", [0.0, 5.0])
def test_two_sided_loads_are_met(scale, skew):
    x = scale * logits(512, 16) + skew * torch.arange(16) / 16
    found = routing.balanced_sigma_topk(x, 2)
    loads = found.probs.sum(0)
    assert (loads / 64 - 1).abs().max() < 1e-3
    free = routing.sigma_topk(x, 2).probs.sum(0)
    if skew and scale < 100:
        assert (free / 64 - 1).abs().max() > 0.2  # a negative control: without prices they are not met


def test_a_capacity_binds_only_where_it_is_exceeded():
    x = logits(512, 8) + torch.tensor([3.0] + [0.0] * 7)
    free = routing.sigma_topk(x, 2)
    capped = routing.balanced_sigma_topk(x, 2, capacity=150)
    assert free.probs.sum(0)[0] > 300
    assert capped.probs.sum(0)[0] == pytest.approx(150, rel=1e-3)
    assert (capped.probs.sum(0)[1:] <= 150.2).all()
    loose = routing.balanced_sigma_topk(x, 2, capacity=512)
    torch.testing.assert_close(loose.probs, free.probs)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_capacities_are_kept_however_sharp_the_scores(scale):
    x = scale * (logits(64, 16) + torch.randn(16, generator=seeded(1)))
    for capacity in (8.001, 8.1, 10.4):  # the mean is 8
        loads = routing.balanced_sigma_topk(x, 2, capacity=capacity).probs.sum(0)
        assert loads.max() < capacity * (1 + 1e-3)
    assert routing.sigma_topk(x, 2).probs.sum(0).max() > 15


def test_prices_hold_beside_tokens_that_are_masked_or_broken():
    x = logits(512, 8) + torch.tensor([3.0] + [0.0] * 7)
    x[:100, 1] = -math.inf
    loads = routing.balanced_sigma_topk(x, 2).probs.sum(0)
    assert (loads / 128 - 1).abs().max() < 1e-3
    x[7, 2] = math.nan
    found = routing.balanced_sigma_topk(x, 2, capacity=140)
    assert found.probs.isnan().any(-1).nonzero().flatten().tolist() == [7]
    assert found.probs.nansum(0).max() < 140.2


def test_experts_that_choose_have_equal_loads():
    x = logits(64, 8) + torch.tensor([3.0] + [0.0] * 7)
    found = routing.expert_choice(x, 2)
    assert routing.load(found).tolist() == [16] * 8
    probs = x.softmax(-1)
    for expert in range(8):
        tokens = (found.indices == expert).any(-1).nonzero()[:, 0]
        assert set(tokens.tolist()) == set(probs[:, expert].topk(16).indices.tolist())
    chosen = found.indices < 8
    torch.testing.assert_close(found.weights[chosen], probs.gather(-1, found.indices.clamp(max=7))[chosen])
    assert (found.weights[~chosen] == 0).all()


def test_gates_that_underflow_have_weights():
    """A bias may choose experts whose gates are 0 in float32; their shares are still known."""
    x = torch.tensor([[-200.0, -201.0, 5.0]], requires_grad=True)
    found = routing.sigmoid_gates(x, 2, bias=torch.tensor([3.0, 3.0, 0.0]))
    torch.testing.assert_close(found.weights, torch.tensor([[0.7311, 0.2689]]), atol=1e-4, rtol=0)
    assert torch.autograd.grad(found.weights[0, 0], x)[0].isfinite().all()
    plain = routing.sigmoid_gates(logits(), 2)
    chosen = plain.probs.gather(-1, plain.indices)
    torch.testing.assert_close(plain.weights, chosen / chosen.sum(-1, keepdim=True))


def test_softmax_gives_the_others_no_gradient_and_chooses_where_it_underflows():
    x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
    assert torch.autograd.grad(routing.softmax_topk(x, 2).weights[0], x)[0][2:].tolist() == [0, 0]
    assert routing.softmax_topk(torch.tensor([300.0, -2.0, -1.0, 0.0]), 2).indices.tolist() == [0, 3]


def test_noise_has_the_scale_asked_for():
    x = torch.cat([torch.zeros(20_000, 4), torch.tensor([-30.0, 0.0, 1.0, 3.0]).expand(20_000, 4)], -1)
    found = routing.noisy_topk(x, 2, generator=seeded())
    expected = torch.nn.functional.softplus(torch.tensor([-30.0, 0.0, 1.0, 3.0]))
    torch.testing.assert_close(found.logits.std(0), expected, rtol=0.02, atol=1e-6)
    assert (routing.noisy_topk(x, 2, training=False).logits == 0).all()


def test_dselect_is_at_most_k_hot_when_codes_are_sharp():
    x = torch.randn(40, 2 * 3 + 2, generator=seeded())
    sharp = torch.cat([x[:, :6].sign(), x[:, 6:]], -1)
    found = routing.dselect_k(sharp, 2, num_experts=8)
    assert ((found.probs > 0).sum(-1) <= 2).all()
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(40))
    soft = routing.dselect_k(0.1 * x, 2, num_experts=8)
    torch.testing.assert_close(soft.probs.sum(-1), torch.ones(40))
    assert soft.indices.shape[-1] == 8


def test_the_code_of_dselect_is_binary():
    x = torch.tensor([[1.0, -1.0, 1.0, 0.0]])  # one slot, digits 1 0 1: expert 5
    found = routing.dselect_k(x, 1, num_experts=8)
    assert found.indices.tolist() == [[5]]
    leaf = (0.2 * torch.randn(6, 8, dtype=torch.float64, generator=seeded())).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: routing.dselect_k(z, 2, num_experts=8).probs, leaf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_routed_in_float32(dtype):
    x = logits().to(dtype)
    for route in TOPK[:3]:
        found = route(x, 2)
        assert found.weights.dtype == torch.float32
        torch.testing.assert_close(found.weights, route(x.float(), 2).weights)


@pytest.mark.parametrize("route", [*TOPK, routing.expert_choice])
def test_no_tokens(route):
    found = route(torch.zeros(0, 8), 2)
    assert found.indices.shape[0] == 0
    assert routing.load(found).tolist() == [0] * 8


@pytest.mark.parametrize("route", [routing.softmax_topk, routing.sigma_topk, routing.expert_choice])
def test_bad_k(route):
    with pytest.raises(ValueError, match=r"1 ≤ k ≤ 8 \(number of experts\); got 9"):
        route(logits(), 9)
    with pytest.raises(TypeError, match="`k` must be an int"):
        route(logits(), 2.0)


def test_a_capacity_that_cannot_hold_all_says_how_many_are_dropped():
    with pytest.raises(ValueError, match=r"≥ 12.5 .* got 10: 20 of 100 assignments would be dropped"):
        routing.balanced_sigma_topk(logits(50), 2, capacity=10)
    routing.balanced_sigma_topk(logits(1, 49), 1, capacity=1 / 49)  # rounds to less than a 49th of 1
    for bad in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="`capacity_factor` must be > 0 and finite"):
            MoE(Router(4, 8, 2), [nn.Identity()] * 8, capacity_factor=bad)
    moe = MoE(Router(4, 8, 2), [nn.Linear(4, 4) for _ in range(8)], capacity_factor=0.5)
    with pytest.raises(ValueError, match="assignments would be dropped"):
        moe(torch.randn(40, 4))


# Load ----------------------------------------------------------------------------------------------------------------


def made(indices, n=4, probs=None):
    index = torch.tensor(indices)
    soft = torch.full((len(index), n), 1 / n) if probs is None else probs
    return Routing(soft, torch.ones(index.shape), index, soft)


def test_measures_of_load():
    found = made([[0, 1], [0, 1], [0, 2], [0, 4]])
    assert routing.load(found).tolist() == [4, 2, 1, 0]
    assert routing.max_violation(found) == pytest.approx(4 / 1.75 - 1)
    assert routing.dead_experts(found) == 1
    assert routing.routing_entropy(found) == pytest.approx(math.log(4))


def test_losses_of_many_routings_at_once():
    """Loads were counted by an operation that torch.vmap cannot batch."""
    found = routing.softmax_topk(logits(60).view(3, 20, 8), 2)
    for loss in (routing.load_balance_loss, routing.importance_loss, routing.z_loss):
        each = [loss(routing.Routing(*parts)) for parts in zip(*found, strict=True)]
        torch.testing.assert_close(torch.vmap(loss)(found), torch.stack(each))


def test_losses_are_least_when_all_is_even():
    even = made([[0, 1], [2, 3]])
    assert float(routing.load_balance_loss(even)) == pytest.approx(1)
    assert float(routing.importance_loss(even)) == pytest.approx(0)
    probs = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 2, requires_grad=True)
    skewed = made([[0, 1], [0, 2]], probs=probs)
    loss = routing.load_balance_loss(skewed)
    assert float(loss.detach()) == pytest.approx(4 * (0.5 * 0.7 + 0.25 * 0.1 * 2))
    assert torch.autograd.grad(loss, probs)[0][0, 0] > 0
    assert float(routing.importance_loss(skewed).detach()) == pytest.approx(0.0675 / 0.0625)
    assert float(routing.z_loss(made([[0]], probs=torch.zeros(1, 4)))) == pytest.approx(math.log(4) ** 2)


@pytest.mark.parametrize(
    ("route", "rate"), [(routing.sigmoid_gates, 0.02), (routing.softmax_topk, 0.002), (routing.sigma_topk, 0.02)]
)
def test_the_bias_evens_the_load_out(route, rate):
    x, bias = logits(2000) + torch.tensor([4.0] + [0.0] * 7), torch.zeros(8)
    before = routing.max_violation(route(x, 2, bias=bias))
    for _ in range(300):
        routing.update_bias(bias, route(x, 2, bias=bias), rate=rate)
    after = routing.max_violation(route(x, 2, bias=bias))
    assert before > 1
    assert after < 0.2


@pytest.mark.parametrize("route", [routing.sigma_topk, partial(routing.balanced_sigma_topk, capacity=40)])
@pytest.mark.parametrize(("infinite", "expected"), [(1, [1.0, 0.0, 0.0]), (2, [0.5, 0.5, 0.0]), (3, [1 / 3] * 3)])
def test_normalised_weights_of_infinite_scores_are_their_limit(route, infinite, expected):
    """`softmax(+inf)` is NaN."""
    x = logits(30, 8)
    x[4, 2 : 2 + infinite] = math.inf
    x[5, :5] = math.inf  # more than k: all of the weight is shared by those that are chosen
    x.requires_grad_()
    for heat in (0.5, torch.tensor(0.5, requires_grad=True)):
        found = route(x, 3, temperature=heat, normalize=True)
        assert found.weights[4].sort(descending=True).values.tolist() == pytest.approx(expected)
        assert found.weights[5].tolist() == pytest.approx([1 / 3] * 3)
        torch.testing.assert_close(found.weights.sum(-1), torch.ones(30))
        leaves = [x, heat] if isinstance(heat, torch.Tensor) else [x]
        for gradient in torch.autograd.grad(found.weights.square().sum(), leaves):
            assert gradient.isfinite().all()
    large = torch.where(x.detach() == math.inf, 80.0, x.detach())
    torch.testing.assert_close(found.weights[4], route(large, 3, normalize=True).weights[4], rtol=0, atol=1e-6)
