"""Heads of `torch.nn.MultiheadAttention`: packed weights are chosen in, and heads are removed."""

import copy
import io

import pytest
import torch
from torch import nn

from khot.nn import sparsity
from khot.nn.sparsity import Sparsifier
from tests.sparse_models import nonzero, size, train


class Alone(nn.Module):
    """One attention layer, with the options of a call."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **{"batch_first": True, **options})

    def forward(self, x, other=None, **call):
        other = x if other is None else other
        return self.attention(x, other, other, **call)[0]


def encoder(layers=1):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers) if layers > 1 else layer


@pytest.mark.parametrize("rule", [sparsity.soft, sparsity.straight_through, sparsity.sampled, sparsity.hard])
def test_heads_are_removed_and_the_budget_is_held(rule):
    torch.manual_seed(0)
    model, x = encoder(), torch.randn(3, 5, 16)
    dense = size(model)
    options = {"units": sparsity.heads(), "exclude": ["linear1", "linear2"], "mask": rule}
    sparsifier = Sparsifier(model, 0.5, steps=12, **options)
    attention = 4 * 16 * 16

    def look():
        rest = max(0.0, 1 - sparsifier.done / 9) ** 3
        budget = attention * (0.5 + 0.5 * rest)
        assert sparsifier.cost() <= budget * (1 + 1e-6)
        if rule is sparsity.soft and sparsifier.done < 9:
            assert sparsifier.cost() == pytest.approx(budget, rel=1e-6)

    train(model, sparsifier, x, after=look)
    names = list(encoder().state_dict())
    model.eval()
    before = model(x)
    assert sparsifier.finalize() is model
    assert size(model) == dense - attention // 2  # the library's own count is not used
    assert model.self_attn.num_heads == 2
    assert model.self_attn.in_proj_weight.shape == (24, 16)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)
    with torch.no_grad():  # torch's fast path must not be taken
        torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), before, rtol=0, atol=1e-6)
    again = Sparsifier(model, 0.5, steps=0, units=sparsity.heads(), exclude=["linear1", "linear2"])
    again.finalize()
    assert model.self_attn.num_heads == 1
    model(x).sum().backward()


HIDDEN = torch.tensor([[False] * 4 + [True], [False] * 5, [False, True, False, False, True]])
CALLS = {
    "plain": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "each head": ({}, {"average_attn_weights": False}),
    "no bias": ({"bias": False}, {}),
    "length first": ({"batch_first": False}, {"need_weights": False}),
    "padding": ({}, {"key_padding_mask": HIDDEN}),
    "causal": ({}, {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True, "need_weights": False}),
    "added": ({}, {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5), "key_padding_mask": HIDDEN.float() * -9.0}),
    "other sizes": ({"kdim": 8, "vdim": 8}, {"other": torch.linspace(-1, 1, 3 * 7 * 8).view(3, 7, 8)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pruned_layer_computes_what_the_masked_one_does(name):
    torch.manual_seed(0)
    options, call = CALLS[name]
    model, x = Alone(**options), torch.randn(*((5, 3, 16) if name == "length first" else (3, 5, 16)))
    Sparsifier(masked := copy.deepcopy(model), 0.5, steps=0, units=sparsity.heads()).finalize(remove=False)
    Sparsifier(model, 0.5, steps=0, units=sparsity.heads()).finalize()
    assert type(model.attention) is sparsity.PrunedAttention
    assert type(masked.attention) is nn.MultiheadAttention
    torch.testing.assert_close(model(x, **call), masked(x, **call))
    if name == "plain":
        torch.testing.assert_close(model(x[0]), masked(x[0]))
        per_head = torch.ones(3 * 2, 5, 5).triu(1).bool()
        torch.testing.assert_close(model(x, attn_mask=per_head), masked(x, attn_mask=per_head[0]))
        with pytest.raises(ValueError, match="`attn_mask` must be given if `is_causal` is"):
            model(x, is_causal=True)


def test_the_weights_are_those_of_the_heads_that_are_left():
    torch.manual_seed(0)
    model, x = Alone(), torch.randn(3, 5, 16)
    each = model.attention(x, x, x, average_attn_weights=False)[1]
    kept = Sparsifier(model, 0.5, steps=0, units=sparsity.heads()).kept()["attention.out_proj.weight"][0, ::4] > 0
    model.attention.parametrizations.in_proj_weight[0].owner.detach()
    Sparsifier(model, 0.5, steps=0, units=sparsity.heads()).finalize()
    for average in (False, True):
        wanted = each[:, kept].mean(1) if average else each[:, kept]
        found = model.attention(x, x, x, average_attn_weights=average)[1]
        torch.testing.assert_close(found, wanted)


def test_an_encoder_with_padding_does_not_take_the_fast_path():
    torch.manual_seed(0)
    model, x = encoder(layers=2), torch.randn(3, 5, 16)
    sparsifier = Sparsifier(model, 0.5, steps=0, units=sparsity.combine(sparsity.heads(), sparsity.weights))
    model.eval()
    hidden = HIDDEN[:2].repeat(2, 1)[:3].sort().values
    expected = model(x, src_key_padding_mask=hidden)
    sparsifier.finalize()
    with torch.no_grad():
        found = model(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(found[~hidden], expected[~hidden], rtol=0, atol=1e-6)


def test_single_weights_of_packed_projections():
    torch.manual_seed(0)
    model, x = encoder(), torch.randn(2, 5, 16)
    sparsifier = Sparsifier(model, 0.25, steps=10, cost=sparsity.Flops(x))
    assert sum(pool.total for pool in sparsifier.pools) == 2 * 5 * size(model)
    train(model, sparsifier, x, steps=10)
    sparsifier.finalize()
    assert nonzero(model) == size(model) // 4
    assert 0 < int(model.self_attn.in_proj_weight.count_nonzero()) < 768
    with pytest.raises(ValueError, match="'attention' has a query and keys of different lengths"):
        Sparsifier(Alone(), 0.5, steps=0, cost=sparsity.Flops((x, torch.randn(2, 7, 16))))


def test_what_cannot_be_removed_is_refused_by_name():
    class Own(nn.MultiheadAttention):
        pass

    class Holder(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

    for attention, match in (
        (nn.MultiheadAttention(16, 4, add_bias_kv=True), "'attention' .MultiheadAttention with `add_bias_kv`"),
        (Own(16, 4), "'attention' .Own, a kind of MultiheadAttention of its own"),
    ):
        model = Holder(attention)
        with pytest.raises(ValueError, match=match):
            Sparsifier(model, 0.5, steps=0, units=sparsity.heads())
        assert nonzero(Sparsifier(model, 0.5, steps=0).finalize()) == 512  # single weights are fine
