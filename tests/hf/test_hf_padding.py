"""Padding of swapped models: every mask that transformers gives, and no mask of another call."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import khot.hf
from khot.nn import routing

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="khot[hf] is not installed")

TOKENS = torch.arange(3, 23).reshape(2, 10)
MASK = (torch.arange(10) < 4).long().expand(2, 10)
ROUTES = (routing.balanced_sigma_topk, routing.expert_choice)
routes = pytest.mark.parametrize("route", ROUTES)


def make(route, sharp=8.0, **options):
    """A Mixtral whose routing matters to its logits."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.MixtralConfig(vocab_size=64, pad_token_id=2, eos_token_id=1, **sizes, **heads, **options)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp if parameter.ndim > 1 else 1)
    khot.hf.swap_routers(model, route)
    return model


def router_of(model):
    return model.model.layers[0].mlp.gate


@routes
def test_padding_reaches_routes_of_all_tokens(route):
    """Experts that choose among all tokens chose padding, which pushed real tokens out."""
    model = make(route, sharp=1.0)
    padded = torch.cat([TOKENS, torch.full((2, 30), 2)], 1)
    mask = (torch.arange(40) < 10).long().expand(2, 40)
    with torch.no_grad():
        expected = model(TOKENS).logits
        for given in ({"attention_mask": mask}, {"attention_mask": mask.bool()}):
            assert torch.allclose(model(padded, **given).logits[:, :10], expected, atol=1e-5)
        assert not torch.allclose(model(padded).logits[:, :10], expected, atol=1e-5)  # the negative control
        assert torch.allclose(model(TOKENS).logits, expected)  # no mask is left behind
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            assert torch.allclose(again(padded, attention_mask=mask).logits[:, :10], expected, atol=1e-5)


def test_padding_reaches_the_loss_of_the_load():
    """The model's own loss of the load, of the scores that swapped routers give."""
    model = make(routing.balanced_sigma_topk)
    padded, options = torch.cat([TOKENS, torch.full((2, 30), 2)], 1), {"output_router_logits": True}
    mask = (torch.arange(40) < 10).long().expand(2, 40)
    expected = model(TOKENS, **options, attention_mask=torch.ones_like(TOKENS)).aux_loss
    torch.testing.assert_close(model(padded, **options, attention_mask=mask).aux_loss, expected, rtol=1e-4, atol=0)
    wrong = model(padded, **options, attention_mask=torch.ones_like(mask)).aux_loss  # the negative control
    assert not torch.allclose(wrong, expected, rtol=1e-2)


def left_padded(pads):
    """Two texts of 20 tokens, 12 and 3 of which are padding."""
    is_token = torch.arange(20) >= torch.tensor([[12], [3]])
    text = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(3))
    return torch.where(is_token, text, pads), is_token.long()


@routes
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_of_a_static_cache_takes_no_expert(route, attention):
    """`generate` with a static cache gives a mask of four dimensions, which was dropped."""
    model = make(route, attn_implementation=attention)
    other = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(4))

    def logits(pads, mask=None, **how):
        tokens, is_token = left_padded(pads)
        options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return model.generate(tokens, attention_mask=is_token if mask is None else mask, **options, **how).logits

    pads = torch.full((2, 20), 2)
    for first, again, dynamic in zip(
        logits(pads, cache_implementation="static"),
        logits(other, cache_implementation="static"),
        logits(pads),
        strict=True,
    ):
        torch.testing.assert_close(first, again)
        torch.testing.assert_close(first, dynamic)
    all_ones = torch.ones(2, 20, dtype=torch.long)  # the negative control
    assert (logits(pads, all_ones)[0] - logits(other, all_ones)[0]).abs().max() > 0.1


