"""Token pruning: what is kept, where it stood, gradients, budgets, and bad input."""

import math

import pytest
import torch

import khot
from khot.nn import Schedule, TokenBudget, TokenPruner, tokens

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 9, 4, dtype=torch.float64, generator=GENERATOR)
SCORES = torch.randn(3, 9, dtype=torch.float64, generator=GENERATOR)
MASK = torch.arange(9) < torch.tensor([[9], [6], [3]])


def test_evaluation_keeps_the_largest_in_their_order():
    out = TokenPruner(4).eval()(X, scores=SCORES, mask=MASK)
    assert out.mask.sum(-1).tolist() == [4, 4, 3]
    for b in range(3):
        best = SCORES[b, MASK[b]].topk(min(4, int(MASK[b].sum()))).indices.sort().values
        assert torch.equal(out.positions[b, out.mask[b]], best)
        assert torch.equal(out.tokens[b, out.mask[b]], X[b, best])
    assert torch.equal(out.weights, out.mask.double())


def test_training_and_evaluation_keep_the_same():
    pruner = TokenPruner(4)
    special = torch.arange(9) == 8
    soft, hard = (pruner.train(mode)(X, scores=SCORES, mask=MASK, special=special) for mode in (True, False))
    assert soft.tokens is X
    kept = [torch.nonzero(row).flatten().tolist() for row in soft.mask]
    assert kept == [row[m].tolist() for row, m in zip(hard.positions, hard.mask, strict=True)]
    assert torch.equal(soft.weights, soft.mask.double())
    assert soft.mask[0, 8]
    assert not soft.mask[1:, 8].any(), "padding is not kept, though it is named special"


def test_positions_survive_several_stages():
    first = TokenPruner(6).eval()(X, scores=SCORES)
    second = TokenPruner(3).eval()(
        first.tokens, scores=first.tokens[..., 0], mask=first.mask, positions=first.positions
    )
    assert torch.equal(X.gather(1, second.positions[..., None].expand(-1, -1, 4)), second.tokens)


def test_weights_have_the_gradient_of_sigmoid_topk():
    scores, k = SCORES.clone().requires_grad_(), torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    out = TokenPruner(temperature=0.7)(X, scores=scores, k=k)
    g = torch.randn(3, 9, dtype=torch.float64)
    got = torch.autograd.grad(out.weights, (scores, k), g)
    expected = torch.autograd.grad(khot.sigmoid_topk(scores, k, temperature=0.7), (scores, k), g)
    torch.testing.assert_close(got, expected)


def test_a_learned_score_and_a_schedule():
    pruner = TokenPruner(9, score=4).double()
    schedule = Schedule(pruner, "k", 9, 3, steps=2, shape=khot.nn.schedules.linear)
    kept = [int(pruner(X).mask[0].sum())]
    for _ in range(2):
        schedule.step()
        kept.append(int(pruner(X).mask[0].sum()))
    assert kept == [9, 6, 3]
    pruner(X).weights.mul(torch.randn(3, 9)).sum().backward()
    assert pruner.score.weight.grad.abs().sum() > 0


def heads(seed):
    return torch.randn(2, 3, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_weighted_attention_of_zeros_and_ones_is_attention_over_the_kept():
    q, k, v = map(heads, (1, 2, 3))
    kept = torch.rand(2, 9, generator=GENERATOR) < 0.5
    out, attention = tokens.weighted_attention(q, k, v, kept.double())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None])
    torch.testing.assert_close(out, expected)
    assert (attention[~kept[:, None, None].expand_as(attention)] == 0).all()
    mask = torch.rand(2, 1, 9, 9, generator=GENERATOR) < 0.6
    out, _ = tokens.weighted_attention(q, k, v, kept.double(), mask=mask)
    allowed = mask & kept[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).nan_to_num()
    torch.testing.assert_close(out, torch.where(allowed.any(-1, keepdim=True), expected, 0.0))


