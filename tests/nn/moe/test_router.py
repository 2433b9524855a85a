"""`Router` and `MoE`."""

from functools import partial, wraps

import pytest
import torch
from torch import nn

from khot.nn import MoE, Router, routing


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_scores_and_bias_keep_their_precision_in_half():
    router = Router(64, 8, 2, biased=True).to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.bias.dtype == torch.float32
    x = torch.randn(20, 64, dtype=torch.bfloat16, generator=seeded())
    torch.testing.assert_close(router(x).logits, x.float() @ router.weight.float().t())
    assert (router(x).logits != router(x).logits.bfloat16().float()).any()
    assert router.double()(x).logits.dtype == torch.float64
    assert router.to("meta").to_empty(device="cpu").bias.device.type == "cpu"


def test_a_router_is_float32_and_samples_in_training_alone():
    router = Router(16, 8, 2, route=partial(routing.sigma_topk, sample=True))
    x = torch.randn(30, 16).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert router(x).logits.dtype == torch.float32
    drawn = {str(router(x).indices.tolist()) for _ in range(3)}
    router.eval()
    fixed = {str(router(x).indices.tolist()) for _ in range(3)}
    assert (len(drawn), len(fixed)) == (3, 1)
    assert "num_experts=8, k=2" in repr(router)


@pytest.mark.parametrize(
    ("route", "width"), [(routing.noisy_topk, 16), (partial(routing.dselect_k), 8), (routing.softmax_topk, 8)]
)
def test_routers_of_other_widths(route, width):
    router = Router(16, 8, 2, route=route)
    assert router.weight.shape == (width, 16)
    found = router(torch.randn(3, 5, 16))
    assert found.probs.shape == (3, 5, 8)


def test_a_biased_router():
    router = Router(16, 8, 2, route=routing.sigmoid_gates, biased=True)
    found = router(torch.randn(100, 16))
    routing.update_bias(router.bias, found, rate=0.1)
    assert router.bias.abs().sum() > 0
    assert "bias" in router.state_dict()
    assert "bias" not in Router(16, 8, 2).state_dict()
    with pytest.raises(ValueError, match="takes a bias"):
        Router(16, 8, 2, route=routing.noisy_topk, biased=True)


def plain(moe, found, x):
    """A loop over all experts, on all tokens."""
    weights = torch.zeros(len(x), len(moe.experts) + 1, dtype=x.dtype)
    weights = weights.scatter_add(1, found.indices, found.weights.to(x.dtype))
    return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(moe.experts))


@pytest.mark.parametrize(
    "route",
    [
        routing.softmax_topk,
        routing.sigma_topk,
        routing.balanced_sigma_topk,
        routing.expert_choice,
        routing.dselect_k,
        partial(routing.sigma_topk, straight_through=True),
    ],
)
def test_the_output_is_that_of_a_loop_over_experts(route):
    torch.manual_seed(0)
    experts = [nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5)) for _ in range(8)]
    moe = MoE(Router(6, 8, 2, route=route), experts).double()
    x = torch.randn(64, 6, dtype=torch.float64, requires_grad=True)
    g = torch.randn(64, 5, dtype=torch.float64)
    got, _, dropped = moe(x)
    expected = plain(moe, moe.router(x), x)
    assert dropped == 0
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    leaves = [x, *moe.parameters()]
    ours, theirs = (torch.autograd.grad(y, leaves, g, allow_unused=True) for y in (got, expected))
    for name, a, b in zip(["x", *dict(moe.named_parameters())], ours, theirs, strict=True):
        a, b = (torch.zeros(()) if v is None else v for v in (a, b))
        assert (a - b).abs().max() < 1e-10, name
    single = moe.float()(x.detach().float()).output
    torch.testing.assert_close(
        single, plain(moe, moe.router(x.detach().float()), x.detach().float()), rtol=0, atol=1e-6
    )


def test_only_the_chosen_experts_are_computed():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    router = Router(4, 8, 2)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[2:4] = 5
    MoE(router, [Spy() for _ in range(8)])(torch.rand(30, 4) + 0.1)
    assert seen == [30, 30]


def test_places_go_to_the_greatest_weights():
    torch.manual_seed(0)
    moe = MoE(
        Router(4, 4, 1, route=partial(routing.softmax_topk, normalize=False)), [nn.Identity()] * 4, capacity_factor=1.0
    )
    x = torch.randn(40, 4)
    found = moe.router(x)
    output, _, dropped = moe(x)
    over = (routing.load(found) - 10).clamp(min=0)
    assert dropped == int(over.sum()) > 0
    for expert in range(4):
        tokens = (found.indices[:, 0] == expert).nonzero()[:, 0]
        kept = tokens[output[tokens].abs().sum(-1) > 0]
        best = tokens[found.weights[tokens, 0].argsort(descending=True)[:10]]
        assert set(kept.tolist()) == set(best.tolist())


