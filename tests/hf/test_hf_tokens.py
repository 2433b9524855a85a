"""Pruned encoders of transformers: against attention masks, positions, shapes, training, and refusals."""

import pytest
import torch

import khot.hf
from khot.nn import tokens

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **SIZES, **options)
    return transformers.BertModel(config).eval()


def vit():
    torch.manual_seed(0)
    return transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, **SIZES)).eval()


IDS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(12) < torch.tensor([[12], [8], [5]])).long()


@torch.no_grad()
def test_everything_kept_is_the_model():
    model = bert()
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    pruning = khot.hf.prune_tokens(model, {0: 1.0, 2: 12})
    got = model(IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(got[MASK.bool()], expected[MASK.bool()])
    assert pruning.kept.sum(-1).tolist() == [[12, 8, 5]] * 4
    pruning.remove()
    assert torch.equal(model(IDS, attention_mask=MASK).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_dropping_is_masking_the_keys_of_later_layers(padding):
    """The hidden states of the kept tokens are those of a model whose later layers mask the dropped ones."""
    model, mask = bert(), {"none": torch.ones_like(MASK), "right": MASK, "left": MASK.flip(-1)}[padding]
    pruning = khot.hf.prune_tokens(model, {1: 0.5})
    got = model(IDS, attention_mask=mask).last_hidden_state
    kept = pruning.kept
    pruning.remove()
    assert torch.equal(kept[0], mask.bool())
    assert torch.equal(kept[1], kept[0])
    assert kept[2].sum(-1).tolist() == (mask.sum(-1) * 0.5).round().tolist()
    hidden = model.embeddings(IDS)
    for i, layer in enumerate(model.encoder.layer):
        hidden = layer(hidden, kept[i][:, None, None])
        if i == 1:
            early = hidden
    torch.testing.assert_close(got[kept[3]], hidden[kept[3]])
    left = mask.bool() & ~kept[3]
    torch.testing.assert_close(got[left], early[left])
    for row, allowed in zip(kept[3], mask.bool(), strict=True):
        assert row[allowed][[0, -1]].all(), "[CLS] and [SEP] stay"


@torch.no_grad()
def test_tokens_are_scored_by_the_attention_they_receive():
    model = bert(attn_implementation="eager")
    received = tokens.attention_received(model(IDS, output_attentions=True).attentions[1])
    pruning = khot.hf.prune_tokens(model, {1: 6})
    model(IDS)
    inner = received[:, 1:-1].topk(4).indices + 1
    expected = torch.zeros(3, 12, dtype=torch.bool).scatter(1, inner, True)
    expected[:, [0, -1]] = True
    assert torch.equal(pruning.kept[2], expected)


@torch.no_grad()
def test_vision_and_scores_of_ones_own():
    model, pixels = vit(), torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    full = model(pixels).last_hidden_state
    seen = []

    def score(hidden):
        seen.append(hidden.shape[1])
        return hidden.square().sum(-1)

    pruning = khot.hf.prune_tokens(model, {0: 9, 1: 5}, score=score)
    out = model(pixels).last_hidden_state
    assert out.shape == full.shape
    assert seen == [17, 9]
    assert pruning.kept.sum(-1).tolist() == [[17, 17], [9, 9], [5, 5], [5, 5]]
    assert pruning.kept[..., 0].all()
    assert not torch.equal(out, full)


def test_training_is_evaluation_with_a_gradient():
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pruning = khot.hf.prune_tokens(model, budget=0.5)
    with torch.no_grad():
        hard = model(IDS, attention_mask=MASK).last_hidden_state
        kept = pruning.kept
        assert torch.equal(pruning.weights, kept[-1].float())
    model.train()
    soft = model(IDS, attention_mask=MASK).last_hidden_state
    assert torch.equal(pruning.kept, kept)
    torch.testing.assert_close(soft[MASK.bool()], hard[MASK.bool()])
    assert torch.equal(pruning.weights.detach() * MASK, kept[-1].float())
    assert pruning.weights.requires_grad
    soft[:, 0].square().sum().backward()
    assert pruning.budget.logits.grad.abs().sum() > 0
    assert model.encoder.layer[0].attention.self.query.weight.grad.abs().sum() > 0
    counts = pruning.kept[1:].sum(-1)
    assert counts.sum(0).tolist() == (MASK.sum(-1) * 0.5 * 3 + 1e-9).round().tolist()


def test_refusals():
    llama = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **SIZES)
    with pytest.raises(ValueError, match="must be an encoder; LlamaModel attends causally"):
        khot.hf.prune_tokens(transformers.LlamaModel(llama), {0: 0.5})
    with pytest.raises(ValueError, match="must be an encoder with a list of layers; got Linear"):
        khot.hf.prune_tokens(torch.nn.Linear(2, 2), {0: 0.5})
    model = bert()
    with pytest.raises(ValueError, match="either `schedule` or `budget`"):
        khot.hf.prune_tokens(model)
    with pytest.raises(ValueError, match="`layers` goes with `budget`"):
        khot.hf.prune_tokens(model, {0: 0.5}, layers=[1])
    with pytest.raises(ValueError, match=r"0 ≤ layer < 3 \(the last drops nothing\); got \[3\]"):
        khot.hf.prune_tokens(model, {3: 0.5})
    with pytest.raises(ValueError, match=r"`schedule\[0\]` must be ≥ 1; got 0"):
        khot.hf.prune_tokens(model, {0: 0})
    with pytest.raises(ValueError, match=r"`schedule\[0\]` must satisfy 0 ≤ schedule\[0\] ≤ 1; got 1.5"):
        khot.hf.prune_tokens(model, {0: 1.5})
    pruning = khot.hf.prune_tokens(model, {0: 0.5})
    with pytest.raises(ValueError, match="`kept` is known after a call"):
        _ = pruning.kept
    with pytest.raises(ValueError, match="is pruned already"):
        khot.hf.prune_tokens(model, {0: 0.5})
