"""The options of `sigma_topk`: weights against the best expert that was not chosen, and a share of samples."""

from functools import partial

import pytest
import torch

import khot
from khot.nn import MoE, Router, Schedule, routing, schedules


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def logits(tokens=50, n=8, dtype=torch.float32):
    return 2 * torch.randn(tokens, n, generator=seeded(), dtype=dtype)


def in_full(x, k, chosen, margin_of):
    """The weights of chosen experts by the formula, with the best of the rest in the sum."""
    worth = (x + khot.sigmoid_topk(x, k).log()).exp()
    rest = worth.masked_fill(torch.zeros_like(x, dtype=torch.bool).scatter(-1, chosen, True), 0).amax(-1, keepdim=True)
    mine = worth.gather(-1, chosen)
    return mine / (mine.sum(-1, keepdim=True) + margin_of * rest)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("sample", [False, True])
def test_a_margin_is_over_the_best_of_the_rest(k, sample):
    x = logits(dtype=torch.float64)
    found = routing.sigma_topk(x, k, margin=True, sample=sample, generator=seeded())
    torch.testing.assert_close(found.weights, in_full(x, k, found.indices, 1.0))
    assert (found.weights - in_full(x, k, found.indices, 0.0)).abs().max() > 0.01, "a sum without the rest differs"
    assert (found.weights.sum(-1) < 1).all()
    if not sample:
        assert (found.weights.sum(-1) >= k / (k + 1)).all()
    plain = routing.sigma_topk(x, k, sample=sample, generator=seeded())
    assert torch.equal(found.indices, plain.indices)
    assert torch.equal(found.probs, plain.probs)


def test_a_margin_of_one_expert_is_a_sigmoid_and_teaches_all_scores():
    x = logits(dtype=torch.float64).requires_grad_()
    found = routing.sigma_topk(x, 1, margin=True, temperature=0.7)
    (first, second), pi = x.topk(2).values.unbind(-1), found.probs.topk(2).values
    margin = (first - second) / 0.7 + (pi[:, 0] / pi[:, 1]).log()
    torch.testing.assert_close(found.weights[:, 0], margin.sigmoid())
    (slope,) = torch.autograd.grad(found.weights.sum(), x)
    assert (slope != 0).all()
    (none,) = torch.autograd.grad(routing.sigma_topk(x, 1, normalize=True).weights.sum(), x)
    assert not none.any(), "without the margin the weight is 1"
    assert torch.autograd.gradcheck(lambda x: routing.sigma_topk(x, 2, margin=True).weights, x[:6])