def test_shapes_and_empty_batches():
    moe = MoE(Router(4, 8, 2), [nn.Linear(4, 3) for _ in range(8)])
    output, found, _ = moe(torch.randn(2, 5, 4))
    assert output.shape == (2, 5, 3)
    assert found.indices.shape == (2, 5, 2)
    assert moe(torch.zeros(0, 4)).output.shape == (0, 3)
    assert moe(torch.randn(4)).output.shape == (3,)


def test_bad_mixtures():
    with pytest.raises(ValueError, match="must be 8 Modules, as many as the router has; got 7"):
        MoE(Router(4, 8, 2), [nn.Linear(4, 4) for _ in range(7)])
    moe = MoE(Router(4, 8, 2), [nn.Linear(4, 4) for _ in range(8)])
    x = torch.randn(20, 4)
    x[[3, 7]] = float("nan")
    with pytest.raises(ValueError, match="NaN for 2 of 20 tokens, first 3"):
        moe(x)
    with pytest.raises(ValueError, match="4 features"):
        moe(torch.randn(20, 5))
    with pytest.raises(ValueError, match="number of experts"):
        Router(4, 2, 3)


def test_the_route_learns():
    """Two regions with two linear experts: the router finds the border."""
    torch.manual_seed(0)
    x = torch.randn(512, 2)
    y = torch.where(x[:, :1] > 0, x @ torch.tensor([[1.0], [2.0]]), x @ torch.tensor([[-1.0], [0.5]]))
    moe = MoE(Router(2, 2, 1), [nn.Linear(2, 1) for _ in range(2)])
    optimizer = torch.optim.Adam(moe.parameters(), lr=0.03)
    for _ in range(200):
        loss = (moe(x).output - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    linear = (x @ torch.linalg.lstsq(x, y).solution - y).square().mean()
    assert loss.item() < 0.25 * linear.item()


def wrapper(scores, k, *, training):
    return routing.noisy_topk(scores, k, training=training)


def test_a_wrapped_route_does_not_lose_experts():
    """`noisy_topk` wants 2n scores; a function around it got n, and routed to n/2 experts."""
    x = torch.randn(20, 5)
    says = r"must give 4 probabilities for each token, .* got 2 from 4 scores.* wrapper .*give it a `width`"
    with pytest.raises(ValueError, match=says):
        Router(5, 4, 2, route=wrapper)(x)
    with pytest.raises(ValueError, match=says):
        MoE(Router(5, 4, 2, route=wrapper), [nn.Identity()] * 4)(x)
    with pytest.raises(ValueError, match="got 2 from 4 scores"):
        Router(5, 4, 2, route=lambda scores, k: routing.dselect_k(scores, k, num_experts=2))(x)


@pytest.mark.parametrize("how", ["wraps", "attribute", "partial", "object"])
def test_a_wrapped_route_that_says_its_width_routes_to_all_experts(how):
    @wraps(routing.noisy_topk if how == "wraps" else wrapper)
    def route(scores, k, **options):
        return wrapper(scores, k, training=options["training"])

    if how != "wraps":
        route.width = routing.noisy_topk.width
    if how == "partial":
        route = partial(route)
    if how == "object":

        class Noisy:
            def width(self, n, k):
                return 2 * n

            def __call__(self, scores, k, *, training=True):
                return wrapper(scores, k, training=training)

        route = Noisy()
    router = Router(5, 4, 2, route=route)
    assert router.weight.shape == (8, 5)
    found = router.eval()(torch.randn(20, 5))
    assert found.probs.shape == (20, 4)
    assert torch.equal(found.logits, router(torch.zeros(20, 5)).logits + found.logits)  # no noise in evaluation


def test_the_count_of_a_router_may_change():
    router = Router(5, 4, 2)
    router.k = 3
    assert router(torch.randn(20, 5)).indices.shape == (20, 3)


def test_a_module_like_a_router_must_route_to_all_experts():
    class Odd(nn.Module):
        num_experts, k = 4, 1

        def forward(self, x, *, generator=None):
            return routing.softmax_topk(x[..., :3], 1)

    with pytest.raises(ValueError, match="must give 4 probabilities for each token, as many as there are experts; got"):
        MoE(Odd(), [nn.Identity()] * 4)(torch.randn(20, 5))


def test_a_route_that_needs_more_than_a_router_gives_is_refused():
    def needy(scores, k, *, heat):
        return routing.sigma_topk(scores, k, temperature=heat)

    with pytest.raises(ValueError, match="`route` must take \\(logits, k\\) and options; needy needs heat"):
        Router(5, 4, 2, route=needy)
    assert Router(5, 4, 2, route=partial(needy, heat=0.5))(torch.randn(3, 5)).indices.shape == (3, 2)
    with pytest.raises(AttributeError):
        Router(5, 4, 2).route = needy  # its weights are of another width


@pytest.mark.parametrize(
    "route", [routing.sigma_topk, routing.softmax_topk, routing.balanced_sigma_topk, routing.expert_choice]
)
def test_padding_is_as_if_it_were_not_there(route):
    torch.manual_seed(0)
    x, mask = torch.randn(3, 8, 5), torch.rand(3, 8) < 0.6
    moe = MoE(Router(5, 4, 2, route=route), [nn.Linear(5, 3) for _ in range(4)])
    expected = moe(x[mask])
    broken = x.masked_fill(~mask[..., None], torch.nan)
    found = moe(broken, mask=mask)
    torch.testing.assert_close(found.output[mask], expected.output)
    assert not found.output[~mask].any()
    for measure in (routing.load_balance_loss, routing.importance_loss, routing.z_loss, routing.load):
        torch.testing.assert_close(measure(found.routing), measure(expected.routing))
    for measure in (routing.routing_entropy, routing.max_violation):
        assert measure(found.routing) == pytest.approx(measure(expected.routing))
    (found.output.sum() + routing.z_loss(found.routing)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in moe.parameters())
    assert routing.load(moe(x).routing).sum() > routing.load(found.routing).sum()  # the negative control


def test_a_mask_of_another_shape_or_dtype_is_named():
    router = Router(5, 4, 2)
    for mask in (torch.ones(3, dtype=torch.bool), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"`mask` must be a boolean tensor of shape \(2, 3\); got"):
            router(torch.zeros(2, 3, 5), mask=mask)


@pytest.mark.parametrize("is_cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("tokens", [0, 12])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    "route", [routing.softmax_topk, routing.balanced_sigma_topk, partial(routing.sigma_topk, sample=True)]
)
def test_capacity_autocast_padding_and_no_tokens_together(route, is_masked, tokens, is_cast):
    torch.manual_seed(0)
    moe = MoE(Router(5, 4, 2, route=route), [nn.Linear(5, 3) for _ in range(4)], capacity_factor=1.0)
    x, mask = torch.randn(2, tokens, 5, requires_grad=True), torch.arange(tokens).expand(2, tokens) % 3 > 0
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        found = moe(x, mask=mask if is_masked else None)
    real = int(mask.sum()) if is_masked else 2 * tokens
    load, places = routing.load(found.routing), -(-2 * real // 4)
    assert int(load.sum()) == 2 * real
    assert found.dropped == int((load - places).clamp(min=0).sum())
    assert found.output.dtype == (torch.bfloat16 if is_cast else torch.float32)
    assert found.routing.logits.dtype == torch.float32
    (found.output.float().sum() + routing.load_balance_loss(found.routing)).backward()
    assert x.grad.isfinite().all()
    assert bool(x.grad.any()) is bool(tokens)


def test_nothing_but_padding_has_no_load():
    moe = MoE(
        Router(5, 4, 2, route=routing.balanced_sigma_topk), [nn.Linear(5, 3) for _ in range(4)], capacity_factor=1.0
    )
    output, found, dropped = moe(torch.zeros(2, 3, 5), mask=torch.zeros(2, 3, dtype=torch.bool))
    assert not output.any()
    assert not routing.load(found).any()
    assert dropped == 0
    assert routing.z_loss(found) == 0


def test_a_seed_in_place_of_a_generator_is_named_by_every_route():
    """Routes without randomness ignored it."""
    router = Router(16, 8, 2)
    for layer in (router, MoE(router, [nn.Linear(16, 16) for _ in range(8)])):
        with pytest.raises(TypeError, match=r"`generator` must be a torch\.Generator or None; got int"):
            layer(torch.randn(3, 16), generator=0)


def test_experts_with_outputs_of_another_shape_are_named():
    """One that flattened its tokens gave wrong numbers in silence."""
    x = torch.randn(20, 8, generator=seeded())
    for experts in ([nn.Flatten(0), nn.Flatten(0)], [nn.Linear(8, 8), nn.Linear(8, 4)]):
        torch.manual_seed(0)
        with pytest.raises(ValueError, match=r"`experts` must map \(tokens, dim\) to \(tokens, d\).*; got \("):
            MoE(Router(8, 2, 1), experts)(x)
    with pytest.raises(TypeError, match=r"`router` must have `num_experts` and `k`, .*; got Linear"):
        MoE(nn.Linear(8, 2), experts)
