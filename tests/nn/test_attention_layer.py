"""`SigmoidTopKAttention`: weights in [0, 1] that sum to k, masks, a learned k for each head, hard and sampled."""

import pytest
import torch
from torch import nn

import khot
from khot.nn import SigmoidTopKAttention
from khot.nn.selectors import hard, sampled, soft, straight_through


def layer(k=3, **options):
    torch.manual_seed(0)
    return SigmoidTopKAttention(8, 2, k, **options).double()


def inputs(rows=4, n=10, seed=0):
    return torch.randn(rows, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(made, x, mask=None, k=3.0):
    """The output of soft, normalised attention, head by head."""
    parts = []
    for h in range(2):
        q, key, v = (p(x)[..., 4 * h : 4 * h + 4] for p in (made.q_proj, made.k_proj, made.v_proj))
        weights = khot.sigmoid_topk(q @ key.mT / 2, k, mask=mask)
        parts.append(weights @ v / k)
    return made.out_proj(torch.cat(parts, -1))


def test_the_formula():
    made, x = layer(), inputs()
    output, weights = made(x)
    torch.testing.assert_close(output, by_hand(made, x))
    assert weights.shape == (4, 2, 10, 10)
    torch.testing.assert_close(weights.sum(-1), torch.full((4, 2, 10), 3.0, dtype=torch.float64))
    assert ((weights >= 0) & (weights <= 1)).all()
    raw, same = layer(normalize=False)(x)
    assert torch.equal(same, weights)
    torch.testing.assert_close(raw - made.out_proj.bias, 3 * (output - made.out_proj.bias))
    other = inputs(n=7, seed=1)
    assert made(x, other)[1].shape == (4, 2, 10, 7)


def test_softmax_is_the_limit_of_a_small_k():
    x = inputs()
    made = layer(1e-6)
    q, key, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (made.q_proj, made.k_proj, made.v_proj))
    mean = nn.functional.scaled_dot_product_attention(q, key, v)
    torch.testing.assert_close(made(x)[0], made.out_proj(mean.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-5)


def test_masks_leave_fewer_keys_than_k_or_none():
    made, x = layer(), inputs()
    mask = torch.ones(10, 10, dtype=torch.bool).tril(-1)
    output, weights = made(x, mask=mask)
    expected = torch.arange(10).clamp(max=3).double().expand(4, 2, 10)
    torch.testing.assert_close(weights.sum(-1), expected)
    assert (weights[..., ~mask] == 0).all()
    assert torch.equal(output[:, 0], made.out_proj.bias.expand(4, 8))
    torch.testing.assert_close(
        output[:, 5:], by_hand(made, x[:, :], mask.clone().index_fill_(0, torch.arange(3), True))[:, 5:]
    )
    x.requires_grad_()
    made(x, mask=mask)[0].sum().backward()
    assert x.grad.isfinite().all()
    padding = torch.ones(4, 1, 1, 10, dtype=torch.bool)
    padding[1, ..., 6:] = False
    short, _ = made(x[1:2, :6])
    torch.testing.assert_close(made(x, mask=padding)[0][1, :6], short[0])


def test_k_is_learned_for_each_head():
    k = nn.Parameter(torch.tensor([2.0, 4.0]))
    made, x = layer(k), inputs()
    output, weights = made(x)
    torch.testing.assert_close(weights.sum(-1).mean((0, 2)), torch.tensor([2.0, 4.0], dtype=torch.float64))
    assert any(p is made.k for p in made.parameters())
    output.square().sum().backward()
    assert (made.k.grad != 0).all()

    def loss(k):
        with torch.no_grad():
            made.k.copy_(k)
        return made(x)[0].detach().square().sum()

    step = 1e-4
    for h in range(2):
        ends = [loss(torch.tensor([2.0, 4.0]) + sign * step * torch.eye(2)[h]) for sign in (1, -1)]
        assert float((ends[0] - ends[1]) / (2 * step)) == pytest.approx(float(made.k.grad[h]), rel=1e-3)


def test_hard_and_straight_through_and_sampled():
    x = inputs()
    _, expected = layer(selector=soft)(x)
    chosen = {}
    for selector in (hard, straight_through, sampled):
        made = layer(selector=selector)
        _, weights = made(x, generator=torch.Generator().manual_seed(0))
        chosen[selector] = weights.detach()
        assert set(weights.unique().tolist()) == {0.0, 1.0}
        assert (weights.sum(-1) == 3).all()
        assert (made.eval()(x)[1] == chosen[hard]).all()  # what is random is so in training alone
    assert torch.equal(chosen[straight_through], chosen[hard])
    assert not torch.equal(chosen[sampled], chosen[hard])
    made = layer(selector=sampled)
    draw = torch.Generator().manual_seed(1)
    mean = torch.stack([made(x, generator=draw)[1].detach() for _ in range(400)]).mean(0)
    assert (mean - expected).abs().max() < 5 * 0.5 / 400**0.5  # five standard errors
    x.requires_grad_()
    made(x)[0].square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_grouped_heads_are_repeated_heads():
    torch.manual_seed(0)
    made = SigmoidTopKAttention(16, 4, 2, kv_heads=2)
    whole = SigmoidTopKAttention(16, 4, 2)
    state = made.state_dict()
    for name in state:
        if name.startswith(("k_proj", "v_proj")):
            state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    whole.load_state_dict(state)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(made(x)[0], whole(x)[0])


def test_temperature_is_a_buffer_that_a_schedule_moves():
    made = layer(temperature=2.0)
    khot.nn.Schedule(made, "temperature", 1.0, 0.1, steps=2).step()
    assert float(made.temperature) < 2.0
    made.temperature.fill_(1e-6)
    x = inputs()
    torch.testing.assert_close(made(x)[1], layer(selector=hard)(x)[1])
    assert "k=3, heads=2" in repr(made)


def test_bad_input():
    with pytest.raises(ValueError, match="`k` must be > 0; got 0"):
        SigmoidTopKAttention(8, 2, 0)
    with pytest.raises(ValueError, match="`embed_dim` must be a multiple of `num_heads`"):
        SigmoidTopKAttention(8, 3, 2)
    with pytest.raises(ValueError, match="and that of `kv_heads`"):
        SigmoidTopKAttention(8, 2, 2, kv_heads=3)
    with pytest.raises(ValueError, match="`k` must broadcast to the heads"):
        SigmoidTopKAttention(8, 2, torch.ones(3))
    with pytest.raises(TypeError, match="`mask` must be boolean"):
        layer()(inputs(), mask=torch.zeros(10, 10))
    with pytest.raises(ValueError, match="`temperature` must be > 0"):
        SigmoidTopKAttention(8, 2, 2, temperature=0.0)
