"""Certified attention in transformers models, from small configurations, without a download."""

import pytest
import torch

import khot.hf
from khot.attention import known_head

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="khot[hf] is not installed")

TOKENS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def bert():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **changes)
    return transformers.LlamaForCausalLM(config).eval()


def states(model, name, **inputs):
    model.set_attn_implementation(name)
    with torch.no_grad():
        output = model(input_ids=TOKENS, **inputs)
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits


def padded():
    mask = torch.ones_like(TOKENS)
    mask[0, 15:] = 0
    return mask


@pytest.mark.parametrize("cells", [None, 4])
@pytest.mark.parametrize("make", [bert, llama])
def test_a_model_with_a_small_epsilon_is_the_dense_model(make, cells):
    """Padding for BERT; causal masks and grouped queries for Llama."""
    model, found = make(), []
    name = khot.hf.register_attention(1e-6, name="tiny", cells=cells, record=lambda module, c: found.append(c))
    for inputs in ({}, {"attention_mask": padded()}):
        real = inputs.get("attention_mask", torch.ones_like(TOKENS)).bool()
        mine, dense = states(model, name, **inputs), states(model, "sdpa", **inputs)
        torch.testing.assert_close(mine[real], dense[real], rtol=0, atol=1e-4)
    assert len(found) == 4
    assert found[0].k.shape == (2, 4, 24)
    assert all((c.bound <= 1e-6).all() for c in found)
    expected = torch.arange(1, 25) if make is llama else torch.full((24,), 24)
    assert (found[0].k <= expected).all()


def test_a_larger_epsilon_keeps_fewer_keys_and_stays_close():
    model, found = bert(), []
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.Linear):
                part.weight *= 4  # sharper attention than that of a new model
    dense, sizes, gaps = states(model, "sdpa"), [], []
    for epsilon in (1e-4, 0.3):
        found.clear()
        name = khot.hf.register_attention(epsilon, certificate=known_head, record=lambda module, c: found.append(c))
        assert name == "khot_certified"
        gaps.append((states(model, name) - dense).norm())
        sizes.append(torch.cat([c.k for c in found]).double().mean())
    assert sizes[1] < sizes[0] <= 24
    assert gaps[0] < gaps[1]
    assert gaps[1] > 1e-3  # the negative control: something was dropped


def test_generation_with_a_cache_is_that_of_the_dense_model():
    model = llama()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("sdpa")
    dense = model.generate(TOKENS[:, :8], **options)
    model.set_attn_implementation(khot.hf.register_attention(1e-6))
    assert torch.equal(model.generate(TOKENS[:, :8], **options), dense)


def test_what_is_not_supported_raises():
    name = khot.hf.register_attention(0.1)
    attend = transformers.AttentionInterface()[name]
    q = torch.randn(1, 2, 3, 4)
    for options, match in (
        ({"softcap": 30.0}, "`softcap`"),
        ({"position_bias": q[..., :3]}, "`position_bias`"),
        ({"dropout": 0.1}, "a dropout of 0.1: use `model.eval"),
    ):
        with pytest.raises(ValueError, match=match):
            attend(torch.nn.Identity(), q, q, q, None, **options)
    with pytest.raises(TypeError, match="`mask` must be boolean"):
        attend(torch.nn.Identity(), q, q, q, torch.zeros(1, 1, 3, 3))
    for epsilon in (0.0, 1.0):
        with pytest.raises(ValueError, match="`epsilon` must"):
            khot.hf.register_attention(epsilon)
    with pytest.raises(ValueError, match="`cells` must be ≥ 1"):
        khot.hf.register_attention(0.1, cells=0)