def test_a_dropped_key_has_a_gradient_and_a_log_mask_gives_it_none():
    q, k, v = map(heads, (1, 2, 3))
    w = torch.ones(2, 9, dtype=torch.float64)
    w[:, 3] = 0
    assert torch.autograd.gradcheck(
        lambda w: tokens.weighted_attention(q, k, v, w)[0], ((w * 0.5 + 0.2).requires_grad_(),)
    )
    w.requires_grad_()
    (g,) = torch.autograd.grad(tokens.weighted_attention(q, k, v, w)[0].square().sum(), w)
    step = torch.zeros_like(w)
    step[:, 3] = 1e-6
    up, at = (tokens.weighted_attention(q, k, v, w.detach() + s)[0].square().sum() for s in (step, 0 * step))
    assert float(g[:, 3].sum()) == pytest.approx(float((up - at) / 1e-6), rel=1e-3)
    far = tokens.weighted_attention(q * 1000, k, v, w)[0]
    assert far.isfinite().all()
    assert torch.autograd.grad(far.sum(), w)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weighted_attention_in_half_precision_is_not_nan(dtype):
    """e^30 · 0 was NaN in float16: the logit of a dropped key is 30 above those of the others."""
    q, k = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor([0.0, 0.0, 30.0], dtype=dtype).view(1, 1, 3, 1)
    w = torch.tensor([[1.0, 1.0, 0.0]], dtype=dtype, requires_grad=True)
    out, attention = tokens.weighted_attention(q, k, k + 1, w)
    assert out.dtype == attention.dtype == dtype
    assert out.item() == 1
    assert attention.flatten().tolist() == [0.5, 0.5, 0.0]
    q, k, v = (heads(i).to(dtype) for i in (1, 2, 3))
    w = torch.rand(2, 9, dtype=torch.float64, generator=GENERATOR).to(dtype)
    exact = tokens.weighted_attention(*(t.double() for t in (q, k, v, w)))[0]
    got = tokens.weighted_attention(q, k, v, w)[0]
    torch.testing.assert_close(got, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = tokens.weighted_attention(q, k, v, w)[0]
    assert torch.equal(again, got)


def test_the_gradient_of_a_dropped_key_is_bounded():
    """It was e^30: training with learned counts could lose what the model had learned."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 0.0, 30.0]).view(1, 1, 3, 1)
    v = torch.tensor([0.0, 1.0, 5.0]).view(1, 1, 3, 1)
    w = torch.tensor([[1.0, 1.0, 0.0]], requires_grad=True)
    (g,) = torch.autograd.grad(tokens.weighted_attention(q, k, v, w)[0].sum(), w)
    torch.testing.assert_close(g, torch.tensor([[-0.25, 0.25, math.e**2 * (5 - 0.5) / 2]]))


@pytest.mark.parametrize("wrong", [-0.1, float("nan")])
def test_weighted_attention_refuses_negative_weights_and_wrong_masks(wrong):
    q, k, v = map(heads, (1, 2, 3))
    w = torch.ones(2, 9, dtype=torch.float64)
    with pytest.raises(TypeError, match="`mask` must be boolean"):
        tokens.weighted_attention(q, k, v, w, mask=torch.zeros(9, 9))
    with pytest.raises(ValueError, match="`mask` must broadcast"):
        tokens.weighted_attention(q, k, v, w, mask=torch.ones(9, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="`weights` must broadcast"):
        tokens.weighted_attention(q, k, v, w[:, :8])
    w[1, 2] = wrong
    with pytest.raises(ValueError, match="`weights` must be ≥ 0"):
        tokens.weighted_attention(q, k, v, w)
    assert tokens.weighted_attention(*(t.to("meta") for t in (q, k, v, w)))[0].shape == q.shape


@pytest.mark.parametrize("share", [0.25, 0.5, 0.77])
@pytest.mark.parametrize("least", [0.0, 0.1])
def test_a_budget_meets_its_total_exactly_while_it_learns(share, least):
    budget = TokenBudget(5, share, least=least)
    optimiser = torch.optim.Adam(budget.parameters(), 0.3)
    n = torch.arange(10, 60)
    for _ in range(30):
        k = budget(n)
        assert torch.equal(k, k.round())
        wanted = n.double() * budget.fractions().sum()
        assert (k.sum(-1) - wanted).abs().max() <= 0.5 + 1e-6
        torch.testing.assert_close(budget.fractions().sum(), torch.tensor(5 * share, dtype=torch.float64))
        assert (k.diff() <= 0).all()
        assert (k <= n[:, None]).all()
        assert (k >= least * n[:, None] - 1).all()
        optimiser.zero_grad()
        (k * torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])).sum().backward()
        optimiser.step()
    assert budget.fractions().max() - budget.fractions().min() > 0.2, "it learned something"


def test_a_budget_with_costs_spends_no_more():
    costs = torch.tensor([1.0, 4.0, 1.0])
    budget = TokenBudget(3, 0.5, costs=costs)
    with torch.no_grad():
        budget.logits.copy_(torch.tensor([2.0, 0.0, -2.0]))
        assert float((budget.fractions() * costs).sum() / costs.sum()) == pytest.approx(0.5)
        budget.logits.copy_(torch.tensor([-2.0, 0.0, 2.0]))
        assert float((budget.fractions() * costs).sum() / costs.sum()) < 0.5


def test_attention_received_and_similar_layers():
    attention = torch.rand(2, 3, 5, 5, generator=GENERATOR).softmax(-1)
    torch.testing.assert_close(tokens.attention_received(attention), attention.mean((1, 2)))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    received = tokens.attention_received(attention, mask)
    torch.testing.assert_close(received[1], attention[1, :, :3].mean((0, 1)))
    layers = torch.stack([received, received, received.flip(-1)])
    similarity = tokens.layer_similarity(layers)
    assert similarity[0] == pytest.approx(1.0)
    assert similarity[1] < similarity[0]


def test_fast_then_slow():
    assert tokens.fast_then_slow(100, 10, 3, power=1.0) == [70, 40, 10]
    steps = torch.tensor([100, *tokens.fast_then_slow(100, 10, 5)]).diff()
    assert (steps.diff() > 0).all(), "each stage drops fewer"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TokenPruner(0), ValueError, "`k` must be ≥ 1; got 0."),
        (lambda: TokenPruner(2)(X), ValueError, "`scores` must be given"),
        (lambda: TokenPruner()(X, scores=SCORES), ValueError, "`k` must be given"),
        (lambda: TokenPruner(2)(X[0], scores=SCORES), ValueError, "`x` must have the shape (batch, n, d)"),
        (
            lambda: TokenPruner(2)(X, scores=SCORES[:, :3]),
            ValueError,
            "`scores` must be (batch, n), (3, 9)",
        ),
        (lambda: TokenPruner(2)(X, scores=SCORES, mask=MASK.float()), TypeError, "`mask` must be boolean"),
        (lambda: TokenBudget(3, 1.0), ValueError, "`share` must satisfy 0.0 < share < 1"),
        (lambda: TokenBudget(3, 0.1, least=0.2), ValueError, "`share` must satisfy 0.2 < share < 1"),
        (lambda: tokens.fast_then_slow(5, 10, 2), ValueError, "`first` must be ≥ 10; got 5."),
        (lambda: tokens.layer_similarity(X[:1]), ValueError, "`received` must be (layers, batch, n)"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


def test_a_row_of_padding_keeps_nothing_and_nan_scores_are_kept_to_their_row():
    out = TokenPruner(2).eval()(X, scores=SCORES, mask=MASK & (torch.arange(3) != 1)[:, None])
    assert out.mask.sum(-1).tolist() == [2, 0, 2]
    bad = SCORES.clone()
    bad[1, 2] = torch.nan
    weights = TokenPruner(2)(X, scores=bad).weights
    assert weights[1].isnan().all()
    assert not weights[[0, 2]].isnan().any()
