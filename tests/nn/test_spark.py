"""Spark layers: their formulas, sparse against dense, what a step reads, conversion of gated FFNs, and bad input."""

import math

import pytest
import torch
from torch.nn.functional import gelu, silu, softplus

import khot
from khot.nn import SparkAttention, SparkCache, SparkFFN


def ffn(seed=0, **options):
    return SparkFFN(16, 64, 6, generator=torch.Generator().manual_seed(seed), **options).double()


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{}, {"smooth": 0.2}, {"exact": True}])
def test_the_ffn_is_its_formula(options):
    layer, x = ffn(**options), tokens(3, 5, 16)
    gates = gelu(khot.statistical_topk(x[..., :8] @ layer.first.mT, 6, **options))
    expected = (gates * (x[..., 8:] @ layer.second.mT)) @ layer.out
    torch.testing.assert_close(layer(x), expected)
    assert layer(x).requires_grad
    assert torch.equal(layer.active(x), gates > 0)


@pytest.mark.parametrize("options", [{}, {"keep": True}, {"project": True}, {"exact": True}, {"smooth": 0.1}])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_sparse_ffn_is_the_dense_one(options, count):
    layer, x = ffn(**options), tokens(count, 16)
    dense = layer(x)
    with torch.no_grad():
        sparse = layer(x)
        layer.few = 0
        torch.testing.assert_close(layer(x), dense)
    torch.testing.assert_close(sparse, dense)
    assert sparse.shape == dense.shape
    assert not torch.equal(torch.zeros_like(sparse), sparse)


def test_a_sparse_step_does_not_read_what_is_not_chosen():
    layer, x = ffn(), tokens(1, 16)
    with torch.no_grad():
        expected, active = layer(x), layer.active(x)[0]
        layer.second[~active], layer.out[~active] = torch.nan, torch.nan
        torch.testing.assert_close(layer(x), expected)
        layer.few = 0
        assert layer(x).isnan().all(), "the dense one reads all"


def test_ffn_has_the_gradient_of_its_formula():
    layer, x = ffn(smooth=0.1), tokens(4, 16).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_a_gated_ffn_of_full_rank_is_kept_where_neurons_are_chosen():
    gate, up, down = tokens(32, 8), tokens(32, 8, seed=2), tokens(8, 32, seed=3)
    x = tokens(5, 8, seed=4)
    layer = SparkFFN.from_gated(gate, up, down, 4, 8, activation=silu, exact=True)
    chosen = khot.hard_topk(x @ gate.mT, 4)
    expected = (silu(x @ gate.mT) * chosen * (x @ up.mT)) @ down.mT
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


def test_the_gate_of_lower_rank_is_the_best_one():
    gate, up, down = tokens(32, 8), tokens(32, 8, seed=2), tokens(8, 32, seed=3)
    layer = SparkFFN.from_gated(gate, up, down, 4, 3, activation=silu)
    values = torch.linalg.svdvals(gate)
    left = (layer.first @ layer.projection - gate).detach().square().sum()
    assert float(left) == pytest.approx(float(values[3:].square().sum()), rel=1e-5)


def attention(**options):
    torch.manual_seed(0)
    return SparkAttention(16, 2, 3, **options).double()


def by_hand(layer, x, allowed):
    """One head and query at a time."""
    q, k, v = (p(x).unflatten(-1, (2, 8)) for p in (layer.query, layer.key, layer.value))
    out = torch.zeros_like(q)
    for b, i, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = allowed[b, i]
        logits = khot.statistical_logits(k[b, seen, h, :4] @ q[b, i, h, :4] / math.sqrt(4), 3)
        second = softplus(k[b, seen, h, 4:] @ q[b, i, h, 4:] / math.sqrt(4))
        out[b, i, h] = (logits.softmax(-1) * second) @ v[b, seen, h]
    return layer.out(out.flatten(2))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_is_its_formula_sparse_and_dense(is_causal, is_padded):
    layer, x = attention(is_causal=is_causal), tokens(2, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [5]]) if is_padded else None
    allowed = torch.ones(2, 7, 7, dtype=torch.bool)
    allowed = allowed.tril() if is_causal else allowed
    allowed = allowed if mask is None else allowed & mask[:, None]
    expected = by_hand(layer, x, allowed)
    torch.testing.assert_close(layer(x, mask=mask), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, mask=mask), expected)
        layer.few = 0
        torch.testing.assert_close(layer(x, mask=mask), expected)