@pytest.mark.parametrize("row", [[1000.0, -200, -200, -300], [9.0, -torch.inf, -torch.inf, 8], [torch.inf, 1, 0, -1]])
@pytest.mark.parametrize("route", [routing.sigma_topk, routing.balanced_sigma_topk])
def test_a_margin_over_experts_that_nobody_wants_has_a_gradient(route, row):
    x = torch.tensor([row, [1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    weights = route(x, 1, margin=True).weights
    assert ((weights > 0) & (weights <= 1)).all()
    assert torch.autograd.grad(weights.sum(), x)[0].isfinite().all()


def test_a_margin_over_nothing_is_normalize():
    x = logits()
    whole = routing.sigma_topk(x, 8, margin=True).weights
    torch.testing.assert_close(whole, routing.sigma_topk(x, 8, normalize=True).weights)
    with pytest.raises(ValueError, match="`margin` must be False with `straight_through`"):
        routing.sigma_topk(x, 2, margin=True, straight_through=True)


@pytest.mark.parametrize("route", [routing.sigma_topk, routing.balanced_sigma_topk])
@pytest.mark.parametrize("k", [1, 2])
def test_routers_with_a_margin_compile_whole(route, k):
    torch.manual_seed(0)
    router = Router(6, 4, k, route=partial(route, margin=True))
    x = torch.randn(20, 6)
    whole = torch.compile(router, fullgraph=True, backend="aot_eager")
    plain, compiled = router(x), whole(x)
    assert torch.equal(compiled.indices, plain.indices)
    torch.testing.assert_close(compiled.weights, plain.weights)
    (mine,), (theirs,) = (torch.autograd.grad(f.weights.square().sum(), router.weight) for f in (compiled, plain))
    torch.testing.assert_close(mine, theirs)


def test_only_the_chosen_expert_runs():
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    moe = MoE(Router(6, 4, 1, route=partial(routing.sigma_topk, margin=True)), [Spy() for _ in range(4)])
    moe(torch.randn(20, 6, generator=seeded()))
    assert sum(seen) == 20


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("share", [0.3, torch.tensor(0.3), 1])
def test_a_share_of_samples_is_between_the_largest_and_a_sample(k, share):
    x = logits(1).expand(20_000, 8)
    found = routing.sigma_topk(x, k, sample=share, generator=seeded())
    largest = torch.zeros(8).index_fill(0, routing.sigma_topk(x[0], k).indices, 1.0)
    expected = float(share) * found.probs[0] + (1 - float(share)) * largest
    torch.testing.assert_close(routing.load(found) / 20_000, expected, rtol=0, atol=0.015)
    assert (found.indices.sort(-1).values.diff(dim=-1) > 0).all()  # k different experts
    if share != 1:  # a negative control: all of it sampled is another law
        assert (expected - found.probs[0]).abs().max() > 0.1


@pytest.mark.parametrize("route", [routing.sigma_topk, routing.balanced_sigma_topk])
@pytest.mark.parametrize("share", [0, 0.0, torch.tensor(0.0)])
def test_no_share_of_samples_is_the_hard_choice(route, share):
    x = logits()
    x[3] = -torch.inf
    x[3, :2] = 1.0
    hard, none = route(x, 2), route(x, 2, sample=share)
    assert torch.equal(hard.indices.sort(-1).values, none.indices.sort(-1).values)
    assert (route(x, 2, sample=1.0, generator=seeded()).indices.sort(-1).values != hard.indices.sort(-1).values).any()


def test_a_router_samples_the_share_that_a_schedule_says_in_training_alone():
    router = Router(16, 8, 2, share=0.0)
    x = torch.randn(200, 16, generator=seeded())
    hard = router(x).indices.sort(-1).values
    schedule = Schedule(router, "share", 0.0, 1.0, steps=4, shape=schedules.between(schedules.linear, 0.25, 0.75))
    moved = []
    for _ in range(5):
        moved.append(int((router(x, generator=seeded()).indices.sort(-1).values != hard).any(-1).sum()))
        schedule.step()
    assert moved[0] == moved[1] == 0
    assert 20 < moved[2] < 0.8 * moved[3]
    assert moved[3] == moved[4]
    assert torch.equal(router.eval()(x).indices.sort(-1).values, hard)
    assert router.state_dict()["share"] == 1
    assert "share" not in Router(16, 8, 2).state_dict()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: routing.sigma_topk(logits(), 2, sample=1.5), ValueError, "`sample` must satisfy 0 ≤ sample ≤ 1"),
        (lambda: routing.sigma_topk(logits(), 2, sample=torch.ones(50)), ValueError, "`sample` must be one number"),
        (lambda: routing.balanced_sigma_topk(logits(), 2, sample=torch.tensor(1)), TypeError, "`sample` must be a fl"),
        (lambda: Router(16, 8, 2, share=2.0), ValueError, "`share` must satisfy 0 ≤ share ≤ 1"),
        (lambda: Router(16, 8, 2, route=routing.softmax_topk, share=0.5), ValueError, "softmax_topk takes none"),
        (lambda: Schedule(Router(16, 8, 2, share=0.0), "share", 0.0, 1.0, steps=3), ValueError, "`start` must be > 0"),
        (lambda: Schedule(Router(16, 8, 2, share=0.0), "share", -1.0, 1.0, steps=3), ValueError, "`start` must be ≥ 0"),
    ],
)
def test_bad_shares(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.compile
@pytest.mark.parametrize("route", [routing.sigma_topk, routing.balanced_sigma_topk])
def test_a_share_that_moves_is_no_constant_of_the_graph(route):
    router = Router(16, 8, 2, route=route, share=0.0)
    x = torch.randn(200, 16, generator=seeded())
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    hard = router(x).indices.sort(-1).values
    assert torch.equal(compiled(x).indices.sort(-1).values, hard)
    router.share.fill_(1.0)
    found = compiled(x)
    assert (found.indices.sort(-1).values != hard).any(-1).float().mean() > 0.2
    found.weights.square().sum().backward()
    assert router.weight.grad.isfinite().all()
    assert router.weight.grad.any()


@pytest.mark.compile
def test_a_capacity_beside_a_mask_compiles_whole_and_is_checked_as_it_runs():
    router = Router(16, 8, 2, route=partial(routing.balanced_sigma_topk, capacity=6.0))
    x, mask = torch.randn(30, 16, generator=seeded()), torch.arange(30) % 3 != 0  # 20 tokens, 5 for each expert
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x, mask=mask), router(x, mask=mask)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.weights, expected.weights)
    with pytest.raises(ValueError, match=r"`capacity` must be ≥ 7\.5"):
        router(x, mask=torch.ones(30, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="assertion failed for expression u0 <= 24"):
        compiled(x, mask=torch.ones(30, dtype=torch.bool))
