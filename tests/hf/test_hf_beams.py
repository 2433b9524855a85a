"""khot's beams in transformers, beside transformers' own, on small random models."""

from functools import partial

import pytest
import torch

import khot.hf
from khot.search import expectation, sampled, soft

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="khot[hf] is not installed")
SMALL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, **SMALL}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_ffn_dim": 48}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "forced_eos_token_id": None, **SMALL}
KHOT = {"custom_generate": khot.hf.beam_search, "return_dict_in_generate": True, "output_scores": True}
OWN = {"return_dict_in_generate": True, "output_scores": True}


def llama(vocabulary=40, sharpness=6.0):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **LLAMA)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)  # else all tokens are about equally likely
        model.lm_head.weight[1].mul_(1.5)  # and few sequences end
    return model


def prompts(rows, length=6, vocabulary=40):
    """Prompts of several lengths, padded on the left."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (rows, length), generator=draw)
    mask = torch.arange(length) >= torch.randint(0, length - 1, (rows, 1), generator=draw)
    return {"input_ids": ids.masked_fill(~mask, 2), "attention_mask": mask.long()}


CASES = {
    "default": {},
    "no penalty": {"length_penalty": 0.0, "early_stopping": "never"},
    "long is better": {"length_penalty": 2.0, "early_stopping": "never"},
    "early": {"early_stopping": True},
    "three of them": {"num_return_sequences": 3},
    "one beam fewer": {"num_beams": 2},
    "processors": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "bad_words_ids": [[5]]},
    "two ends": {"eos_token_id": [1, 7]},
    "no cache": {"use_cache": False},
    "no end": {"eos_token_id": None},
    "a criterion": {"max_time": 1000.0},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_sequences_and_scores_of_transformers(case):
    model = llama()
    options = {**prompts(25), "num_beams": 4, "max_new_tokens": 12, "do_sample": False, **CASES[case]}
    own = model.generate(**options, **OWN)
    ours = model.generate(**options, **KHOT)
    assert torch.equal(ours.sequences, own.sequences)
    torch.testing.assert_close(ours.sequences_scores, own.sequences_scores, rtol=0, atol=1e-4)
    plain = model.generate(**options, custom_generate=khot.hf.beam_search)
    assert torch.equal(plain, own.sequences)
    if case == "default":
        ended = (own.sequences[:, 6:] == 1).any(-1)
        assert 0 < ended.sum() < 25  # both kinds occur


def test_a_hundred_prompts():
    model = llama(sharpness=10.0)
    options = {**prompts(100), "num_beams": 5, "max_new_tokens": 16, "do_sample": False}
    own, ours = model.generate(**options, **OWN), model.generate(**options, **KHOT)
    assert torch.equal(ours.sequences, own.sequences)
    torch.testing.assert_close(ours.sequences_scores, own.sequences_scores, rtol=0, atol=1e-4)


def test_an_encoder_and_a_decoder():
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=40, decoder_start_token_id=1, **BART)
    model = transformers.BartForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.shared.weight.mul_(20)
    options = {**prompts(10), "num_beams": 3, "max_new_tokens": 10, "do_sample": False}
    own, ours = model.generate(**options, **OWN), model.generate(**options, **KHOT)
    assert torch.equal(ours.sequences, own.sequences)
    torch.testing.assert_close(ours.sequences_scores, own.sequences_scores, rtol=0, atol=1e-4)


def test_sampled_beams():
    """Against all sequences of two tokens: distinct ones, their probabilities, and an estimate without bias."""
    model = llama(vocabulary=6, sharpness=10.0)
    prompt = torch.tensor([[3, 4, 5]])
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 2, "do_sample": False}
    draw = torch.Generator().manual_seed(0)
    rows = prompt.expand(2000, -1)
    given = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    result = model.generate(**given, **options, **KHOT, select=sampled, generator=draw)
    assert result.sequences.shape == (6000, 5)
    numbers = (result.beams.tokens.clamp(min=0) * torch.tensor([6, 1])).sum(-1)
    assert all(len(set(row)) == 3 for row in numbers.tolist())
    with torch.no_grad():
        first = model(prompt).logits[0, -1].log_softmax(-1)
        after = torch.cat((prompt.expand(6, -1), torch.arange(6)[:, None]), 1)
        second = model(after).logits[:, -1].log_softmax(-1)
    every = (first[:, None] + second).exp().double()
    every[1] = 0.0  # ended after one token
    every[1, 0] = first[1].exp()
    f = torch.arange(36.0).view(6, 6).double()
    exact = (every * f).sum()
    estimate = expectation(result.beams, f.flatten()[numbers]).mean
    assert abs(estimate.mean() - exact) < 5 * estimate.std() / 2000**0.5
    again = model.generate(**given, **options, **KHOT, select=partial(sampled), generator=draw.manual_seed(0))
    assert torch.equal(again.sequences, result.sequences)
    torch.testing.assert_close(result.sequences_scores.view(2000, 3), result.beams.log_probs)


def test_what_is_refused():
    with pytest.raises(ValueError, match="lengths and end tokens for sampled beams; got MaxTimeCriteria"):
        llama().generate(**prompts(1), **KHOT, num_beams=2, max_new_tokens=2, max_time=1.0, select=sampled)
    with pytest.raises(ValueError, match="must not be soft"):
        llama().generate(**prompts(1), **KHOT, num_beams=2, max_new_tokens=2, select=soft)