@routes
def test_masks_of_every_form_are_one(route):
    model = make(route)
    tokens, is_token = left_padded(torch.full((2, 20), 2))
    sees = is_token.bool()[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril()  # (batch, 1, queries, columns)
    additive = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(tokens, attention_mask=is_token).logits[is_token.bool()]
        for mask in (is_token.bool(), is_token.float(), sees, additive):
            torch.testing.assert_close(model(tokens, attention_mask=mask).logits[is_token.bool()], expected)


@routes
def test_padding_reaches_tokens_after_a_cache(route):
    """Text that is read in two parts, the second with a cache, by masks of two and of four dimensions."""
    model = make(route)
    tokens, is_token = left_padded(torch.full((2, 20), 2))
    sees = is_token.bool()[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril()
    found = []
    for mask, parts in ((is_token, (is_token[:, :15], is_token)), (sees, (sees[..., :15, :15], sees[..., 15:, :]))):
        with torch.no_grad():
            first = model(tokens[:, :15], attention_mask=parts[0], use_cache=True)
            again = model(tokens[:, 15:], attention_mask=parts[1], past_key_values=first.past_key_values).logits
        found.append(again)
        assert len(mask) == 2
    torch.testing.assert_close(*found)


@routes
def test_no_mask_outlives_its_call(route):
    """The base model and a router alone took the mask of the last call of the whole model."""
    model, hidden = make(route), torch.randn(20, 32)
    with torch.no_grad():
        expected, alone = model.model(TOKENS)[0], router_of(model)(hidden)[1]
        masked = model.model(TOKENS, attention_mask=MASK)[0]
        model(TOKENS, attention_mask=MASK)
        with pytest.raises(RuntimeError):
            model(TOKENS, attention_mask=MASK, position_ids=torch.zeros(3, 7, dtype=torch.long))
        assert torch.equal(model.model(TOKENS)[0], expected)
        assert torch.equal(router_of(model)(hidden)[1], alone)
        assert torch.equal(model.model(TOKENS, attention_mask=MASK)[0], masked)
        padded = model.model(TOKENS.where(MASK > 0, 2), attention_mask=MASK)[0]
        torch.testing.assert_close(padded[:, :4], masked[:, :4])  # the base model reads its own mask
    assert not torch.allclose(masked[:, :4], expected[:, :4], atol=1e-3)  # the negative control


def test_a_base_model_that_was_swapped_has_the_padding_of_the_whole():
    model = make(routing.expert_choice)
    khot.hf.swap_routers(model.model, routing.balanced_sigma_topk)
    assert len(model.model._forward_pre_hooks) == 1
    with torch.no_grad():
        rows = [model(text, attention_mask=MASK).logits[:, :4] for text in (TOKENS, TOKENS.where(MASK > 0, 2))]
    torch.testing.assert_close(*rows)


def gradients(route, start):
    """Those of two forwards with different masks before one backward."""
    model = make(route).train()
    model.config.use_cache = False
    start(model)
    losses = [
        model(text, labels=text.where(mask > 0, -100), attention_mask=mask).loss
        for text, mask in ((TOKENS, MASK), (TOKENS.flip(1), torch.ones_like(MASK)))
    ]
    sum(losses).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@routes
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_has_the_padding_of_its_own_forward(route, is_reentrant, monkeypatch):
    """The layers that were computed again took the mask of the last forward: a gradient 22 % off."""

    def start(model):
        new = getattr(model, "activation_checkpointing_enable", None)  # its name in new versions
        (new or model.gradient_checkpointing_enable)({"use_reentrant": is_reentrant})

    expected = gradients(route, lambda model: None)
    found = gradients(route, start)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("khot.hf._padding._Keeping.__call__", lambda self, *args: self.checkpoint(*args))
    with pytest.raises(RuntimeError, match="`attention_mask` must be known where a router is computed again"):
        gradients(route, start)


def test_checkpointing_of_layers_outside_transformers_is_refused_with_padding():
    def start(model):
        for layer in model.model.layers:
            forward = layer.forward
            layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
                forward, *args, use_reentrant=False, **kwargs
            )

    with pytest.raises(RuntimeError, match="`attention_mask` must be known where a router is computed again"):
        gradients(routing.balanced_sigma_topk, start)
    gradients(routing.sigma_topk, start)  # which needs no mask


def test_checkpointing_of_a_whole_model_keeps_its_padding():
    model = make(routing.balanced_sigma_topk).train()
    slopes = []
    for call in (model, lambda *args, **kwargs: checkpoint(model, *args, use_reentrant=False, **kwargs)):
        model.zero_grad()
        first = call(TOKENS, attention_mask=MASK).logits[:, :4].square().sum()
        (first + call(TOKENS.flip(1)).logits.square().sum()).backward()
        slopes.append(router_of(model).weight.grad.clone())
    torch.testing.assert_close(*slopes)


class PreTrainedModel(nn.Module):
    """A tower, by its name."""

    def __init__(self, router):
        super().__init__()
        self.gate = router


class Text(PreTrainedModel):
    def forward(self, hidden, attention_mask=None):
        return self.gate(hidden)[1].sum(-1) > 0


class Vision(PreTrainedModel):
    def forward(self, patches):
        return self.gate(patches)[1].sum(-1) > 0


class Both(nn.Module):
    """A model of text and images, with as many patches as tokens."""

    def __init__(self):
        super().__init__()
        model = make(routing.softmax_topk)
        self.text, self.vision = Text(model.model.layers[0].mlp.gate), Vision(model.model.layers[1].mlp.gate)

    def forward(self, hidden, patches, attention_mask=None):
        return self.text(hidden, attention_mask=attention_mask), self.vision(patches)


def test_images_do_not_take_the_mask_of_the_text():
    """A mask was given to every router with as many tokens, those of a tower of images too."""
    model = Both()
    khot.hf.swap_routers(model, routing.balanced_sigma_topk)
    text, vision = model(torch.randn(2, 10, 32), torch.randn(20, 32), attention_mask=MASK)
    assert torch.equal(text, MASK.reshape(-1) > 0)  # the negative control
    assert vision.all()


def test_a_copy_of_a_router_is_no_copy_of_the_model():
    """Swapping again copies each router, to try it, and what knows its padding must not bring the model along."""
    model = make(routing.expert_choice)
    alone, whole = (len(pickle.dumps(module)) for module in (router_of(model), model))
    assert alone < whole / 10


def test_masks_that_do_not_fit_the_tokens_of_a_router_are_refused():
    model = make(routing.expert_choice)
    hidden = torch.randn(2, 10, 32)

    class Part(PreTrainedModel):
        def forward(self, hidden, attention_mask=None, inputs_embeds=None):
            return self.gate(hidden)

    part = Part(router_of(model))
    khot.hf.swap_routers(part, routing.expert_choice)
    for shape in ((2, 9), (3, 10), (2, 1, 9, 10), (2, 1, 10, 9)):
        with pytest.raises(ValueError, match=r"must have one entry for each of 20 tokens of a router; got shape"):
            part(hidden, attention_mask=torch.ones(shape))
    for wrong in (torch.ones(20), "causal"):
        with pytest.raises(ValueError, match="must be a tensor of 2 to 4 dimensions"):
            part(hidden, attention_mask=wrong)
    assert part(hidden[:, :0], attention_mask=torch.ones(2, 0))[1].shape[0] == 0  # no tokens
    none = {"attention_mask": torch.ones(0, 10), "inputs_embeds": torch.zeros(0, 10, 32)}
    assert part(hidden[:0], **none)[1].shape[0] == 0
    texts = {"inputs_embeds": torch.zeros(2, 12, 32), "attention_mask": torch.ones(2, 12)}
    with pytest.raises(ValueError, match=r"one entry for each of 20 tokens of a router; got shape \(2, 12\)"):
        part(hidden, **texts)  # four tokens were dropped on the way, and nobody knows which
    khot.hf.swap_routers(part, routing.sigma_topk)  # which needs no mask
    part(hidden, attention_mask=torch.ones(3, 10))


@pytest.mark.long
@pytest.mark.compile
def test_swapped_models_with_padding_compile_whole():
    model = make(routing.balanced_sigma_topk)
    tokens, is_token = left_padded(torch.full((2, 20), 2))
    sees = is_token.bool()[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for mask in (is_token, sees):
            expected = model(tokens, attention_mask=mask).logits[is_token.bool()]
            found = compiled(tokens, attention_mask=mask).logits[is_token.bool()]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not model.model.khot_padding_hook.calls


def test_one_router_that_cannot_be_swapped_is_left_alone_by_name():
    """DeepSeek-V4 has three layers that choose by a table, and could not be swapped for them."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8}
    ranks = {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 1, "max_position_embeddings": 64}
    config = transformers.DeepseekV4Config(vocab_size=64, num_hidden_layers=5, **sizes, **heads, **ranks)
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"layers\.0.* needs input_ids .* give `skip=\('DeepseekV4HashRouter',\)`"):
        khot.hf.swap_routers(model)
    assert [type(module) for module in model.modules()] == kinds
    with pytest.raises(ValueError, match=r"`skip` must name routers .*DeepseekV4TopKRouter\); got 'Hash'"):
        khot.hf.swap_routers(model, skip=["Hash"])
    with pytest.raises(TypeError, match="`skip` must be names in a list; got int"):
        khot.hf.swap_routers(model, skip=5)
    with torch.no_grad():
        before = model(TOKENS).logits
        for skip in ("DeepseekV4HashRouter", [f"model.layers.{i}.mlp.gate" for i in range(3)]):
            assert khot.hf.swap_routers(model, skip=skip) == ["model.layers.3.mlp.gate", "model.layers.4.mlp.gate"]
        after = model(TOKENS).logits
    assert type(model.model.layers[0].mlp.gate).__name__ == "DeepseekV4HashRouter"
    assert after.isfinite().all()
    assert not torch.allclose(after, before)
