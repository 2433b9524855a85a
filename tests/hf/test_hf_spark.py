"""Spark FFNs in transformers models: the same function at full rank, sparse decoding, and refusals."""

import pytest
import torch

import khot.hf
from khot.nn import SparkFFN

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **SIZES, **options)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_nearly_all_neurons_at_full_rank_are_nearly_the_model():
    model = llama()
    expected = model(IDS).logits
    assert khot.hf.swap_ffns(model, 63, 1.0, exact=True) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(isinstance(layer.mlp, SparkFFN) for layer in model.model.layers)
    assert float((model(IDS).logits - expected).norm() / expected.norm()) < 0.02


@torch.no_grad()
def test_more_rank_and_more_neurons_are_closer():
    expected = llama()(IDS).logits
    errors = []
    for k, r in ((0.1, 0.25), (0.5, 0.25), (0.5, 1.0), (0.9, 1.0)):
        model = llama()
        khot.hf.swap_ffns(model, k, r)
        errors.append(float((model(IDS).logits - expected).norm()))
    assert errors == sorted(errors, reverse=True)


def test_a_swapped_model_generates_and_learns():
    model = llama()
    khot.hf.swap_ffns(model, 0.1)
    with torch.no_grad():
        assert model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 13)
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].mlp.first.grad.abs().sum() > 0


def test_refusals_name_the_reason():
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, **SIZES))
    with pytest.raises(ValueError, match="got BertModel: its MLPs have no gate"):
        khot.hf.swap_ffns(bert)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp must have no biases"):
        khot.hf.swap_ffns(llama(mlp_bias=True))
    phi = transformers.Phi3Config(vocab_size=50, pad_token_id=0, num_key_value_heads=2, **SIZES)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp has its gate and up in one matrix"):
        khot.hf.swap_ffns(transformers.Phi3Model(phi))
    model = llama()
    model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp must compute down"):
        khot.hf.swap_ffns(model)
    assert not any(isinstance(module, SparkFFN) for module in model.modules()), "all or none"
    with pytest.raises(ValueError, match="`k` must satisfy 0 ≤ k ≤ 64"):
        khot.hf.swap_ffns(llama(), 65)