def test_a_cache_gives_what_the_whole_sequence_does():
    layer, x = attention(is_causal=True), tokens(2, 40, 16)
    whole = layer(x).detach()
    for size in (1, 3, 20):
        cache = SparkCache()
        with torch.no_grad():
            parts = torch.cat([layer(part, cache=cache) for part in x.split(size, dim=1)], 1)
        torch.testing.assert_close(parts, whole)
        assert len(cache) == 40


def test_a_step_of_attention_does_not_read_what_is_not_chosen():
    layer, x = attention(is_causal=True), tokens(1, 30, 16)
    cache = SparkCache()
    with torch.no_grad():
        layer(x[:, :29], cache=cache)
        q = layer.query(x[:, 29:]).unflatten(-1, (2, 8)).transpose(1, 2)
        k = layer.key(x).unflatten(-1, (2, 8)).transpose(1, 2)
        logits = khot.statistical_logits(q[..., :4] @ k[..., :4].mT / 2, 3)
        is_silent = (logits == -torch.inf)[0, :, 0, :29]
        assert is_silent.any()
        expected = layer(x)[:, 29:]
        for room in cache._rooms[1:]:
            room[0, :, :29][is_silent] = torch.nan
        torch.testing.assert_close(layer(x[:, 29:], cache=cache), expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SparkFFN(8, 16, 16), ValueError, "`k` must satisfy 0 < k < 16 (neurons); got 16."),
        (lambda: SparkFFN(8, 16, 0), ValueError, "`k` must satisfy 0 < k < 16"),
        (lambda: SparkFFN(8, 16, 2.5), TypeError, "`k` must be an int"),
        (lambda: SparkFFN(8, 16, 2, 8), ValueError, "`r` must satisfy 0 < r < 8 (inputs); got 8."),
        (lambda: SparkFFN(8, 16, 2, activation=torch.sigmoid), ValueError, "`activation` must be 0 at 0"),
        (lambda: SparkFFN(8, 16, 2)(torch.ones(3, 9)), ValueError, "`x` must have 8 features"),
        (lambda: SparkAttention(9, 2, 3), ValueError, "`heads` must divide `d_model`, 9; got 2."),
        (lambda: SparkAttention(8, 2, 0), ValueError, "`k` must be ≥ 1; got 0."),
        (lambda: SparkAttention(8, 2, 3, 4), ValueError, "`r` must satisfy 0 < r < 4"),
        (lambda: SparkAttention(8, 2, 3)(torch.ones(3, 8)), ValueError, "`x` must have the shape (batch, n, d_model)"),
        (lambda: SparkAttention(8, 2, 3)(torch.ones(1, 3, 8), cache=SparkCache()), ValueError, "keeps no gradient"),
        (
            lambda: SparkAttention(8, 2, 3)(torch.ones(1, 3, 8), mask=torch.ones(1, 3)),
            TypeError,
            "`mask` must be boolean",
        ),
        (
            lambda: SparkFFN.from_gated(*(torch.ones(4, 3),) * 3, 2, 2, activation=silu),
            ValueError,
            "`gate`, `up` and `down` must be (d_ff, d_model) twice and (d_model, d_ff)",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


def test_a_cache_refuses_another_batch():
    layer, cache = SparkAttention(8, 2, 3), SparkCache()
    with torch.no_grad():
        layer(torch.ones(2, 3, 8), cache=cache)
        with pytest.raises(ValueError, match=r"`cache` holds \(batch, heads\) = \(2, 2\); got \(3, 2\)"):
            layer(torch.ones(3, 1, 8), cache=cache)
